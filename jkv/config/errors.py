"""What is wrong with a configuration, and where.

Knows no schema: a problem is a place, a key and a sentence.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a value was written.

    Attributes:
        file: a file as the user would name it, or `command line`.
        line: counted from 1; None where lines mean nothing.
    """

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


COMMAND_LINE = Place("command line")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        place: where it was written.
        key: dotted path of the key; empty where the whole file is wrong.
        message: what must hold, what was got, what to do.
    """

    place: Place
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.message}" if self.key else f"{self.place}: {self.message}"


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one problem a line.

    Attributes:
        problems: by file, then by line.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda it: (it.place.file, it.place.line or 0)))
        super().__init__("\n".join(map(str, self.problems)))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return ` (did you mean "..."?)` with the nearest known word, or nothing where none is near."""
    near = difflib.get_close_matches(str(word), known, n=1)
    return f' (did you mean "{near[0]}"?)' if near else ""
