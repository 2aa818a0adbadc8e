"""Sets every codec of the cache beside a float32 cache on one text, and prints a table for docs/codecs.md.

    python scripts/compare_codecs.py --tokens TOKENS.npz [--model smollm2-135m] [--codecs int8,int8/int4]
    python scripts/compare_codecs.py --tokens TOKENS.npz --calibrate TEXT.txt --codecs int8_static
    python scripts/compare_codecs.py --bytes

TOKENS.npz holds an integer array `text_ids [time]`; static codecs are calibrated on 8,192 tokens of the text,
from the 4,096th on, by the least squared error of each head. The bytes are those of a page on its device.
"""

import argparse
import dataclasses
import itertools
from pathlib import Path

import numpy as np

from jkv.cache.codec import PoolLayout
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.cli.score import EVERY_CODEC
from jkv.decode.calibrate import calibrate
from jkv.decode.compare import compare
from jkv.decode.generate import Decoding
from jkv.models.decoder import cache_spec
from jkv.models.load import load_model, load_tokenizer
from jkv.models.weights.locate import resolve_model

DEFAULT = [name for name in EVERY_CODEC if name != "f32"]
CALIBRATED = slice(4096, 4096 + 8192)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--calibrate", type=Path, help="text on which static codecs are calibrated")
    parser.add_argument(
        "--bytes", action="store_true", help="print what a token takes in each layout instead"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--codecs", default=",".join(DEFAULT), help="names, or keys/values, with commas")
    arguments = parser.parse_args()
    codecs = arguments.codecs.split(",")
    if arguments.bytes:
        print_bytes(codecs)
    elif arguments.tokens is None:
        parser.error("one of --tokens and --bytes must be given")
    else:
        print_quality(arguments, codecs)


def print_bytes(codecs: list[str]) -> None:
    """Print the bytes of each codec's pages over those of bfloat16's in layout `plain`."""
    # Pages of `plain` differ in int4 alone, whose runs are shorter in pages under 32.
    places: list[tuple[PoolLayout, int]] = [
        *(("plain", size) for size in (16, 64)),
        *(("tpu", size) for size in (16, 32, 64, 128)),
    ]
    forms = [(*place, dim) for dim in (128, 64) for place in places]

    def page_bytes(codec: str, layout: PoolLayout, page_size: int, head_dim: int) -> int:
        keys, _, values = codec.partition("/")
        group = CacheGroup(1, 8, head_dim, keys, value_codec=values or None)
        return CacheSpec.create([group], page_size=page_size, layout=layout).padded_bytes_per_page

    print_row(["codec", *(f"{dim}, `{layout}`, {page_size}" for layout, page_size, dim in forms)])
    print("|" + "---|" * (1 + len(forms)))
    for codec in codecs:
        ratios = [page_bytes(codec, *form) / page_bytes("bf16", "plain", *form[1:]) for form in forms]
        print_row([codec, *(f"{ratio:.3f}" for ratio in ratios)])


def print_quality(arguments: argparse.Namespace, codecs: list[str]) -> None:
    """Print each codec's divergence from a float32 cache."""
    with np.load(arguments.tokens) as arrays:
        tokens = arrays["text_ids"][None]
    others = None
    if arguments.calibrate is not None:
        tokenizer = load_tokenizer(resolve_model(arguments.model))
        others = [tokenizer.encode(arguments.calibrate.read_text(encoding="utf-8"))[CALIBRATED]]
    model = load_model(arguments.model)

    def decoding(codec: str) -> Decoding:
        keys, _, values = codec.partition("/")
        spec = cache_spec(model.config, page_size=64, codec=keys, value_codec=values or None)
        made = Decoding(model.step, model.weights, spec, model.config.vocab_size)
        if not spec.scale_bytes:
            return made
        if others is None:
            raise SystemExit(f"{codec} needs scales: give the text to measure them on, --calibrate")
        return dataclasses.replace(made, scales=calibrate(made, others))

    borders = [0, *(border for border in (512, 1024) if border < tokens.shape[1]), tokens.shape[1]]
    slices = list(itertools.pairwise(borders))
    names = [f"KLD {start}-{end}" for start, end in slices]
    header = ["codec", "bytes a token", "ppl ratio", "mean KLD", "p99 KLD", "same top", *names]
    print_row(header)
    print("|" + "---|" * len(header), flush=True)
    # A few at a time: each is a forward pass in one program, compiled together.
    for some in itertools.batched(codecs, 3):
        compared = [decoding(codec) for codec in some]
        results = compare(decoding("f32"), compared, tokens, chunk=256)
        for codec, other, result in zip(some, compared, results, strict=True):
            cells = [
                codec,
                f"{other.spec.bytes_per_token:,}",
                f"{result.perplexity_ratio:.5f}",
                f"{result.mean_divergence:.5f}",
                f"{result.worst_divergence:.4f}",
                f"{result.same_top_share:.2%}",
                *(f"{result.between(*ends).mean_divergence:.5f}" for ends in slices),
            ]
            print_row(cells)


def print_row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
