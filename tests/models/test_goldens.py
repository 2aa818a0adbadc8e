"""Public reference outputs, reproduced in chunks of every width, through every cache, and by generation."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache.cache import Cache
from jkv.decode.generate import Decoding, Stream, begin, generate
from jkv.decode.loop import decode
from jkv.models.decoder import cache_spec
from jkv.models.load import LanguageModel, abstract_decoder, load_model
from jkv.models.model_config import ModelConfig
from jkv.models.step import split_model

from ..compare import assert_close, relative_errors
from ..poison import poison

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = (
    "llama",
    "llama3_rope",
    "mistral_sliding",
    "qwen3_qknorm",
    "mixtral_moe",
    "gemma3_local_global",
    "qwen2",
    "qwen3_moe",
    "gemma2",
    "gpt_oss",
    "olmo2",
    "phi3",
    "phi3_longrope",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v2_grouped",
    "deepseek_v3_yarn",
    "glm4_moe_lite",
)
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 40, 16
# The references' own bound: float32 of another implementation.
TOLERANCE = 1e-4
WIDTHS = (40, 16, 7, 1)
# Each program compiles for seconds: `make test` takes each width and each model, the gates all pairs.
SHORT = {
    ("llama", 40),
    ("llama", 1),
    ("llama3_rope", 16),
    ("mistral_sliding", 7),
    ("qwen3_qknorm", 7),
    ("mixtral_moe", 7),
    ("gemma3_local_global", 16),
    ("qwen2", 7),
    ("qwen3_moe", 16),
    ("gemma2", 7),
    ("gpt_oss", 7),
    ("olmo2", 16),
    ("phi3", 16),
    ("phi3_longrope", 7),
    ("deepseek_v2_lite", 7),
    ("deepseek_v3", 16),
    ("deepseek_v2_grouped", 16),
    ("deepseek_v3_yarn", 7),
    ("glm4_moe_lite", 7),
}
PAIRS = [
    pytest.param(name, width, marks=() if (name, width) in SHORT else pytest.mark.histories)
    for name in NAMES
    for width in WIDTHS
]
LLAMAS = NAMES[:4]
WINDOWED = ("mistral_sliding", "gemma3_local_global", "gemma2", "gpt_oss", "phi3")
LATENT = NAMES[-5:]


def models(names: Iterable[str], short: Collection[str]) -> Any:
    """Return a mark that runs a test with each model, those that are not `short` by the gates."""
    marked = [pytest.param(name, marks=() if name in short else pytest.mark.gate) for name in names]
    return pytest.mark.parametrize("golden", marked, indirect=True)


class Golden(NamedTuple):
    model: LanguageModel
    tokens: np.ndarray
    logits: np.ndarray
    greedy: np.ndarray


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    folder = GOLDEN / request.param
    with np.load(folder / "reference.npz") as reference:
        return Golden(load_model(folder), reference["tokens"], reference["logits"], reference["greedy"])


def make_decoding(model: LanguageModel, **options) -> Decoding:
    spec = cache_spec(model.config, page_size=4, codec="f32")
    return Decoding(model.step, model.weights, spec, model.config.vocab_size, **options)


def make_cache(
    config: ModelConfig, layout: str, rows: int, capacity: int, max_chunk: int | None = None
) -> Cache:
    """Return a poisoned cache, dense or of pages that lie in random places of the pool."""
    spec = cache_spec(config, page_size=4, codec="f32", max_chunk=max_chunk)
    sizes = {"num_sequences": rows, "capacity": capacity}
    if layout == "dense":
        return poison(Cache.dense(spec, **sizes))
    # As many pages as a dense cache has, so that they share programs.
    widths = [spec.table_width(capacity, group) for group in range(len(spec.groups))]
    cache = poison(Cache.paged(spec, **sizes, num_pages=[rows * width for width in widths]))
    pages = [np.random.default_rng(0).permutation(rows * width) for width in widths]
    return cache.assign([jnp.asarray(ids.reshape(rows, -1).astype(np.int32)) for ids in pages])


def logits_in_chunks(
    model: LanguageModel, tokens: np.ndarray, width: int, layout: str = "dense", *, has_ring: bool = True
) -> np.ndarray:
    """Run the tokens through a cache, `width` at a time, the last chunk padded.

    With a ring, layers with a window keep no more than they see.
    """
    rows, length = tokens.shape
    cache = make_cache(model.config, layout, rows, length + 5, max_chunk=width if has_ring else None)
    found = []
    for start in range(0, length, width):
        chunk = tokens[:, start : start + width]
        lens = jnp.full(rows, chunk.shape[1], jnp.int32)
        padded = jnp.asarray(np.pad(chunk, ((0, 0), (0, width - chunk.shape[1]))))
        logits, cache = run_chunk(model.step, model.weights, padded, cache, lens)
        found.append(np.asarray(logits)[:, : chunk.shape[1]])
    return np.concatenate(found, axis=1)


@jax.jit(static_argnames="step")
def run_chunk(step, weights, tokens, cache, lens):
    cache, batch = cache.begin(lens, time=tokens.shape[1], outputs="all")
    return step(weights, tokens, cache, batch)


@pytest.mark.parametrize(("golden", "width"), PAIRS, indirect=["golden"])
def test_logits_in_chunks_equal_the_reference(golden: Golden, width: int):
    for layout in ("dense", "paged"):
        assert_close(logits_in_chunks(golden.model, golden.tokens, width, layout), golden.logits, TOLERANCE)


@pytest.mark.histories
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("golden", WINDOWED, indirect=True)
def test_windows_of_a_cache_that_keeps_all_give_the_reference_s_logits(golden: Golden, width: int):
    for layout in ("dense", "paged"):
        found = logits_in_chunks(golden.model, golden.tokens, width, layout, has_ring=False)
        assert_close(found, golden.logits, TOLERANCE)


@pytest.mark.histories
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("golden", LATENT, indirect=True)
def test_each_form_of_latents_gives_the_reference_s_logits(golden: Golden, width: int):
    for form in ("absorbed", "expanded"):
        model = in_form(golden.model, form)
        for layout in ("dense", "paged"):
            assert_close(logits_in_chunks(model, golden.tokens, width, layout), golden.logits, TOLERANCE)


def in_form(model: LanguageModel, form: str) -> LanguageModel:
    """Return the model with latent attention in one form, whatever a step's width."""
    decoder = abstract_decoder(model.config)
    for layer in decoder.layers:
        layer.attention.form = form
    step, shapes = split_model(decoder)
    assert [array.shape for array in shapes] == [array.shape for array in model.weights]
    return replace(model, step=step)


@models(["phi3_longrope"], ["phi3_longrope"])
def test_a_cache_within_the_original_context_is_rotated_by_the_short_factors(golden: Golden):
    with np.load(GOLDEN / "phi3_longrope" / "reference.npz") as reference:
        expected = reference["short_logits"]
    tokens = golden.tokens[:, : expected.shape[1]]
    assert_close(logits_in_chunks(golden.model, tokens, 16), expected, TOLERANCE)
    # The same tokens among those that went past it.
    whole, row = relative_errors(golden.logits[:, : tokens.shape[1]], expected)
    assert min(whole, row) > 100 * TOLERANCE


@models(NAMES, LLAMAS)
def test_logits_without_a_cache_equal_the_reference(golden: Golden):
    logits, cache = jax.jit(golden.model.step)(golden.model.weights, golden.tokens, None, None)
    assert cache is None
    assert_close(logits, golden.logits, TOLERANCE)


@models(NAMES, LLAMAS[::2])
def test_greedy_tokens_equal_the_reference(golden: Golden):
    generations = generate(make_decoding(golden.model), golden.tokens.tolist(), max_new_tokens=NUM_NEW_TOKENS)
    assert [list(row.tokens) for row in generations] == golden.greedy[:, NUM_PROMPT_TOKENS:].tolist()


@models(NAMES, ["mixtral_moe"])
def test_greedy_tokens_from_a_pool_equal_the_reference(golden: Golden):
    # Room for one of the two sequences: the other waits.
    decoding = make_decoding(golden.model, num_pages=14)
    generations = generate(decoding, golden.tokens.tolist(), max_new_tokens=NUM_NEW_TOKENS)
    assert [list(row.tokens) for row in generations] == golden.greedy[:, NUM_PROMPT_TOKENS:].tolist()


@models(WINDOWED, ["mistral_sliding"])
def test_a_window_keeps_all_that_its_layers_see(golden: Golden):
    spec = cache_spec(golden.model.config, page_size=4, max_chunk=8)
    decoding = replace(make_decoding(golden.model, buckets=(8,)), spec=spec)
    state = begin(decoding, golden.tokens.tolist(), max_new_tokens=NUM_NEW_TOKENS)
    # 16 tokens of the window and 8 of a step, of 55.
    assert state.cache.pools[0].page_table.shape == (2, 6)
    state = decode(decoding.step, decoding.weights, state, NUM_NEW_TOKENS)
    assert state.new_tokens.tolist() == golden.greedy[:, NUM_PROMPT_TOKENS:].tolist()


@models(LLAMAS, LLAMAS[::2])
def test_streamed_tokens_equal_the_reference(golden: Golden):
    stream = Stream(make_decoding(golden.model), golden.tokens.tolist(), max_new_tokens=NUM_NEW_TOKENS)
    steps = [result.tokens for result in stream]
    assert np.transpose(steps).tolist() == golden.greedy[:, NUM_PROMPT_TOKENS:].tolist()


@models(["llama"], ["llama"])
def test_one_wrong_token_of_forty_fails_the_comparison(golden: Golden):
    wrong = golden.tokens.copy()
    wrong[1, 0] += 1
    logits, _ = jax.jit(golden.model.step)(golden.model.weights, wrong, None, None)
    whole, row = relative_errors(logits, golden.logits)
    assert min(whole, row) > 100 * TOLERANCE
