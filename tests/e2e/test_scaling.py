"""docs/scaling.md has the figures that its script prints."""

import runpy
from pathlib import Path

from jkv.config import load_config

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_script():
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "scaling.py"))
    for name in ("llama-3.1-70b", "deepseek-v3"):
        table = script["table"](load_config("smollm2-cpu", ["--model", name]).model.sizes)
        assert table in text


def test_what_a_table_says_is_sent_is_what_a_compiled_program_sends():
    script = runpy.run_path(str(ROOT / "scripts" / "scaling.py"))
    sizes = load_config("smollm2-cpu", ["--model", "llama-3.1-70b"]).model.sizes
    layout = script["Layout"](model=8)
    # 161 all-reduces of 256 rows of 8,192 entries in bfloat16, as libtpu compiles them for v6e-8.
    assert script["sent_bytes"](sizes, layout) == 161 * 2 * 7 * 256 * 8192 * 2 // 8
