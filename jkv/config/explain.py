"""Turns what pydantic found wrong into problems with places.

Knows pydantic's error types and the schema's key names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from jkv.config.errors import Problem, did_you_mean
from jkv.config.sections import DecodeConfig
from jkv.config.source import Entry


def explain(kind: str, entry: Entry, error: ValidationError) -> list[Problem]:
    """Return a problem for each of pydantic's errors; the branches of a union make one."""
    problems = []
    wanted: dict[tuple[str, ...], list[str]] = {}
    for item in error.errors(include_url=False):
        path = _path(entry, item["loc"])
        if item["type"] == "missing":
            problems.append(problem_at(kind, entry, (*path, str(item["loc"][-1])), "is missing; add it"))
        elif item["type"] == "unexpected_keyword_argument":
            known = _keys(kind, path[:-1])
            hint = did_you_mean(path[-1], known) or f"; known: {', '.join(known)}"
            problems.append(problem_at(kind, entry, path, f"is not a known key{hint}"))
        else:
            wanted.setdefault(path, []).append(_wanted(item))
    for path, expected in wanted.items():
        got = entry.find(path)
        hint = did_you_mean(got.plain(), re.findall(r'"([^"]*)"', " ".join(expected)))
        problems.append(
            problem_at(kind, entry, path, f"must be {' or '.join(expected)}, got {got.shown()}{hint}")
        )
    return problems


def problem_at(kind: str, entry: Entry, path: Sequence[str], message: str) -> Problem:
    """Return a problem with the key at `path` of a section, placed where that key or its mapping stands."""
    return Problem(entry.find(path).place, ".".join((kind, *path)), message)


def _path(entry: Entry, loc: Sequence[int | str]) -> tuple[str, ...]:
    """Return the keys of `loc` that the entry has: pairs of a mapping by name, no tags of unions."""
    path: tuple[str, ...] = ()
    for step in loc:
        value = entry.find(path).value
        if not isinstance(value, dict):
            break
        name = list(value)[step] if isinstance(step, int) else step
        if name not in value:
            break
        path = (*path, name)
    return path


def _keys(kind: str, path: Sequence[str]) -> list[str]:
    """Return the keys that the section's mapping at `path` may have."""
    section: Any = get_type_hints(DecodeConfig)[kind]
    for name in path:
        hint = get_type_hints(section)[name]
        section = next((part for part in get_args(hint) if is_dataclass(part)), hint)
    return [field.name for field in fields(section)]


def _wanted(item: Mapping[str, Any]) -> str:
    """Return what an error's value should have been."""
    if item["type"] == "string_too_short":
        return "text that is not empty"
    if item["type"] == "dataclass_type":
        return "a mapping"
    text = item["msg"].removeprefix("Input should be ").replace("a valid tuple", "a list")
    return text.replace("a valid ", "a ").replace("a integer", "an integer").replace("'", '"')
