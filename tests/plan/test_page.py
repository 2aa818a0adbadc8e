"""The calculator's page, alone and in a browser, beside Python's own arithmetic."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from jkv.cache.codec import CODECS
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.config import load_config
from jkv.plan.page import Settings, page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
FIRST = Settings(CacheSpec.create([CacheGroup(80, 8, 128, "bf16")], page_size=64))
# Reads the page for each address, then moves its controls; what it finds is the text of the last element.
DRIVER = """<pre id="found"></pre><script>
const found = [];
const look = () => found.push({
  cache: $("cache").dataset.value, fits: $("fits").dataset.value, token: $("token").dataset.value,
  refusal: $("refusal").textContent, hash: location.hash, model: $("model").value,
  codecs: Object.fromEntries([...$("codecs").children].map((row) => [row.dataset.codec, row.dataset.cache])),
});
const move = (id, value, kind = "input") => {
  $(id).value = value;
  $(id).dispatchEvent(new Event(kind));
  look();
};
for (const hash of __HASHES__) {
  history.replaceState(null, "", hash);
  dispatchEvent(new Event("hashchange"));
  look();
}
move("b", 7);
move("l-slider", 9);
move("k", "int8", "change");
move("layout", "tpu", "change");
move("model", "gemma-3-27b", "change");
move("d", "-3");
$("found").textContent = JSON.stringify(found);
</script>"""


def make_state(**changes: Any) -> dict[str, Any]:
    state = {"b": 32, "s": 8192, "l": 80, "h": 8, "d": 128, "page": 64, "hbm": 141, "rest": 0}
    return state | {"k": "bf16", "v": "bf16", "w": 0, "g": 0, "r": 0, "layout": "plain"} | changes


def make_spec(state: dict[str, Any], k: str, v: str) -> CacheSpec:
    """Return the cache that a state of the page describes."""
    windowed = state["l"] - state["g"] if state["w"] else 0
    sizes = {"codec": k, "num_kv_heads": state["h"], "head_dim": state["d"], "value_codec": v}
    if state["r"]:
        sizes |= {"num_kv_heads": 1, "value_codec": None, "kind": "latent", "rope_dim": state["r"]}
    parts = ((state["l"] - windowed, None), (windowed, state["w"]))
    groups = [CacheGroup(num_layers=count, window=window, **sizes) for count, window in parts if count]
    return CacheSpec.create(groups, page_size=state["page"], layout=state["layout"])


STATES = [
    make_state(),
    make_state(b=3, s=8191, l=7, h=3, d=80, page=16, k="int8", v="int4"),
    make_state(s=100, k="int8_static", v="fp8_e4m3_static", hbm=80.5, rest=17.25),
    make_state(s=32768, l=62, h=16, w=1024, g=10, page=48),
    make_state(s=700, l=32, w=4096),
    make_state(l=61, h=1, d=512, r=64, k="int8"),
    make_state(l=61, h=1, d=512, r=64, k="f32", hbm=1),
    make_state(page=8, k="int4", v="int4"),
    make_state(l=61, h=1, d=512, r=64, k="int4"),
    make_state(b=3, s=8191, l=7, h=3, d=80, page=16, k="int8", v="int4", layout="tpu"),
    make_state(s=700, l=13, h=5, w=512, g=3, k="int8_static", v="bf16", layout="tpu"),
    make_state(s=100, d=64, page=8, k="int4", v="int4", layout="tpu"),
    make_state(l=61, h=1, d=576, r=64, page=128, k="int4", layout="tpu"),
    make_state(page=32, layout="gpu"),
]


def open_page(folder: Path, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the page shows for each state, and after each move of `DRIVER`."""
    models = {"gemma-3-27b": load_config("smollm2-cpu", ["--model", "gemma-3-27b"]).model.sizes}
    hashes = json.dumps([f"#{urlencode(state)}" for state in states])
    file = folder / "page.html"
    file.write_text(page(models, FIRST) + DRIVER.replace("__HASHES__", hashes))
    command = [BROWSER, *QUIET, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(re.search(r'<pre id="found">(.*?)</pre>', dom)[1].replace("&amp;", "&"))


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_page_computes_what_python_computes(tmp_path):
    odd, small = make_state(d=127, k="int4", v="int4"), make_state(page=4, k="int4")
    found = open_page(tmp_path, [*STATES, odd, small, make_state(page=24, layout="gpu")])
    for state, shown in zip(STATES, found, strict=False):
        spec = make_spec(state, state["k"], state["v"])
        assert int(shown["cache"]) == spec.dense_bytes(state["b"], state["s"])
        assert int(shown["token"]) == spec.padded_bytes_per_token
        room = int((state["hbm"] - state["rest"]) * 10**9) - spec.scale_bytes
        assert int(shown["fits"]) == room // spec.bytes_for(state["s"])
        planned = {name: make_spec(state, name, name).dense_bytes(state["b"], state["s"]) for name in CODECS}
        assert {name: int(size) for name, size in shown["codecs"].items()} == planned
    refused, small, gpu, *moved = found[len(STATES) :]
    assert refused["refusal"] == "head_dim must be even for int4, two entries a byte, got 127"
    assert (refused["cache"], refused["codecs"]["int4"]) == ("", "")
    with pytest.raises(ValueError, match="int4 keys need") as refusal:
        make_spec(make_state(page=4), "int4", "bf16")
    assert small["refusal"] == str(refusal.value)
    with pytest.raises(ValueError, match="a multiple of 64") as refusal:
        make_spec(make_state(page=24, layout="gpu"), "bf16", "bf16")
    assert gpu["refusal"] == str(refusal.value)
    fewer, layers, int8, tpu, preset, wrong = moved
    assert "b=7&" in fewer["hash"]
    # The tenth stop of the layers' slider is ten layers.
    assert "l=10&" in layers["hash"]
    assert "k=int8&v=int8" in int8["hash"]
    assert "layout=tpu" in tpu["hash"]
    sizes = make_state(b=7, page=24, layout="tpu", l=62, h=16, d=128, w=1024, g=10, k="int8", v="int8")
    assert preset["model"] == "gemma-3-27b"
    assert int(preset["cache"]) == make_spec(sizes, "int8", "int8").dense_bytes(7, 8192)
    assert wrong["hash"] == preset["hash"]


def test_the_page_needs_no_network():
    text = page({}, FIRST)
    assert re.findall(r"https?://|src=|@import|url\(", text) == []


def test_the_page_starts_with_the_settings():
    spec = CacheSpec.create(
        [CacheGroup(2, 4, 64, "int8"), CacheGroup(6, 4, 64, "int8", window=128)], page_size=32, max_chunk=16
    )
    models = {"gpt-oss-20b": load_config("smollm2-cpu", ["--model", "gpt-oss-20b"]).model.sizes}
    settings = Settings(spec, 3, 500, memory=80 * 10**9, taken=10**9 + 1)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page(models, settings))[1])
    assert data["initial"] == {
        **{"b": 3, "s": 500, "l": 8, "h": 4, "d": 64, "page": 32, "hbm": 80.0, "rest": 1.001},
        **{"k": "int8", "v": "int8", "w": 128, "g": 2, "r": 0, "layout": "plain"},
    }
    assert data["max_chunk"] == 16
    assert list(data["codecs"]) == list(CODECS)
    assert data["presets"]["gpt-oss-20b"] == {
        "l": 24,
        "h": 8,
        "d": 64,
        "w": 128,
        "g": 12,
        "r": 0,
        "rest": 41.83,
    }
