"""What each codec makes of a head, and what is read back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache.codec import CODECS, Codec, find_codecs
from jkv.cache.encoding import FP8, Stored, decode, encode, encode_run, hadamard, pack, rotate, unpack

NUM_HEADS = 3
# A run of slots is encoded as a whole, the others token by token.
BY_TOKEN = [name for name, codec in CODECS.items() if codec.scaling != "slots"]
DYNAMIC = [name for name in BY_TOKEN if CODECS[name].scaling != "static"]
STATIC = [name for name, codec in CODECS.items() if codec.scaling == "static"]
# Half a step of the worst entry, as a share of the largest of the head, without rotation.
STEP = {
    "f32": 0,
    "bf16": 2**-8,
    "int8": 1 / 254,
    "fp8_e4m3": 2**-4,
    "fp8_e5m2": 2**-3,
    "int4_token": 1 / 15 + 2**-8,
}


def make_heads(head_dim: int = 64, count: int = 50, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, NUM_HEADS, head_dim))


def plain(name: str) -> Codec:
    """Return the codec without its rotation, so that errors are those of single entries."""
    codec = CODECS[name]
    return Codec(codec.entry, codec.scaling)


def scales_for(codec: Codec, heads: jax.Array) -> jax.Array | None:
    """Return the scales at which a static codec just does not saturate."""
    if codec.scaling != "static":
        return None
    largest = 127 if codec.entry == "int8" else float(jnp.finfo(FP8[codec.entry]).max)
    return jnp.abs(rotate(codec, heads)).max(axis=(0, 2)) / largest


def read_back(codec: Codec, heads: jax.Array) -> np.ndarray:
    scales = scales_for(codec, heads)
    return np.asarray(decode(codec, jax.jit(encode, static_argnums=0)(codec, heads, scales), scales))


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("largest", [0.01, 4.0, 3e-4, 1e38])
def test_an_entry_is_off_by_at_most_half_a_step_of_its_head(name: str, largest: float):
    heads = make_heads()
    heads = heads / jnp.abs(heads).max(-1, keepdims=True) * largest
    error = np.abs(read_back(plain(name), heads).astype(np.float64) - heads) / largest
    assert error.max() <= STEP[name] * (1 + 1e-5)
    assert STEP[name] == 0 or error.max() > STEP[name] / 4


@pytest.mark.parametrize("name", BY_TOKEN)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_what_is_read_back_is_near_what_was_stored(name: str, head_dim: int):
    heads = make_heads(head_dim)
    codec = CODECS[name]
    error = np.linalg.norm(read_back(codec, heads) - heads) / np.linalg.norm(heads)
    assert error < {"int4": 0.12, "fp8_e5m2": 0.08, "fp8_e4m3": 0.04, "int8": 0.02}.get(codec.entry, 0.01)


@pytest.mark.parametrize("name", DYNAMIC)
def test_zero_and_constant_heads_are_kept_and_their_scales_are_finite(name: str):
    heads = jnp.stack([jnp.zeros((NUM_HEADS, 64)), jnp.full((NUM_HEADS, 64), 3e-4)])
    stored = encode(plain(name), heads)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(stored))
    back = read_back(plain(name), heads)
    assert (back[0] == 0).all()
    np.testing.assert_allclose(back[1], 3e-4, rtol=2**-8)


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_head_that_is_not_finite_stays_so_and_spoils_no_other(name: str, bad: float):
    heads = make_heads(count=2).at[0, 1, 5].set(bad)
    back = read_back(CODECS[name], heads)
    assert not np.isfinite(back[0, 1]).all()
    assert np.isfinite(back[0, [0, 2]]).all()
    assert np.isfinite(back[1]).all()


@pytest.mark.parametrize("name", STATIC)
def test_entries_past_a_calibrated_scale_saturate(name: str):
    codec = plain(name)
    heads = make_heads()
    scales = scales_for(codec, heads)
    assert scales is not None
    back = decode(codec, encode(codec, 10 * heads, scales), scales)
    limit = jnp.abs(heads).max(axis=(0, 2))
    np.testing.assert_allclose(np.abs(np.asarray(back)).max(axis=(0, 2)), limit, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 7, 64, 80, 96, 128])
def test_the_rotation_is_orthogonal_and_keeps_products(size: int):
    signs, factor = hadamard(size)
    np.testing.assert_allclose(factor**2 * signs @ signs.T, np.eye(size), atol=1e-6)
    query, key = make_heads(size, seed=1), make_heads(size, seed=2)
    codec = CODECS["int8"]
    before, after = ((q * k).sum(-1) for q, k in ((query, key), (rotate(codec, query), rotate(codec, key))))
    np.testing.assert_allclose(after, before, atol=1e-4)
    np.testing.assert_allclose(rotate(codec, rotate(codec, key), is_inverse=True), key, atol=1e-5)


def test_an_outlying_channel_costs_the_others_less_when_rotated():
    heads = make_heads().at[..., 9].mul(50)
    rotated, unrotated = (
        np.abs(read_back(codec, heads) - heads) for codec in (CODECS["int8"], plain("int8"))
    )
    others = np.arange(64) != 9
    assert rotated[..., others].mean() < unrotated[..., others].mean() / 2


def test_packing_keeps_every_nibble():
    entries = jnp.arange(16).reshape(1, 16)
    assert pack(entries).nbytes == 8
    np.testing.assert_array_equal(unpack(pack(entries)), entries)


@pytest.mark.parametrize("name", BY_TOKEN)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_page_is_declared_as_it_is_encoded(name: str, head_dim: int):
    codec = CODECS[name]
    declared = codec.page_arrays(num_pages=50, num_kv_heads=NUM_HEADS, page_size=1, head_dim=head_dim)
    stored = encode(codec, make_heads(head_dim), jnp.ones(NUM_HEADS))
    got = {field: getattr(stored, field) for field in ("data", "scale", "zero")}
    got = {field: array[:, :, None] for field, array in got.items() if array is not None}
    assert {field: (array.shape, str(array.dtype)) for field, array in got.items()} == {
        field: (array.shape, array.dtype) for field, array in declared.items()
    }


def read_run(heads: jax.Array) -> np.ndarray:
    stored = jax.jit(encode_run)(heads)
    scale, zero = (array[:, None] for array in (stored.scale, stored.zero))
    return np.asarray(decode(CODECS["int4"], Stored(data=stored.data, scale=scale, zero=zero)))


def test_a_channel_of_a_run_is_off_by_at_most_half_a_step_of_its_own():
    """A channel that is large at every slot costs no other."""
    heads = jax.random.normal(jax.random.key(0), (3, 32, 64)) * jnp.logspace(-3, 3, 64)[None, None]
    span = np.ptp(np.asarray(heads), axis=1, keepdims=True)
    largest = np.abs(np.asarray(heads)).max(1, keepdims=True)
    error = np.abs(read_run(heads).astype(np.float64) - heads)
    assert (error <= span / 30 * (1 + 1e-5) + largest * 2**-7).all()
    assert (error > span / 60).any(axis=(0, 1)).all()


def test_zero_constant_and_non_finite_channels_stay_what_they_are():
    heads = jnp.zeros((2, 8, 16)).at[:, :, 1].set(3e-4).at[0, 5, 2].set(jnp.nan).at[0, 5, 3].set(jnp.inf)
    back = read_run(heads)
    assert not np.isfinite(back[0, :, 2:4]).all(axis=0).any()
    assert np.isfinite(back[1]).all()
    assert (back[:, :, [0, *range(4, 16)]] == 0).all()
    np.testing.assert_allclose(back[:, :, 1], 3e-4, rtol=2**-8)


@pytest.mark.parametrize("page_size", [8, 16, 24, 64])
def test_a_page_of_runs_is_declared_as_it_is_encoded(page_size: int):
    codec = CODECS["int4"]
    span = codec.span(page_size)
    declared = codec.page_arrays(num_pages=5, num_kv_heads=NUM_HEADS, page_size=page_size, head_dim=80)
    stored = encode_run(jnp.ones((5, NUM_HEADS, page_size // span, span, 80)))
    assert declared["scale"].shape == stored.scale.shape
    assert declared["zero"].shape == stored.zero.shape
    assert declared["data"].shape == (5, NUM_HEADS, page_size, stored.data.shape[-1])


@pytest.mark.parametrize(
    ("name", "share"), [("int8", 0.53), ("fp8_e4m3", 0.53), ("int4", 0.32), ("int4_token", 0.32)]
)
def test_bytes_beside_bfloat16_are_bounded(name: str, share: float):
    sizes = {"num_pages": 4, "num_kv_heads": 8, "page_size": 32, "head_dim": 128}
    small, large = (
        sum(array.nbytes for array in CODECS[codec].page_arrays(**sizes).values()) for codec in (name, "bf16")
    )
    assert small <= share * large


def test_an_unknown_codec_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"codec must be one of f32, .*, got 'int9'; did you mean 'int8'\?"):
        find_codecs("int9")
