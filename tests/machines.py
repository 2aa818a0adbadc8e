"""Machines that are not here, for tests that compile for them."""

import dataclasses
from typing import Any

import pytest
from jax.sharding import Mesh

from jkv.targets import TARGETS, target, target_mesh


def find_target(machine: str) -> Mesh:
    """Return a mesh of one device of the machine, or skip the test where its compiler is not installed."""
    try:
        return target(machine) if machine in TARGETS else target_mesh(machine, (1,), {"device": 1})
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def recording(parameters: type) -> Any:
    """Return parameters of an interpreter that records races: newer ones raise at the first by default."""
    names = {field.name for field in dataclasses.fields(parameters)}
    return parameters(detect_races=True, **({"on_race": "warn"} if "on_race" in names else {}))
