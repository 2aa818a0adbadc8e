"""Multi-head latent attention (DeepSeek-V2, section 2.1): one latent a token, which all heads share.

Two forms of one layer. Expanded, a latent becomes keys and values of every head; absorbed, queries are taken
to latents, and what is attended is taken from them. Knows nothing of models.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jkv import ops
from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache
from jkv.layers.attention import step_rotation
from jkv.layers.checks import check_input, check_sizes
from jkv.layers.dense import tied
from jkv.layers.linear import Linear, RMSNorm, output_placement
from jkv.layers.rope import RopeConfig, Rotation, inverse_frequencies, rotate, softmax_correction
from jkv.sharding import Sharding

Form = Literal["auto", "expanded", "absorbed"]


@dataclass(frozen=True)
class LatentDims:
    """The widths of latent attention, and whether it norms what it compresses; hashable.

    Attributes:
        latent: entries of the vector that a token leaves in the cache (kv_lora_rank).
        rope: entries of the rotated part of keys and queries; that of a key is the same for all heads.
        key: entries of a head's key and query without the rotated part.
        value: entries of a head's value.
        query: entries that queries are compressed to (q_lora_rank); None projects them at once.
        has_norm: RMSNorm over compressed vectors; a latent made of projections that had none has none.
    """

    latent: int
    rope: int
    key: int
    value: int
    query: int | None = None
    has_norm: bool = True


def is_expansion_cheaper(dims: LatentDims, num_tokens: int) -> bool:
    """Whether a step of so many tokens of one sequence takes fewer products in the expanded form.

    Of each head, a step of `T` tokens over `S` takes

        expanded    S * latent * (key + value) + T * S * (key + rope + value)
        absorbed    T * latent * (key + value) + T * S * (2 * latent + rope)

    so that for any past, however long, the expanded form is cheaper from
    `T > latent * (key + value) / (2 * latent - key - value)` on: 171 tokens of DeepSeek-V3. For a short past
    it is cheaper sooner; the rule asks for the width alone, so that a program is for any past.
    """
    heads = dims.key + dims.value
    return num_tokens * (2 * dims.latent - heads) > dims.latent * heads


class LatentAttention(nnx.Module):
    """Causal attention whose keys and values are made of one latent a token.

    With a cache, which holds the latent and its rotated part alone, the form follows from the step's width by
    `is_expansion_cheaper`; a ragged step, which is cut into pieces of a few tokens, is absorbed. Without a
    cache keys and values are expanded. The up-projections keep `param_dtype` when a model's weights are
    packed: the absorbed form multiplies by their transposes.

    Args:
        embed_dim: width of input and output.
        num_heads: query heads.
        dims: the other widths.
        rope: rotary embedding over `dims.rope` entries; None leaves them unrotated.
        window: latest positions that a query sees, its own included; None is all.
        scale: multiplies the logits; None is `(key + rope) ** -0.5`, times YaRN's correction of the softmax.
        has_bias: biases on the projections to compressed vectors and on the output's.
        norm_eps: of the norms over compressed vectors.
        form: `auto`, or one for every step with a cache.
        implementation: how `jkv.ops.attend_latent` computes; see `jkv.ops.attend`.
        dtype: dtype of activations.
        param_dtype: dtype of stored parameters.
        sharding: splits sequences and heads over a mesh, and no latent; None is one device.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is below 1, the rotary embedding has another width, the form is unknown, or the
            mesh does not divide the heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dims: LatentDims,
        *,
        rope: RopeConfig | None = None,
        window: int | None = None,
        scale: float | None = None,
        has_bias: bool = False,
        norm_eps: float = 1e-6,
        form: Form = "auto",
        implementation: ops.Implementation = "auto",
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        check_sizes(
            embed_dim=embed_dim,
            num_heads=num_heads,
            window=window,
            latent=dims.latent,
            rope=dims.rope,
            key=dims.key,
            value=dims.value,
            query=dims.query,
        )
        if rope is not None and 2 * len(inverse_frequencies(rope)) != dims.rope:
            raise ValueError(f"rope must rotate {dims.rope} entries beside a latent, got {rope.dim}")
        if form not in get_args(Form):
            raise ValueError(f"form must be one of {get_args(Form)}, got {form!r}")
        if sharding is not None:
            sharding.check_divides("q_head", num_heads)
        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "sharding": sharding,
            "rngs": rngs,
        }

        def down(size: int) -> Linear:
            return Linear(embed_dim, size, axes=("embed", "latent"), has_bias=has_bias, **options)

        def norm(size: int) -> Any:
            if not dims.has_norm:
                return nnx.data(None)
            return RMSNorm(size, eps=norm_eps, param_dtype=param_dtype, axis="latent")

        self.q_down = nnx.data(None)
        self.q_norm = nnx.data(None)
        if dims.query is not None:
            self.q_down, self.q_norm = down(dims.query), norm(dims.query)
        width, axis = (embed_dim, "embed") if dims.query is None else (dims.query, "latent")
        self.q_proj = Linear(width, num_heads * (dims.key + dims.rope), axes=(axis, "q_head"), **options)
        self.kv_down = down(dims.latent + dims.rope)
        self.kv_norm = norm(dims.latent)

        def up(size: int) -> nnx.Param:
            draw = nnx.initializers.lecun_normal(in_axis=2, out_axis=1, batch_axis=0)
            value = draw(rngs.params(), (num_heads, size, dims.latent), param_dtype)
            return nnx.Param(value, logical_axes=("q_head", "head_dim", "latent"))

        self.key_up = up(dims.key)
        self.value_up = up(dims.value)
        self.o_proj = Linear(
            num_heads * dims.value, embed_dim, axes=("q_head", "embed"), has_bias=has_bias, **options
        )
        correction = 1.0 if rope is None else softmax_correction(rope)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dims = dims
        self.rope = rope
        self.window = window
        self.scale = (dims.key + dims.rope) ** -0.5 * correction if scale is None else scale
        self.form: Form = form
        self.implementation: ops.Implementation = implementation
        self.dtype = dtype
        self.sharding = sharding

    def __call__(
        self,
        x: Float[Array, "seq time embed"],
        cache: Cache | None = None,
        *,
        where: ops.Where | None = None,
        batch: TokenBatch | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Float[Array, "seq time embed"], Cache | None]:
        """Attend from each token to its sequence's past and itself; arguments as `GQAttention`."""
        check_input(x, self.embed_dim, batch)
        num_seqs, time, _ = x.shape
        query, rope_query = jnp.split(self._queries(x), [self.dims.key], axis=-1)
        latent, rope = jnp.split(self.kv_down(x), [self.dims.latent], axis=-1)
        latent = latent if self.kv_norm is None else self.kv_norm(latent)
        if self.rope is not None:
            cos, sin = step_rotation(self.rope, time, cache, batch) if rotation is None else rotation
            rope_query = rotate(rope_query, cos, sin)
            rope = rotate(rope[:, :, None], cos, sin)[:, :, 0]
        query, key_up = tied(query, self.key_up[...])
        query, value_up = tied(query, self.value_up[...])
        up = ops.UpProjections(key_up, value_up)
        if cache is None:
            out = self._attend_alone(query, rope_query, latent, rope, up)
        else:
            is_expanded = self._is_expanded(time, batch)
            out, cache, _ = ops.attend_latent(
                query if is_expanded else jnp.einsum("bthd,hdl->bthl", query, up.key),
                rope_query,
                latent,
                rope,
                cache,
                where,
                batch,
                scale=self.scale,
                up=up if is_expanded else None,
                window=self.window,
                implementation=self.implementation,
                sharding=self.sharding,
            )
            out = out if is_expanded else jnp.einsum("bthl,hvl->bthv", out, up.value)
        return self.o_proj(out.reshape(num_seqs, time, self.num_heads * self.dims.value)), cache

    def _queries(self, x: Float[Array, "seq time embed"]) -> Float[Array, "seq time q_head width"]:
        if self.q_down is not None:
            x = self.q_down(x)
        if self.q_norm is not None:
            x = self.q_norm(x)
        return self.q_proj(x).reshape(*x.shape[:2], self.num_heads, -1)

    def _is_expanded(self, time: int, batch: TokenBatch | None) -> bool:
        if self.form != "auto":
            return self.form == "expanded"
        is_ragged = batch is not None and batch.sequences is not None
        return not is_ragged and is_expansion_cheaper(self.dims, time)

    def _attend_alone(
        self,
        query: Float[Array, "seq time q_head key"],
        rope_query: Float[Array, "seq time q_head rope"],
        latent: Float[Array, "seq time latent"],
        rope: Float[Array, "seq time rope"],
        up: ops.UpProjections,
    ) -> Float[Array, "seq time q_head value"]:
        """Attend among the tokens given, expanded; differentiates."""
        key, value = (jnp.einsum("btl,hdl->bthd", latent, weight) for weight in up)
        placement = output_placement(self.sharding, "seq", None, "q_head", None)
        rope = jnp.broadcast_to(rope[:, :, None], rope_query.shape, out_sharding=placement)
        return ops.attend(
            jnp.concatenate([query, rope_query], axis=-1),
            jnp.concatenate([key, rope], axis=-1),
            value,
            scale=self.scale,
            window=self.window,
        ).out
