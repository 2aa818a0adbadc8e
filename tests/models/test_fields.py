from pathlib import Path

import pytest

from jkv.models.fields import COUNT, check_fields, either, many, read_json_object


def test_a_field_that_is_missing_passes():
    check_fields({"other": "x"}, {"size": COUNT}, "")


@pytest.mark.parametrize("value", [1, 2**31 - 1, [3, 4]])
def test_a_value_of_its_kind_passes(value: object):
    check_fields({"size": value}, {"size": either(COUNT, many(COUNT))}, "")


@pytest.mark.parametrize("value", [0, 2**31, True, 1.0, "1", None, [0], [[1]]])
def test_a_value_of_no_kind_is_refused(value: object):
    with pytest.raises(ValueError, match=r"^file's size must be a whole number"):
        check_fields({"size": value}, {"size": either(COUNT, many(COUNT))}, "file's ")


def test_a_long_value_is_shortened():
    with pytest.raises(ValueError, match=r"got \[0, 1, .* \.\.\. .*\]$") as caught:
        check_fields({"size": list(range(1000))}, {"size": COUNT}, "")
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "must be JSON, got Expecting"),
        (b"\xff", "must be UTF-8 text, got other bytes at 0"),
        (b"[1, 2]", r"must hold a JSON object, got \[1, 2\]"),
        (b"[" * 100_000, "must be JSON, got maximum recursion depth"),
    ],
)
def test_a_file_without_a_json_object_is_named(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{file} {message}"):
        read_json_object(file)
