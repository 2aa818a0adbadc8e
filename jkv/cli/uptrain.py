"""`jkv uptrain`: trains a model on a text, most of all one that was converted.

Knows files; jkv.convert does the work.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jkv.cli.options import Flag, check_output, default_output, parse_alone, read_text, show_progress
from jkv.convert.curve import check_curve, draw_curve
from jkv.convert.text import HELD_OUT, split_text
from jkv.convert.uptrain import Model, Settings, make_model, perplexity, uptrain
from jkv.decode.params import require_whole
from jkv.models.load import abstract_decoder, load_tokenizer, parameter_targets
from jkv.models.tokenizer_files import copy_tokenizer
from jkv.models.weights.checkpoint import check_new, new_folder, save_checkpoint
from jkv.models.weights.model import StoredModel, open_model

_WARMUP, _KEEP_EVERY = 10, 100


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a model on a text by AdamW, with a warm-up and a cosine; the text's last part is held out."""

    model: str
    """Bundled model's name, GGUF file, folder or hub id."""
    text: Path
    """File of UTF-8 text; text that looks like a control token is text."""
    steps: int
    """Updates of the weights."""
    out: Path | None = None
    """New folder that gets the trained model; MODEL-uptrained in the working directory if left out."""
    length: int = 256
    """Tokens of a row."""
    batch: int = 4
    """Rows that a gradient is taken of at once."""
    accumulate: int = 1
    """Such batches of a step, whose gradients are averaged."""
    learning_rate: float = 3e-4
    """At the end of the warm-up; falls to a tenth of it."""
    warmup: int | None = None
    """Steps in which the learning rate rises; 10 if left out, or all but one of fewer steps."""
    weight_decay: float = 0.01
    """Of matrices."""
    clip: float = 1.0
    """Most that the gradient's norm over all parameters may be."""
    teacher: str | None = None
    """Model whose next-token distributions are learnt too, as the original of a converted one."""
    teacher_share: float | None = None
    """Share of the loss that is the divergence from the teacher; 1 if left out."""
    seed: int = 0
    """Orders the text's rows."""
    held_out: float = HELD_OUT
    """Last share of the text, on which the model is measured before and after."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Activations; weights are float32."""
    remat: Flag = False
    """Keep a layer's input alone for the gradient, and compute the rest again."""
    keep: Path | None = None
    """Folder for the run's state; the same command goes on from there."""
    keep_every: int | None = None
    """Steps between two states; 100 if left out."""
    plot: Path | None = None
    """File that gets the curve of losses, such as curve.png."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> None:
    """Train as the command line says, and print how the held-out text's perplexity changed."""
    arguments = parse_alone(Arguments, argv, "uptrain")
    out = arguments.out or default_output(arguments.model, "uptrained")
    check_new(out)
    settings = _settings(arguments)
    stored = open_model(arguments.model)
    teacher = None if arguments.teacher is None else open_model(arguments.teacher)
    _check_models(arguments, stored, teacher)
    tokens = np.array(load_tokenizer(stored.location).encode(read_text(arguments.text)), np.int32)
    text = split_text(tokens, arguments.length, held_out=arguments.held_out)
    identity = {
        "model": stored.fingerprint(),
        "dtype": arguments.dtype,
        "remat": str(arguments.remat),
    }
    if teacher is not None:
        identity["teacher"] = teacher.fingerprint()
    with show_progress(f"loading {arguments.model}") as show:
        model = _load(arguments, stored)
        before = perplexity(model, text.held_out)
        trained = uptrain(
            model,
            text,
            settings,
            teacher=None if teacher is None else _load(arguments, teacher),
            keep=arguments.keep,
            keep_every=_KEEP_EVERY if arguments.keep_every is None else arguments.keep_every,
            identity=identity,
            report=lambda step, loss: show(f"step {step} of {settings.steps}, loss {loss:.3f}"),
        )
        show("measuring")
        after = perplexity(Model(model.forward, trained.parameters), text.held_out)
    with new_folder(out) as folder:
        save_checkpoint(folder, stored.config, trained.parameters)
        copy_tokenizer(stored.location.path, folder)
    if arguments.plot is not None:
        draw_curve(arguments.plot, trained.losses, label=f"{arguments.model} on {arguments.text.name}")
    shown = {
        "out": str(out),
        "tokens_per_step": settings.batch * settings.accumulate * arguments.length,
        "losses": [float(loss) for loss in trained.losses],
        "held_out_tokens": text.held_out.size,
        "perplexity": before,
        "uptrained_perplexity": after,
    }
    print(json.dumps(shown) if arguments.json else _table(shown))


def _settings(arguments: Arguments) -> Settings:
    """Return the run's settings, after what can be refused before a model is opened."""
    if arguments.plot is not None:
        check_output("--plot", arguments.plot)
        check_curve(arguments.plot)
    if arguments.keep_every is not None:
        require_whole("--keep-every", arguments.keep_every, at_least=1, unit=" step")
        if arguments.keep is None:
            raise ValueError("--keep-every is for --keep alone; give it, or drop --keep-every")
    if arguments.teacher is None and arguments.teacher_share is not None:
        raise ValueError("--teacher-share is for --teacher alone; give it, or drop --teacher-share")
    values = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    if arguments.warmup is None:
        values["warmup"] = max(0, min(_WARMUP, arguments.steps - 1))
    if arguments.teacher_share is None:
        values["teacher_share"] = 0.0 if arguments.teacher is None else 1.0
    settings = Settings(**values)
    settings.check()
    return settings


def _check_models(arguments: Arguments, stored: StoredModel, teacher: StoredModel | None) -> None:
    if arguments.length > stored.config.max_length:
        raise ValueError(
            f"--length must be at most the model's {stored.config.max_length} tokens, got {arguments.length}"
        )
    if teacher is not None and teacher.config.vocab_size != stored.config.vocab_size:
        raise ValueError(
            f"a teacher must have the model's vocabulary of {stored.config.vocab_size:,} tokens, "
            f"got {teacher.config.vocab_size:,}"
        )


def _load(arguments: Arguments, stored: StoredModel) -> Model:
    parameters = stored.load(parameter_targets(abstract_decoder(stored.config)))
    return make_model(stored.config, parameters, dtype=jnp.dtype(arguments.dtype), has_remat=arguments.remat)


def _table(shown: dict[str, Any]) -> str:
    losses = shown["losses"]
    lines = {
        "steps": f"{len(losses):,} of {shown['tokens_per_step']:,} tokens",
        "loss": f"{losses[0]:.3f}, at the end {losses[-1]:.3f}",
        "perplexity": f"{shown['perplexity']:.3f}, trained {shown['uptrained_perplexity']:.3f}, of "
        f"{shown['held_out_tokens']:,} held-out tokens",
        "written to": shown["out"],
    }
    return "\n".join(f"{name:12}{value}" for name, value in lines.items())
