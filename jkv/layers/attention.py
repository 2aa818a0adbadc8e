"""Grouped-query attention that decodes with a cache and trains without one.

Knows nothing of models: it is given its place in the cache and the step's batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jkv import ops
from jkv.cache.batch import TokenBatch
from jkv.cache.cache import Cache
from jkv.layers.checks import check_input, check_sizes
from jkv.layers.linear import Linear, RMSNorm
from jkv.layers.rope import RopeConfig, Rotation, inverse_frequencies, rotate, rotations
from jkv.sharding import Sharding


def step_rotation(
    rope: RopeConfig, time: int, cache: Cache | None = None, batch: TokenBatch | None = None
) -> Rotation:
    """Return cos and sin at the step's positions; without a cache and a batch they are 0 to `time` - 1."""
    rope = rope.for_capacity(time if cache is None else cache.capacity)
    positions = jnp.arange(time, dtype=jnp.int32)[None] if batch is None else batch.positions
    # Computed once: XLA's CPU backend would repeat the cosines inside every fusion that rotates.
    return jax.lax.optimization_barrier(rotations(rope, positions))


class GQAttention(nnx.Module):
    """Causal attention in which groups of query heads share a key and a value head (Ainslie et al. 2023).

    `num_kv_heads == num_heads` is multi-head attention, `num_kv_heads == 1` multi-query attention.

    Args:
        embed_dim: width of input and output.
        num_heads: query heads.
        num_kv_heads: key heads, and as many value heads; divides `num_heads`; None is `num_heads`.
        head_dim: entries of a head; None is `embed_dim / num_heads`.
        rope: rotary embedding of queries and keys; None leaves them unrotated.
        window: latest positions that a query sees, its own included; None is all.
        scale: multiplies the logits; None is `head_dim ** -0.5`.
        soft_cap: limits the logits; see `jkv.ops.attend`.
        has_sinks: a learned logit for each query head that takes probability and adds no value.
        has_qk_norm: RMSNorm over each query and key head before rotation.
        is_qk_norm_wide: that norm is over all heads of a token at once.
        has_qkv_bias: biases on the query, key and value projections.
        has_output_bias: a bias on the output projection.
        norm_eps: of the query and key norms.
        implementation: how `jkv.ops.attend` computes; see there.
        dtype: dtype of activations.
        param_dtype: dtype of stored parameters.
        sharding: splits sequences and heads over a mesh; None is one device.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is below 1, head counts do not divide, more entries are rotated than a head has,
            or the mesh does not divide the heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope: RopeConfig | None = None,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        has_qk_norm: bool = False,
        is_qk_norm_wide: bool = False,
        has_qkv_bias: bool = False,
        has_output_bias: bool = False,
        norm_eps: float = 1e-6,
        implementation: ops.Implementation = "auto",
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        check_sizes(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim, got {num_heads} and {embed_dim}; or give head_dim"
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {num_heads}")
        if rope is not None and 2 * len(inverse_frequencies(rope)) > self.head_dim:
            raise ValueError(f"rope must rotate at most a head's {self.head_dim} entries, got {rope.dim}")
        if sharding is not None:
            sharding.check_divides("kv_head", self.num_kv_heads)
        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "sharding": sharding,
            "rngs": rngs,
        }

        def project(heads: int, axis: str) -> Linear:
            width = heads * self.head_dim
            return Linear(embed_dim, width, axes=("embed", axis), has_bias=has_qkv_bias, **options)

        self.q_proj = project(num_heads, "q_head")
        self.k_proj = project(self.num_kv_heads, "kv_head")
        self.v_proj = project(self.num_kv_heads, "kv_head")
        self.o_proj = Linear(
            num_heads * self.head_dim,
            embed_dim,
            axes=("q_head", "embed"),
            has_bias=has_output_bias,
            **options,
        )
        self.q_norm = nnx.data(None)
        self.k_norm = nnx.data(None)
        if has_qk_norm:
            norm: dict[str, Any] = {"eps": norm_eps, "param_dtype": param_dtype}
            self.q_norm, self.k_norm = (
                RMSNorm(heads * self.head_dim, axis=axis, **norm)
                if is_qk_norm_wide
                else RMSNorm(self.head_dim, axis="head_dim", **norm)
                for heads, axis in ((num_heads, "q_head"), (self.num_kv_heads, "kv_head"))
            )
        self.sinks = nnx.data(None)
        if has_sinks:
            self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype), logical_axes=("q_head",))
        self.is_qk_norm_wide = is_qk_norm_wide
        self.rope = rope
        self.window = window
        self.soft_cap = soft_cap
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.implementation: ops.Implementation = implementation
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
        """Attend from each token to its sequence's past and itself.

        Args:
            x: the step's tokens, in rows as the batch's: padded or ragged.
            cache: what the sequences hold; consumed where the caller donates it. None: `x` is all there is.
            where: the cache group and this layer's index in it; needed with a cache.
            batch: the step, from `cache.begin`; needed with a cache.
            rotation: from `step_rotation`, where layers share it; None computes it.

        Returns:
            The output and the cache with the new tokens (None without one).
        """
        check_input(x, self.embed_dim, batch)
        num_seqs, time, _ = x.shape
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.is_qk_norm_wide:
            query, key = self._normed(query, key)
        query = query.reshape(num_seqs, time, self.num_heads, self.head_dim)
        key = key.reshape(num_seqs, time, self.num_kv_heads, self.head_dim)
        value = value.reshape(num_seqs, time, self.num_kv_heads, self.head_dim)
        if not self.is_qk_norm_wide:
            query, key = self._normed(query, key)
        if self.rope is not None:
            cos, sin = step_rotation(self.rope, time, cache, batch) if rotation is None else rotation
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out, cache, _ = ops.attend(
            query,
            key,
            value,
            cache,
            where,
            batch,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            implementation=self.implementation,
            sharding=self.sharding,
        )
        return self.o_proj(out.reshape(num_seqs, time, self.num_heads * self.head_dim)), cache

    def _normed(self, query: Array, key: Array) -> tuple[Array, Array]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)
