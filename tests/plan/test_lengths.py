from fractions import Fraction
from pathlib import Path

import pytest

from jkv.config import ConfigError
from jkv.plan.lengths import one_length, read_mix


def write(folder: Path, text: str) -> Path:
    file = folder / "mix.csv"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    [
        "1024, 0.75\n8192, 0.25\n",
        "tokens,share\n8192,25%\n1024,75%\n",
        "# short ones\n1024: 3   # of four\n\n8192: 1\n",
        "\ufeff1024 .3\r\n8192 .1\r\n",
    ],
)
def test_lengths_and_shares_are_read_in_every_form(tmp_path, text: str):
    mix = read_mix(write(tmp_path, text))
    assert mix.shares == ((1024, Fraction(3, 4)), (8192, Fraction(1, 4)))
    assert mix.longest == 8192
    assert mix.mean(lambda length: length) == Fraction(3 * 1024 + 8192, 4)


def test_equal_lengths_are_a_mix_of_one():
    assert one_length(7).mean(lambda length: length * length) == 49


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", {1: "must hold a length and its share, got none"}),
        ("1024, -1\n8k 1\n", {1: "both positive, as 8192, 0.25, got '1024, -1'", 2: "got '8k 1'"}),
        ("0 1\n5 0\n", {1: "got '0 1'", 2: "got '5 0'"}),
        ("8 1\n8 2\n", {2: "got 8 again; add the shares up"}),
        ("8 1\ntokens share\n", {2: "got 'tokens share'"}),
        ("8 1 2\n", {1: "got '8 1 2'"}),
    ],
)
def test_every_wrong_line_is_named(tmp_path, text: str, lines: dict[int, str]):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_mix(file)
    said = str(caught.value).splitlines()
    assert len(said) == len(lines)
    for (number, message), line in zip(lines.items(), said, strict=True):
        assert line.startswith(f"{file}:{number}: ")
        assert message in line
