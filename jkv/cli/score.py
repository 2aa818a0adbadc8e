"""`jkv score`: how likely a model finds a text, through its cache.

Knows files of text and tokens; jkv.decode.score does the work.
"""

import itertools
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jkv.cache.codec import CODECS
from jkv.cli.fits import check_tokens
from jkv.cli.options import Flag, ModelOptions, check_output, parse, read_text, resolve, show_progress
from jkv.config import CacheSection, DecodeConfig, UncalibratedCodec
from jkv.decode.compare import Comparison, compare
from jkv.decode.configured import load_configured, make_decoding, open_configured
from jkv.decode.generate import Decoding
from jkv.decode.params import require_whole
from jkv.decode.score import Score, score
from jkv.models.load import LanguageModel, load_tokenizer

# What needs no scales; then keys and values in different codecs.
EVERY_CODEC = [name for name, codec in CODECS.items() if codec.scaling != "static"]
EVERY_CODEC += ["int8/int4", "bf16/int4", "int4/int8", "fp8_e4m3/int4"]
# Where a context begins that is worth a row of its own.
_BORDERS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions):
    """Give the negative log-likelihood of each token but the first, and the perplexity."""

    text: Path | None = None
    """File of UTF-8 text; text that looks like a control token is text."""
    tokens: Path | None = None
    """.npz file with an integer array `tokens [batch, time]`."""
    max_tokens: int | None = None
    """Score the first so many tokens only."""
    chunk: int = 256
    """Tokens of a step; the result does not depend on it."""
    logits: Path | None = None
    """.npz file that gets a float32 array `logits [batch, time, vocab]`."""
    compare: UncalibratedCodec | None = None
    """Codec of a second cache, taken for right, that the configured one is compared with: every codec without
    scales, and keys and values in different ones, where that is in the same codec."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> None:
    """Score as the command line says, and print the result."""
    arguments, overrides = parse(Arguments, argv, "score")
    require_whole("--chunk", arguments.chunk, at_least=1, unit=" token")
    config = resolve(arguments, overrides)
    if arguments.logits is not None:
        check_output("--logits", arguments.logits)
    if arguments.compare is not None and arguments.logits is not None:
        raise ValueError("--compare and --logits exclude each other, got both")
    tokens = read_tokens(arguments, config.model.path)
    sizes = open_configured(config).config
    plan = check_tokens(
        config,
        sizes,
        tokens.tolist(),
        0,
        remedy="; give --max-tokens",
        max_chunk=arguments.chunk,
    )
    plan.require_room()
    with show_progress(f"loading {config.model.path}") as show:
        model = load_configured(config)
        show("scoring")
        if arguments.compare is not None:
            shown = compare_codecs(config, arguments.compare, model, tokens, arguments.chunk)
            print(json.dumps(shown) if arguments.json else _rows(shown))
            return
        decoding = make_decoding(config, model, max_chunk=arguments.chunk)
        result = score(decoding, tokens, chunk=arguments.chunk, keep_logits=arguments.logits is not None)
    if result.logits is not None and arguments.logits is not None:
        with arguments.logits.open("wb") as file:
            np.savez(file, logits=result.logits)
    print(_json(tokens, result) if arguments.json else _table(result))


def compare_codecs(
    config: DecodeConfig,
    base_codec: UncalibratedCodec,
    model: LanguageModel,
    tokens: Int[np.ndarray, "batch time"],
    chunk: int,
) -> dict[str, Any]:
    """Return what the configured cache costs beside one of the base codec, or what every codec does."""

    def with_codecs(codec: str, value_codec: str | None = None) -> Decoding:
        codecs = {"codec": codec, "value_codec": value_codec, "window_codec": None, "scales": None}
        return make_decoding(replace(config, cache=replace(config.cache, **codecs)), model, max_chunk=chunk)

    base = with_codecs(base_codec)
    own = make_decoding(config, model, max_chunk=chunk)
    compared, refused = {_codec_name(config.cache): own}, {}
    if [group.codecs for group in own.spec.groups] == [group.codecs for group in base.spec.groups]:
        compared = {}
        for name in (name for name in EVERY_CODEC if name != base_codec):
            keys, _, values = name.partition("/")
            try:
                compared[name] = with_codecs(keys, values or None)
            except ValueError as error:
                refused[name] = str(error)
    results = []
    # A few at a time: each is a forward pass in one program, compiled together.
    for some in itertools.batched(compared.values(), 3):
        results += compare(base, some, tokens, chunk=chunk)
    return {
        "base": base_codec,
        "base_bytes_per_token": base.spec.bytes_per_token,
        "codecs": {
            name: describe(result, decoding.spec.bytes_per_token)
            for (name, decoding), result in zip(compared.items(), results, strict=True)
        },
        "refused": refused,
    }


def _codec_name(cache: CacheSection) -> str:
    names = "/".join(dict.fromkeys((cache.codec, cache.value_codec or cache.codec)))
    return names if cache.window_codec is None else f"{names}, {cache.window_codec} in windows"


def describe(comparison: Comparison, nbytes: int) -> dict[str, Any]:
    """Return what a comparison says, over all tokens and by how much context they have."""
    num_tokens = comparison.divergence.shape[1]
    # The last token has none after it whose likelihood would be compared: it makes no row of its own.
    borders = [0, *(border for border in _BORDERS if border < num_tokens - 1), num_tokens]
    slices = {f"{start}-{end}": comparison.between(start, end) for start, end in itertools.pairwise(borders)}
    return {
        "bytes_per_token": nbytes,
        **_measures(comparison),
        "by_context": {name: _measures(part) for name, part in slices.items()},
    }


def _measures(comparison: Comparison) -> dict[str, float]:
    return {
        "perplexity_ratio": comparison.perplexity_ratio,
        "mean_kld": comparison.mean_divergence,
        "p99_kld": comparison.worst_divergence,
        "same_top": comparison.same_top_share,
    }


def _rows(shown: dict[str, Any]) -> str:
    width = 2 + max(map(len, ["codec", *shown["codecs"]]))
    lines = [
        f"base: {shown['base']}, {shown['base_bytes_per_token']:,} bytes a token",
        f"{'codec':{width}}{'bytes a token':>13}  {'tokens':12}"
        f"{'ppl ratio':>12}{'mean KLD':>12}{'p99 KLD':>12}{'same top':>12}",
    ]
    for codec, found in shown["codecs"].items():
        head = f"{codec:{width}}{found['bytes_per_token']:>13,}"
        for name, part in ({"all": found} | found["by_context"]).items():
            lines.append(
                f"{head}  {name:12}{part['perplexity_ratio']:12.5f}{part['mean_kld']:12.5f}"
                f"{part['p99_kld']:12.4f}{part['same_top']:12.2%}"
            )
            head = " " * len(head)
    return "\n".join([*lines, *(f"{codec}: {reason}" for codec, reason in shown["refused"].items())])


def read_tokens(arguments: Arguments, model: str) -> Int[np.ndarray, "batch time"]:
    """Return the tokens that the arguments name, one row a sequence.

    Raises:
        ValueError: not exactly one file is named, or it does not hold tokens.
    """
    if arguments.max_tokens is not None and arguments.max_tokens < 2:
        raise ValueError(f"--max-tokens must be at least 2, got {arguments.max_tokens}")
    if arguments.text is not None and arguments.tokens is None:
        text = read_text(arguments.text)
        tokens = np.array([load_tokenizer(model).encode(text)], np.int32)
    elif arguments.tokens is not None and arguments.text is None:
        tokens = _read_array(arguments.tokens)
    else:
        raise ValueError("exactly one of --text and --tokens must be given")
    if not len(tokens) or tokens.shape[1] < 2:
        file, (rows, width) = arguments.text or arguments.tokens, tokens.shape
        raise ValueError(f"{file} must hold at least 2 tokens a row to score, got {rows} rows of {width}")
    return tokens[:, : arguments.max_tokens]


def _read_array(path: Path) -> Int[np.ndarray, "batch time"]:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            tokens = arrays["tokens"]
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"{path} must be an .npz file with an array 'tokens' of integers, got a file that is none, is "
            "damaged, lacks the array or keeps it as objects"
        ) from error
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"'tokens' in {path} must be integers [batch, time], got {tokens.dtype}{list(tokens.shape)}"
        )
    return tokens


def _json(tokens: Int[np.ndarray, "batch time"], result: Score) -> str:
    return json.dumps(
        {
            "perplexity": result.perplexity,
            "mean_nll": float(result.nll.mean(dtype=np.float64)),
            "num_tokens": result.nll.size,
            "tokens": tokens.tolist(),
            "nll": result.nll.tolist(),
        }
    )


def _table(result: Score) -> str:
    lines = {
        "tokens scored": f"{result.nll.size:,}",
        "mean nll": f"{result.nll.mean(dtype=np.float64):.4f}",
        "perplexity": f"{result.perplexity:.3f}",
    }
    return "\n".join(f"{name:15}{value}" for name, value in lines.items())
