"""`jkv convert`: a model with fewer KV heads or with latents, and what that costs it.

Knows files and tables; jkv.convert does the work.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cli.options import Flag, default_output, parse_alone, read_text, show_progress
from jkv.convert.converted import Converted
from jkv.convert.latent import SPAN, to_latent
from jkv.convert.measure import compare_models, make_decoder
from jkv.convert.moments import input_moments
from jkv.convert.pooling import pool_heads
from jkv.convert.text import HELD_OUT, SplitText, split_text
from jkv.decode.compare import Comparison
from jkv.decode.params import require_whole
from jkv.models.decoder import cache_spec
from jkv.models.load import abstract_decoder, load_tokenizer, parameter_targets
from jkv.models.model_config import ModelConfig
from jkv.models.tokenizer_files import copy_tokenizer
from jkv.models.weights.checkpoint import check_new, new_folder, save_checkpoint
from jkv.models.weights.locate import ModelLocation
from jkv.models.weights.model import StoredModel, open_model

_ROW, _MAX_ROWS = 512, 16


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Convert a model's attention. Its quality is not kept unless it is trained on; see jkv uptrain."""

    model: str
    """Bundled model's name, GGUF file, folder or hub id."""
    out: Path | None = None
    """New folder that gets the converted model; MODEL-converted in the working directory if left out."""
    kv_heads: int | None = None
    """Mean-pool the KV heads to so many."""
    latent: int | None = None
    """Make keys and values of a latent of so many entries."""
    rope: int | None = None
    """Entries beside the latent that stay rotated, shared by all heads; half a head if left out."""
    span: int | None = None
    """Distances over which the rotation of what is rotated no more is averaged; 64 if left out."""
    text: Path | None = None
    """File of UTF-8 text: its first part says which directions a latent keeps, its last what was lost."""
    held_out: float | None = None
    """Last share of the text, on which the models are compared; an eighth if left out."""
    row: int | None = None
    """Tokens of the rows that the text is cut into; 512 if left out."""
    max_rows: int | None = None
    """Rows of each part that are used, at most; 16 if left out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """How weights are stored."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> None:
    """Convert as the command line says, and print what was lost."""
    arguments = parse_alone(Arguments, argv, "convert")
    out = arguments.out or default_output(arguments.model, "converted")
    check_new(out)
    _check(arguments)
    stored = open_model(arguments.model)
    text = _read(arguments, stored.location, stored.config)
    with show_progress(f"loading {arguments.model}") as show:
        parameters = stored.load(parameter_targets(abstract_decoder(stored.config)))
        show("converting")
        converted = convert(arguments, stored.config, parameters, text)
        with new_folder(out) as folder:
            save_checkpoint(folder, converted.config, _stored_as(arguments.dtype, converted))
            copy_tokenizer(stored.location.path, folder)
        comparison = None
        if text is not None:
            show("comparing")
            models = (
                make_decoder(stored.config, parameters),
                make_decoder(converted.config, converted.parameters),
            )
            comparison = compare_models(*models, text.held_out[: _max_rows(arguments)])
    shown = {"out": str(out)} | describe(stored, converted, comparison)
    print(json.dumps(shown) if arguments.json else _table(shown))


def convert(
    arguments: Arguments, config: ModelConfig, parameters: dict[str, jax.Array], text: SplitText | None
) -> Converted:
    """Return the model that the arguments ask for."""
    if arguments.kv_heads is not None:
        return pool_heads(config, parameters, arguments.kv_heads)
    assert arguments.latent is not None
    moments = None
    if text is not None:
        moments = input_moments(make_decoder(config, parameters), text.rows[: _max_rows(arguments)])
    return to_latent(
        config,
        parameters,
        latent=arguments.latent,
        rope=config.head_dim // 2 if arguments.rope is None else arguments.rope,
        span=SPAN if arguments.span is None else arguments.span,
        moments=moments,
    )


def describe(stored: StoredModel, converted: Converted, comparison: Comparison | None) -> dict[str, Any]:
    """Return each layer's errors, the caches' bytes in bfloat16, and what the text's last part says."""
    shown: dict[str, Any] = {
        "bytes_per_token": cache_spec(stored.config, page_size=1, codec="bf16").bytes_per_token,
        "converted_bytes_per_token": cache_spec(converted.config, page_size=1, codec="bf16").bytes_per_token,
        "errors": list(converted.errors),
    }
    if comparison is not None:
        shown["text"] = {
            "num_tokens": comparison.nll.size,
            "perplexity": comparison.base_perplexity,
            "converted_perplexity": comparison.base_perplexity * comparison.perplexity_ratio,
            "mean_kld": comparison.mean_divergence,
            "same_top": comparison.same_top_share,
        }
    return shown


def _check(arguments: Arguments) -> None:
    if (arguments.kv_heads is None) == (arguments.latent is None):
        raise ValueError("exactly one of --kv-heads and --latent must be given")
    if arguments.kv_heads is not None and (arguments.rope is not None or arguments.span is not None):
        raise ValueError("--rope and --span are for --latent alone; drop them")
    of_text = (arguments.held_out, arguments.row, arguments.max_rows)
    if arguments.text is None and of_text != (None, None, None):
        raise ValueError("--held-out, --row and --max-rows are for --text alone; give it, or drop them")
    require_whole("--max-rows", _max_rows(arguments), at_least=1, unit=" row")


def _max_rows(arguments: Arguments) -> int:
    return _MAX_ROWS if arguments.max_rows is None else arguments.max_rows


def _read(arguments: Arguments, location: ModelLocation, config: ModelConfig) -> SplitText | None:
    if arguments.text is None:
        return None
    row = _ROW if arguments.row is None else arguments.row
    if row > config.max_length:
        raise ValueError(f"--row must be at most the model's {config.max_length} tokens, got {row}")
    tokens = np.array(load_tokenizer(location).encode(read_text(arguments.text)), np.int32)
    held_out = HELD_OUT if arguments.held_out is None else arguments.held_out
    return split_text(tokens, row, held_out=held_out)


def _stored_as(dtype: str, converted: Converted) -> dict[str, jax.Array]:
    return {name: array.astype(jnp.dtype(dtype)) for name, array in converted.parameters.items()}


def _table(shown: dict[str, Any]) -> str:
    names = list(shown["errors"][0])
    lines = [f"{'layer':8}" + "".join(f"{name:>12}" for name in names) + "   relative errors"]
    for layer, errors in enumerate(shown["errors"]):
        lines.append(f"{layer:<8}" + "".join(f"{errors[name]:12.4f}" for name in names))
    before, after = shown["bytes_per_token"], shown["converted_bytes_per_token"]
    lines.append(f"cache bytes a token in bf16: {before:,}, converted {after:,}")
    text = shown.get("text")
    if text is not None:
        lines.append(
            f"perplexity of {text['num_tokens']:,} held-out tokens: {text['perplexity']:.3f}, converted "
            f"{text['converted_perplexity']:.3f}; mean KLD {text['mean_kld']:.4f}, "
            f"same top {text['same_top']:.2%}"
        )
    lines.append(f"written to {shown['out']}")
    return "\n".join(lines)
