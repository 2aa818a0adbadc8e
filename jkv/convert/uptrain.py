"""The training after a conversion: AdamW on a text, by seed, that goes on where it was stopped.

Knows parameters by name and rows of tokens; reads no model and no text.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from orbax.checkpoint import v1 as ocp

from jkv.convert.text import SplitText, draw_rows
from jkv.decode.compare import divergence
from jkv.decode.params import require_whole
from jkv.decode.score import losses
from jkv.models.fields import read_json_object
from jkv.models.load import abstract_decoder
from jkv.models.model_config import ModelConfig
from jkv.models.weights.checkpoint import errors_once
from jkv.models.weights.load import check_finite

Parameters = Mapping[str, jax.Array]
_State = dict[str, Any]
# Says which run a folder of states belongs to.
_RUN = "run.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is: two runs of one model, text and settings are the same to the bit on one machine.

    Attributes:
        steps: updates of the weights.
        batch: rows that a gradient is taken of at once.
        accumulate: such batches of a step, whose gradients are averaged.
        learning_rate: at the end of the warm-up; falls to a tenth of it along a cosine.
        warmup: steps in which it rises from zero.
        weight_decay: of matrices; vectors have none.
        clip: most that the gradient's norm over all parameters may be.
        teacher_share: of the loss that is the divergence from the teacher; the rest is the text's.
        seed: orders the text's rows.
    """

    steps: int
    batch: int = 4
    accumulate: int = 1
    learning_rate: float = 3e-4
    warmup: int = 10
    weight_decay: float = 0.01
    clip: float = 1.0
    teacher_share: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for the first value out of its range."""
        for name in ("steps", "batch", "accumulate"):
            require_whole(name, getattr(self, name), at_least=1)
        for name in ("warmup", "seed"):
            require_whole(name, getattr(self, name), at_least=0)
        if self.warmup >= self.steps:
            raise ValueError(f"warmup must be less than the {self.steps} steps, got {self.warmup}")
        # Comparisons with NaN are false.
        if not (0 < self.learning_rate < math.inf and self.clip > 0 and 0 <= self.weight_decay < math.inf):
            raise ValueError(
                "learning_rate and clip must be above 0 and weight_decay not below, of which clip may be "
                f"infinite, got {self.learning_rate}, {self.clip} and {self.weight_decay}"
            )
        if not 0 <= self.teacher_share <= 1:
            raise ValueError(f"teacher_share must be from 0 to 1, got {self.teacher_share}")


@dataclass(frozen=True)
class Model:
    """A function of parameters and rows of tokens to logits, and its parameters, by dotted path."""

    forward: Callable[[Parameters, jax.Array], jax.Array]
    parameters: Parameters


@dataclass(frozen=True)
class Uptrained:
    """What a run gives: the parameters, and the loss of each step before its update."""

    parameters: dict[str, jax.Array]
    losses: Float[np.ndarray, " step"]


def make_model(
    config: ModelConfig, parameters: Parameters, *, dtype: DTypeLike = jnp.float32, has_remat: bool = True
) -> Model:
    """Return the decoder as a function, which keeps a layer's input alone for the gradient if `has_remat`."""
    graph, state = nnx.split(abstract_decoder(config, dtype=dtype, is_rematerialized=has_remat))
    flat = nnx.to_flat_state(state)

    def forward(parameters: Parameters, tokens: jax.Array) -> jax.Array:
        filled = [(path, old.replace(parameters[".".join(map(str, path))])) for path, old in flat]
        return nnx.merge(graph, nnx.from_flat_state(filled))(tokens)[0]

    return Model(forward, parameters)


def perplexity(model: Model, rows: Int[np.ndarray, "row time"]) -> float:
    """Return the perplexity of rows of tokens, one by one and without a cache."""
    found = [_row_losses(model.forward, model.parameters, jnp.asarray(row[None])) for row in rows]
    return float(np.exp(np.mean(jax.device_get(found), dtype=np.float64)))


@functools.partial(jax.jit, static_argnames="forward")
def _row_losses(forward: Any, parameters: Any, row: Int[Array, "1 time"]) -> Float[Array, "1 scored"]:
    return losses(forward(parameters, row)[:, :-1], row[:, 1:])


def uptrain(
    model: Model,
    text: SplitText,
    settings: Settings,
    *,
    teacher: Model | None = None,
    keep: Path | None = None,
    keep_every: int = 100,
    identity: Mapping[str, str] | None = None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Uptrained:
    """Train a model on the first part of a text.

    Args:
        model: where it starts.
        text: what it learns from.
        settings: how.
        teacher: the model whose next-token distributions it learns too.
        keep: a folder for the run's state; a run that finds one goes on from there, to the same result.
        keep_every: steps between two states.
        identity: what else the result depends on, such as fingerprints of the models, by name.
        report: is told each step's number, from 1 on, and its loss.

    Raises:
        ValueError: a setting is out of range, `keep` holds a run with other settings, text or identity, or
            the loss or a parameter is not finite: no such state is kept.
    """
    settings.check()
    if (teacher is None) != (settings.teacher_share == 0):
        raise ValueError(
            f"a teacher and its share of the loss go together, got teacher_share {settings.teacher_share} "
            f"{'without' if teacher is None else 'with'} a teacher"
        )
    state = _start(model.parameters, settings)
    kept = None
    if keep is not None:
        kept = _open_kept(keep, {**asdict(settings), **_text_identity(text), **(identity or {})})
        if kept.latest is not None:
            state = _load(kept, state)
    forwards = (model.forward, None if teacher is None else teacher.forward)
    of_teacher = None if teacher is None else teacher.parameters
    width = settings.accumulate * settings.batch
    for step in range(int(state["step"]), settings.steps):
        rows = draw_rows(text, seed=settings.seed, first=step * width, count=width)
        rows = jnp.asarray(rows.reshape(settings.accumulate, settings.batch, -1))
        state = _update(forwards, settings, state, of_teacher, rows)
        loss = float(state["losses"][step])
        if not np.isfinite(loss):
            raise ValueError(f"the loss must be finite, got {loss} at step {step + 1}; lower learning_rate")
        report(step + 1, loss)
        is_last = step + 1 == settings.steps
        if is_last or (kept is not None and (step + 1) % keep_every == 0):
            # A loss is from before its update.
            check_finite(state["parameters"])
            if kept is not None:
                with errors_once():
                    kept.save(step + 1, _named(state))
    if kept is not None:
        kept.close()
    return Uptrained(state["parameters"], np.asarray(state["losses"]))


def _make_optimizer(settings: Settings) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        init_value=settings.learning_rate / (settings.warmup + 1),
        peak_value=settings.learning_rate,
        warmup_steps=settings.warmup,
        decay_steps=settings.steps,
        end_value=settings.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(rate, b2=0.95, weight_decay=settings.weight_decay, mask=_are_matrices),
    )


def _are_matrices(parameters: Parameters) -> Any:
    return jax.tree.map(lambda array: array.ndim > 1, parameters)


def _start(parameters: Parameters, settings: Settings) -> _State:
    # Copied, as an update consumes its state.
    copied = {name: jnp.array(array, copy=True) for name, array in parameters.items()}
    return {
        "parameters": copied,
        "moments": _make_optimizer(settings).init(copied),
        "losses": jnp.zeros(settings.steps, jnp.float32),
        "step": jnp.zeros((), jnp.int32),
    }


@functools.partial(jax.jit, static_argnames=("forwards", "settings"), donate_argnames="state")
def _update(
    forwards: tuple[Any, Any], settings: Settings, state: _State, of_teacher: Any, rows: jax.Array
) -> _State:
    """Return the state after a step. Consumes `state`.

    Args:
        forwards: of the model and its teacher; None without one.
        settings: of the run.
        state: before the step.
        of_teacher: the teacher's parameters.
        rows: tokens `[accumulate, batch, length + 1]`.
    """
    forward, teach = forwards
    share = settings.teacher_share

    def loss(parameters: Parameters, some: jax.Array) -> jax.Array:
        logits = forward(parameters, some[:, :-1])
        found = (1 - share) * losses(logits, some[:, 1:]).mean()
        if teach is not None:
            wanted = jax.lax.stop_gradient(teach(of_teacher, some[:, :-1]))
            found += share * divergence(wanted, logits).mean()
        return found

    def add(total: Any, some: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(parameters, some)), None

    parameters, step = state["parameters"], state["step"]
    start = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, parameters))
    total, _ = jax.lax.scan(add, start, rows)
    value, gradient = jax.tree.map(lambda summed: summed / settings.accumulate, total)
    # optax mixes dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        changes, moments = _make_optimizer(settings).update(gradient, state["moments"], parameters)
        parameters = optax.apply_updates(parameters, changes)
    return {
        "parameters": parameters,
        "moments": moments,
        "losses": state["losses"].at[step].set(value),
        "step": step + 1,
    }


def _named(state: _State) -> dict[str, Any]:
    """Return the state's leaves by name: Orbax takes no empty node, which optimizers have."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _load(kept: ocp.training.Checkpointer, state: _State) -> _State:
    """Return the latest state, in the form and the places of one that was just started."""
    found = kept.load(kept.latest, _named(jax.tree.map(_like, state)))
    return jax.tree.unflatten(jax.tree.structure(state), [found[name] for name in _named(state)])


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _text_identity(text: SplitText) -> dict[str, Any]:
    digest = hashlib.sha256(np.ascontiguousarray(text.tokens, np.int32).tobytes()).hexdigest()
    return {"text": digest[:32], "length": text.held_out.shape[1]}


def _open_kept(folder: Path, identity: Mapping[str, Any]) -> ocp.training.Checkpointer:
    """Return the states of a run that is this one, of which the latest stays.

    Raises:
        ValueError: the folder holds another run.
    """
    file = folder / _RUN
    if file.is_file():
        other = read_json_object(file)
        differing = sorted(name for name in {*other, *identity} if other.get(name) != identity.get(name))
        if differing:
            said = ", ".join(f"{name} {identity.get(name)} for {other.get(name)}" for name in differing)
            raise ValueError(
                f"{folder} keeps another run, got {said}; go on with its values or keep elsewhere"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} must be a new folder or keep this run, got one with other files")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(identity, indent=2) + "\n")
    policy: Any = ocp.training.preservation_policies.LatestN(1)
    return ocp.training.Checkpointer(str((folder / "states").absolute()), preservation_policy=policy)
