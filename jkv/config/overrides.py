"""What the command line changes in a configuration: whole sections by name, single values by dotted flags.

Knows tyro and how it reports mistakes; reads no file.
"""

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from jkv.config.compose import FOLDERS
from jkv.config.errors import COMMAND_LINE, ConfigError, Problem, did_you_mean
from jkv.config.sections import DecodeConfig
from jkv.config.source import Entry

# What a file calls null is None to tyro.
_NULL = re.compile(r"(?<==)(null|none)$|^(null|none)$")


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
    """Set single values by dotted flags, null as in a file; what they add up to is for the caller to check.

    Raises:
        ConfigError: a flag is unknown, or its value is not of the right kind.
    """
    flags = [_NULL.sub("None", flag) for flag in flags]
    changed, unknown = read_flags(DecodeConfig, flags, prog="jkv", default=config)
    refuse_unknown(unknown, [f"--{kind}" for kind in FOLDERS] + _flags(asdict(config), "--"))
    return changed


def read_flags[T](kind: type[T], flags: Sequence[str], *, prog: str, **options: Any) -> tuple[T, list[str]]:
    """Read a dataclass from flags; returns it and the arguments that are not its own.

    Args:
        kind: the dataclass.
        flags: as on the command line; a request for help prints it and exits.
        prog: the command that the help names.
        options: of `tyro.cli`.

    Raises:
        ConfigError: a value is missing or not of the right kind, or a flag of several values is given twice,
            the first of which would be lost.
    """
    names = [word.partition("=")[0].replace("_", "-") for word in flags]
    if twice := [name for name in own_flags(kind, default=tuple) if names.count(name) > 1]:
        raise ConfigError(
            [Problem(COMMAND_LINE, name, "must be given once, with all values") for name in twice]
        )
    import tyro  # takes longer to import than the rest of a load without flags

    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            # A section that may be null is no subcommand.
            config = (tyro.conf.AvoidSubcommands,)
            read: Any = tyro.cli(
                kind, args=flags, prog=prog, return_unknown_args=True, config=config, **options
            )
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise ConfigError(_problems(report.getvalue(), kind)) from None
    return read


def own_flags(kind: type[Any], *, default: type = object) -> list[str]:
    """Return the flags of a dataclass's fields whose default is of a type."""
    return [
        f"--{field.name.replace('_', '-')}" for field in fields(kind) if isinstance(field.default, default)
    ]


def refuse_unknown(unknown: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ConfigError for arguments that nothing reads, each with the nearest known flag."""
    if unknown:
        strangers = [argument for argument in unknown if argument.startswith("--")] or unknown
        raise ConfigError([_unknown(argument, known) for argument in strangers])


def command_line_entry(value: Any) -> Entry:
    """Return a value as if it had been written on the command line."""
    if isinstance(value, dict):
        value = {name: command_line_entry(item) for name, item in value.items()}
    elif isinstance(value, tuple):
        value = tuple(command_line_entry(item) for item in value)
    return Entry(value, COMMAND_LINE)


def _problems(report: str, kind: type[Any]) -> list[Problem]:
    """Turn tyro's boxed report into sentences; what it says in no known way stays in its words."""
    lines = [line.strip(" │╭╰╮╯─|+") for line in report.splitlines()[1:]]
    text = " ".join(line for line in lines if line.strip("-"))
    if text.startswith("Missing from"):
        missing, _, strangers = text.partition("Unrecognized options:")
        needed = re.findall(r"--[a-z][\w.-]*(?= [A-Z{\[])", missing.partition(":")[2])
        problems = [Problem(COMMAND_LINE, flag, "is missing; --help describes it") for flag in needed]
        problems += [
            _unknown(flag, own_flags(kind))
            for flag in re.findall(r"--[\w.-]+", strangers.split("For full")[0])
        ]
        # What has no flag has a place on the line.
        needed = [field.name for field in fields(kind) if field.default is MISSING]
        return problems or [Problem(COMMAND_LINE, needed[0], "is missing; --help describes it")]
    if wrong := re.search(r"Error parsing (\S+): .*?(?: from |: )(\[.*?\]|'.*?')[. ]", text + " "):
        flag, got = wrong.groups()
        form = re.search(rf"Argument helptext: .*?{re.escape(flag)} (\[.+?\]\]|\S+)", text)
        wanted = _wanted(form.group(1)) if form else "of another kind"
        return [Problem(COMMAND_LINE, flag, f"must be {wanted}, got {got.strip('[]')}")]
    if wrong := re.search(r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)", text):
        got, flag, choices = wrong.groups()
        known = sorted({*re.findall(r"'(.*?)'", choices)} - {"None"})
        hint = did_you_mean(got, known)
        return [Problem(COMMAND_LINE, flag, f"must be {' or '.join(known)}, got '{got}'{hint}")]
    if wrong := re.search(r"Missing value for argument '(.*?)'", text):
        return [Problem(COMMAND_LINE, wrong.group(1), "must be followed by a value")]
    return [Problem(COMMAND_LINE, "", re.split(r"Got errors:|Argument helptext:|For full", text)[0].strip())]


def _wanted(form: str) -> str:
    """Say tyro's `{None}|INT|{auto}` in words."""
    words = {"INT": "a whole number", "FLOAT": "a number", "STR": "text", "PATH": "a path"}
    if form.startswith("["):
        # Written again and again, alone as `[INT [INT ...]]` or by turns as `[STR INT [STR INT ...]]`.
        kinds = form[1:].split(" [")[0].split()
        if len(kinds) > 1:
            return f"{', then '.join(words[kind] for kind in kinds)}, and so on"
        return f"{kinds[0].replace('INT', 'whole numbers').replace('STR', 'text')} and so on"
    kinds = [word.strip("{}") for word in form.split("|") if word != "{None}"]
    return " or ".join(words.get(kind, kind.replace(",", " or ")) for kind in kinds)


def _unknown(argument: str, known: Sequence[str]) -> Problem:
    hint = did_you_mean(argument.partition("=")[0], known)
    return Problem(COMMAND_LINE, argument, f"is not a flag{hint or '; --help lists them'}")


def _flags(values: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the dotted flag of every value."""
    flags = []
    for name, value in values.items():
        flag = prefix + name.replace("_", "-")
        flags += _flags(value, f"{flag}.") if isinstance(value, dict) else [flag]
    return flags
