"""Machines that are not here, for tests that compile for them."""

import pytest
from jax.sharding import Mesh

from jkv.targets import target


def find_target(machine: str) -> Mesh:
    """Return a mesh of the machine, or skip the test where its compiler is not installed."""
    try:
        return target(machine)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
