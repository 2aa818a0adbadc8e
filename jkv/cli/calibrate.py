"""`jkv calibrate`: measures the scales of the static codecs on a text.

Knows files; jkv.decode.calibrate does the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jkv.cache.codec import CODECS
from jkv.cli.fits import check_tokens
from jkv.cli.options import DEFAULT, ModelOptions, check_output, parse, read_text, resolve, show_progress
from jkv.config import DecodeConfig, load_config
from jkv.config.overrides import split_names
from jkv.decode.calibrate import PERCENTILE, Method, Per, calibrate, check_options
from jkv.decode.configured import configured_spec, load_configured, make_decoding, open_configured
from jkv.decode.params import require_whole
from jkv.decode.scales import write_scales
from jkv.models.load import load_tokenizer

_MAX_CONTEXT = 2048
_CODECS = ("codec", "value_codec", "window_codec")


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions):
    """Measure the scales of the codecs whose names end in _static, on a text, for --scales.

    Those of int8_static, if neither --codec nor a configuration or cache that is named has another of them.
    """

    text: Path
    """File of UTF-8 text; text that looks like a control token is text."""
    out: Path
    """.safetensors file that gets the scales."""
    method: Method = "mse"
    """What a scale is chosen by: the largest magnitude, a percentile of all, or the least squared error."""
    percentile: float | None = None
    """Magnitudes in percent that do not saturate, with --method percentile; 99.99 if left out."""
    per: Per = "head"
    """Whether each KV head has a scale, or all heads of a layer have one."""
    context: int | None = None
    """Tokens of the pieces that the text is cut into; at most 2,048 if left out."""
    chunk: int = 256
    """Tokens of a step; the result does not depend on it."""


def run(argv: Sequence[str]) -> None:
    """Calibrate as the command line says, and print what was written."""
    arguments, overrides = parse(Arguments, argv, "calibrate")
    _check(arguments)
    arguments = _with_codec(arguments, overrides)
    config = resolve(arguments, overrides, {"out": "cache.scales"})
    exact = _with_exact_cache(config)
    percentile = PERCENTILE if arguments.percentile is None else arguments.percentile
    check_options(arguments.method, percentile, arguments.per, arguments.chunk)
    stored = open_configured(config)
    tokens = load_tokenizer(stored.location).encode(read_text(arguments.text))
    if not tokens:
        raise ValueError(f"{arguments.text} must hold a text to measure on, got an empty one")
    context = arguments.context or min(_MAX_CONTEXT, stored.config.max_length)
    pieces = [tokens[start : start + context] for start in range(0, len(tokens), context)]
    # One piece at a time is in the cache, none longer than the first.
    check_tokens(exact, stored.config, pieces[:1], 0, remedy="; lower --context")
    with show_progress(f"loading {config.model.path}") as show:
        decoding = make_decoding(exact, load_configured(exact))
        show("measuring")
        spec = configured_spec(config, stored.config)
        scales = calibrate(
            replace(decoding, spec=spec),
            pieces,
            method=arguments.method,
            percentile=percentile,
            per=arguments.per,
            chunk=arguments.chunk,
        )
    method = f"percentile {percentile}" if arguments.method == "percentile" else arguments.method
    notes = {"method": method, "per": arguments.per, "num_tokens": str(len(tokens))}
    copies = config.mesh.kv_copies
    write_scales(arguments.out, scales, spec, model=stored.fingerprint(), kv_copies=copies, notes=notes)
    print(f"{arguments.out}: scales by {method} per {arguments.per}, from {len(tokens):,} tokens")


def _with_codec(arguments: Arguments, overrides: Sequence[str]) -> Arguments:
    """Return the arguments with a codec that has scales: int8_static, where nothing says otherwise.

    Raises:
        ValueError: none of the codecs that the arguments name has scales.
    """
    names, flags = split_names(overrides)
    cache = [f"--cache={names['cache']}"] if "cache" in names else []
    named = load_config(arguments.config or DEFAULT, cache).cache
    given = {name: value for name in _CODECS if (value := getattr(arguments, name)) is not None}
    codecs = [codec for name in _CODECS if (codec := given.get(name, getattr(named, name))) is not None]
    if any(CODECS[codec].scaling == "static" for codec in codecs):
        return arguments
    if given:
        raise ValueError(
            f"scales are measured for a codec whose name ends in _static, got {' and '.join(codecs)}; "
            "give --codec int8_static"
        )
    if any(flag.partition("=")[0].endswith("codec") for flag in flags):
        return arguments
    return replace(arguments, codec="int8_static")


def _with_exact_cache(config: DecodeConfig) -> DecodeConfig:
    """Return the configuration with all that the model writes kept in float32."""
    codecs = {"codec": "f32", "value_codec": None, "window_codec": None}
    return replace(config, cache=replace(config.cache, layout="dense", scales=None, **codecs))


def _check(arguments: Arguments) -> None:
    check_output("--out", arguments.out)
    if arguments.scales is not None:
        raise ValueError("--scales is what other verbs read; jkv calibrate writes --out, drop --scales")
    if arguments.percentile is not None and arguments.method != "percentile":
        raise ValueError("--percentile is for --method percentile alone; give it, or drop --percentile")
    if arguments.context is not None:
        require_whole("--context", arguments.context, at_least=1, unit=" token")
