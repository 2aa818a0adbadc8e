import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jkv.cli import generate, main
from jkv.cli.generate import Arguments, read_prompts
from jkv.models.load import LanguageModel
from jkv.models.tokenizer import Tokenizer
from jkv.models.weights.model import open_model

GREEDY = ("generate", "--ignore-eos", "--max-new-tokens", 16)


@pytest.fixture(scope="module")
def reference(tiny):
    return np.load(tiny / "reference.npz")["greedy"].tolist()


def ids(tokens):
    return ",".join(map(str, tokens))


def test_json_tells_tokens_times_and_bytes_of_each_prompt(run_json, tiny, reference):
    prompts = [ids(row[:40]) for row in reference]
    flags = ("--engine.max-sequences", 1, "--json", "--logprobs", 2)
    shown = run_json(*GREEDY, "--model", tiny, "--prompt-tokens", *prompts, *flags)
    assert [one["tokens"] for one in shown] == [row[40:] for row in reference]
    # The second prompt has waited for the first one's end.
    assert shown[1]["ttft_ms"] > shown[0]["ttft_ms"] + 15 * shown[0]["itl_ms"]["p50"] / 2
    for one in shown:
        assert (one["prompt"], one["text"], one["finish_reason"]) == (None, None, "length")
        assert (one["num_prompt_tokens"], one["num_new_tokens"]) == (40, 16)
        assert one["ttft_ms"] > 0
        assert 0 < one["itl_ms"]["p50"] <= one["itl_ms"]["p95"]
        assert one["tokens_per_second"] > 0
        assert one["cache_bytes"] == 64 * 2 * 3 * 2 * 8 * 4
        assert one["pages"] is None
        assert one["pool_layout"] == "plain"
        assert [place["top"][0]["token"] for place in one["logprobs"]] == one["tokens"]
        assert [len(place["top"]) for place in one["logprobs"]] == [2] * 16


def test_tokens_are_printed_where_there_is_no_tokenizer(run_jkv, tiny, reference):
    flags = ("--page-size", 16, "--engine.prefill-buckets", 16)
    stop = reference[0][42]
    shown = run_jkv(
        *GREEDY, *flags, "--model", tiny, "--prompt-tokens", ids(reference[0][:40]), "--stop-token-ids", stop
    )
    end = reference[0].index(stop, 40)
    assert shown == ids(reference[0][40 : end + 1]) + "\n"


@pytest.mark.parametrize("layout", [(), ("--cache", "window")], ids=str)
def test_a_window_s_layers_keep_no_more_than_it(run_json, tiny, layout):
    model = tiny.parent / "mistral_sliding"
    rows = np.load(model / "reference.npz")["greedy"].tolist()
    flags = ("--page-size", 4, "--engine.prefill-buckets", 8, "--json")
    prompts = [ids(row[:40]) for row in rows]
    shown = run_json(*GREEDY, "--model", model, *layout, *flags, "--prompt-tokens", *prompts)
    assert [one["tokens"] for one in shown] == [row[40:] for row in rows]
    assert {one["cache_bytes"] for one in shown} == {(16 + 8) * 2 * 3 * 2 * 8 * 4}


def test_a_pool_serves_prompts_of_different_lengths(run_json, tiny, reference):
    prompts = [reference[0][:40], reference[1][:40], reference[0][:41]]
    flags = ("--cache", "paged", "--page-size", 8, "--num-pages", 14, "--json")
    shown = run_json(*GREEDY, "--model", tiny, *flags, "--prompt-tokens", *map(ids, prompts))
    for one, row in zip(shown, (*reference, reference[0]), strict=True):
        written = one["prompt_tokens"] + one["tokens"]
        assert written[: len(row)] == row[: len(written)]
        assert one["num_new_tokens"] == 16
        # 55 or 56 tokens are 7 pages: two sequences run, and one waits.
        assert one["cache_bytes"] == 7 * 8 * 2 * 3 * 2 * 8 * 4
        assert one["pages"] == [{"peak": 14, "pool": 14}]
    assert shown[2]["ttft_ms"] > shown[0]["ttft_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exactly one of --prompt, --prompts, --chat, --prompt-tokens must be given, got none"),
        (("--prompt", "x", "--chat", "y"), "got --prompt and --chat"),
        (("--prompt", "x"), "must have a tokenizer.json"),
        (("--prompt", "x", "--system", "y"), "--system goes before a chat message"),
        (
            ("--prompt-tokens", "1", "--prompt_tokens=2"),
            "--prompt-tokens: must be given once, with all values",
        ),
        (("--prompt-tokens", "1,x"), "--prompt-tokens must be numbers with commas, as 1,2,3, got '1,x'"),
        (("--prompt-tokens", "1_0,2"), "--prompt-tokens must be numbers with commas, as 1,2,3, got '1_0,2'"),
        (("--prompt-tokens", "1", "--logit-bias", "1_0=1"), "--logit-bias must be ID=VALUE"),
        (("--prompt-tokens", "1", "--special"), "--special reads text"),
        (("--prompt-tokens", "1", "--logprobs", "2"), "--logprobs is printed by --json alone"),
        (("--prompt-tokens", "1", "--page-size", "2147483647"), "the cache must fit in the memory"),
        (
            ("--prompt-tokens", "1", "--capacity", "1999999999"),
            "bytes for 1 sequences of 1,999,999,999 tokens",
        ),
        (
            ("--prompt-tokens", "1", "--capacity", "999999999999"),
            "cache.capacity: must be less than 2147483648",
        ),
        (("--prompt-tokens", ""), "prompt 0 is empty"),
        (("--prompt-tokens", "1,320"), "prompt 0 has token id 320, outside the vocabulary [0, 320)"),
        (("--prompt-tokens", "1", "--stop-token-ids", "320"), "stop tokens must be in the vocabulary"),
        (("--prompt-tokens", "1", "--stop", "x"), "stop strings need a model with a tokenizer"),
        (("--prompt-tokens", "1", "--logit-bias", "5"), "--logit-bias must be ID=VALUE"),
        (("--prompt-tokens", "1", "--logit-bias", "320=1"), "a token id in logit_bias must be"),
        (("--prompt-tokens", "1", "--max-new-tokens", "0"), "engine.sampling.max_new_tokens"),
        (("--prompt-tokens", "1", "--temperature", "-1"), "engine.sampling.temperature"),
        (("--prompt-tokens", "1", "--top-p", "0"), "engine.sampling.top_p"),
        (("--prompt-tokens", "1", "--temprature", "1"), "--temprature: is not a flag"),
        (("--prompt-tokens", "1", "--num-pages", "8"), "num_pages: must be auto without a shared pool, got"),
        (("--prompt-tokens", "1", "--cache", "window"), "cache layout window needs a model whose layers"),
        (("--prompt-tokens", "1,2", "--capacity", "2", "--max-new-tokens", "2"), "need a capacity of 3"),
        (("--prompt-tokens", "1", "--max-new-tokens", "513"), "the model reads at most 512 tokens, got 513"),
        (
            (
                *("--prompt-tokens", "1", "--mesh.axes", "data", "1", "model", "1", "x", "99"),
                *("--mesh.rules.context", "x"),
            ),
            "the mesh needs 99 devices",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(refusal, tiny, arguments, message):
    assert message in refusal("generate", "--model", tiny, *arguments)


def test_text_of_several_prompts_is_not_interleaved(run_jkv, talking_tiny, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\nthree", encoding="utf-8")
    shown = run_jkv(*GREEDY, "--model", talking_tiny, "--prompts", prompts, "--engine.max-sequences", 2)
    first, rest = shown.split("\n\n[1]: two\n")
    second, third = rest.split("\n\n[2]: three\n")
    assert first.startswith("[0]: one\n")
    assert len(first.removeprefix("[0]: one\n")) >= 16
    assert len(second) >= 16
    assert len(third.removesuffix("\n\n")) >= 16


@pytest.fixture
def count_up(monkeypatch, talking_tiny):
    """Flags of a command whose model follows each token with the next id, so that `bcd` follows `a`."""

    def step(weights, tokens, cache, batch):
        last = jnp.take_along_axis(tokens, batch.last[:, None], axis=1)[:, 0]
        return 2 * jax.nn.one_hot((last + 1) % 320, 320), cache

    stored = open_model(talking_tiny)
    model = LanguageModel(stored.config, step, (), stored.location)
    monkeypatch.setattr(generate, "load_configured", lambda config: model)
    return ("generate", "--model", talking_tiny, "--ignore-eos", "--max-new-tokens", 5)


def test_a_text_goes_on_up_to_a_stop_string(run_jkv, count_up):
    assert run_jkv(*count_up, "--prompt", "a") == "bcdef\n"
    assert run_jkv(*count_up, "--prompt", "a", "--stop", "de", "x") == "bc\n"


def test_a_chat_message_is_answered_after_the_template_s_end(run_json, count_up):
    (shown,) = run_json(*count_up, "--chat", "a", "--json")
    assert shown["prompt"] == "a"
    assert shown["num_prompt_tokens"] == len("user: a") + 1
    # What follows `<|end|>`, the last id, is the first.
    assert shown["tokens"] == [0, 1, 2, 3, 4]
    assert shown["text"] == '!"#$%'


def test_sampling_is_as_the_options_say(run_jkv, count_up):
    def sample(*flags):
        return run_jkv(*count_up, "--prompt", "a", "--temperature", 1, *flags)

    assert sample("--seed", 1) == sample("--seed", 1) != sample("--seed", 2)
    for flags in (("--top-k", 1), ("--top-p", 0.001), ("--min-p", 1)):
        assert sample(*flags) == "bcdef\n"


def test_a_chat_message_goes_through_the_template(talking_tiny):
    tokenizer = Tokenizer.from_folder(talking_tiny)
    _, (prompt,) = read_prompts(Arguments(system="s", chat="<|end|>"), tokenizer)
    assert tokenizer.decode(prompt, skip_special=False) == "system: s<|end|>user: <|end|><|end|>"
    assert prompt.count(319) == 2


def test_a_prompts_file_that_is_not_there_is_refused(refusal, talking_tiny):
    said = refusal("generate", "--model", talking_tiny, "--prompts", "none.txt")
    assert said == "jkv: none.txt: No such file or directory"


def test_lines_of_a_prompts_file_end_at_line_feeds_alone(tmp_path, talking_tiny):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\xe2\x80\xa8still one\r\n\ntwo\x0cstill two\n")
    texts, _ = read_prompts(Arguments(prompts=file), Tokenizer.from_folder(talking_tiny))
    assert texts == ["one\u2028still one", "two\x0cstill two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a\xff", "must be UTF-8 text, got other bytes at 1"), (b"\n", "must hold a prompt a line, got none")],
)
def test_a_prompts_file_without_text_is_refused(refusal, talking_tiny, tmp_path, content, message):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    assert refusal("generate", "--model", talking_tiny, "--prompts", file) == f"jkv: {file} {message}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt-tokens", ""), "prompt 0 is empty"),
        (("--prompt-tokens", "1,320"), "outside the vocabulary"),
        (("--stop-token-ids", "320"), "stop tokens must be in the vocabulary [0, 320), got 320"),
        (("--stop", "x"), "stop strings need a model with a tokenizer"),
        (("--logit-bias", "320=1"), "a token id in logit_bias must be from 0 to 319, got 320"),
        (("--capacity", "2"), "a prompt of 1 tokens and 128 new ones need a capacity of 128 tokens, got 2"),
        (("--cache", "paged", "--num-pages", "1"), "need 8 pages of 16 tokens, got a pool of 1"),
    ],
)
def test_a_request_is_checked_before_weights_are_read(refusal, copy_of_tiny, flags, message):
    tensors = safetensors.numpy.load_file(copy_of_tiny / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    safetensors.numpy.save_file(tensors, copy_of_tiny / "model.safetensors")
    prompt = () if flags[0] == "--prompt-tokens" else ("--prompt-tokens", "1")
    assert message in refusal("generate", "--model", copy_of_tiny, *prompt, *flags)


def test_all_that_a_mesh_does_not_divide_is_told_at_once(capsys, tiny):
    assert main(["generate", "--model", str(tiny), "--prompt-tokens", "1", "--mesh", "cpu-2x4"]) == 2
    sequences, heads = capsys.readouterr().err.splitlines()
    assert "must split sequences evenly, got 1 over 2 devices" in sequences
    assert "must split key and value heads evenly, got 2 over 4 devices" in heads


def test_an_empty_prompt_is_refused(refusal, talking_tiny):
    assert "prompt 0 is empty" in refusal("generate", "--model", talking_tiny, "--prompt", "")


def test_a_model_must_be_named(refusal):
    assert refusal("generate", "--prompt", "x") == "jkv: a model must be named; give --model or --config"


def test_a_model_that_is_not_there_is_refused(refusal):
    assert "a model must be an existing path" in refusal("generate", "--model", "none", "--prompt", "x")


def test_a_cut_file_is_refused(refusal, copy_of_tiny):
    weights = copy_of_tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    said = refusal("generate", "--model", copy_of_tiny, "--prompt-tokens", "1")
    assert str(weights) in said


def test_weights_that_are_no_numbers_are_refused(refusal, copy_of_tiny):
    weights = copy_of_tiny / "model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    tensors["model.norm.weight"][0] = np.nan
    safetensors.numpy.save_file(tensors, weights)
    assert "must be finite" in refusal("generate", "--model", copy_of_tiny, "--prompt-tokens", "1")
