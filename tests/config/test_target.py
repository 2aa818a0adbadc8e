"""Machines that meshes are for."""

import pytest

from jkv.config import ConfigError, load_config
from jkv.config.target import Target, read_target


def test_a_target_is_a_machine_and_its_chips():
    assert read_target("v6e:2x4") == Target("v6e", (2, 4))
    assert read_target("h200:8").num_devices == 8
    assert read_target("h200:8").platform == "gpu"
    # Each half of a TPU7x is a device.
    assert read_target("tpu7x:2x2x1").num_devices == 8
    assert read_target("tpu7x:2x2x1").platform == "tpu"


@pytest.mark.parametrize("text", ["v6:2x4", "v6e", "v6e:2x4x1", "v6e:0x4", "h200:2x4", "v6e:2x", "v6e:2x4 "])
def test_text_that_names_no_target_is_refused(text: str):
    with pytest.raises(ValueError, match=r"must be one of v5e, .* and its chips, as v6e:2x4 or h200:8, got"):
        read_target(text)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("v6e:2x2", "mesh.target: must have the 8 devices of the mesh's axes, got 4 of v6e:2x2"),
        ("v6e:8", "mesh.target: must be one of v5e"),
    ],
)
def test_a_mesh_has_the_devices_of_its_target(target: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config("smollm2-cpu", ["--mesh", "v6e-8", "--mesh.target", target])
