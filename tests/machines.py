"""Machines that are not here, for tests that compile for them."""

import pytest
from jax.sharding import Mesh

from jkv.targets import TARGETS, target, target_mesh


def find_target(machine: str) -> Mesh:
    """Return a mesh of one device of the machine, or skip the test where its compiler is not installed."""
    try:
        return target(machine) if machine in TARGETS else target_mesh(machine, (1,), {"device": 1})
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
