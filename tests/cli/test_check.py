import re
from dataclasses import replace

import pytest
import yaml

from jkv.cli.check import check, stored_config
from jkv.config import ConfigError, load_config
from jkv.layers.rope import RopeConfig
from jkv.models.model_config import ModelConfig, with_kv_copies
from jkv.plan.decoder import parameters


def make_model(**changes: int) -> ModelConfig:
    sizes = {
        "vocab_size": 64,
        "num_layers": 3,
        "embed_dim": 16,
        "num_heads": 4,
        "num_kv_heads": 4,
        "mlp_dim": 32,
    }
    return ModelConfig(
        family="llama",
        head_dim=4,
        norm_eps=1e-5,
        rope=RopeConfig(dim=4),
        max_length=128,
        windows=(None,) * 3,
        is_tied=True,
        **(sizes | changes),
    )


def test_the_resolved_configuration_comes_first():
    shown = check("smollm2-cpu", ["--cache.page-size", "32"])
    resolved = yaml.safe_load(shown.partition("\ndevices:")[0])
    assert resolved["cache"]["page_size"] == 32
    assert list(resolved) == ["model", "cache", "mesh", "engine"]


def test_the_mesh_and_its_specs_are_shown():
    shown = check("smollm2-cpu", ["--mesh", "cpu-2x4"])
    assert "devices: 8 (data 2 x model 4)" in shown
    (pool,) = [line for line in shown.splitlines() if line.startswith("  pool ")]
    assert pool.endswith("P(data, model, None, None)")


def test_the_implementation_that_will_run_is_named():
    assert "attention: auto -> xla" in check("smollm2-cpu")
    assert "attention: reference -> reference" in check("smollm2-cpu", ["--engine.attention", "reference"])
    # Of another machine.
    assert "attention: pallas_gpu -> pallas_gpu" in check("smollm2-cpu", ["--engine.attention", "pallas_gpu"])


def test_the_layout_of_the_pool_is_named_with_its_padding():
    layer = 2 * 4 * 4 * 4
    shown = check("smollm2-cpu", model=make_model())
    assert f"pool layout: auto -> plain, {16 * 3 * layer:,} bytes a page" in shown
    # Of a head of 4 entries a page of 16 tokens takes half a row.
    shown = check("smollm2-cpu", ["--cache.pool-layout", "tpu"], model=make_model())
    assert f"pool layout: tpu -> tpu, {32 * 3 * layer:,} bytes a page" in shown


def test_parameters_are_counted_to_the_byte():
    count = 64 * 16 + 3 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16
    shown = check("smollm2-cpu", model=make_model())
    assert f"parameters: {count:,}" in shown
    assert f"float32   {4 * count:,} bytes" in shown
    assert f"on a device, float32: {4 * count:,} bytes" in shown


def test_packed_weights_are_counted_with_their_scales():
    model = make_model(embed_dim=64, num_heads=16, num_kv_heads=16, mlp_dim=128)
    shown = check("smollm2-cpu", ["--model.weights", "int4"], model=model)
    table, norms, packed = 64 * (64 + 4), 4 * 7 * 64, 3 * (4 * 64 * 64 + 3 * 64 * 128)
    assert f"on a device, int4: {table + norms + packed * 3 // 4:,} bytes" in shown
    assert "int8      none: int8 weights need inputs in multiples of 32" in check(
        "smollm2-cpu", model=make_model()
    )


def test_a_device_holds_its_share_of_weights_and_cache():
    flags = ["--mesh", "cpu-2x4", "--cache.capacity", "40", "--cache.page-size", "16"]
    shown = check("smollm2-cpu", flags, model=make_model())
    norms = (2 * 3 + 1) * 16
    split = 64 * 16 + 3 * (4 * 16 * 16 + 3 * 16 * 32)
    assert f"on a device, float32: {4 * (norms + split // 4):,} bytes" in shown
    total = 2 * 8 * 48 * 3 * 4 * 4 * 4
    assert f"8 sequences of 40 tokens: {total:,} bytes" in shown
    assert f"on a device: {total // 8:,} bytes" in shown


def test_a_capacity_that_depends_on_the_request_is_said():
    shown = check("smollm2-cpu", model=make_model())
    assert f"cache: {2 * 3 * 4 * 4 * 4} bytes a token" in shown
    assert "holds its prompt and new tokens" in shown


def test_groups_of_layers_show_what_a_window_saves():
    flags = ["--cache", "window", "--cache.window-codec", "bf16", "--engine.prefill-buckets", "8", "16"]
    shown = check("smollm2-cpu", flags, model=replace(make_model(), windows=(None, 24, 24)))
    layer = 2 * 4 * 4
    assert f"  1 layers: {4 * layer} bytes a token; a sequence of 128 tokens: dense {512 * layer:,}" in shown
    windowed = f"  2 layers, window 24: {4 * layer} bytes a token; a sequence of 128 tokens: "
    # 24 tokens of the window and 16 of the longest step, in pages of 16.
    assert f"{windowed}dense {512 * layer:,} bytes, window {4 * 48 * layer:,} bytes\n" in shown


def test_a_pool_has_the_bytes_of_its_pages():
    flags = ["--cache", "paged", "--cache.num-pages", "40", "--cache.page-size", "8"]
    shown = check("smollm2-cpu", flags, model=replace(make_model(), windows=(None, 8, 8)))
    layer = 8 * 2 * 4 * 4 * 4
    # The widest step has 512 tokens: a window keeps all of a sequence of 128.
    assert f"  a pool of 40 and 40 pages: {40 * 3 * layer:,} bytes\n" in shown
    flags += ["--engine.prefill-buckets", "8"]
    shown = check("smollm2-cpu", flags, model=replace(make_model(), windows=(None, 8, 8)))
    # Eight sequences of a window of 8 tokens and a step of 8.
    assert f"  a pool of 40 and 16 pages: {(40 + 2 * 16) * layer:,} bytes\n" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cache", "window"], "cache layout window needs a model whose layers have a sliding window"),
        (["--cache.window-codec", "bf16"], "cache window_codec needs a model whose layers have a sliding"),
    ],
)
def test_a_window_that_no_layer_has_is_refused(flags: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        check("smollm2-cpu", flags, model=make_model())


def test_weights_that_do_not_pack_are_refused_as_they_are_when_loaded(tiny):
    flags = ["--mesh", "cpu-2x4", "--model.weights", "int8"]
    with pytest.raises(ValueError, match="int8 weights must be on one device, got a mesh"):
        check("smollm2-cpu", flags, model=make_model())
    config = load_config("smollm2-cpu", ["--model.path", str(tiny.parent / "mixtral_moe")])
    with pytest.raises(ValueError, match="int4 weights must have no experts"):
        check("smollm2-cpu", ["--model.weights", "int4"], model=stored_config(config))


def test_devices_that_would_all_do_the_same_are_refused():
    reason = "mesh.axes: must each split something of the model, got 2 devices of 'expert' that would all do"
    axes = ["--mesh.axes", "data", "1", "model", "2", "expert", "2"]
    with pytest.raises(ConfigError, match=reason):
        check("smollm2-cpu", ["--mesh", "single", *axes, "--mesh.rules.expert", "expert"], model=make_model())
    with pytest.raises(ConfigError, match=reason):
        check("smollm2-cpu", ["--mesh", "single", *axes], model=make_model())


def test_a_mesh_that_does_not_divide_the_model_is_refused():
    with pytest.raises(ConfigError) as caught:
        check("smollm2-cpu", ["--mesh", "cpu-2x4"], model=make_model(num_heads=9, num_kv_heads=3))
    assert str(caught.value).splitlines() == [
        "smollm2-135m: mesh.rules.q_head: must split query heads evenly, got 9 over 4 devices; "
        "choose 3 or 9, or drop the rules of q_head and kv_head",
        "smollm2-135m: mesh.rules.kv_head: must split key and value heads evenly, got 3 over 4 devices; "
        "choose 3, or drop the rules of q_head and kv_head",
    ]


def test_copies_that_would_lie_on_one_device_are_refused():
    sizes = {"num_heads": 16, "num_kv_heads": 2}
    flags = ["--mesh", "cpu-4x2", "--mesh.kv-copies", "2"]
    reason = "must be the copies that 2 KV heads need to split over 2 devices, got 2; set it to 1"
    with pytest.raises(ConfigError, match=reason):
        check("smollm2-cpu", flags, model=with_kv_copies(make_model(**sizes), 2))


def test_the_command_prints_what_the_function_returns(run_jkv, tiny):
    flags = ("--cache.page-size", "32", "--model.path", str(tiny))
    shown = run_jkv("check", "smollm2-cpu", *flags)
    assert shown == check("smollm2-cpu", flags, model=stored_config(load_config("smollm2-cpu", flags)))
    assert "parameters: 127,424" in shown


def test_copies_of_kv_heads_are_shown_and_counted(run_jkv, tiny, refusal):
    flags = ("--model.path", str(tiny), "--mesh", "cpu-2x4")
    assert "set mesh.kv_copies to 2" in refusal("check", "smollm2-cpu", "--engine.max-sequences", "2", *flags)
    flags += ("--engine.max-sequences", "2", "--cache.capacity", "16")
    shown = run_jkv("check", "smollm2-cpu", *flags, "--mesh.kv-copies", "2")
    assert "each of 2 KV heads is held by 2 devices of its axis" in shown
    # Copies are no more parameters.
    assert "parameters: 127,424\n" in shown
    # A device of the eight: a sequence of 16 tokens, three layers, a head of 8 keys and values.
    assert f"on a device: {16 * 3 * 2 * 8 * 4:,} bytes" in shown


@pytest.mark.parametrize(
    ("copies", "message"),
    [("3", "mesh.kv_copies: must divide the 4 devices of kv_head's axis, got 3"), ("8", "must divide the 4")],
)
def test_copies_that_do_not_fit_the_mesh_are_refused(refusal, tiny, copies, message):
    flags = ("--model.path", str(tiny), "--mesh", "cpu-2x4", "--mesh.kv-copies", copies)
    assert message in refusal("check", "smollm2-cpu", *flags)


def test_more_copies_than_a_kv_head_has_queries_are_refused():
    with pytest.raises(ValueError, match="must divide the 2 query heads of a KV head, got 4; choose 2, or"):
        with_kv_copies(make_model(num_kv_heads=2), 4)
    with pytest.raises(ValueError, match="for a model that norms all heads of a token at once, got 2"):
        with_kv_copies(make_model(num_kv_heads=2, is_qk_norm_wide=True), 2)


def test_a_model_that_is_elsewhere_leaves_out_its_sizes(run_jkv):
    assert "parameters" not in run_jkv("check", "smollm2-cpu", "--model.path", "some/model")


def test_a_model_that_is_elsewhere_is_checked_by_its_sizes(run_jkv, refusal):
    shown = run_jkv("check", "smollm2-cpu", "--model", "gemma-3-4b", "--cache", "window")
    sizes = load_config("smollm2-cpu", ["--model", "gemma-3-4b"]).model.sizes
    assert sizes is not None
    assert f"parameters: {sum(part.num_parameters() for part in parameters(sizes)):,}\n" in shown
    # Keys and values of four heads of 256.
    assert f"  29 layers, window 1,024: {29 * 2 * 4 * 256 * 4:,} bytes a token" in shown
    flags = ("--model", "llama-3.1-8b", "--cache", "window")
    assert "layers have a sliding window" in refusal("check", "smollm2-cpu", *flags)
    flags = ("--model", "llama-3.1-8b", "--mesh.axes", "data", "1", "model", "16")
    assert "must split key and value heads evenly, got 8 over 16" in refusal("check", "smollm2-cpu", *flags)
    assert "each of 8 KV heads is held by 2 devices" in run_jkv(
        "check", "smollm2-cpu", *flags, "--mesh.kv-copies", "2"
    )


@pytest.mark.parametrize("path", ["none", "/nonexistent/model", "none.gguf"])
def test_a_model_that_is_not_there_is_refused(refusal, path):
    assert "a model must be an existing path" in refusal("check", "smollm2-cpu", "--model.path", path)


def test_a_wrong_flag_is_a_usage_error(refusal):
    said = refusal("check", "smollm2-cpu", "--cache.pagesize", "32")
    assert said == 'jkv: command line: --cache.pagesize: is not a flag (did you mean "--cache.page-size"?)'


def test_arrays_are_placed_and_a_step_s_collectives_are_shown(run_jkv, tiny):
    flags = ("--mesh", "cpu-4x2", "--cache", "paged", "--cache.num-pages", "5", "--devices", "8")
    shown = run_jkv("check", "smollm2-cpu", "--model.path", tiny, *flags)
    (pool,) = [line for line in shown.splitlines() if line.startswith("  cache.pools[0].keys.data")]
    # The five pages of a shard's pool, of 16 tokens in three layers; one of two KV heads of 8.
    assert f"P(data, model, None, None): {5 * 16 * 3 * 8 * 4:,} bytes" in pool
    (query,) = [line for line in shown.splitlines() if "q_proj" in line]
    assert "layers.*.attention.q_proj.weight x 3" in query
    assert "P(model, None)" in query
    # The embedding, and each layer's attention and MLP: two rows of 64 in float32.
    assert f"  all-reduce of 2: 7 with {7 * 2 * 64 * 4:,} bytes" in shown


@pytest.mark.parametrize(
    ("flags", "fitting"),
    [
        # Four query heads for two KV heads.
        (("--mesh", "cpu-4x2", "--devices", "4"), "--mesh single --mesh.axes data 2 model 2"),
        (("--devices", "8"), "--mesh cpu-4x2"),
        (("--devices", "1"), "--mesh cpu-2x4"),
        (("--devices", "7"), "--mesh cpu-2x4"),
    ],
)
def test_devices_that_are_not_the_mesh_s_are_refused_with_a_mesh_that_has_them(
    flags: tuple, fitting: str, refusal, run_jkv, tiny
):
    argv = ("check", "smollm2-cpu", "--model.path", tiny)
    said = refusal(*argv, *flags)
    assert "--devices must be those of a mesh of several" in said
    assert said.endswith(f"choose another mesh, as {fitting}")


def test_the_mesh_that_is_offered_for_devices_shows_them(refusal, run_jkv, tiny):
    argv = ("check", "smollm2-cpu", "--model.path", tiny, "--devices", "8")
    (flags,) = re.findall("choose another mesh, as (.*)$", refusal(*argv))
    assert "collectives of a decode step" in run_jkv(*argv, *flags.split())


def test_what_is_offered_for_sequences_that_a_mesh_does_not_divide_works(refusal, run_jkv, tiny):
    argv = ("check", "smollm2-cpu", "--model.path", tiny, "--mesh", "cpu-4x2", "--engine.max-sequences")
    # The axis of sequences splits nothing else, so to drop its rules is no remedy.
    assert refusal(*argv, "3").endswith("got 3 over 4 devices; choose 3, or give a multiple of 4 sequences")
    run_jkv(*argv, "4")
