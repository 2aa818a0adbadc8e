"""What every section of the configuration has in common.

Knows no section: constrained types, and the base that refuses unknown keys.
"""

from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

Count = Annotated[int, Field(strict=True, gt=0, lt=2**31)]  # positions are int32
Text = Annotated[str, Field(min_length=1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Conflict = tuple[tuple[str, ...], str]


class Section:
    """Base of all sections: unknown keys are refused, and `conflicts` checks values against each other."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def conflicts(self) -> list[Conflict]:
        """Return the path of each key that another one contradicts, and why."""
        return []
