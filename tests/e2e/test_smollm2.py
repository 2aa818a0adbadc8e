"""SmolLM2-135M against the logits and tokens of a public implementation."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jkv.decode.generate import Decoding, Generation, generate
from jkv.models.decoder import cache_spec
from jkv.models.load import LanguageModel, load_model

from ..compare import assert_close

pytestmark = pytest.mark.model

NUM_PROMPTS, NUM_NEW_TOKENS = 4, 48
# The references' own bound: float32 of another implementation.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model("smollm2-135m")


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "golden" / "smollm2" / "reference.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def generations(model: LanguageModel, reference: dict[str, np.ndarray]) -> list[Generation]:
    """All four prompts in one batch: their lengths differ."""
    spec = cache_spec(model.config, page_size=16, codec="f32")
    decoding = Decoding(model.step, model.weights, spec, model.config.vocab_size)
    prompts = [reference[f"p{i}_ids"].tolist() for i in range(NUM_PROMPTS)]
    return generate(decoding, prompts, max_new_tokens=NUM_NEW_TOKENS)


@pytest.fixture(scope="module")
def logits(
    model: LanguageModel, reference: dict[str, np.ndarray], generations: list[Generation]
) -> np.ndarray:
    """Score each prompt and what was generated after it, without a cache, padded to one length."""
    sequences = [[*reference[f"p{i}_ids"], *row.tokens] for i, row in enumerate(generations)]
    longest = max(map(len, sequences))
    padded = np.array([sequence + [0] * (longest - len(sequence)) for sequence in sequences], np.int32)
    return np.asarray(jax.jit(model.step)(model.weights, padded, None, None)[0])


@pytest.mark.gate
@pytest.mark.parametrize("prompt", range(NUM_PROMPTS))
def test_the_last_logits_of_a_prompt_equal_the_reference(prompt: int, logits, reference):
    last = len(reference[f"p{prompt}_ids"]) - 1
    assert_close(logits[prompt, last][None], reference[f"p{prompt}_last_logits"][None], TOLERANCE)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_greedy_tokens_equal_the_reference(prompt: int, generations, reference):
    assert list(generations[prompt].tokens) == reference[f"p{prompt}_greedy"].tolist()


# Prompt 3 holds token 2, which the run behind its `p3_greedy` masked as padding: those tokens contradict the
# same file's `p3_last_logits`. Its first token is checked against these logits instead.
def test_the_first_token_of_prompt_3_is_the_references_likeliest(generations, reference):
    assert generations[3].tokens[0] == reference["p3_last_logits"].argmax() != reference["p3_greedy"][0]


@pytest.mark.gate
@pytest.mark.parametrize("prompt", range(NUM_PROMPTS))
def test_tokens_decoded_with_a_cache_are_the_likeliest_without_one(
    prompt: int, logits, generations, reference
):
    last = len(reference[f"p{prompt}_ids"]) - 1
    likeliest = logits[prompt, last : last + NUM_NEW_TOKENS].argmax(-1)
    assert list(generations[prompt].tokens) == likeliest.tolist()
