"""Public reference outputs, reproduced whole, in chunks, step by step, and by both forms of generation."""

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
from jkv.models.load import LanguageModel, load_model

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
# Each program compiles for seconds: `make test` takes each width and each model, the gates all single tokens.
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
    *sorted(SHORT),
    *(pytest.param(name, 1, marks=pytest.mark.histories) for name in NAMES if (name, 1) not in SHORT),
]
LLAMAS = NAMES[:4]


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


def logits_in_chunks(model: LanguageModel, tokens: np.ndarray, width: int) -> np.ndarray:
    """Run the tokens through a poisoned cache, `width` at a time, the last chunk padded.

    Layers with a window keep no more than they see.
    """
    rows, length = tokens.shape
    spec = cache_spec(model.config, page_size=4, codec="f32", max_chunk=width)
    cache = poison(Cache.dense(spec, num_sequences=rows, capacity=length + 5))
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
    assert_close(logits_in_chunks(golden.model, golden.tokens, width), golden.logits, TOLERANCE)


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


@models(("mistral_sliding", "gemma3_local_global", "gemma2", "gpt_oss", "phi3"), ["mistral_sliding"])
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
