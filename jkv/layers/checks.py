"""What layers refuse: sizes below 1, and inputs that are not theirs.

Knows shapes; every refusal names them.
"""

from typing import Any

from jkv.cache.batch import TokenBatch
from jkv.cache.spec import is_whole


def check_sizes(**sizes: int | None) -> None:
    """Raise a ValueError for sizes that are not whole and at least 1; None is one that was left out."""
    given = {name: size for name, size in sizes.items() if size is not None}
    wrong = [f"{name} {size!r}" for name, size in given.items() if not is_whole(size, at_least=1)]
    if wrong:
        raise ValueError(f"sizes of a layer must be whole and at least 1, got {', '.join(wrong)}")


def check_input(x: Any, width: int, batch: TokenBatch | None) -> None:
    """Raise a ValueError for rows of another width, or that are not the step's."""
    if x.ndim != 3 or x.shape[2] != width:
        raise ValueError(f"a layer's input must be [seq, time, {width}], got {list(x.shape)}")
    if batch is not None and x.shape[:2] != batch.positions.shape:
        raise ValueError(
            f"the step's rows and their tokens are {batch.positions.shape}, got an input of {list(x.shape)}"
        )
