import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from jkv.axes import AXES, NEVER_SPLIT
from jkv.config import ConfigError, MeshRules, config_yaml, load_config
from jkv.config.compose import FOLDERS, bundled_configs

TOP = {
    "model": "{path: toy}",
    "cache": "{layout: dense}",
    "mesh": "{axes: {data: 2, model: 4}}",
    "engine": "{max_sequences: 2}",
}


def make_config(folder: Path, **sections: str | None) -> Path:
    file = folder / "decode.yaml"
    entries = {kind: text for kind, text in (TOP | sections).items() if text is not None}
    file.write_text("".join(f"{kind}: {text}\n" for kind, text in entries.items()))
    return file


def messages(config: object, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(str(config), overrides)
    return str(caught.value).splitlines()


def test_every_bundled_file_loads():
    for kind, folder in FOLDERS.items():
        for file in sorted((bundled_configs() / folder).glob("*.yaml")):
            load_config("smollm2-cpu", [f"--{kind}", file.stem])


def test_a_configuration_is_hashable_and_survives_yaml(tmp_path):
    config = load_config("smollm2-cpu", ["--mesh", "cpu-2x4", "--cache.capacity", "96"])
    file = tmp_path / "again.yaml"
    file.write_text(config_yaml(config))
    assert load_config(file) == config
    assert hash(load_config(file)) == hash(config)


def test_reading_a_configuration_imports_no_jax():
    code = "import sys, jkv.config; jkv.config.load_config('smollm2-cpu', ['--cache.page-size', '8']); "
    code += "assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_base_is_merged_key_by_key(tmp_path):
    file = make_config(tmp_path, mesh="{base: single, axes: {model: 4}, rules: {embed: null, vocab: null}}")
    mesh = load_config(file).mesh
    assert mesh.axes == (("data", 1), ("model", 4))
    assert (mesh.rules.mlp, mesh.rules.vocab) == ("model", None)


def test_another_path_has_no_sizes_until_they_are_given_with_it(tmp_path):
    model = load_config("smollm2-cpu").model
    assert model.sizes is not None
    assert load_config("smollm2-cpu", ["--model.path", model.path]).model == model
    assert load_config("smollm2-cpu", ["--model.path", "x.gguf"]).model.sizes is None
    flags = ["--model.path", "x.gguf", "--model.sizes.num-layers", "3"]
    assert load_config("smollm2-cpu", flags).model.sizes == replace(model.sizes, num_layers=3)
    file = make_config(tmp_path, model="{base: smollm2-135m, path: x.gguf}")
    assert load_config(file).model == replace(model, path="x.gguf", sizes=None)
    file = make_config(tmp_path, model="{base: smollm2-135m, sizes: {num_layers: 3}}")
    assert load_config(file).model == replace(model, sizes=replace(model.sizes, num_layers=3))


def test_names_are_looked_up_beside_the_file_first(tmp_path):
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches" / "dense.yaml").write_text("{layout: dense, page_size: 4}\n")
    assert load_config(make_config(tmp_path, cache="dense")).cache.page_size == 4


def test_names_are_looked_up_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    make_config(tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    assert load_config("decode").model.path == "toy"


def test_a_section_may_be_a_path_from_its_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("layout: dense\npage_size: 2\n")
    assert load_config(make_config(tmp_path, cache="mine.yaml")).cache.page_size == 2


def test_a_small_float_is_a_float(tmp_path):
    file = make_config(tmp_path, engine="{max_sequences: 2, sampling: {temperature: 1e-5}}")
    assert load_config(file).engine.sampling.temperature == 1e-5


def test_every_error_of_every_file_is_told_at_once(tmp_path):
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches" / "bad.yaml").write_text("layout: dense\npagesize: 8\ncapacity: big\n")
    file = make_config(tmp_path, cache="bad", model="{dtype: float16}", engine="{max_sequences: 0}")
    found = messages(file)
    cache = tmp_path / "caches" / "bad.yaml"
    assert found == [
        f'{cache}:2: cache.pagesize: is not a known key (did you mean "page_size"?)',
        f'{cache}:3: cache.capacity: must be an integer or "auto", got "big"',
        f"{file}:1: model.path: is missing; add it",
        f'{file}:1: model.dtype: must be "float32" or "bfloat16", got "float16" (did you mean "bfloat16"?)',
        f"{file}:4: engine.max_sequences: must be greater than 0, got 0",
    ]


@pytest.mark.parametrize(
    ("section", "text", "message"),
    [
        ("cache", "{layout: ring}", 'cache.layout: must be "auto", "dense", "paged" or "window", got "ring"'),
        (
            "cache",
            "{layout: window, num_pages: 8}",
            'cache.num_pages: must be auto without a shared pool, got 8; choose layout "paged"',
        ),
        ("cache", "{layout: dense, page_size: '8'}", 'cache.page_size: must be an integer, got "8"'),
        ("cache", "{layout: dense, page_size: 8.0}", "cache.page_size: must be an integer, got 8.0"),
        ("cache", "{layout: dense, page_size: true}", "cache.page_size: must be an integer, got true"),
        ("cache", "{layout: dense, capacity: 0}", 'cache.capacity: must be greater than 0 or "auto", got 0'),
        ("cache", "3", "cache: must be a name or a mapping, got 3"),
        (
            "cache",
            "{layout: dense, codec: bf16, value_codec: int8_static}",
            "cache.scales: must name a file for bf16, int8_static, got none; jkv calibrate writes it",
        ),
        (
            "cache",
            "{layout: dense, codec: int8, scales: x}",
            'cache.scales: must be left out for int8, got "x"; it is for codecs that end in _static',
        ),
        ("model", "{path: ''}", 'model.path: must be text that is not empty, got ""'),
        ("engine", "{max_sequences: 1, sampling: 3}", "engine.sampling: must be a mapping, got 3"),
        (
            "engine",
            "{max_sequences: 1, sampling: {top_p: 0}}",
            "engine.sampling.top_p: must be greater than 0, got 0",
        ),
        (
            "engine",
            "{max_sequences: 1, sampling: {temprature: 1}}",
            'engine.sampling.temprature: is not a known key (did you mean "temperature"?)',
        ),
        (
            "engine",
            "{max_sequences: 1, prefill_buckets: [64, 16]}",
            "engine.prefill_buckets: must be one width or more, rising, got [64, 16]; "
            "sort them and keep each once",
        ),
        (
            "engine",
            "{max_sequences: 1, prefill_buckets: []}",
            "engine.prefill_buckets: must be one width or more, rising, got []; sort them and keep each once",
        ),
    ],
)
def test_a_bad_value_is_refused_with_what_it_must_be(tmp_path, section, text, message):
    found = messages(make_config(tmp_path, **{section: text}))
    assert [line.partition(": ")[2] for line in found] == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{axes: {data: 0}}", "mesh.axes.data: must be greater than 0, got 0"),
        (
            "{axes: {data: 2, model: 4}, rules: {mlp: modle}}",
            "mesh.rules.mlp: must name an axis of the mesh (data, model), "
            'got "modle" (did you mean "model"?)',
        ),
        (
            "{axes: {data: 2}, rules: {kv_heads: data}}",
            'mesh.rules.kv_heads: is not a known key (did you mean "kv_head"?)',
        ),
        (
            "{axes: {data: 2}, rules: {embed: data, mlp: data}}",
            'mesh.rules.mlp: must not be "data", which splits embed of the same array '
            "(mlp in: embed mlp); drop one",
        ),
        (
            "{axes: {data: 2}, rules: {page: data}}",
            "mesh.rules.page: must equal the rule of seq (null), got data; set both alike",
        ),
        (
            "{axes: {data: 2}, rules: {latent: data}}",
            "mesh.rules.latent: must be null: each device of a mesh axis has latents whole, or those of its "
            'sequences, got "data"',
        ),
    ],
)
def test_a_mesh_that_cannot_work_is_refused(tmp_path, text, message):
    found = messages(make_config(tmp_path, mesh=text))
    assert [line.partition(": ")[2] for line in found] == [message]


def test_every_axis_of_the_glossary_has_a_rule_or_is_never_split():
    assert {field.name for field in fields(MeshRules)} == set(AXES) - set(NEVER_SPLIT) | {"latent"}


def test_missing_and_unknown_sections_are_told(tmp_path):
    file = make_config(tmp_path, engine=None, engin="default")
    assert messages(file) == [
        f"{file}:1: engine: is missing; name a file or write a mapping",
        f'{file}:4: engin: is not a section (did you mean "engine"?)',
    ]


def test_a_missing_name_is_told_with_the_nearest(tmp_path):
    file = make_config(tmp_path, cache="dense-bf61")
    wanted = (
        f'{file}:2: cache: must name a file in configs/caches, got "dense-bf61" (did you mean "dense-bf16"?)'
    )
    assert messages(file) == [wanted]
    assert 'did you mean "smollm2-cpu"?' in messages("smollm-cpu")[0]
    assert "which does not exist" in messages(tmp_path / "none.yaml")[0]
    (tmp_path / "some.yaml").mkdir()
    assert "which is a folder" in messages(tmp_path / "some.yaml")[0]


def test_a_base_that_leads_to_itself_is_refused(tmp_path):
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches" / "a.yaml").write_text("base: b\n")
    (tmp_path / "caches" / "b.yaml").write_text("base: a\n")
    assert "must not be its own base" in messages(make_config(tmp_path, cache="a"))[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: must hold a mapping, got an empty file"),
        ("[1]\n", ":1: must be a mapping of model, cache, mesh, engine, got [1]"),
        ("model: {\n", ":2: must be YAML, got: expected the node content, but found '<stream end>'"),
        (
            "model: &a {path: toy}\ncache: *a\n",
            ":2: must be YAML, got: an alias (*name); write the value out",
        ),
        (
            "model: !!python/name:os.system x\n",
            ":1: model: must have no tag, got tag:yaml.org,2002:python/name:os.system",
        ),
        ("model: !!binary eA==\n", ":1: model: must have no tag, got tag:yaml.org,2002:binary"),
        ("model: [1, 2]\n", ":1: model: must be a name or a mapping, got [1, 2]"),
        ("? [a, b]\n: c\n", ":1: a key must be text, got a list or a mapping; quote it"),
        ("model: " + "[" * 5000, ": must be YAML that a person can read, got too deep a nesting"),
    ],
)
def test_what_is_not_strict_yaml_is_refused(tmp_path, text, message):
    file = tmp_path / "decode.yaml"
    file.write_text(text)
    assert any(line.startswith(f"{file}{message}") for line in messages(file))


def test_what_is_not_text_is_refused(tmp_path):
    file = tmp_path / "decode.yaml"
    file.write_bytes(b"model: \xff\xfe\n")
    assert messages(file)[0].startswith(f"{file}: must be UTF-8 text")


def test_a_key_that_stands_twice_is_refused(tmp_path):
    file = make_config(tmp_path, cache="{layout: dense, page_size: 4, page_size: 8}")
    assert messages(file) == [f"{file}:2: cache.page_size: stands twice, first on line 2; keep one"]


def test_a_key_that_is_no_text_is_refused(tmp_path):
    file = make_config(tmp_path, cache="{layout: dense, 4: 8}")
    assert messages(file) == [f"{file}:2: cache: a key must be text, got '4'; quote it"]


def test_flags_set_single_values():
    config = load_config(
        "smollm2-cpu",
        [
            "--cache.page-size",
            "64",
            "--engine.sampling.top-p",
            "0.9",
            "--mesh.axes",
            "data",
            "2",
            "model",
            "4",
        ],
    )
    assert config.cache.page_size == 64
    assert config.engine.sampling.top_p == 0.9
    assert config.mesh.axes == (("data", 2), ("model", 4))


def test_a_flag_drops_a_rule_as_a_file_does():
    flags = ["--mesh.rules.q-head", "null", "--mesh.rules.kv-head=none", "--cache.value-codec", "null"]
    config = load_config("smollm2-cpu", ["--mesh", "cpu-2x4", *flags])
    assert (config.mesh.rules.q_head, config.mesh.rules.kv_head, config.cache.value_codec) == (None,) * 3
    assert config.mesh.rules.mlp == "model"


def test_flags_take_whole_sections_by_name():
    config = load_config("smollm2-cpu", ["--cache=dense-bf16", "--mesh", "cpu-2x4", "--cache.page-size", "8"])
    assert (config.cache.codec, config.cache.page_size, config.mesh.num_devices) == ("bf16", 8, 8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cache.pagesize", "8"], '--cache.pagesize: is not a flag (did you mean "--cache.page-size"?)'),
        (["--cache.page-size", "x"], "--cache.page-size: must be a whole number, got 'x'"),
        (["--cache.page-size", "1" + "0" * 21], "cache.page_size: must be less than 2147483648, got 1000"),
        (["--cache.capacity", "x"], "--cache.capacity: must be a whole number or auto, got 'x'"),
        (["--engine.sampling.top-p", "x"], "--engine.sampling.top-p: must be a number, got 'x'"),
        (
            ["--engine.prefill-buckets", "x"],
            "--engine.prefill-buckets: must be whole numbers and so on, got 'x'",
        ),
        (
            ["--mesh.axes", "data", "x"],
            "--mesh.axes: must be text, then a whole number, and so on, got 'data', 'x'",
        ),
        (["--engine.seed"], "--engine.seed: must be followed by a value"),
        (["--cache.page-size", "0"], "cache.page_size: must be greater than 0, got 0"),
        (["--cache.codec", "f16"], "--cache.codec: must be bf16 or f32 or fp8_e4m3 or"),
        (["--cache", "dense-bf17"], 'cache: must name a file in configs/caches, got "dense-bf17"'),
        (["--cache"], '--cache: must be followed by a name, got ""'),
        (["--cache", "--mesh"], '--cache: must be followed by a name, got "--mesh"'),
        (["--mesh.axes", "data", "2", "data", "4"], "mesh.axes: must name each mesh axis once"),
        (["stray"], "stray: is not a flag"),
    ],
)
def test_a_bad_flag_is_refused(flags, message):
    assert messages("smollm2-cpu", *flags)[0].startswith(f"command line: {message}")


def test_help_lists_every_value_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config("smollm2-cpu", ["--help"])
    assert not caught.value.code
    shown = capsys.readouterr().out
    assert "--cache.page-size" in shown
    assert "tokens of a page" in shown


def test_a_mesh_gives_specs_and_shards():
    mesh = load_config("smollm2-cpu", ["--mesh", "cpu-2x4"]).mesh
    assert mesh.spec(("page", "kv_head", "slot", "head_dim")) == ("data", "model", None, None)
    assert (mesh.shards("kv_head"), mesh.shards("embed"), mesh.shards("slot")) == (4, 1, 1)


def test_problems_are_values(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(make_config(tmp_path, cache="{}"))
    problem = caught.value.problems[0]
    assert (problem.place.line, problem.key) == (2, "cache.layout")


def test_a_key_inside_sizes_is_named_with_its_line(tmp_path):
    sizes = "sizes:\n  num_layers: 2\n  experts:\n    num_expert: 2\n    num_active: 1\n    mlp_dim: 3\n"
    (tmp_path / "toy.yaml").write_text(f"path: toy\n{sizes}")
    said = messages(make_config(tmp_path, model="toy.yaml"))
    assert f"{tmp_path}/toy.yaml:2: model.sizes.embed_dim: is missing; add it" in said
    (expert,) = [line for line in said if "num_expert:" in line]
    assert expert == (
        f"{tmp_path}/toy.yaml:5: model.sizes.experts.num_expert: is not a known key "
        '(did you mean "num_experts"?)'
    )


def test_sizes_that_contradict_each_other_are_refused():
    sizes = ["--model.sizes.num-kv-heads", "3", "--model.sizes.num-global-layers", "99"]
    assert messages("smollm2-cpu", "--model", "gemma-3-4b", *sizes) == [
        "command line: model.sizes.num_kv_heads: must divide num_heads, got 3 and 8",
        "command line: model.sizes.num_global_layers: must be at most num_layers, beside a window, "
        "got 99 of 34, window 1024",
    ]
