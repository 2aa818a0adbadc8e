"""Scales of the static codecs against what the keys and values themselves say."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.codec import CODECS
from jkv.cache.encoding import decode, encode, rotate
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.canonical import to_canonical
from jkv.decode.calibrate import SHARES, calibrate
from jkv.decode.generate import Decoding
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.step import split_model

from ..compare import assert_close
from ..tiny import make_config

VOCAB_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 1024, 2, 3, 8
LARGEST = {"int8_static": 127, "fp8_e4m3_static": 448, "fp8_e5m2_static": 57344}
PROMPTS = [list(range(700)), [3], list(range(700, VOCAB_SIZE))]


def make_tables() -> np.ndarray:
    """Return a key and a value of each token, layer and head: heads of unlike sizes, with far outliers."""
    random = np.random.default_rng(0)
    tables = random.standard_t(3, (2, NUM_LAYERS, VOCAB_SIZE, NUM_HEADS, HEAD_DIM))
    return np.float32(tables * np.array([[0.1], [1], [20]]))


def write_tables(tables, tokens, cache, batch):
    """Be a model whose keys and values follow from the token alone."""
    for layer in range(NUM_LAYERS):
        cache = ops.append(cache, (0, layer), batch, tables[0, layer, tokens], tables[1, layer, tokens])
    return jnp.zeros((1, VOCAB_SIZE)), cache


def make_decoding(codec: str, value_codec: str | None = None, **options: Any) -> Decoding:
    group = CacheGroup(NUM_LAYERS, NUM_HEADS, HEAD_DIM, codec, value_codec)
    spec = CacheSpec.create([group], page_size=4)
    decoding = Decoding(write_tables, jnp.asarray(make_tables()), spec, VOCAB_SIZE)
    return dataclasses.replace(decoding, **options)


def written_heads(codec: str, which: int) -> np.ndarray:
    """Return all keys (0) or values (1) as a codec scales them: `[layer, token, kv_head, head_dim]`."""
    heads = make_tables()[which][:, [token for prompt in PROMPTS for token in prompt]]
    return np.asarray(rotate(CODECS[codec], jnp.asarray(heads)))


def over_heads(per: str, values: np.ndarray, combine=np.max) -> np.ndarray:
    """Return what scales of heads are, or the same for all heads of a layer."""
    return values if per == "head" else np.broadcast_to(combine(values, -1, keepdims=True), values.shape)


@pytest.mark.parametrize("per", ["head", "tensor"])
@pytest.mark.parametrize("codecs", [("int8_static", "fp8_e4m3_static"), ("fp8_e5m2_static", None)])
def test_absmax_is_the_largest_magnitude_over_the_largest_entry(codecs: tuple, per: str):
    (pair,) = calibrate(make_decoding(*codecs), PROMPTS, method="absmax", per=per)
    for which, codec in enumerate((codecs[0], codecs[1] or codecs[0])):
        magnitudes = np.abs(written_heads(codec, which)).max((1, 3))
        assert_close(pair[which], over_heads(per, magnitudes) / LARGEST[codec], 1e-6)


@pytest.mark.parametrize("percentile", [50.0, 90.0, 100.0])
def test_a_percentile_is_the_least_share_that_holds_so_many(percentile: float):
    decoding = make_decoding("int8_static", "bf16")
    ((keys, values),) = calibrate(decoding, PROMPTS, method="percentile", percentile=percentile)
    assert values is None
    magnitudes = np.abs(written_heads("int8_static", 0))
    limits = 127 * np.asarray(keys)[:, None, :, None]
    shares = [(magnitudes <= limits * factor).mean((1, 3)) for factor in (1.0001, 0.9999 * SHARES[1])]
    assert (shares[0] >= percentile / 100).all()
    assert (shares[1] < percentile / 100).all()


@pytest.mark.parametrize(("codec", "per"), [("int8_static", "head"), ("fp8_e4m3_static", "tensor")])
def test_mse_has_the_least_error_of_all_shares(codec: str, per: str):
    heads = written_heads(codec, 0)
    limits = over_heads(per, np.abs(heads).max((1, 3)))
    plain = dataclasses.replace(CODECS[codec], is_rotated=False)

    def errors(scales: np.ndarray) -> np.ndarray:
        pairs = [(jnp.asarray(layer), jnp.asarray(scale)) for layer, scale in zip(heads, scales, strict=True)]
        read = np.stack([decode(plain, encode(plain, *pair), pair[1]) for pair in pairs])
        return over_heads(per, np.square(read.astype(np.float64) - heads).sum((1, 3)), np.sum)

    ((keys, _),) = calibrate(make_decoding(codec), PROMPTS, method="mse", per=per)
    every = np.stack([errors((share * limits / LARGEST[codec]).astype(np.float32)) for share in SHARES])
    got = errors(np.asarray(keys))
    np.testing.assert_allclose(got, every.min(0), rtol=1e-4)
    assert (got < 0.99 * every[0]).any()


@pytest.mark.parametrize("method", ["percentile", "mse"])
def test_the_width_of_a_step_changes_nothing(method: str):
    decoding = make_decoding("int8_static")
    (whole,), (pieces,) = (calibrate(decoding, PROMPTS, method=method, chunk=chunk) for chunk in (1024, 100))
    np.testing.assert_allclose(pieces, whole, rtol=1e-6)


def test_the_heads_of_a_model_are_measured_after_the_rotary_embedding():
    config, tokens = make_config(num_kv_heads=2), [1, 5, 9, 2, 30, 7, 7]
    step, weights = split_model(Decoder(config, rngs=nnx.Rngs(0)))
    spec = cache_spec(config, page_size=4, codec="int8_static")
    decoding = Decoding(step, weights, spec, config.vocab_size)
    (pair,) = calibrate(decoding, [tokens], method="absmax", chunk=4)
    exact = Cache.dense(cache_spec(config, page_size=4), num_sequences=1, capacity=8)

    @jax.jit
    def run(cache: Cache):
        cache, batch = cache.begin(jnp.array([7], jnp.int32), time=7)
        return to_canonical(step(weights, jnp.array([tokens]), cache, batch)[1])

    canonical = run(exact)
    for scales, layers in zip(pair, (canonical.keys[0], canonical.values[0]), strict=True):
        heads = rotate(CODECS["int8_static"], jnp.stack(layers))
        assert_close(scales, jnp.abs(heads).max((1, 2, 4)) / 127)


def test_a_head_that_is_always_zero_has_a_scale():
    tables = make_tables()
    tables[:, 1, :, 2] = 0
    ((keys, _),) = calibrate(make_decoding("int8_static", weights=jnp.asarray(tables)), PROMPTS)
    assert (np.asarray(keys) > 0).all()
    assert np.isfinite(keys).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_keys_and_values_that_are_not_finite_are_refused(bad: float):
    tables = make_tables()
    tables[1, 1, 999, 2, 3] = bad
    with pytest.raises(ValueError, match="keys and values must be finite, got NaN or infinity"):
        calibrate(make_decoding("int8_static", weights=jnp.asarray(tables)), PROMPTS)


def test_pages_in_stripes_are_not_measured():
    decoding = make_decoding("int8_static")
    striped = dataclasses.replace(decoding, spec=dataclasses.replace(decoding.spec, num_stripes=2))
    with pytest.raises(ValueError, match="where each device has whole sequences, got pages in 2 stripes"):
        calibrate(striped, PROMPTS)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("codec", "options", "message"),
    [
        ("int8", {}, "scales are measured for a codec whose name ends in _static, got int8"),
        ("int8_static", {"method": "max"}, "method must be one of absmax, percentile, mse, got 'max'"),
        ("int8_static", {"per": "layer"}, "per must be one of head, tensor, got 'layer'"),
        ("int8_static", {"percentile": 0.0}, "percentile must be above 0 and at most 100, got 0.0"),
        ("int8_static", {"percentile": 100.5}, "percentile must be above 0 and at most 100, got 100.5"),
        ("int8_static", {"chunk": 0}, "chunk must be at least 1 token, got 0"),
        ("int8_static", {"prompts": [[]]}, "prompt 0 is empty"),
    ],
)
def test_what_cannot_be_measured_is_refused(codec: str, options: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        calibrate(make_decoding(codec), **{"prompts": PROMPTS} | options)


def test_latents_and_their_rotated_parts_have_scales_of_their_own():
    names = ("int8_static", "fp8_e4m3_static")
    sizes = {"kind": "latent", "rope_dim": HEAD_DIM, "rope_codec": names[1]}
    spec = CacheSpec.create([CacheGroup(NUM_LAYERS, 1, HEAD_DIM, names[0], **sizes)], page_size=4)
    tables = jnp.asarray(make_tables()[..., :1, :])
    (pair,) = calibrate(make_decoding("f32", spec=spec, weights=tables), PROMPTS, method="absmax")
    for which, (name, scale) in enumerate(zip(names, pair, strict=True)):
        largest = np.abs(written_heads(name, which)[:, :, :1]).max((1, 3))
        assert_close(scale, largest / LARGEST[name])
