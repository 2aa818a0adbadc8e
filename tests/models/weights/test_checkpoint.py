"""jkv's checkpoints: saved on one mesh, restored on another, and refused when they are not whole."""

import json
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jkv.layers.mlp import Gating
from jkv.layers.moe import Routing
from jkv.layers.rope import RopeConfig
from jkv.models.model_config import MixtureConfig, ModelConfig
from jkv.models.weights.checkpoint import (
    checkpoint_fingerprint,
    is_checkpoint,
    new_folder,
    read_checkpoint_config,
    restore_checkpoint,
    save_checkpoint,
)

from .checkpoints import make_normal

WEIGHT = "layers.0.mlp.weight"
CONFIG = ModelConfig(
    family="llama",
    vocab_size=320,
    num_layers=2,
    embed_dim=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=96,
    norm_eps=1e-6,
    rope=RopeConfig(dim=8, scaling="yarn", factor=4.0, frequency_factors=(1.0, 1.0, 2.0, 8.0)),
    max_length=512,
    windows=(None, 16),
    window_rope=RopeConfig(dim=8),
    gating=Gating(limit=7.0),
    mixture=MixtureConfig(Routing(4, 2, "sigmoid"), 32),
    eos_token_ids=(2, 7),
)


READ_ON_ONE_DEVICE = """
import json, sys
from pathlib import Path
import jax, numpy as np
from orbax.checkpoint import v1 as ocp
from jkv.models.weights.checkpoint import checkpoint_shapes, restore_checkpoint

path = Path(sys.argv[1])
shapes = checkpoint_shapes(path)
empty = {name: np.empty(shape.shape, shape.dtype) for name, shape in shapes.items()}
read = restore_checkpoint(path, shapes), ocp.load(str(path / "parameters"), empty)
found = [{name: np.asarray(array).tobytes().hex() for name, array in arrays.items()} for arrays in read]
kinds = [type(next(iter(arrays.values()))).__name__ for arrays in read]
shown = {name: [shape.shape, str(shape.dtype)] for name, shape in shapes.items()}
print(json.dumps([jax.device_count(), shown, kinds, found]))
"""


def make_target(
    spec: tuple, dtype: object = jnp.float32, shape: tuple = (16, 8), devices: tuple = (4, 2)
) -> jax.ShapeDtypeStruct:
    count, axis_types = math.prod(devices), (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(devices, ("data", "model"), axis_types=axis_types, devices=jax.devices()[:count])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def save(path: Path, seed: int = 0) -> dict[str, np.ndarray]:
    values = {
        WEIGHT: make_normal(16, 8, seed=seed),
        "norm.scale": make_normal(16, seed=seed + 1),
    }
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    save_checkpoint(path, CONFIG, {name: jax.device_put(value, sharding) for name, value in values.items()})
    return values


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    return path, save(path)


@pytest.fixture
def copied(saved: tuple, tmp_path: Path) -> Path:
    return shutil.copytree(saved[0], tmp_path / "model")


@pytest.mark.parametrize("devices", [(4, 2), (2, 2)])
def test_parameters_return_on_another_mesh(saved: tuple, devices: tuple):
    path, values = saved
    targets = {
        WEIGHT: make_target(("model", "data"), devices=devices),
        "norm.scale": make_target((), shape=(16,), devices=devices),
    }
    restored = restore_checkpoint(path, targets)
    for name, value in values.items():
        assert restored[name].sharding == targets[name].sharding
        np.testing.assert_array_equal(restored[name], value, strict=True)


def test_a_process_of_one_device_lists_and_reads_what_eight_saved(saved: tuple):
    path, values = saved
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", READ_ON_ONE_DEVICE, str(path)]
    shown = subprocess.check_output(command, env=environment, text=True, cwd=Path(__file__).parents[3])
    count, shapes, kinds, (on_device, in_memory) = json.loads(shown)
    assert (count, kinds) == (1, ["ArrayImpl", "ndarray"])
    assert shapes == {name: [list(value.shape), "float32"] for name, value in values.items()}
    assert on_device == in_memory == {name: value.tobytes().hex() for name, value in values.items()}


def test_parameters_return_in_another_floating_dtype(saved: tuple):
    path, values = saved
    targets = {name: make_target((), jnp.bfloat16, value.shape) for name, value in values.items()}
    restored = restore_checkpoint(path, targets)
    for name, value in values.items():
        assert restored[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(restored[name], value.astype(jnp.bfloat16))


def test_the_configuration_returns_equal_and_hashable(saved: tuple):
    config = read_checkpoint_config(saved[0])
    assert config == CONFIG
    assert hash(config) == hash(CONFIG)


def test_the_configuration_is_plain_json(saved: tuple):
    description = json.loads((saved[0] / "jkv.json").read_text())
    assert description["version"] == 1
    assert description["config"]["rope"]["frequency_factors"] == [1.0, 1.0, 2.0, 8.0]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path):
    with pytest.raises(ValueError, match="must go to a new folder"):
        save_checkpoint(tmp_path, CONFIG, {})


def test_a_new_folder_has_its_name_only_when_all_is_in_it(tmp_path: Path):
    path = tmp_path / "made" / "model"
    with new_folder(path) as folder:
        (folder / "parts").mkdir(parents=True)
        assert not path.exists()
    assert (path / "parts").is_dir()
    assert os.listdir(path.parent) == ["model"]


def test_a_disk_that_takes_no_more_leaves_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = {WEIGHT: jnp.asarray(make_normal(256, 256))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with (
            pytest.raises(ValueError, match="/model must be written whole, got: File too large; nothing"),
            new_folder(tmp_path / "model") as folder,
        ):
            save_checkpoint(folder, CONFIG, weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)
    # What a thread says that ends after the error was raised.
    logging.getLogger("absl").error("_SignalingThread.run() raised an exception: NOT_FOUND")
    assert not caplog.records


def test_a_folder_that_the_system_does_not_make_is_told_by_its_own_name(tmp_path: Path):
    path = tmp_path / ("m" * 250)
    with (
        pytest.raises(ValueError, match=f"^{path} must be written whole, got: File name too long"),
        new_folder(path),
    ):
        pass


def test_other_parameters_are_named(saved: tuple):
    targets = {WEIGHT: make_target(()), "norm.other": make_target((), shape=(16,))}
    with pytest.raises(ValueError, match=r"\['norm.other', 'norm.scale'\]"):
        restore_checkpoint(saved[0], targets)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (make_target((), shape=(16, 9)), r"float32\[16, 8\] for float32\[16, 9\]"),
        (make_target((), jnp.int32), "for int32"),
    ],
)
def test_another_shape_or_kind_is_named(saved: tuple, target: jax.ShapeDtypeStruct, message: str):
    targets = {WEIGHT: target, "norm.scale": make_target((), shape=(16,))}
    with pytest.raises(ValueError, match=rf"layers.0.mlp.weight .*{message}"):
        restore_checkpoint(saved[0], targets)


def test_a_missing_folder_and_a_foreign_one_are_told_apart(tmp_path: Path):
    with pytest.raises(ValueError, match="must be a folder"):
        read_checkpoint_config(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no checkpoint of jkv, or was not finished"):
        read_checkpoint_config(tmp_path)


def test_a_checkpoint_that_was_not_finished_is_refused(copied: Path):
    (copied / "jkv.json").unlink()
    assert is_checkpoint(copied)
    with pytest.raises(ValueError, match="was not finished"):
        restore_checkpoint(copied, {})


def test_a_checkpoint_without_its_parameters_is_refused(copied: Path):
    shutil.rmtree(copied / "parameters")
    with pytest.raises(ValueError, match="parameters must hold the parameters of the checkpoint"):
        restore_checkpoint(copied, {})


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"extra": 1}, {"config": {"family": "llama"}}],
)
def test_a_description_of_another_version_is_refused(copied: Path, change: dict):
    file = copied / "jkv.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"jkv\.json must describe a model of this jkv, got other \["):
        read_checkpoint_config(copied)


def test_a_setting_that_this_version_does_not_know_is_refused(copied: Path):
    file = copied / "jkv.json"
    description = json.loads(file.read_text())
    description["config"]["rope"]["new_scaling"] = 3.0
    file.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"config\.rope\.new_scaling"):
        read_checkpoint_config(copied)


def test_a_copy_has_the_same_fingerprint_and_other_weights_another(
    saved: tuple, copied: Path, tmp_path: Path
):
    original = checkpoint_fingerprint(saved[0])
    assert len(original) == 32
    assert checkpoint_fingerprint(copied) == original
    save(tmp_path / "other", seed=5)
    assert checkpoint_fingerprint(tmp_path / "other") != original
