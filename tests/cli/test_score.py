import json
from pathlib import Path

import numpy as np
import pytest

from jkv.cli.score import describe
from jkv.decode.compare import Comparison

SMOLLM2 = Path(__file__).parents[1] / "golden" / "smollm2"


@pytest.fixture(scope="module")
def reference(tiny):
    return dict(np.load(tiny / "reference.npz"))


@pytest.fixture
def tokens_file(tmp_path, reference):
    path = tmp_path / "tokens.npz"
    np.savez(path, tokens=reference["tokens"])
    return path


def expected_nll(reference):
    logits, tokens = reference["logits"].astype(np.float64), reference["tokens"]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


def relative_error(got, wanted):
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def test_scores_and_logits_are_the_reference_s(run_json, tiny, reference, tokens_file, tmp_path):
    out = tmp_path / "logits.npz"
    flags = ("--chunk", 16, "--logits", out, "--json")
    (shown,) = run_json("score", "--model", tiny, "--tokens", tokens_file, *flags)
    wanted = expected_nll(reference)
    assert shown["num_tokens"] == wanted.size
    assert shown["tokens"] == reference["tokens"].tolist()
    assert relative_error(np.array(shown["nll"]), wanted) < 1e-4
    assert shown["perplexity"] == pytest.approx(np.exp(wanted.mean()), rel=1e-4)
    logits = np.load(out)["logits"]
    assert logits.dtype == np.float32
    assert relative_error(logits, reference["logits"]) < 1e-4


@pytest.mark.parametrize("cache", ["paged", "window"])
def test_a_cache_of_another_layout_gives_the_same_scores(run_json, tiny, tmp_path, cache):
    model = tiny.parent / "mistral_sliding"
    arrays = dict(np.load(model / "reference.npz"))
    np.savez(tmp_path / "tokens.npz", tokens=arrays["tokens"])
    flags = ("--tokens", tmp_path / "tokens.npz", "--cache", cache, "--page-size", 4, "--chunk", 7, "--json")
    (shown,) = run_json("score", "--model", model, *flags)
    assert relative_error(np.array(shown["nll"]), expected_nll(arrays)) < 1e-4


def test_a_pool_that_cannot_hold_all_rows_is_refused(refusal, tiny, tokens_file):
    flags = ("--cache", "paged", "--page-size", 8, "--num-pages", 9)
    said = refusal("score", "--model", tiny, "--tokens", tokens_file, *flags)
    assert "the 2 sequences need 10 pages at once, got a pool of 9; raise num_pages" in said


def test_the_first_tokens_alone_are_scored(run_jkv, tiny, reference, tokens_file):
    shown = run_jkv("score", "--model", tiny, "--tokens", tokens_file, "--max-tokens", 20)
    lines = dict(line.rsplit(maxsplit=1) for line in shown.splitlines())
    assert lines["tokens scored"] == "38"
    assert float(lines["perplexity"]) == pytest.approx(
        np.exp(expected_nll(reference)[:, :19].mean()), rel=1e-4
    )


def test_a_mesh_changes_nothing(run_json, tiny, reference, tokens_file):
    mesh = ("--mesh.axes", "data", 2, "model", 2, "--mesh.axis-types", "explicit")
    (shown,) = run_json("score", "--model", tiny, "--tokens", tokens_file, *mesh, "--json")
    assert relative_error(np.array(shown["nll"]), expected_nll(reference)) < 1e-4


@pytest.mark.parametrize(
    ("arrays", "flags", "message"),
    [
        ({"tokens": [[1, 2]]}, ("--text", "x.txt"), "exactly one of --text and --tokens must be given"),
        ({"tokens": [[1, 2]]}, ("--chunk", "0"), "chunk must be at least 1 token, got 0"),
        ({"tokens": [[1, 2]]}, ("--max-tokens", "1"), "--max-tokens must be at least 2, got 1"),
        ({"tokens": [[1]]}, (), "tokens.npz must hold at least 2 tokens a row to score, got 1 rows of 1"),
        ({"tokens": np.zeros((0, 9), int)}, (), "to score, got 0 rows of 9"),
        ({"tokens": [[1, 320]]}, (), "token id 320, outside the vocabulary"),
        ({"tokens": [[1] * 513]}, (), "the model reads at most 512 tokens, got 513; give --max-tokens"),
        ({"tokens": [1, 2]}, (), "must be integers [batch, time], got int64[2]"),
        ({"other": [[1, 2]]}, (), "must be an .npz file with an array 'tokens'"),
    ],
)
def test_what_cannot_be_scored_is_refused(refusal, tiny, tmp_path, arrays, flags, message):
    path = tmp_path / "tokens.npz"
    np.savez(path, **{name: np.array(values) for name, values in arrays.items()})
    assert message in refusal("score", "--model", tiny, "--tokens", path, *flags)


def test_tokens_kept_as_objects_or_text_are_refused(refusal, tiny, tmp_path):
    path = tmp_path / "tokens.npz"
    np.savez(path, tokens=np.array([[1, None]], object))
    said = refusal("score", "--model", tiny, "--tokens", path)
    assert said.startswith(f"jkv: {path} must be an .npz file with an array 'tokens' of integers")
    assert "pickle" not in said
    path.write_text("1 2 3")
    assert refusal("score", "--model", tiny, "--tokens", path) == said


def test_a_text_that_is_not_utf_8_is_refused(refusal, talking_tiny, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff")
    said = refusal("score", "--model", talking_tiny, "--text", path)
    assert said == f"jkv: {path} must be UTF-8 text, got other bytes at 0"


def test_a_place_for_logits_is_checked_first(refusal, tmp_path):
    for place in (tmp_path, tmp_path / "none" / "out.npz"):
        said = refusal("score", "--model", "none", "--tokens", "none.npz", "--logits", place)
        assert said.startswith(f"jkv: --logits must be a file that can be written, got {place}")


def test_tokens_are_read_before_the_model(refusal, tmp_path):
    file = tmp_path / "none.npz"
    assert refusal("score", "--model", tmp_path / "none", "--tokens", file).startswith(
        f"jkv: {file}: No such"
    )


def test_a_cut_array_is_refused(refusal, tiny, tokens_file):
    tokens_file.write_bytes(tokens_file.read_bytes()[:-30])
    assert f"{tokens_file} must be an .npz file" in refusal("score", "--model", tiny, "--tokens", tokens_file)


def test_a_text_needs_a_tokenizer(refusal, tiny, tmp_path):
    (tmp_path / "text.txt").write_text(json.dumps("x"))
    assert "must have a tokenizer.json" in refusal("score", "--model", tiny, "--text", tmp_path / "text.txt")


def test_a_text_is_scored_by_its_tokens(run_json, talking_tiny, tmp_path):
    (tmp_path / "text.txt").write_text("<|end|>", encoding="utf-8")
    (shown,) = run_json("score", "--model", talking_tiny, "--text", tmp_path / "text.txt", "--json")
    assert len(shown["tokens"][0]) == len("<|end|>")


def test_a_codec_is_compared_with_another(run_json, run_jkv, tiny, tokens_file):
    flags = ("score", "--model", tiny, "--tokens", tokens_file, "--codec", "int8", "--compare", "f32")
    (shown,) = run_json(*flags, "--json")
    assert (shown["base"], list(shown["codecs"])) == ("f32", ["int8"])
    found = shown["codecs"]["int8"]
    assert found["bytes_per_token"] < shown["base_bytes_per_token"] == 2 * 3 * 2 * 8 * 4
    assert 0 < found["mean_kld"] < found["p99_kld"] < 1e-3
    assert found["perplexity_ratio"] == pytest.approx(1, abs=1e-2)
    assert 0.9 < found["same_top"] <= 1
    assert list(found["by_context"]) == ["0-40"]
    base, header, row, part = run_jkv(*flags).splitlines()
    assert base == "base: f32, 384 bytes a token"
    assert " ".join(header.split()) == "codec bytes a token tokens ppl ratio mean KLD p99 KLD same top"
    assert row.split() == ["int8", str(found["bytes_per_token"]), "all", *part.split()[1:]]


def test_a_base_beside_itself_is_compared_with_every_codec(run_json, run_jkv, tiny, tokens_file):
    flags = ("score", "--model", tiny, "--tokens", tokens_file, "--compare", "f32")
    (shown,) = run_json(*flags, "--json")
    found = shown["codecs"]
    assert set(found) > {"bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "int4_token", "int8/int4"}
    assert "f32" not in found
    assert shown["refused"] == {}
    assert found["bf16"]["mean_kld"] < found["fp8_e4m3"]["mean_kld"] < found["int4_token"]["mean_kld"]
    # Pages of 12 are not whole runs of 4-bit keys: the others are compared all the same.
    lines = run_jkv(*flags, "--page-size", 12).splitlines()
    assert sum(" all " in line for line in lines) == len(found) - 2
    assert [line.partition(":")[0] for line in lines[-2:]] == ["int4", "int4/int8"]
    assert "int4 keys need a page_size" in lines[-1]


@pytest.mark.parametrize(("num_tokens", "names"), [(513, ["0-513"]), (514, ["0-512", "512-514"])])
def test_a_context_of_one_token_is_no_row_of_a_comparison(num_tokens, names):
    nll = np.ones((1, num_tokens - 1))
    places = np.ones((1, num_tokens))
    shown = describe(Comparison(nll, nll, places, places > 0), 8)
    assert list(shown["by_context"]) == names
    assert all(part["perplexity_ratio"] == 1 for part in shown["by_context"].values())


def test_a_comparison_keeps_no_logits(refusal, tiny, tokens_file, tmp_path):
    flags = ("--compare", "f32", "--logits", tmp_path / "logits.npz")
    assert "--compare and --logits exclude each other" in refusal(
        "score", "--model", tiny, "--tokens", tokens_file, *flags
    )


@pytest.mark.gate
@pytest.mark.model
@pytest.mark.parametrize(("count", "perplexity"), [(512, 49.017), (2048, 34.887)])
def test_smollm2_s_perplexity_is_the_reference_s(run_json, tmp_path, count, perplexity):
    path = tmp_path / "tokens.npz"
    with np.load(SMOLLM2 / "reference.npz") as arrays:
        np.savez(path, tokens=arrays["text_ids"][None, :count])
        nll = arrays[f"nll_{count}"]
    (shown,) = run_json("score", "--model", "smollm2-135m", "--tokens", path, "--json")
    assert shown["perplexity"] == pytest.approx(perplexity, rel=1e-3)
    assert relative_error(np.array(shown["nll"]), nll[None]) < 1e-4
