"""The kinds of value that the fields of a model's description hold: sizes, numbers, switches, texts.

Knows kinds and ranges; which field is of which kind is its reader's to say.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A position and a token id are int32 on the device.
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Kind:
    """What a value must be.

    Attributes:
        words: the end of "must be".
        holds: whether a value is one.
    """

    words: str
    holds: Callable[[Any], bool]


def whole(least: int, most: int = MAX_COUNT) -> Kind:
    """Return the kind of whole numbers within bounds."""
    return Kind(
        f"a whole number from {least} to {most}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
    )


def many(kind: Kind) -> Kind:
    """Return the kind of lists whose items are all of `kind`."""
    return Kind(
        f"a list, each {kind.words}", lambda value: isinstance(value, list) and all(map(kind.holds, value))
    )


def either(first: Kind, second: Kind) -> Kind:
    """Return the kind of what is of one kind or the other."""
    return Kind(f"{first.words} or {second.words}", lambda value: first.holds(value) or second.holds(value))


COUNT = whole(1)
INDEX = whole(0)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
AT_LEAST_ZERO = Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
NUMBER = Kind("a finite number", lambda value: _is_number(value))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
MAPPING = Kind("a mapping", lambda value: isinstance(value, dict))


def check_fields(given: Mapping[str, Any], kinds: Mapping[str, Kind], prefix: str) -> None:
    """Refuse fields that are not of their kind; those that are missing or have none pass.

    Args:
        given: values by field.
        kinds: what the fields must be.
        prefix: stands before a field's name in messages.

    Raises:
        ValueError: names every field that is wrong.
    """
    wrong = [
        f"{prefix}{field} must be {kind.words}, got {_shown(given[field])}"
        for field, kind in kinds.items()
        if field in given and not kind.holds(given[field])
    ]
    if wrong:
        raise ValueError(", and ".join(wrong))


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: the file is not UTF-8, not JSON, has two values of a key, or holds something else; the
            message names it.
    """
    try:
        value = json.loads(file.read_bytes().decode("utf-8"), object_pairs_hook=_mapping)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text, got other bytes at {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} must be JSON, got {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, got {_shown(value)}")
    return value


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    twice = [key for key, value in pairs if found[key] != value]
    if twice:
        raise ValueError(f"two values of {twice[0]!r}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    """Return a value as JSON, its middle left out where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"
