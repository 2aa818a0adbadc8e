"""A configuration in, text out, on CPU, TPU or GPU: the short program to copy.

python scripts/decode.py smollm2-cpu "Once upon a time" --engine.sampling.temperature 0.8

Random weights have no tokenizer: token ids in, token ids out, of a model of which no file is here.

python scripts/decode.py default 1,2,3 --model llama-3.1-8b --model.has-random-weights
"""

import sys

from jkv import TextStream, load_config, load_tokenizer
from jkv.decode.configured import end_ids, load_configured, make_decoding, make_sampling


def main(name: str, prompt: str, *overrides: str) -> None:
    config = load_config(name, overrides)
    model = load_configured(config)
    tokenizer = load_tokenizer(model.location) if model.location else None
    stream = TextStream(
        make_decoding(config, model, stop_ids=end_ids(model, tokenizer)),
        tokenizer,
        [tokenizer.encode(prompt) if tokenizer else token_ids(prompt)],
        max_new_tokens=config.engine.sampling.max_new_tokens,
        sampling=make_sampling(config),
        seed=config.engine.seed,
    )
    for step in stream:
        print(step.pieces[0], end="", flush=True)
    print("" if tokenizer else ",".join(map(str, stream.generations()[0].tokens)))


def token_ids(prompt: str) -> list[int]:
    words = [word.strip() for word in prompt.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"without a tokenizer a prompt must be token ids, as 1,2,3, got {prompt!r}")
    return [int(word) for word in words]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
