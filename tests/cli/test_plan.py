import re
import shlex
import sys
from pathlib import Path

import pytest

from jkv.cli.inspect import inspect
from jkv.cli.plan import parse_bytes

BARE = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--context", "8192")


def test_bare_sizes_give_the_cache_to_the_byte(run_jkv, run_json):
    argv = ("plan", *BARE, "--batch", "32", "--codec", "bf16")
    (shown,) = run_json(*argv, "--json")
    assert shown["pool_bytes"] == 80 * 2**30
    assert shown["parameters"] is None
    printed = run_jkv(*argv)
    assert "85,899,345,920 bytes     85.90 GB     80.00 GiB" in printed
    assert "counted with --model" in printed


def test_a_preset_is_planned_by_name_and_by_hub_id(run_json):
    argv = ("--hbm", "141GB", "--devices", "2", "--context", "8192", "--json")
    (shown,) = run_json("plan", "--model", "llama-3.1-70b", *argv)
    assert shown["parameters"] == 70_553_706_496
    assert shown["reserve"] == 14_100_000_000
    assert shown["free"] == 141_000_000_000 - shown["reserve"] - shown["total"] >= 0
    (chosen,) = [one for one in shown["choices"] if (one["codec"], one["page_size"]) == ("bf16", 64)]
    assert chosen["num_sequences"] == shown["fits"] == shown["num_sequences"]
    argv = ("--batch", shown["num_sequences"], *argv[2:])
    (by_id,) = run_json("plan", "--model", "meta-llama/Llama-3.1-70B", *argv)
    assert by_id["memory"] == shown["memory"]


def test_the_page_is_written_alone_and_beside_a_plan(run_jkv, tmp_path):
    file = tmp_path / "plan.html"
    assert run_jkv("plan", "--html", file) == ""
    assert '"initial": {"b": 32, "s": 8192, "page": 64' in file.read_text()
    argv = ("--model", "qwen3-8b", "--batch", "5", "--context", "100", "--html", file)
    assert "8,190,735,360 parameters" in run_jkv("plan", *argv)
    assert '"initial": {"b": 5, "s": 100, "page": 64' in file.read_text()


def test_what_does_not_fit_says_by_how_much(run_jkv):
    printed = run_jkv("plan", *BARE, "--batch", "32", "--hbm", "80GB", "--reserve", "0")
    assert "too much               5,899,362,688 bytes" in printed
    assert "sequences that fit: 29" in printed


def test_a_device_s_share_and_padding_of_a_token_are_shown(run_json):
    argv = ("--model", "gpt-oss-20b", "--batch", "1", "--context", "64", "--devices", "2", "--json")
    argv += ("--codec", "int8", "--page-size", "64")
    (plain,) = run_json("plan", *argv)
    (padded,) = run_json("plan", *argv, "--pool-layout", "tpu")
    assert 2 * plain["device_bytes_per_token"] == plain["bytes_per_token"] == padded["bytes_per_token"]
    # A page's 64 scales, of 4 bytes beside heads of 64, lie in a row of 128.
    assert 17 * padded["device_bytes_per_token"] == 18 * plain["device_bytes_per_token"]


def test_a_model_on_this_machine_is_planned_by_its_header(run_json, tiny):
    (shown,) = run_json("plan", "--model", tiny, "--batch", "2", "--context", "16", "--json")
    sizes = inspect(tiny)["sizes"]
    assert shown["parameters"] == sizes["parameters"]
    assert shown["bytes_per_token"] == sizes["cache_bytes_per_token"]["bf16"]


def test_copies_of_kv_heads_are_counted(run_json, refusal, tmp_path, monkeypatch):
    mesh = tmp_path / "configs" / "meshes" / "eight.yaml"
    mesh.parent.mkdir(parents=True)
    mesh.write_text("base: single\naxes: {data: 1, model: 8}\nkv_copies: 2\n")
    monkeypatch.chdir(tmp_path)
    argv = ("--batch", "8", "--context", "8192", "--json")
    (copied,) = run_json("plan", "--model", "qwen3-30b-a3b", "--mesh", "eight", *argv)
    (halved,) = run_json("plan", "--model", "qwen3-30b-a3b", "--devices", "4", *argv)
    assert copied["pool_bytes"] == halved["pool_bytes"]
    assert copied["parameters"] == halved["parameters"]
    assert "a mesh with kv_copies needs a --model" in refusal(
        "plan", *BARE, "--mesh", "eight", "--batch", "8"
    )


def test_a_dense_cache_keeps_what_no_window_sees_and_the_longest_of_all(run_json, tmp_path):
    mix = tmp_path / "mix.txt"
    mix.write_text("4096 1\n8192 1\n")
    argv = ("--model", "gemma-3-4b", "--batch", "4", "--context-mix", mix, "--codec", "bf16", "--json")
    paged, dense, window = (
        run_json("plan", *argv, "--cache", cache)[0] for cache in ("paged", "dense", "window")
    )
    # 34 layers of 4 heads of 256 keys and values in bfloat16.
    assert dense["pool_bytes"] == 2 * 4 * 8192 * 34 * 4 * 256 * 2
    # 29 of them have a window of 1,024, and room for a step of 512.
    per_layer = 2 * 4 * 256 * 2
    assert window["pool_bytes"] == 4 * (5 * 8192 + 29 * (1024 + 512)) * per_layer
    assert paged["pool_bytes"] == window["pool_bytes"] - 2 * 5 * 4096 * per_layer


def test_windows_may_have_a_codec_of_their_own(run_json, run_jkv):
    argv = ("plan", "--model", "gemma-3-4b", "--batch", "4", "--context", "4096", "--codec", "int8")
    argv = (*argv, "--window-codec", "bf16")
    assert "(paged, int8, bf16 in windows, pages of 64, plain)" in run_jkv(*argv)
    # 5 layers of 4 heads of 256 keys and values; 29 more have a window of 1,024 and room for a step of 512.
    whole, windowed = 5 * 4096 * 2 * 4 * (256 + 4), 29 * (1024 + 512) * 2 * 4 * 256 * 2
    for codec, bytes_of_whole in (("int8", whole), ("f32", 5 * 4096 * 2 * 4 * 256 * 4)):
        (shown,) = run_json(*argv, "--json", "--codec", codec)
        assert shown["pool_bytes"] == 4 * (bytes_of_whole + windowed)
    (int8,) = run_json(*argv, "--json", "--hbm", "16GB")
    (f32,) = run_json(*argv, "--json", "--hbm", "16GB", "--codec", "f32")
    assert int8["choices"] == f32["choices"]
    assert {choice["num_sequences"] for choice in f32["choices"] if choice["codec"] == "f32"} >= {f32["fits"]}


def test_a_mesh_and_a_mix_are_read_from_files(run_json, tmp_path):
    mix = tmp_path / "mix.txt"
    mix.write_text("1000 1\n8192 1\n")
    argv = ("--mesh", "cpu-2x4", "--batch", "4", "--context-mix", mix, "--json")
    (shown,) = run_json("plan", "--model", "llama-3.1-8b", *argv)
    assert shown["devices"] == {"data": 2, "model": 4}
    # Two of the four sequences, one of each length; the shorter one's last page has 24 tokens of room.
    assert shown["memory"]["cache"] == (1000 + 8192) * shown["bytes_per_token"] // 4
    assert shown["memory"]["rounding"] == 24 * shown["bytes_per_token"] // 4


@pytest.mark.parametrize(
    ("text", "size"),
    [("141GB", 141 * 10**9), ("80GiB", 80 * 2**30), ("16e9", 16 * 10**9), ("1.5 tb", 1500 * 10**9), ("7", 7)],
)
def test_memory_is_read_with_its_unit(text: str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*BARE,), "--hbm or --batch must be given"),
        ((*BARE, "--batch", "1", "--plot", "x.png"), "--plot needs --hbm"),
        ((*BARE, "--hbm", "80 apples"), "--hbm must be bytes, as 141GB, 80GiB or 16e9, got '80 apples'"),
        ((*BARE, "--hbm", "0GB"), "got '0GB'"),
        ((*BARE, "--batch", "1", "--model", "qwen3-8b"), "drop --layers"),
        ((*BARE, "--batch", "1", "--context-mix", "x"), "--context and --context-mix exclude each other"),
        ((*BARE[:6], "--batch", "1"), "--context or --context-mix must be given where no --model"),
        ((*BARE, "--hbm", "1e99"), "--hbm must be below 2**63 bytes, got '1e99'"),
        ((*BARE, "--hbm", "1e999999999"), "--hbm must be bytes, as 141GB, 80GiB or 16e9, got '1e999999999'"),
        ((*BARE, "--batch", "1", "--window-codec", "f32"), "window_codec f32 needs a --model whose layers"),
        (
            ("--model", "gemma-3-4b", "--batch", "1", "--window-codec", "f32", "--html", "x.html"),
            "--html writes a page of one codec for all layers",
        ),
        ((*BARE, "--hbm", "0.1"), "--hbm must be bytes"),
        ((*BARE, "--batch", f"1{'0' * 400}"), "--batch must be below 2**63, got 1000"),
        ((*BARE, "--batch", "1", "--html", "none/x.html"), "--html must be a file that can be written"),
        ((*BARE, "--batch", "0"), "--batch must be at least 1, got 0"),
        ((*BARE, "--batch", "1", "--mesh", "single", "--devices", "2"), "drop --devices"),
        ((*BARE, "--batch", "1", "--devices", "3"), "KV heads must split evenly over devices, got 8 over 3"),
        ((*BARE, "--hbm", "1GB", "--reserve", "1"), "--reserve must be a share from 0 to 1, got 1.0"),
        (("--layers", "2", "--batch", "1", "--context", "8"), "--model must be given, or all of"),
        (("--model", "qwen3-7b", "--batch", "1", "--context", "8"), 'did you mean "qwen3-'),
        (("--model", "a/b", "--batch", "1", "--context", "8"), "which is on the hub"),
        (("--model", "qwen3-8b", "--batch", "1", "--context", "99999"), "at most 40,960 tokens, got 99,999"),
        (
            ("--model", "qwen3-8b", "--batch", "1", "--context", "8", "--devices", "16"),
            "mesh.rules.kv_head: must split key and value heads evenly, got 8 over 16 devices; choose 8",
        ),
        (
            ("--model", "deepseek-v2-lite", "--batch", "1", "--context", "8", "--mesh", "wide.yaml"),
            "mesh.rules.mlp: must split entries of an MLP evenly, got 64 over 128 devices",
        ),
        ((*BARE, "--batch", "1", "--reserve", "0.2"), "--reserve is a share of --hbm; give the memory"),
        (
            (*BARE, "--batch", "1", "--weights", "int8", "--step-tokens", "8"),
            "without --model the cache alone is counted; give one, or drop --weights",
        ),
        (
            ("--model", "qwen3-8b", "--batch", "1", "--context", "8", "--cache", "window"),
            "--cache window needs a --model whose layers have a sliding window, got one without; use dense",
        ),
        (
            ("--model", "deepseek-v2-lite", "--batch", "1", "--context", "8", "--weights", "int4"),
            "int4 weights must have no experts",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(
    refusal, argv: tuple, message: str, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.yaml").write_text("axes: {wide: 128}\nrules: {mlp: wide}\n")
    assert message in refusal("plan", *argv)


def test_a_model_is_planned_for_the_longest_that_it_reads(run_json):
    (shown,) = run_json("plan", "--model", "qwen3-8b", "--hbm", "80GB", "--json")
    assert shown["lengths"] == [{"tokens": 40960, "share": 1.0}]


def test_a_preset_of_the_working_folder_needs_sizes(refusal, run_json, tmp_path, monkeypatch):
    folder = tmp_path / "configs" / "models"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("path: mine\n")
    monkeypatch.chdir(tmp_path)
    argv = ("plan", "--model", "mine", "--batch", "1", "--context", "8")
    assert "mine.yaml must have sizes to be planned, got none" in refusal(*argv)
    (folder / "mine.yaml").write_text("base: qwen3-0.6b\nsizes: {num_layers: 1}\n")
    (shown,) = run_json(*argv, "--json")
    assert shown["bytes_per_token"] == 2 * 8 * 128 * 2


def test_a_plan_is_drawn(run_jkv, tmp_path):
    file = tmp_path / "plan.png"
    run_jkv("plan", *BARE, "--hbm", "141GB", "--plot", file)
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (1500, 675)


def test_a_plot_without_matplotlib_is_refused(refusal, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refusal("plan", *BARE, "--hbm", "141GB", "--plot", tmp_path / "plan.png")
    assert said == "jkv: a plot needs matplotlib, got none; pip install 'jkv[plot]'"


def test_a_wrong_line_of_a_mix_is_named(refusal, tmp_path):
    mix = tmp_path / "mix.txt"
    mix.write_text("8192 1\nlong 2\n")
    said = refusal("plan", "--model", "qwen3-8b", "--batch", "1", "--context-mix", mix)
    assert f"{mix}:2: must be a length and its share" in said


def test_the_plan_in_the_docs_is_what_the_command_prints(run_jkv, monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    (shown,) = re.findall(
        r"^```\n\$ jkv (.*?)\n(.*?)^```$", (root / "docs/capacity.md").read_text(), re.M | re.S
    )
    command, printed = shown
    assert run_jkv(*shlex.split(command)) == printed


COMPILED = ("plan", "--compile", "--model", "llama-3.1-70b", "--context", "8192", "--cache", "paged-int8")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--mesh", "v6e-8", "--batch", "640"),
            "a device of v6e must hold it all in 33,543,694,581 bytes, got 128,370,531,840 for 640 "
            "sequences: 17,640,734,720 of weights, 110,729,797,120 of cache; "
            "use --batch 91 or --context 1152 or --mesh v6e-256",
        ),
        (("--mesh", "v6e-8", "--batch", "95"), "use --batch 91 or --context 7808 or --codec int4_token"),
        (
            ("--mesh", "cpu-2x4"),
            "a mesh with a target, got cpu-2x4, which names none; meshes that divide",
        ),
        (("--mesh", "v5p-64", "--batch", "12"), "must be a multiple of the 16 parts that the mesh splits"),
        (("--mesh", "v6e-8", "--hbm", "32GB"), "--compile asks the machine of --mesh; drop --hbm"),
        ((), "--compile needs --model and --mesh; meshes of machines: h100-8, h200-8, tpu7x-4"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_nearest_that_can(
    argv: tuple, message: str, refusal, monkeypatch
):
    # With a compiler, what is nearest is compiled first.
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert message in refusal(*COMPILED, *argv)


def test_a_mesh_that_does_not_divide_is_refused_with_those_that_do(refusal):
    said = refusal("plan", "--compile", "--model", "qwen3-30b-a3b", "--context", "512", "--mesh", "v6e-8")
    assert "must split key and value heads evenly, got 4 over 8" in said
    assert said.endswith("meshes that divide it: v5p-64 or v5p-64-experts")
    said = refusal("plan", "--compile", "--model", "qwen3-30b-a3b", "--context", "0", "--mesh", "v6e-8")
    assert "--context" in said
    assert "meshes" not in said


def test_a_broken_file_of_the_working_folder_is_told_to_who_names_it(refusal, run_jkv, tmp_path, monkeypatch):
    for folder, text in (("meshes", "target: v7:2x2\naxes: {model: 4}\n"), ("models", "path: mine\n")):
        (tmp_path / "configs" / folder).mkdir(parents=True)
        (tmp_path / "configs" / folder / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert "mine.yaml:1: mesh.target: must be one of v5e" in refusal(*COMPILED, "--mesh", "mine")
    assert 'did you mean "v6e-8"' in refusal(*COMPILED, "--mesh", "v6e-9")
    assert "use --batch 91 or --context" in refusal(*COMPILED, "--mesh", "v6e-8", "--batch", "640")
    argv = ("plan", "--model", "Qwen/Qwen3-8B", "--batch", "1", "--context", "8", "--html", "plan.html")
    assert "8,190,735,360 parameters" in run_jkv(*argv)


def test_a_compiler_that_is_not_installed_is_named_with_its_extra(refusal, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    said = refusal(*COMPILED, "--mesh", "v6e-8", "--batch", "64")
    assert said == "jkv: to compile for v6e:2x4, its compiler must be installed; pip install 'jkv[aot]'"
