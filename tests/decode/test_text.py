import jax
import jax.numpy as jnp
import pytest
from tokenizers import pre_tokenizers

from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.decode.generate import Decoding
from jkv.decode.params import SamplingParams
from jkv.decode.text import TextStream
from jkv.models.tokenizer import Tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [*LETTERS, "</s>"]
EOS = len(LETTERS)


def count_up(weights, tokens, cache, batch):
    """A model whose next token is the last one's successor, so that `a` is continued by `bcd`."""
    last = jnp.take_along_axis(tokens, batch.last[:, None], axis=1)[:, 0]
    return jax.nn.one_hot(last + 1, len(VOCABULARY)) * weights, cache


def make_tokenizer() -> Tokenizer:
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": VOCABULARY,
        "token_type": [1] * len(LETTERS) + [3],
        "merges": [],
        "eos_token_id": EOS,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


def make_decoding(**changes) -> Decoding:
    spec = CacheSpec.create([CacheGroup(num_layers=1, num_kv_heads=1, head_dim=4)], page_size=8)
    values = {"step": count_up, "weights": jnp.float32(9), "spec": spec, "vocab_size": len(VOCABULARY)}
    return Decoding(**(values | changes))


def make_stream(*texts, max_new_tokens=6, decoding=None, **options) -> TextStream:
    tokenizer = make_tokenizer()
    prompts = [tokenizer.encode(text) for text in texts]
    return TextStream(
        decoding or make_decoding(), tokenizer, prompts, max_new_tokens=max_new_tokens, **options
    )


def run(stream):
    """Run a stream to its end; returns each sequence's pieces, joined, and the generations."""
    steps = list(stream)
    return [
        "".join(pieces) for pieces in zip(*(step.pieces for step in steps), strict=True)
    ], stream.generations()


def test_pieces_add_up_to_the_text():
    streamed, generations = run(make_stream("a", "sp"))
    assert streamed == ["bcdefg", "qrstuv"]
    assert [generation.text for generation in generations] == streamed
    assert [generation.finish_reason for generation in generations] == ["length", "length"]


def test_requests_of_a_later_batch_draw_what_they_would_in_one():
    # Of flat logits every token is as likely.
    options = {"decoding": make_decoding(weights=jnp.float32(0)), "sampling": SamplingParams(temperature=1.0)}
    _, together = run(make_stream("a", "a", **options))
    _, (later,) = run(make_stream("a", first_request=1, **options))
    assert together[0].tokens != together[1].tokens == later.tokens


def test_nothing_of_a_stop_string_is_passed_on():
    streamed, (generation,) = run(make_stream("a", stop_strings=["ef"]))
    assert streamed == ["bcd"]
    assert generation.text == "bcd"
    assert generation.finish_reason == "stop"


def test_tokens_end_where_the_stop_string_is_complete():
    _, (generation,) = run(make_stream("a", stop_strings=["ef"]))
    assert make_tokenizer().decode(generation.tokens) == "bcdef"
    assert len(generation.logprobs) == len(generation.seconds) == len(generation.tokens)


def test_other_sequences_go_on_after_a_stop():
    streamed, (stopped, other) = run(make_stream("a", "p", stop_strings=["c"]))
    assert streamed == ["b", "qrstuv"]
    assert (stopped.finish_reason, other.finish_reason) == ("stop", "length")


def test_what_could_begin_a_stop_string_comes_at_the_end():
    streamed, (generation,) = run(make_stream("a", stop_strings=["gh"]))
    assert streamed == ["bcdefg"]
    assert generation.finish_reason == "length"


def test_a_stop_string_that_ends_at_the_limit_is_a_stop():
    _, (generation,) = run(make_stream("a", stop_strings=["fg"]))
    assert (generation.text, generation.finish_reason) == ("bcde", "stop")


def test_a_stop_token_is_the_last_token_and_no_text():
    (stop,) = make_tokenizer().encode("e")
    streamed, (generation,) = run(make_stream("a", decoding=make_decoding(stop_ids=(stop,))))
    assert streamed == ["bcd"]
    assert generation.tokens[-1] == stop
    assert generation.finish_reason == "stop"


def test_likeliest_tokens_stand_beside_each_token():
    _, (generation,) = run(make_stream("a", sampling=SamplingParams(num_logprobs=2), stop_strings=["d"]))
    assert len(generation.top_logprobs) == len(generation.tokens) == 3
    assert all(
        top[0] == (token, logprob)
        for token, logprob, top in zip(
            generation.tokens, generation.logprobs, generation.top_logprobs, strict=True
        )
    )


def test_each_sequence_has_as_many_likeliest_tokens_as_it_asks_for():
    sampling = [SamplingParams(num_logprobs=count) for count in (2, 0, 1)]
    _, generations = run(make_stream("a", "b", "c", sampling=sampling, max_new_tokens=2))
    assert [[len(top) for top in row.top_logprobs] for row in generations] == [[2, 2], [0, 0], [1, 1]]


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    stream = TextStream(make_decoding(), None, [[5]], max_new_tokens=3)
    streamed, (generation,) = run(stream)
    assert streamed == [""]
    assert generation.text is None
    assert generation.tokens == (6, 7, 8)


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="stop strings need a model with a tokenizer"):
        TextStream(make_decoding(), None, [[5]], max_new_tokens=3, stop_strings=["x"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("stop_strings", ["ef", ["ef", 5], [b"ef"], 5])
def test_stop_strings_that_are_no_list_of_texts_are_refused(stop_strings):
    with pytest.raises(ValueError, match="stop_strings must be a list of texts, got"):
        make_stream("a", stop_strings=stop_strings)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("prompts", ["text", [0, 1], [[0.5]], None])
def test_prompts_that_are_no_lists_of_ids_are_refused(prompts):
    with pytest.raises(ValueError, match=r"must be (a list|lists) of"):
        TextStream(make_decoding(), make_tokenizer(), prompts, max_new_tokens=3)


def test_text_iterated_again_goes_on_and_ends():
    stream = make_stream("a", "p", stop_strings=["c"])
    first = next(iter(stream)).pieces
    rest = list(stream)
    assert first == ("b", "q")
    assert ["".join(pieces) for pieces in zip(*(step.pieces for step in rest), strict=True)] == ["", "rstuv"]
    assert list(stream) == []
    assert [generation.text for generation in stream.generations()] == ["b", "qrstuv"]


def test_an_id_that_is_no_token_gives_no_text():
    width = len(VOCABULARY) + 2

    def count_round(weights, tokens, cache, batch):
        last = jnp.take_along_axis(tokens, batch.last[:, None], axis=1)[:, 0]
        return jax.nn.one_hot((last + 1) % width, width) * weights, cache

    decoding = make_decoding(step=count_round, vocab_size=width)
    streamed, (generation,) = run(TextStream(decoding, make_tokenizer(), [[EOS]], max_new_tokens=5))
    assert generation.tokens == (EOS + 1, EOS + 2, 0, 1, 2)
    assert streamed == [generation.text] == ["".join(LETTERS[:3])]


def test_cache_bytes_are_those_of_whole_pages():
    stream = make_stream("a", max_new_tokens=9)
    assert stream.cache_bytes == [16 * 2 * 4 * 4]
    assert stream.pages is None


def test_a_sequence_that_waits_has_waited_for_its_first_token():
    # Of 2 + 6 - 1 tokens, one page each: the second starts when the first has ended.
    stream = make_stream("ab", "kl", decoding=make_decoding(num_pages=1))
    streamed, (first, second) = run(stream)
    assert streamed == ["cdefgh", "mnopqr"]
    assert second.seconds[0] > sum(first.seconds)
    assert stream.cache_bytes == [8 * 2 * 4 * 4] * 2
    assert stream.pages == [(1, 1)]
