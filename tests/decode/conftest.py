"""Calls as a caller's own program makes them."""

from collections.abc import Iterator

import pytest
from jaxtyping import config


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch the runner's type checks off, so that what jkv itself refuses shows."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
