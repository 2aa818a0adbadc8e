"""YAML files as values that remember where they stand.

Knows YAML's syntax and nothing of what the keys mean.
"""

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jkv.config.errors import Place, Problem


@dataclass(frozen=True)
class Entry:
    """A value and its place.

    Attributes:
        value: a scalar, a tuple of entries, or a mapping from names to entries.
        place: where its key stands, or the value itself where it has none.
    """

    value: Any
    place: Place

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {name: entry.plain() for name, entry in self.value.items()}
        if isinstance(self.value, tuple):
            return tuple(entry.plain() for entry in self.value)
        return self.value

    def shown(self) -> str:
        """Return the value as JSON, which is YAML too."""
        return json.dumps(self.plain())

    def find(self, path: Sequence[str]) -> "Entry":
        """Return the entry at `path`, or the deepest one on the way to it."""
        if path and isinstance(self.value, dict) and path[0] in self.value:
            return self.value[path[0]].find(path[1:])
        return self


def merge(under: Entry, over: Entry) -> Entry:
    """Return `under` with what `over` says instead; mappings merge key by key."""
    if not (isinstance(under.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(under.value)
    for name, entry in over.value.items():
        merged[name] = merge(merged[name], entry) if name in merged else entry
    return Entry(merged, over.place)


def read_yaml(file: Path, problems: list[Problem]) -> Entry | None:
    """Read one YAML document; None, with a problem added, where it cannot be parsed.

    Keys are text and stand once: what breaks that is added to `problems` and left out.
    """
    entry, found = _parse(display(file), file.read_bytes())
    problems += found
    return entry


# A plan tries meshes and caches whose files stand on the same few.
@functools.lru_cache(maxsize=256)
def _parse(name: str, text: bytes) -> tuple[Entry | None, tuple[Problem, ...]]:
    problems: list[Problem] = []
    entry = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            problems.append(Problem(Place(name, 1), "", "must hold a mapping, got an empty file"))
        else:
            entry = _Converter(name, loader, problems).convert(node, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        problems.append(Problem(Place(name, line), "", f"must be YAML, got: {error.problem}"))
    except RecursionError:
        problems.append(
            Problem(Place(name), "", "must be YAML that a person can read, got too deep a nesting")
        )
    except yaml.reader.ReaderError as error:
        problems.append(Problem(Place(name), "", f"must be UTF-8 text, got: {error.reason}"))
    return entry, tuple(problems)


def display(file: Path) -> str:
    """Return the file's name as a user in the current folder would write it."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: `no` is text and `1e-5` is a number. Aliases are refused."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own form; filled below)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem="an alias (*name); write the value out", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class _Converter:
    """Turns the nodes of one file into entries."""

    file: str
    loader: _Loader
    problems: list[Problem]

    def convert(self, node: yaml.Node, path: tuple[str, ...], key: yaml.Node | None = None) -> Entry:
        place = self.place(key or node)
        if isinstance(node, yaml.MappingNode):
            return Entry(self.mapping(node, path), place)
        if isinstance(node, yaml.SequenceNode):
            return Entry(tuple(self.convert(item, path) for item in node.value), place)
        if node.tag not in _TAGS:
            self.add(node, path, f"must have no tag, got {node.tag}; write the value alone")
            return Entry(None, place)
        return Entry(self.loader.construct_object(node), place)

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key, value in node.value:
            name = self.loader.construct_object(key) if isinstance(key, yaml.ScalarNode) else None
            if not isinstance(name, str):
                got = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                self.add(key, path, f"a key must be text, got {got}; quote it")
            elif name in entries:
                self.add(
                    key, (*path, name), f"stands twice, first on line {entries[name].place.line}; keep one"
                )
            else:
                entries[name] = self.convert(value, (*path, name), key)
        return entries

    def add(self, node: yaml.Node, path: tuple[str, ...], message: str) -> None:
        self.problems.append(Problem(self.place(node), ".".join(path), message))

    def place(self, node: yaml.Node) -> Place:
        return Place(self.file, node.start_mark.line + 1)
