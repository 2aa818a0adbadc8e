"""A configuration in, text out, on CPU, TPU or GPU: the short program to copy.

python scripts/decode.py smollm2-cpu "Once upon a time" --engine.sampling.temperature 0.8
"""

import sys

from jkv import TextStream, load_config, load_tokenizer
from jkv.decode.configured import end_ids, load_configured, make_decoding, make_sampling


def main(name: str, prompt: str, *overrides: str) -> None:
    config = load_config(name, overrides)
    model = load_configured(config)
    tokenizer = load_tokenizer(model.location)
    stream = TextStream(
        make_decoding(config, model, stop_ids=end_ids(model, tokenizer)),
        tokenizer,
        [tokenizer.encode(prompt)],
        max_new_tokens=config.engine.sampling.max_new_tokens,
        sampling=make_sampling(config),
        seed=config.engine.seed,
    )
    for step in stream:
        print(step.pieces[0], end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
