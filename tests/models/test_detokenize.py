import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.models.detokenize import Detokenizer, StopStrings
from jkv.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(make_byte_level):
    return Tokenizer.from_gguf(make_byte_level())


@pytest.fixture
def sentencepiece(sentencepiece_metadata):
    return Tokenizer.from_gguf(sentencepiece_metadata)


def push_all(detokenizer, ids):
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


def test_a_character_comes_when_its_last_byte_does(byte_level):
    pieces = push_all(Detokenizer(byte_level), byte_level.encode("é€😀a"))
    assert pieces == ["", "é", "", "", "€", "", "", "", "😀", "a", ""]


def test_a_text_that_ends_within_a_character_ends_in_one_replacement(byte_level, sentencepiece):
    for tokenizer in (byte_level, sentencepiece):
        detokenizer = Detokenizer(tokenizer, is_continuation=True)
        ids = tokenizer.encode("😀", add_bos=False)[:-1]
        assert "".join(push_all(detokenizer, ids)).strip() == "\N{REPLACEMENT CHARACTER}"


def test_a_control_token_within_a_character_is_passed_over(byte_level):
    first, second = byte_level.encode("é")
    ids = [first, byte_level.token_id("<|im_end|>"), second]
    assert "".join(push_all(Detokenizer(byte_level), ids)) == "é" == byte_level.decode(ids)
    shown = Detokenizer(byte_level, skip_special=False)
    replacement = "\N{REPLACEMENT CHARACTER}"
    assert "".join(push_all(shown, ids)) == f"{replacement}<|im_end|>{replacement}"


def test_only_the_first_space_of_sentencepiece_is_dropped(sentencepiece):
    ids = sentencepiece.encode(" it  is")
    assert "".join(push_all(Detokenizer(sentencepiece), ids)) == " it  is"
    assert "".join(push_all(Detokenizer(sentencepiece, is_continuation=True), ids)) == "  it  is"


def test_an_id_outside_the_vocabulary_is_refused(byte_level):
    for token_id in (-1, byte_level.vocab_size):
        with pytest.raises(ValueError, match="must name one of this vocabulary's"):
            Detokenizer(byte_level).push(token_id)


@given(data=st.data())
def test_pieces_join_to_the_decoded_text(make_byte_level, data):
    tokenizer = Tokenizer.from_gguf(make_byte_level())
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip_special = data.draw(st.booleans())
    pieces = push_all(Detokenizer(tokenizer, skip_special=skip_special), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)


@given(text=st.text(max_size=30))
def test_any_text_survives_encoding_and_decoding(make_byte_level, text):
    tokenizer = Tokenizer.from_gguf(make_byte_level())
    assert "".join(push_all(Detokenizer(tokenizer), tokenizer.encode(text))) == text


def stream(stops, pieces):
    stopper = StopStrings(stops)
    streamed = [stopper.push(piece) for piece in pieces]
    return [*streamed, stopper.flush()], stopper.matched


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [
        (["DE"], "ABC", "DE"),
        (["CDEFGHI"], "ABCDEFGH", None),
        (["GH", "CD"], "AB", "CD"),
        (["A"], "", "A"),
        (["BC", "H"], "A", "BC"),
        (["EF", "CDEF"], "AB", "CDEF"),
        (["BCD", "BC"], "A", "BC"),
        ([], "ABCDEFGH", None),
    ],
)
def test_nothing_of_a_stop_string_is_streamed(stops, text, matched):
    for pieces in (["AB", "CDEF", "GH"], ["ABCDEFGH"], list("ABCDEFGH")):
        streamed, found = stream(stops, pieces)
        assert "".join(streamed) == text
        assert found == matched


def test_a_beginning_that_fails_is_released_at_once():
    assert stream(["aab"], ["a", "a", "a", "c"])[0] == ["", "", "a", "aac", ""]


def test_a_beginning_that_fails_may_begin_again():
    assert stream(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", "", ""], "aab")


def test_nothing_follows_a_match():
    assert stream(["b"], ["ab", "c", "b"]) == (["a", "", "", ""], "b")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
)
def test_stop_strings_agree_with_a_look_at_every_prefix(stops, pieces):
    text = "".join(pieces)
    ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    matched = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len) if ends else None
    expected = text[: ends[0]].removesuffix(matched) if matched else text
    streamed, found = stream(stops, pieces)
    assert found == matched
    assert "".join(streamed) == expected
    for count in range(1, len(pieces) + 1):
        num_held = len("".join(pieces[:count])) - len("".join(streamed[:count]))
        assert matched or num_held < max(map(len, stops), default=1)
