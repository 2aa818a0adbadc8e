"""Latent attention as a layer: both forms, through every cut of a prompt, trained, and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.layers.latent import LatentAttention, LatentDims, is_expansion_cheaper
from jkv.layers.rope import RopeConfig, attention_scaling, inverse_frequencies
from jkv.models.load import parameter_targets, set_parameters
from jkv.sharding import Sharding

from ..compare import assert_close, relative_errors
from ..poison import poison

EMBED_DIM, NUM_HEADS = 32, 4
ROWS, TIME = 2, 37
DIMS = LatentDims(latent=16, rope=8, key=12, value=10)
COMPRESSED = LatentDims(latent=16, rope=8, key=12, value=10, query=20)
# The softmax is corrected by 0.1 * ln(40) + 1, squared.
YARN = RopeConfig(
    dim=8, scaling="yarn", factor=40.0, original_max_position=64, mscale=1.0, mscale_all_dim=1.0
)
CORRECTION = 1.8738542
FORMS, WIDTHS = ("absorbed", "expanded"), (37, 16, 5, 1)


def make_layer(dims: LatentDims = COMPRESSED, **options) -> LatentAttention:
    options = {"rope": YARN, "rngs": nnx.Rngs(0)} | options
    return LatentAttention(EMBED_DIM, NUM_HEADS, dims, **options)


def make_input(rows: int = ROWS, time: int = TIME) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (rows, time, EMBED_DIM))


def make_cache(codec: str = "f32", rows: int = ROWS, sharding: Sharding | None = None, **options) -> Cache:
    group = CacheGroup(1, 1, DIMS.latent, codec, kind="latent", rope_dim=DIMS.rope, **options)
    spec = CacheSpec.create([group], page_size=4)
    return poison(Cache.dense(spec, num_sequences=rows, capacity=TIME, sharding=sharding))


@nnx.jit
def run_chunk(layer: nnx.Module, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    cache, batch = cache.begin(jnp.full(x.shape[0], x.shape[1], jnp.int32), time=x.shape[1])
    return layer(x, cache, where=(0, 0), batch=batch)


def run_cached(layer: LatentAttention, x: jax.Array, width: int, cache: Cache) -> np.ndarray:
    outs = []
    for start in range(0, x.shape[1], width):
        out, cache = run_chunk(layer, x[:, start : start + width], cache)
        outs.append(out)
    return np.concatenate(outs, axis=1)


def plain_attention(layer: LatentAttention, x: jax.Array, correction: float = CORRECTION) -> np.ndarray:
    """Compute the layer row by row, head by head, in float64, rotating pairs as complex numbers."""

    def product(rows: np.ndarray, linear) -> np.ndarray:
        return rows @ np.asarray(linear.weight[...], np.float64).T

    def normed(rows: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)

    def rotate(rows: np.ndarray) -> np.ndarray:
        angles = np.arange(rows.shape[-2])[:, None] * inverse_frequencies(layer.rope)
        turned = (rows[..., :4] + 1j * rows[..., 4:]) * np.exp(1j * angles) * attention_scaling(layer.rope)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    rows, dims = np.asarray(x, np.float64), layer.dims
    queries = rows if dims.query is None else normed(product(rows, layer.q_down))
    queries = product(queries, layer.q_proj).reshape(*rows.shape[:2], NUM_HEADS, -1).swapaxes(1, 2)
    compressed = product(rows, layer.kv_down)
    latent, rope = normed(compressed[..., : dims.latent]), rotate(compressed[..., dims.latent :])
    key_up, value_up = (np.asarray(up[...], np.float64) for up in (layer.key_up, layer.value_up))
    queries = np.concatenate([queries[..., : dims.key], rotate(queries[..., dims.key :])], axis=-1)
    out = np.zeros((*rows.shape[:2], NUM_HEADS, dims.value))
    for row, head, step in np.ndindex(queries.shape[:3]):
        past = slice(0, step + 1)
        keys = np.concatenate([latent[row, past] @ key_up[head].T, rope[row, past]], axis=-1)
        scale = (dims.key + dims.rope) ** -0.5 * correction
        weights = np.exp(keys @ queries[row, head, step] * scale)
        out[row, step, head] = weights / weights.sum() @ (latent[row, past] @ value_up[head].T)
    return product(out.reshape(*rows.shape[:2], -1), layer.o_proj)


@pytest.mark.parametrize("dims", [DIMS, COMPRESSED], ids=["whole_queries", "compressed_queries"])
def test_without_a_cache_it_is_causal_attention(dims: LatentDims):
    layer, x = make_layer(dims), make_input()
    out, cache = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert cache is None
    assert_close(out, plain_attention(layer, x))


def test_logits_without_the_correction_of_the_softmax_fail_the_comparison():
    layer, x = make_layer(), make_input()
    assert min(relative_errors(plain_attention(layer, x, 1.0), plain_attention(layer, x))) > 1e-2


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", FORMS)
def test_through_a_cache_every_cut_gives_the_same_in_both_forms(form: str, width: int):
    layer, x = make_layer(form=form), make_input()
    assert_close(run_cached(layer, x, width, make_cache()), plain_attention(layer, x))


@pytest.mark.parametrize(
    ("codec", "rope_codec"),
    [pytest.param("int8", "int8", marks=pytest.mark.histories), ("int4", "f32"), ("bf16", "bf16")],
)
def test_both_forms_see_latents_as_they_are_stored(codec: str, rope_codec: str):
    x = make_input()
    outs = [
        run_cached(make_layer(form=form), x, 16, make_cache(codec, rope_codec=rope_codec)) for form in FORMS
    ]
    # Absorbed queries are rounded to multiply raw bfloat16 latents.
    assert_close(*outs, 2**-7 if codec == "bf16" else 1e-5)


def test_a_step_takes_the_form_that_costs_less():
    deepseek = LatentDims(latent=512, rope=64, key=128, value=128)
    assert not is_expansion_cheaper(deepseek, 170)
    assert is_expansion_cheaper(deepseek, 171)
    # Heads as wide as two latents: nothing is won by reading latents alone.
    assert not is_expansion_cheaper(LatentDims(latent=128, rope=64, key=128, value=128), 10_000)
    widths = {16: "absorbed", 37: "expanded"}
    # 16 * 22 / (2 * 16 - 22) tokens.
    for time, form in widths.items():
        x = make_input(time=time)
        auto, _ = run_chunk(make_layer(), x, make_cache())
        named, _ = run_chunk(make_layer(form=form), x, make_cache())
        np.testing.assert_array_equal(auto, named)


def test_a_token_leaves_its_latent_and_its_rotated_part_alone():
    """Keys of 128 + 64 and values of 128 entries a head would be 71 times as much in DeepSeek-V2."""
    dims, num_heads = LatentDims(latent=512, rope=64, key=128, value=128), 128
    group = CacheGroup(1, 1, dims.latent, "bf16", kind="latent", rope_dim=dims.rope)
    spec = CacheSpec.create([group], page_size=16)
    cache = Cache.dense(spec, num_sequences=1, capacity=64)
    arrays = jax.tree.leaves((cache.pools[0].keys, cache.pools[0].values))
    found = sum(array.nbytes for array in arrays) // 64
    assert found == spec.bytes_per_token == (dims.latent + dims.rope) * 2
    assert num_heads * (dims.key + dims.rope + dims.value) * 2 // found == 71


@nnx.jit
def loss(layer: LatentAttention, x: jax.Array, cache: Cache | None) -> jax.Array:
    if cache is None:
        return jnp.square(layer(x)[0]).mean()
    return jnp.square(run_chunk(layer, x, cache)[0]).mean()


def test_a_gradient_without_a_cache_is_that_of_finite_differences():
    layer, x = make_layer(), make_input()
    direction = jax.random.normal(jax.random.key(3), layer.key_up.shape)
    gradient = nnx.jit(nnx.grad(loss))(layer, x, None).key_up[...]
    step, weight = 1e-2, layer.key_up[...]
    losses = []
    for sign in (1, -1):
        layer.key_up[...] = weight + sign * step * direction
        losses.append(float(loss(layer, x, None)))
    slope = float(jnp.vdot(gradient, direction))
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_through_a_cache_is_refused(form: str):
    with pytest.raises(ValueError, match="a gradient through a cache is refused"):
        nnx.grad(loss)(make_layer(form=form), make_input(), make_cache())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_splits_heads_and_holds_latents_whole(form: str, axis_type: AxisType):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    rules = {"seq": "data", "page": "data", "q_head": "model", "kv_head": "model"}
    sharding = Sharding.create(mesh, rules)
    layer, x = make_layer(form=form, sharding=sharding), make_input()
    expected = plain_attention(layer, x)
    targets = parameter_targets(layer, sharding)
    flat = {".".join(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    set_parameters(layer, {name: jax.device_put(flat[name], targets[name].sharding) for name in flat})
    assert {shard.data.shape for shard in layer.key_up[...].addressable_shards} == {(2, 12, 16)}
    cache = make_cache(sharding=sharding)
    # Ten pages for the one sequence of a device.
    assert {shard.data.shape for shard in cache.pools[0].keys.data.addressable_shards} == {(10, 1, 4, 16)}
    x = jax.device_put(x, sharding.named("seq", None, None))
    with jax.set_mesh(mesh):
        out, _ = run_chunk(layer, x, cache)
        alone, _ = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert_close(out, expected)
    assert_close(alone, expected)


@pytest.mark.parametrize("name", ["latent", "rope", "key", "value", "query"])
@pytest.mark.parametrize("size", [0, -1])
def test_widths_below_one_are_refused(name: str, size: int):
    dims = dataclasses.replace(COMPRESSED, **{name: size})
    with pytest.raises(ValueError, match=f"whole and at least 1, got {name} {size}"):
        make_layer(dims)


def test_rows_that_are_not_the_step_s_are_refused():
    layer, x = make_layer(), make_input()
    with pytest.raises(ValueError, match=r"input must be \[seq, time, 32\], got \[2, 37, 16\]"):
        layer(x[..., :16])
    cache, batch = make_cache(rows=3).begin(jnp.full(3, TIME, jnp.int32), time=TIME)
    with pytest.raises(ValueError, match=r"tokens are \(3, 37\), got an input of \[2, 37, 32\]"):
        layer(x, cache, where=(0, 0), batch=batch)


def test_a_rotary_embedding_of_another_width_is_refused():
    with pytest.raises(ValueError, match="rope must rotate 8 entries beside a latent, got 16"):
        make_layer(rope=RopeConfig(dim=16))


def test_a_cache_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="needs `where` and the `batch`"):
        make_layer()(make_input(), make_cache())
