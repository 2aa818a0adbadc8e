"""What the command line changes in a configuration: whole sections by name, single values by dotted flags.

Knows tyro and how it reports mistakes; reads no file.
"""

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jkv.config.compose import FOLDERS
from jkv.config.errors import COMMAND_LINE, ConfigError, Problem, did_you_mean
from jkv.config.sections import DecodeConfig
from jkv.config.source import Entry


def split_names(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Take `--model NAME`, `--cache NAME`, `--mesh NAME` and `--engine NAME` out of the overrides.

    Raises:
        ConfigError: a name is missing after its flag.
    """
    names: dict[str, str] = {}
    rest: list[str] = []
    arguments = iter(overrides)
    for argument in arguments:
        flag, equals, name = argument.partition("=")
        if flag not in {f"--{kind}" for kind in FOLDERS}:
            rest.append(argument)
            continue
        name = name if equals else next(arguments, "")
        if not name or name.startswith("-"):
            raise ConfigError([Problem(COMMAND_LINE, flag, f'must be followed by a name, got "{name}"')])
        names[flag.removeprefix("--")] = name
    return names, rest


def apply_flags(config: DecodeConfig, flags: Sequence[str]) -> DecodeConfig:
    """Set single values by dotted flags; what they add up to is for the caller to check.

    Raises:
        ConfigError: a flag is unknown, or its value is not of the right kind.
    """
    import tyro  # takes longer to import than the rest of a load without flags

    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            changed, unknown = tyro.cli(
                DecodeConfig, default=config, args=flags, prog="jkv", return_unknown_args=True
            )
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise ConfigError([Problem(COMMAND_LINE, "", _sentence(report.getvalue()))]) from None
    if unknown:
        strangers = [argument for argument in unknown if argument.startswith("--")] or unknown
        raise ConfigError([_unknown(argument, config) for argument in strangers])
    return changed


def command_line_entry(value: Any) -> Entry:
    """Return a value as if it had been written on the command line."""
    if isinstance(value, dict):
        value = {name: command_line_entry(item) for name, item in value.items()}
    elif isinstance(value, tuple):
        value = tuple(command_line_entry(item) for item in value)
    return Entry(value, COMMAND_LINE)


def _sentence(report: str) -> str:
    """Return the first paragraphs of tyro's boxed report as one line, its title dropped."""
    lines = [line.strip(" │╭╰╮╯─-") for line in report.splitlines()]
    text = " ".join(line for line in lines[1:] if line)
    return re.split(r"Got errors:|Argument helptext:|For full helptext", text)[0].strip()


def _unknown(argument: str, config: DecodeConfig) -> Problem:
    known = [f"--{kind}" for kind in FOLDERS] + _flags(asdict(config), "--")
    hint = did_you_mean(argument.partition("=")[0], known)
    return Problem(COMMAND_LINE, argument, f"is not a flag{hint or '; --help lists them'}")


def _flags(values: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the dotted flag of every value."""
    flags = []
    for name, value in values.items():
        flag = prefix + name.replace("_", "-")
        flags += _flags(value, f"{flag}.") if isinstance(value, dict) else [flag]
    return flags
