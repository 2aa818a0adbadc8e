"""What the verbs that run a model have in common: their options, and how these become a configuration.

Knows flags; what a value may be is the configuration's to check.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jkv.config import CodecName, DecodeConfig, load_config
from jkv.config.compose import FOLDERS, section_names
from jkv.config.overrides import own_flags, read_flags, refuse_unknown
from jkv.hosts import connect
from jkv.models.load import load_tokenizer
from jkv.models.tokenizer import Tokenizer
from jkv.models.tokenizer_files import has_tokenizer
from jkv.models.weights.locate import SMOLLM2, ModelLocation

Flag = tyro.conf.FlagCreatePairsOff[bool]

# What a model without a configuration gets.
DEFAULT = "default"
_KEYS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "weights": "model.weights",
    "page_size": "cache.page-size",
    "capacity": "cache.capacity",
    "num_pages": "cache.num-pages",
    "codec": "cache.codec",
    "value_codec": "cache.value-codec",
    "window_codec": "cache.window-codec",
    "scales": "cache.scales",
    "attention": "engine.attention",
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it runs; each option beats the configuration's value."""

    model: str | None = None
    """Bundled model's name, GGUF file, folder or hub id."""
    config: str | None = None
    """Configuration's name or .yaml file; dotted flags (--engine.max-sequences 16) set its other values."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Activations."""
    weights: Literal["float32", "bfloat16", "int8", "int4"] | None = None
    """How weights are stored."""
    page_size: int | None = None
    """Tokens of a page."""
    capacity: int | None = None
    """Tokens that a sequence may hold; its prompt and new tokens if left out."""
    num_pages: int | None = None
    """Pages of the pool that sequences share, with --cache paged; what they need if left out."""
    codec: CodecName | None = None
    """How keys are stored, and values unless --value-codec says otherwise."""
    value_codec: CodecName | None = None
    """How values are stored."""
    window_codec: CodecName | None = None
    """How layers with a sliding window store keys and values."""
    scales: Path | None = None
    """File of `jkv calibrate` for codecs whose names end in _static."""
    attention: Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu"] | None = None
    """Implementation of attention."""


@dataclass(frozen=True, kw_only=True)
class RandomOptions(ModelOptions):
    """Those of verbs that need no more of a model than its sizes."""

    random_weights: Flag = False
    """Draw the weights of a model whose sizes --model names in configs/models, and read no file."""


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The processes that run one program, each started with the same options but its own --process-id."""

    coordinator_address: str | None = None
    """HOST:PORT of the first process; auto where a Cloud TPU or Slurm says it."""
    num_processes: int | None = None
    """Processes of the program."""
    process_id: int | None = None
    """This process's number, from 0 on."""


def meet(options: HostOptions) -> None:
    """Meet the program's other processes, of which the first alone prints from then on.

    Raises:
        ValueError: as `jkv.hosts.connect`.
    """
    if options.coordinator_address is not None:
        # Gloo says on standard output whom it has met, beside what `--json` prints there.
        sys.stdout = os.fdopen(os.dup(1), "w", errors="backslashreplace")
        os.dup2(2, 1)
    if not connect(options.coordinator_address, options.num_processes, options.process_id):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def resolve(
    options: ModelOptions, overrides: Sequence[str] = (), keys: Mapping[str, str] = {}
) -> DecodeConfig:
    """Return the configuration that the options and dotted flags make.

    Args:
        options: of a verb; what is None leaves the configuration's value.
        overrides: see `load_config`.
        keys: the verb's own options, and the configuration's keys that they set.

    Raises:
        ValueError: neither a model nor a configuration is named, or the configuration is wrong.
    """
    if options.model is None and options.config is None:
        raise ValueError("a model must be named; give --model or --config")
    keys, random = {**_KEYS, **keys}, []
    if isinstance(options, RandomOptions) and options.random_weights:
        keys, random = {**keys, "model": "model"}, ["--model.has-random-weights"]
    else:
        can_draw = isinstance(options, RandomOptions)
        remedy = "or --random-weights to draw weights of these sizes" if can_draw else "which holds weights"
        refuse_sizes_alone(options.model, remedy)
    flags = [
        f"--{key}={value}" for name, key in keys.items() if (value := getattr(options, name)) is not None
    ]
    return load_config(options.config or DEFAULT, [*flags, *random, *overrides])


def refuse_sizes_alone(model: str | None, remedy: str) -> None:
    """Refuse a name of configs/models where a model's files are meant.

    Raises:
        ValueError: ends with the remedy, beside the model's folder.
    """
    if model is None or model == SMOLLM2 or Path(model).exists() or model not in section_names("model"):
        return
    raise ValueError(
        f"--model must be {SMOLLM2}, a file, a folder or a hub id, got {model!r}, of which configs/models "
        f"has the sizes alone; give its folder, {remedy}"
    )


def parse[T](arguments: type[T], argv: Sequence[str], verb: str) -> tuple[T, list[str]]:
    """Read a verb's arguments; returns them and the flags that are not its own, for `load_config`."""
    parsed, unknown = read_flags(arguments, argv, prog=f"jkv {verb}")
    sections = [f"--{kind}" for kind in FOLDERS]
    strangers = [
        word
        for word in unknown
        if word.startswith("--") and "." not in word and word.partition("=")[0] not in sections
    ]
    refuse_unknown(strangers, [*own_flags(arguments), *sections])
    return parsed, unknown


def parse_alone[T](arguments: type[T], argv: Sequence[str], verb: str) -> T:
    """Read the arguments of a verb that takes no configuration."""
    parsed, unknown = read_flags(arguments, argv, prog=f"jkv {verb}")
    refuse_unknown(unknown, own_flags(arguments))
    return parsed


def read_text(file: Path) -> str:
    """Read a file of UTF-8 text, lines ended by line feeds, without the mark that some editors put first.

    Raises:
        ValueError: the file is not UTF-8.
    """
    try:
        return file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text, got other bytes at {error.start}") from error


def check_output(flag: str, file: Path) -> None:
    """Refuse a place that no file can be written to."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{flag} must be a file that can be written, got {file}; make its folder first")


def default_output(model: str, made: str) -> Path:
    """Return the folder in the working directory that gets what was made of a model, named after it."""
    return Path(f"{Path(model).absolute().name.removesuffix('.gguf')}-{made}")


def find_tokenizer(location: ModelLocation) -> Tokenizer | None:
    """Return the model's tokenizer; None where its folder has none."""
    return load_tokenizer(location) if has_tokenizer(location.path) else None


@contextlib.contextmanager
def show_progress(task: str) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error, nothing where that is no terminal; yields what renames its task."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(task, total=None)
        yield lambda description: progress.update(bar, description=description)
