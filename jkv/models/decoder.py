"""The decoder: embedding, blocks of attention and MLP, norm, output head.

Reads a `ModelConfig`; knows no file format and no loop.
"""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jkv import ops
from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache
from jkv.cache.codec import PoolLayout
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.layers.attention import GQAttention, step_rotation
from jkv.layers.latent import LatentAttention
from jkv.layers.linear import Embedding, Linear, RMSNorm
from jkv.layers.mlp import GatedMLP
from jkv.layers.moe import MoE
from jkv.layers.rope import RopeConfig, Rotation
from jkv.models.model_config import ModelConfig
from jkv.sharding import Sharding


class Block(nnx.Module):
    """One decoder layer: attention and MLP, each added to the residual stream.

    What enters and what leaves them is normed where the configuration has it so.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, implementation: ops.Implementation, **options: Any
    ):
        def norm(is_there: bool) -> Any:
            if not is_there:
                return nnx.data(None)
            return RMSNorm(config.embed_dim, eps=config.norm_eps, param_dtype=options["param_dtype"])

        self.attention_norm = norm(config.has_pre_norms)
        self.attention = _attention(config, config.windows[layer], implementation=implementation, **options)
        self.attention_post_norm = norm(config.has_post_norms)
        self.mlp_norm = norm(config.has_pre_norms)
        self.mlp = _mlp(config, layer, **options)
        self.mlp_post_norm = norm(config.has_post_norms)

    def __call__(
        self,
        x: Float[Array, "seq time embed"],
        cache: Cache | None = None,
        *,
        where: ops.Where | None = None,
        batch: TokenBatch | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Float[Array, "seq time embed"], Cache | None]:
        """Run the layer; arguments as `GQAttention`."""
        attended, cache = self.attention(
            _normed(self.attention_norm, x), cache, where=where, batch=batch, rotation=rotation
        )
        x = x + _normed(self.attention_post_norm, attended)
        return x + _normed(self.mlp_post_norm, self.mlp(_normed(self.mlp_norm, x))), cache


def _normed(norm: RMSNorm | None, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time embed"]:
    return x if norm is None else norm(x)


def layer_rope(config: ModelConfig, window: int | None) -> RopeConfig:
    """Return the rotary embedding of layers with such a window."""
    return config.window_rope if window is not None and config.window_rope is not None else config.rope


def _attention(config: ModelConfig, window: int | None, **options: Any) -> GQAttention | LatentAttention:
    if config.latent is not None:
        return LatentAttention(
            config.embed_dim,
            config.num_heads,
            config.latent,
            rope=layer_rope(config, window),
            window=window,
            scale=config.attention_scale,
            has_bias=config.has_qkv_bias,
            **options,
        )
    return GQAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=layer_rope(config, window),
        window=window,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        has_sinks=config.has_sinks,
        has_qk_norm=config.has_qk_norm,
        is_qk_norm_wide=config.is_qk_norm_wide,
        has_qkv_bias=config.has_qkv_bias,
        has_output_bias=config.has_output_bias,
        norm_eps=config.norm_eps,
        **options,
    )


def _mlp(config: ModelConfig, layer: int, **options: Any) -> GatedMLP | MoE:
    mixture = config.mixture
    options = {"gating": config.gating, "has_bias": config.has_mlp_bias, **options}
    if mixture is None or layer < mixture.num_dense_layers:
        return GatedMLP(config.embed_dim, config.mlp_dim, **options)
    return MoE(config.embed_dim, mixture.mlp_dim, mixture.routing, shared_dim=mixture.shared_dim, **options)


def _run(
    layer: Block,
    x: Float[Array, "seq time embed"],
    cache: Cache | None,
    batch: TokenBatch | None,
    rotation: Rotation,
    where: tuple[int, int],
) -> tuple[Float[Array, "seq time embed"], Cache | None]:
    """Run a layer in its place; those that differ in weights and index alone are traced and lowered once."""
    group, index = where
    parts = nnx.split(layer, nnx.Param, ...)
    x, cache, rest = _run_parts(*parts, x, cache, jnp.int32(index), batch, rotation, group=group)
    nnx.update(layer, rest)
    return x, cache


@functools.partial(jax.jit, static_argnames=("graph", "group"))
def _run_parts(
    graph: Any,
    parameters: Any,
    rest: Any,
    x: Float[Array, "seq time embed"],
    cache: Cache | None,
    index: Int[Array, ""],
    batch: TokenBatch | None,
    rotation: Rotation,
    *,
    group: int,
) -> tuple[Float[Array, "seq time embed"], Cache | None, Any]:
    """Return the layer's output, the cache, and what it keeps beside its parameters."""
    layer = nnx.merge(graph, parameters, rest)
    x, cache = layer(x, cache, where=(group, index), batch=batch, rotation=rotation)
    return x, cache, nnx.state(layer, nnx.Not(nnx.Param))


@nnx.remat
def _recomputed(layer: Block, x: Float[Array, "seq time embed"], rotation: Rotation) -> Any:
    return layer(x, rotation=rotation)[0]


class Decoder(nnx.Module):
    """A decoder-only language model.

    Args:
        config: sizes and switches.
        implementation: how attention is computed; see `jkv.ops.attend`.
        dtype: dtype of activations.
        param_dtype: dtype of stored parameters.
        sharding: places activations and runs attention over a mesh; None is one device.
        is_rematerialized: without a cache, a gradient computes each layer's activations again and keeps its
            input alone.
        rngs: draws the parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        implementation: ops.Implementation = "auto",
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        sharding: Sharding | None = None,
        is_rematerialized: bool = False,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "sharding": sharding,
            "rngs": rngs,
        }
        self.embed = Embedding(config.vocab_size, config.embed_dim, **options)
        self.layers = nnx.List(
            [
                Block(config, layer, implementation=implementation, **options)
                for layer in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.embed_dim, eps=config.norm_eps, param_dtype=param_dtype)
        self.lm_head = nnx.data(None)
        if not config.is_tied:
            self.lm_head = Linear(config.embed_dim, config.vocab_size, axes=("embed", "vocab"), **options)
        self.config = config
        self.is_rematerialized = is_rematerialized

    def __call__(
        self,
        tokens: Int[Array, "row time"],
        cache: Cache | None = None,
        batch: TokenBatch | None = None,
    ) -> tuple[Float[Array, "*selected vocab"], Cache | None]:
        """Return float32 logits and the cache that holds the tokens.

        Args:
            tokens: ids below the vocabulary's size; padding may be any id.
            cache: see `GQAttention`; None for training.
            batch: the step, from `cache.begin` or `cache.begin_ragged`. Its `outputs` says whether logits are
                `[seq, vocab]`, of each sequence's last new token, or `[row, time, vocab]`; without a cache
                they are the latter.
        """
        x = self.embed(tokens)
        if self.config.embed_scale != 1:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        ropes = dict.fromkeys(layer_rope(self.config, window) for window in self.config.windows)
        rotations = {rope: step_rotation(rope, tokens.shape[1], cache, batch) for rope in ropes}
        places = cache_places(self.config)
        for layer, window, where in zip(self.layers, self.config.windows, places, strict=True):
            rotation = rotations[layer_rope(self.config, window)]
            if cache is None and self.is_rematerialized:
                x = _recomputed(layer, x, rotation)
            else:
                x, cache = _run(layer, x, cache, batch, rotation, where)
        last_only = False
        if batch is not None and batch.outputs == "last":
            last_only = True
            x = batch.select(x)[:, None]
        x = self.norm(x)
        logits = self.embed.attend(x) if self.lm_head is None else self.lm_head(x).astype(jnp.float32)
        cap = self.config.logit_soft_cap
        if cap is not None:
            logits = cap * jnp.tanh(logits / cap)
        return (logits[:, 0] if last_only else logits), cache


def cache_places(config: ModelConfig) -> list[tuple[int, int]]:
    """Return each layer's cache group and its index there.

    Layers of one window are a group, and so are those without one; groups come in order of first appearance.
    """
    windows = list(dict.fromkeys(config.windows))
    counts: Counter[int | None] = Counter()
    places = []
    for window in config.windows:
        places.append((windows.index(window), counts[window]))
        counts[window] += 1
    return places


def cache_spec(
    config: ModelConfig,
    *,
    page_size: int,
    codec: str = "f32",
    value_codec: str | None = None,
    window_codec: str | None = None,
    max_chunk: int | None = None,
    layout: PoolLayout = "plain",
    num_stripes: int = 1,
) -> CacheSpec:
    """Return the cache that the model decodes with, its groups as `cache_places` counts them.

    Args:
        config: the model's layers, heads and windows.
        page_size: tokens of a page.
        codec: how keys are stored, and values unless they have a codec of their own; or latents.
        value_codec: how values are stored.
        window_codec: how layers with a window store keys and values; None is as the others.
        max_chunk: tokens of the longest step, for which layers with a window keep room beside their window;
            None: they keep every token.
        layout: how the slots of a page lie.
        num_stripes: devices that share the pages of each sequence, those of the mesh axis `context`.
    """
    groups = []
    for window, num_layers in Counter(config.windows).items():
        codecs = (codec, value_codec) if window is None or window_codec is None else (window_codec, None)
        kept = None if max_chunk is None else window
        shape, kind = (config.num_kv_heads, config.head_dim), {}
        if config.latent is not None:
            shape, kind = (1, config.latent.latent), {"kind": "latent", "rope_dim": config.latent.rope}
        groups.append(CacheGroup(num_layers, *shape, *codecs, window=kept, **kind))
    longest: dict[str, Any] = {} if max_chunk is None else {"max_chunk": max_chunk}
    return CacheSpec.create(groups, page_size=page_size, layout=layout, num_stripes=num_stripes, **longest)
