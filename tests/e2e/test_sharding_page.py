"""docs/sharding.md shows a test that passes, and that fails where a sharding is another."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


def shown_code() -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return code


def run_page(change: tuple[str, str] = ("", "")) -> None:
    code = shown_code()
    namespace: dict = {"__name__": "page"}
    exec(compile(code.replace(*change), str(PAGE), "exec"), namespace)
    namespace["test_heads_are_split_and_one_sum_is_sent"]()


def test_the_test_that_is_shown_passes_in_ten_lines():
    run_page()
    assert len(shown_code().partition("\ndef test_")[2].splitlines()) <= 10


def test_the_test_that_is_shown_fails_where_heads_are_not_split():
    with pytest.raises(AssertionError):
        run_page((', "q_head": "model", "kv_head": "model"', ""))
