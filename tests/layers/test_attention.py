"""The attention layer: plain, through a cache, trained, and inside a Linen model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.layers.attention import GQAttention
from jkv.layers.rope import RopeConfig, inverse_frequencies

from ..compare import assert_close, relative_errors
from ..poison import poison

EMBED_DIM, NUM_HEADS, HEAD_DIM = 32, 4, 8
ROWS, TIME = 2, 11
HEADS = pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["multi_head", "grouped", "multi_query"])


def make_layer(num_kv_heads: int = 2, **options) -> GQAttention:
    options = {"rope": RopeConfig(dim=HEAD_DIM), "rngs": nnx.Rngs(0)} | options
    return GQAttention(EMBED_DIM, NUM_HEADS, num_kv_heads=num_kv_heads, **options)


def make_input(time: int = TIME, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (ROWS, time, EMBED_DIM), dtype)


def make_cache(num_kv_heads: int = 2, capacity: int = TIME) -> Cache:
    spec = CacheSpec.create([CacheGroup(1, num_kv_heads, HEAD_DIM)], page_size=4)
    return poison(Cache.dense(spec, num_sequences=ROWS, capacity=capacity))


def chunk(layer: nnx.Module, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    cache, batch = cache.begin(jnp.full(ROWS, x.shape[1], jnp.int32), time=x.shape[1])
    return layer(x, cache, where=(0, 0), batch=batch)


run_chunk = nnx.jit(chunk)


def run_cached(
    layer: GQAttention, x: jax.Array, widths: list[int], run: Callable[..., Any] = run_chunk
) -> np.ndarray:
    cache, outs = make_cache(layer.num_kv_heads, x.shape[1]), []
    for start, width in zip(np.cumsum([0, *widths]), widths, strict=False):
        out, cache = run(layer, x[:, start : start + width], cache)
        outs.append(out)
    return np.concatenate(outs, axis=1)


def plain_attention(layer: GQAttention, x: jax.Array) -> np.ndarray:
    """Compute the layer row by row, head by head, in float64."""
    rows = np.asarray(x, np.float64)

    def project(linear, heads: int) -> np.ndarray:
        weight = np.asarray(linear.weight[...], np.float64)
        return (rows @ weight.T).reshape(*rows.shape[:2], heads, HEAD_DIM)

    def rotate(heads: np.ndarray) -> np.ndarray:
        angles = np.arange(rows.shape[1])[:, None, None] * inverse_frequencies(layer.rope)
        half = HEAD_DIM // 2
        turned = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    query = rotate(project(layer.q_proj, NUM_HEADS))
    key = rotate(project(layer.k_proj, layer.num_kv_heads))
    value = project(layer.v_proj, layer.num_kv_heads)
    out = np.zeros_like(query)
    for row, step, head in np.ndindex(query.shape[:3]):
        first = 0 if layer.window is None else max(step + 1 - layer.window, 0)
        seen = (row, slice(first, step + 1), head * layer.num_kv_heads // NUM_HEADS)
        weights = np.exp(key[seen] @ query[row, step, head] * HEAD_DIM**-0.5)
        out[row, step, head] = weights / weights.sum() @ value[seen]
    return out.reshape(*rows.shape[:2], -1) @ np.asarray(layer.o_proj.weight[...], np.float64).T


@HEADS
@pytest.mark.parametrize("window", [None, 4])
def test_without_a_cache_it_is_causal_attention(num_kv_heads: int, window: int | None):
    layer, x = make_layer(num_kv_heads, window=window), make_input()
    out, cache = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert cache is None
    assert_close(out, plain_attention(layer, x))


@HEADS
@pytest.mark.parametrize("widths", [[11], [1, 5, 5], [4, 4, 3]], ids=["whole", "unequal", "even"])
def test_through_a_cache_every_cut_gives_the_same(num_kv_heads: int, widths: list[int]):
    layer, x = make_layer(num_kv_heads), make_input()
    assert_close(run_cached(layer, x, widths), plain_attention(layer, x))


@pytest.mark.parametrize(
    "widths", [[11, *[1] * 5], [*[1] * 7, 3, 6]], ids=["long_prefill_then_steps", "steps_then_chunks"]
)
def test_a_window_of_four_holds_throughout(widths: list[int]):
    layer, x = make_layer(window=4), make_input(16)
    assert_close(run_cached(layer, x, widths), plain_attention(layer, x))


def test_a_window_one_token_too_wide_fails_the_comparison():
    x = make_input()
    whole, row = relative_errors(
        plain_attention(make_layer(window=5), x), plain_attention(make_layer(window=4), x)
    )
    assert min(whole, row) > 1e-2


def test_bfloat16_activations_stay_bfloat16_and_near_float32():
    x = make_input(dtype=jnp.bfloat16)
    layer = make_layer(dtype=jnp.bfloat16)
    out, _ = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert out.dtype == jnp.bfloat16
    exact = plain_attention(layer, x)
    # `jax.nn` mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        low = jax.nn.dot_product_attention(*low_heads(layer, x), is_causal=True)
    low = low.reshape(ROWS, TIME, -1) @ layer.o_proj.weight[...].astype(jnp.bfloat16).T
    assert_close(out.astype(jnp.float32), exact, 2 * max(relative_errors(low.astype(jnp.float32), exact)))


def low_heads(layer: GQAttention, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project and rotate in bfloat16 alone."""
    angles = jnp.arange(TIME, dtype=jnp.float32)[:, None, None] * inverse_frequencies(layer.rope)[None, None]
    cos, sin = jnp.cos(angles).astype(jnp.bfloat16)[None], jnp.sin(angles).astype(jnp.bfloat16)[None]

    def project(linear) -> jax.Array:
        return (x @ linear.weight[...].astype(jnp.bfloat16).T).reshape(ROWS, TIME, -1, HEAD_DIM)

    def turn(heads: jax.Array) -> jax.Array:
        a, b = jnp.split(heads, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return turn(project(layer.q_proj)), turn(project(layer.k_proj)), project(layer.v_proj)


def mean_square(layer: GQAttention, x: jax.Array) -> jax.Array:
    return jnp.square(layer(x)[0]).mean()


@nnx.jit
def loss(layer: GQAttention, x: jax.Array, cache: Cache | None) -> jax.Array:
    if cache is None:
        return mean_square(layer, x)
    return jnp.square(run_chunk(layer, x, cache)[0]).mean()


def test_a_gradient_without_a_cache_is_that_of_finite_differences():
    layer, x = make_layer(), make_input()
    direction = jax.random.normal(jax.random.key(3), layer.k_proj.weight.shape)
    gradient = nnx.jit(nnx.grad(loss))(layer, x, None).k_proj.weight[...]
    step, weight = 1e-2, layer.k_proj.weight[...]
    losses = []
    for sign in (1, -1):
        layer.k_proj.weight[...] = weight + sign * step * direction
        losses.append(float(loss(layer, x, None)))
    slope = float(jnp.vdot(gradient, direction))
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-2)


def test_a_gradient_through_a_cache_is_refused():
    with pytest.raises(ValueError, match="a gradient through a cache is refused"):
        nnx.grad(loss)(make_layer(), make_input(), make_cache())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
        ({"num_kv_heads": 0}, "must be whole and at least 1, got num_kv_heads 0"),
        ({"num_heads": 0, "window": 0}, "at least 1, got num_heads 0, window 0"),
        ({"num_heads": 5}, "num_heads must divide embed_dim, got 5 and 32"),
        ({"rope": RopeConfig(dim=10)}, "rope must rotate at most a head's 8 entries, got 10"),
        ({"rope": RopeConfig(dim=7)}, "even, positive number of rotated entries, got 7"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict, message: str):
    sizes = {"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS} | options
    with pytest.raises(ValueError, match=message):
        GQAttention(**sizes, rngs=nnx.Rngs(0))


def test_a_cache_of_another_head_dim_is_refused():
    layer = make_layer(head_dim=16, rope=None)
    with pytest.raises(ValueError, match="head_dim"):
        run_chunk(layer, make_input(), make_cache())


def test_rows_that_are_not_the_step_s_are_refused():
    layer, x = make_layer(), make_input()
    with pytest.raises(ValueError, match=r"input must be \[seq, time, 32\], got \[2, 11, 16\]"):
        layer(x[..., :16])
    cache, batch = make_cache().begin(jnp.full(ROWS, 3, jnp.int32), time=3)
    with pytest.raises(ValueError, match=r"rows and their tokens are \(2, 3\), got an input of \[2, 4, 32\]"):
        layer(x[:, :4], cache, where=(0, 0), batch=batch)


def test_a_cache_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="needs `where` and the `batch`"):
        make_layer()(make_input(), make_cache())


class LinenModel(linen.Module):
    """A Linen user's model around the layer."""

    @linen.compact
    def __call__(self, x, cache=None, batch=None):
        options = {"num_kv_heads": 2, "rope": RopeConfig(dim=HEAD_DIM)}
        layer = nnx.bridge.to_linen(GQAttention, EMBED_DIM, NUM_HEADS, **options, name="attention")
        return layer(x, cache, where=(0, 0), batch=batch)


def test_a_linen_model_decodes_with_an_explicit_cache():
    x = make_input(6)
    variables = LinenModel().init(jax.random.key(0), x)
    whole, _ = LinenModel().apply(variables, x)
    cache, outs = make_cache(), []

    @jax.jit
    def step(x, cache):
        cache, batch = cache.begin(jnp.ones(ROWS, jnp.int32), time=1)
        return LinenModel().apply(variables, x, cache, batch)

    for token in range(6):
        out, cache = step(x[:, token : token + 1], cache)
        outs.append(out)
    assert_close(np.concatenate(outs, axis=1), whole)


def test_a_linen_model_equals_the_nnx_layer_of_its_parameters():
    x = make_input(6)
    variables = LinenModel().init(jax.random.key(0), x)
    layer = make_layer()
    for name, parameters in variables["params"]["attention"].items():
        leaf = jax.tree.leaves(parameters["weight"])[0]
        getattr(layer, name).weight[...] = leaf
    np.testing.assert_array_equal(LinenModel().apply(variables, x)[0], layer(x)[0])


def test_layers_work_without_the_graphs_of_nnx():
    layer, x = make_layer(), make_input()
    expected = nnx.jit(nnx.grad(loss))(layer, x, None).k_proj.weight[...]
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        layer = make_layer()
        assert_close(run_cached(layer, x, [4, 4, 3], nnx.jit(chunk)), plain_attention(layer, x))
        gradient = nnx.jit(nnx.grad(mean_square))(layer, x).k_proj.weight[...]
    assert_close(gradient, expected)
