"""Converts a model in several ways, trains each a little, and prints a table for docs/conversion.md.

    python scripts/compare_conversions.py --text TEXT [--model smollm2-135m] [--conversions kv1,128+32]
        [--steps 30] [--batch 4] [--keep FOLDER]

A conversion is `kvN`, N KV heads, or `L+R`, a latent of L entries beside R rotated ones. The last eighth of
the text is held out; perplexities are of its first rows, each by itself. Training is by distillation from the
original on the rest, which teaches nothing that the original does not know.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

from jkv.convert.converted import Converted
from jkv.convert.latent import to_latent
from jkv.convert.measure import make_decoder
from jkv.convert.moments import input_moments
from jkv.convert.pooling import pool_heads
from jkv.convert.text import split_text
from jkv.convert.uptrain import Model, Settings, make_model, perplexity, uptrain
from jkv.models.decoder import cache_spec
from jkv.models.load import abstract_decoder, load_tokenizer, parameter_targets
from jkv.models.model_config import ModelConfig
from jkv.models.weights.model import open_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--conversions", default="kv1,192+32,128+32,64+32", help="with commas")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--row", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=8, help="rows that perplexity is of")
    parser.add_argument("--keep", type=Path, help="folder for the runs' states")
    arguments = parser.parse_args()
    stored = open_model(arguments.model)
    tokens = load_tokenizer(stored.location).encode(arguments.text.read_text(encoding="utf-8"))
    text = split_text(np.array(tokens, np.int32), arguments.row)
    config = stored.config
    parameters = stored.load(parameter_targets(abstract_decoder(config)))
    teacher = make_model(config, parameters)
    settings = Settings(
        steps=arguments.steps,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
        warmup=min(5, arguments.steps - 1),
        teacher_share=1.0,
    )
    moments = input_moments(make_decoder(config, parameters), text.rows[: arguments.rows])
    held_out = text.held_out[: arguments.rows]

    def show(*cells: str) -> None:
        print("| " + " | ".join(cells) + " |", flush=True)

    def bytes_of(config: ModelConfig) -> str:
        return f"{cache_spec(config, page_size=1, codec='bf16').bytes_per_token:,}"

    rows = f"{arguments.batch} x {arguments.row}"
    print(f"{held_out.size:,} held-out tokens; {arguments.steps} steps of {rows}")
    show("attention", "cache bytes a token", "perplexity", "trained", "keys lost", "values lost")
    show(*["---"] * 6)
    show("original", bytes_of(config), f"{perplexity(teacher, held_out):,.2f}", "", "", "")
    for name in arguments.conversions.split(","):
        made = convert(name, config, parameters, moments)
        model = make_model(made.config, made.parameters, has_remat=False)
        before = perplexity(model, held_out)
        print(f"{name}: {before:,.2f}", file=sys.stderr, flush=True)
        trained = uptrain(
            model,
            text,
            settings,
            teacher=teacher,
            keep=None if arguments.keep is None else arguments.keep / name,
            keep_every=5,
            identity={"model": stored.fingerprint(), "conversion": name},
            report=lambda step, loss: print(f"step {step}: {loss:.3f}", file=sys.stderr, flush=True),
        )
        after = perplexity(Model(model.forward, trained.parameters), held_out)
        lost = [np.mean([errors[step] for errors in made.errors]) for step in ("keys", "values")]
        show(name, bytes_of(made.config), f"{before:,.2f}", f"{after:,.2f}", *(f"{x:.1%}" for x in lost))


def convert(
    name: str, config: ModelConfig, parameters: dict[str, jax.Array], moments: list[np.ndarray]
) -> Converted:
    """Return the conversion of such a name."""
    if name.startswith("kv"):
        return pool_heads(config, parameters, int(name.removeprefix("kv")))
    latent, rope = map(int, name.split("+"))
    return to_latent(config, parameters, latent=latent, rope=rope, moments=moments)


if __name__ == "__main__":
    main()
