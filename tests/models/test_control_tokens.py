import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from jkv.models.control_tokens import ControlTokens, choose_mark

_MARK = "\ue000"


def make_control(*texts, **rules):
    return ControlTokens({index: AddedToken(text, special=True, **rules) for index, text in enumerate(texts)})


def test_split_finds_the_leftmost_and_longest():
    control = make_control("<s>", "<s><s>", "s>x")
    assert control.split("a<s>x<s><s><s>") == ["a", 0, "x", 1, 0]


def test_split_of_text_without_control_tokens_is_the_text():
    assert make_control("<s>").split("a < s >") == ["a < s >"]
    assert make_control("<s>").split("") == []
    assert make_control().split("<s>") == ["<s>"]


def test_a_single_word_is_not_found_inside_a_word():
    assert make_control("mask", single_word=True).split("unmask mask") == ["unmask ", 0]


@pytest.mark.parametrize("text", ["plain", " <b>bold</b> ", "a < b > c", "</think>", "", "  "])
def test_text_without_control_tokens_is_not_covered(text):
    assert make_control("<|im_start|>", "<|im_end|>", "</s>").cover(text, _MARK) == text


def test_nested_values_are_covered_and_the_rest_is_kept():
    covered = make_control("<s>").cover({"a": ["<s>", 3, None], "b": ({"<s>": True},)}, _MARK)
    token = f"<{_MARK}s>"
    assert covered["a"][1:] == [3, None]
    assert covered["a"][0].replace(_MARK, "") == "<s>" != covered["a"][0]
    assert token in covered["a"][0]
    assert list(covered["b"][0].values()) == [True]


def find_owners(control, texts, pieces):
    """For each control token in the joined pieces, the piece of its first and that of its last character."""
    owners = [index for index, piece in enumerate(pieces) for _ in piece]
    position, found = 0, []
    for part in control.split("".join(pieces)):
        end = position + len(part if isinstance(part, str) else texts[part])
        if isinstance(part, int):
            found.append((owners[position], owners[end - 1]))
        position = end
    return found


# Fragments of the tokens below, so that strings often hold, begin and end them, overlapping.
_TOKENS = ["<s>", "<|a|>", "<<s>>", "|b|", "<|ab"]
_TEXT = st.text(alphabet="<|>sab ", max_size=8)


@given(parts=st.lists(_TEXT, max_size=4), glue=_TEXT, is_stripped=st.booleans())
def test_control_tokens_begin_and_end_outside_covered_text(parts, glue, is_stripped):
    control = make_control(*_TOKENS)
    covered = [control.cover(part, _MARK) for part in parts]
    assert [text.replace(_MARK, "") for text in covered] == parts
    pieces = [glue]
    for text in covered:
        pieces += [text.strip() if is_stripped else text, glue]
    for first, last in find_owners(control, _TOKENS, pieces):
        assert first % 2 == 0
        assert last % 2 == 0


def test_text_that_is_not_covered_forms_control_tokens():
    control = make_control(*_TOKENS)
    assert find_owners(control, _TOKENS, ["", "<", "", "s>", ""]) == [(1, 3)]
    assert find_owners(control, _TOKENS, ["x", "<s>", "x"]) == [(1, 1)]


def test_the_mark_is_a_character_that_nobody_uses():
    assert choose_mark("abc") == "\ue000"
    assert choose_mark({"\ue000": ["\ue001", ("\ue003",)]}, None, "\ue002") == "\ue004"
