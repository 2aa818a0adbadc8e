"""Sets every codec of the cache beside a float32 cache on one text, and prints a table for docs/codecs.md.

    python scripts/compare_codecs.py --tokens TOKENS.npz [--model smollm2-135m] [--codecs int8,int8/int4]

The file holds an integer array `tokens [batch, time]`, as for `jkv score`.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

from jkv.cache.codec import CODECS
from jkv.decode.compare import compare
from jkv.decode.generate import Decoding
from jkv.models.decoder import cache_spec
from jkv.models.load import load_model

DEFAULT = [name for name, codec in CODECS.items() if codec.scaling != "static" and name != "f32"]
PAIRS = ["int8/int4", "bf16/int4", "int4/int8", "fp8_e4m3/int4"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--codecs", default=",".join([*DEFAULT, *PAIRS]), help="names, or keys/values, with commas"
    )
    arguments = parser.parse_args()
    with np.load(arguments.tokens) as arrays:
        tokens = arrays["tokens"]
    model = load_model(arguments.model)

    def decoding(codec: str) -> Decoding:
        keys, _, values = codec.partition("/")
        spec = cache_spec(model.config, page_size=64, codec=keys, value_codec=values or None)
        return Decoding(model.step, model.weights, spec, model.config.vocab_size)

    codecs = arguments.codecs.split(",")
    borders = [0, *(border for border in (512, 1024) if border < tokens.shape[1]), tokens.shape[1]]
    slices = list(itertools.pairwise(borders))
    names = [f"KLD {start}-{end}" for start, end in slices]
    header = ["codec", "bytes a token", "ppl ratio", "mean KLD", "p99 KLD", "same top", *names]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header), flush=True)
    # A few at a time: each is a forward pass in one program, compiled together.
    for some in itertools.batched(codecs, 3):
        others = [decoding(codec) for codec in some]
        results = compare(decoding("f32"), others, tokens, chunk=256)
        for codec, other, result in zip(some, others, results, strict=True):
            cells = [
                codec,
                f"{other.spec.bytes_per_token:,}",
                f"{result.perplexity_ratio:.5f}",
                f"{result.mean_divergence:.5f}",
                f"{result.worst_divergence:.4f}",
                f"{result.same_top_share:.2%}",
                *(f"{result.between(*ends).mean_divergence:.5f}" for ends in slices),
            ]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
