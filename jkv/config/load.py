"""Loads a configuration: files first, then what the command line overrides.

Knows the order of the steps; each step stands in a file of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from jkv.config.compose import compose
from jkv.config.errors import ConfigError, Problem
from jkv.config.explain import explain, problem_at
from jkv.config.overrides import apply_flags, command_line_entry, split_names
from jkv.config.section import Section
from jkv.config.sections import DecodeConfig
from jkv.config.source import Entry

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind: TypeAdapter(section) for kind, section in get_type_hints(DecodeConfig).items()
}


def load_config(config: str | Path, overrides: Sequence[str] = ()) -> DecodeConfig:
    """Read a configuration and apply overrides.

    Args:
        config: a path ending in .yaml, or a name looked up in `configs/` here, then among jkv's own.
        overrides: flags as on the command line: `--cache.page-size 64` sets one value, `--cache dense-bf16`
            takes a whole section from another file. Another path has no sizes until they are given with it. A
            request for help prints it and exits.

    Raises:
        ConfigError: names everything that is wrong, each with its file and line.
    """
    names, flags = split_names(overrides)
    problems: list[Problem] = []
    result = _build(compose(str(config), names, problems), problems)
    if not flags:
        return result
    changed = apply_flags(result, flags)
    if changed.model.path != result.model.path and changed.model.sizes == result.model.sizes:
        # They are those of the other model.
        changed = replace(changed, model=replace(changed.model, sizes=None))
    sections = asdict(changed)
    return _build({kind: command_line_entry(section) for kind, section in sections.items()}, [])


def config_yaml(config: DecodeConfig) -> str:
    """Return the configuration as YAML that loads to the same value."""
    return yaml.safe_dump(TypeAdapter(DecodeConfig).dump_python(config, mode="json"), sort_keys=False)


def _build(entries: Mapping[str, Entry], problems: list[Problem]) -> DecodeConfig:
    """Turn composed sections into a configuration, or raise everything that is wrong."""
    sections = {}
    for kind, entry in entries.items():
        try:
            section: Section = _ADAPTERS[kind].validate_python(entry.plain())
        except ValidationError as error:
            problems.extend(explain(kind, entry, error))
            continue
        problems.extend(problem_at(kind, entry, path, message) for path, message in section.conflicts())
        sections[kind] = section
    if problems:
        raise ConfigError(problems)
    return DecodeConfig(**sections)
