"""Times SmolLM2 in jkv beside Hugging Face transformers and llama.cpp in one run, and prints the ratios.

    python scripts/bench_peers.py --hf-python PYTHON_WITH_TORCH_AND_TRANSFORMERS
        [--llama-python PYTHON_WITH_LLAMA_CPP_PYTHON]

Prompts are 64 random tokens, with 64 new ones. transformers gets the dequantized weights, llama.cpp the file
itself, at batch 1 only. The systems take turns, so that a noisy machine slows all of them; the machine's own
limits are measured beside them, and the prefill's products alone in XLA, torch and NumPy.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jkv.decode.generate import Decoding, begin
from jkv.decode.loop import decode
from jkv.layers.dense import dense
from jkv.models.decoder import cache_spec
from jkv.models.load import LanguageModel, load_model
from jkv.models.weights.locate import resolve_model
from jkv.models.weights.model import open_model
from jkv.models.weights.rules import tensor_rules

PROMPT, NEW = 64, 64
MODELS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "param_dtype": "bfloat16"},
    "int8": {"weight_codec": "int8"},
    "int4": {"weight_codec": "int4"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-python", required=True, help="interpreter that has torch and transformers")
    parser.add_argument(
        "--llama-python", help="interpreter that has llama_cpp; llama.cpp is left out without"
    )
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS), help="of jkv; int8 and int4 at batch 1 only")
    arguments = parser.parse_args()
    batches = [int(size) for size in arguments.batch.split(",")]
    base = load_model("smollm2-135m")
    ours = {
        name: load_model("smollm2-135m", **MODELS[name]) if MODELS[name] else base
        for name in arguments.models.split(",")
    }
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder))
        peers = {
            f"transformers {dtype}": Peer(arguments.hf_python, _TRANSFORMERS, folder, dtype)
            for dtype in ("float32", "bfloat16")
        }
        if arguments.llama_python and 1 in batches:
            file = str(resolve_model("smollm2-135m").path)
            peers["llama.cpp Q4_1"] = Peer(arguments.llama_python, _LLAMA, file)
        for batch in batches:
            systems = {
                f"jkv {name}": JkvRunner(model, batch, "bf16" if name == "bfloat16" else "f32")
                for name, model in ours.items()
                if batch == 1 or name in ("float32", "bfloat16")
            }
            systems |= {
                name: PeerRunner(peer, batch)
                for name, peer in peers.items()
                if batch == 1 or name.startswith("transformers")
            }
            times = compare(systems, arguments.repeats)
            report(batch, times, limits(batch, base))
            report_products(batch, times, base, arguments.hf_python)


def export(folder: Path) -> None:
    """Write the model as a Hugging Face folder of float32 weights."""
    stored = open_model("smollm2-135m")
    config = stored.config
    gguf = {rule.target: rule for rule in tensor_rules(config, "gguf")}
    shapes = {t: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for t, rule in gguf.items()}
    parameters = stored.load(shapes)
    names = {rule.target: rule.source for rule in tensor_rules(config, "hf") if not rule.is_copy}
    save_file(
        {names[t]: np.asarray(value) for t, value in parameters.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(description))


def prompts(batch: int) -> list[list[int]]:
    return np.random.default_rng(batch).integers(3, 49152, (batch, PROMPT)).tolist()


class JkvRunner:
    """One timed generation of jkv."""

    def __init__(self, model: LanguageModel, batch: int, codec: str):
        spec = cache_spec(model.config, page_size=64, codec=codec)
        self.decoding = Decoding(model.step, model.weights, spec, model.config.vocab_size)
        self.batch = batch

    def __call__(self) -> tuple[float, float]:
        """Return seconds of the prefill and of a decode step."""
        start = time.perf_counter()
        state = jax.block_until_ready(begin(self.decoding, prompts(self.batch), max_new_tokens=NEW))
        middle = time.perf_counter()
        jax.block_until_ready(decode(self.decoding.step, self.decoding.weights, state, NEW))
        return middle - start, (time.perf_counter() - middle) / (NEW - 1)


class Peer:
    """Another system's process, which loads once and times on demand."""

    def __init__(self, python: str, program: str, *arguments: str):
        self.process = subprocess.Popen(
            [python, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=peer_environment(),
        )

    def time(self, batch: int) -> tuple[float, float]:
        """Return seconds of a prefill and of a decode step."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(prompts(batch)) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            sys.exit("a peer's process ended; its message is above")
        prefill, step = json.loads(line)
        return prefill, step


def peer_environment() -> dict[str, str]:
    """Return the environment without this interpreter's own settings, which must not reach another one."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


class PeerRunner:
    """One timed generation of a peer."""

    def __init__(self, peer: Peer, batch: int):
        self.peer, self.batch = peer, batch

    def __call__(self) -> tuple[float, float]:
        """Return seconds of the prefill and of a decode step."""
        return self.peer.time(self.batch)


_TRANSFORMERS = f"""
import json, sys, time, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads({os.cpu_count()})
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
for line in sys.stdin:
    tokens = torch.tensor(json.loads(line))
    with torch.inference_mode():
        start = time.perf_counter()
        out = model(tokens, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        middle = time.perf_counter()
        for _ in range({NEW - 1}):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        end = time.perf_counter()
    print(json.dumps([middle - start, (end - middle) / {NEW - 1}]), flush=True)
"""


_TORCH_PRODUCTS = f"""
import json, statistics, sys, time, torch
torch.set_num_threads({os.cpu_count()})
pairs = [(torch.ones(rows, width), torch.ones(out, width)) for rows, out, width in json.load(sys.stdin)]
times = []
with torch.inference_mode():
    for _ in range(10):
        start = time.perf_counter()
        for rows, weight in pairs:
            torch.nn.functional.linear(rows, weight)
        times.append(time.perf_counter() - start)
print(statistics.median(times[1:]))
"""


_LLAMA = f"""
import json, sys, time
import numpy as np
from llama_cpp import Llama
threads = {os.cpu_count()}
model = Llama(sys.argv[1], n_ctx={PROMPT + NEW}, n_threads=threads, n_threads_batch=threads, verbose=False)
def next_token():
    return int(np.ctypeslib.as_array(model._ctx.get_logits(), (model.n_vocab(),)).argmax())
for line in sys.stdin:
    (tokens,) = json.loads(line)
    model.reset()
    start = time.perf_counter()
    model.eval(tokens)
    token = next_token()
    middle = time.perf_counter()
    for _ in range({NEW - 1}):
        model.eval([token])
        token = next_token()
    end = time.perf_counter()
    print(json.dumps([middle - start, (end - middle) / {NEW - 1}]), flush=True)
"""


def compare(systems: dict, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Run the systems in turn, once to warm up and then `repeats` times."""
    for run in systems.values():
        run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, run in systems.items():
            times[name].append(run())
    return times


def limits(batch: int, model: LanguageModel) -> dict[str, float]:
    """Return the seconds that bound a float32 step, and a prefill of all prompts in one chunk."""
    spec = cache_spec(model.config, page_size=64, codec="f32")
    nbytes = sum(weight.nbytes for weight in arrays(model))
    nbytes += batch * (PROMPT + NEW // 2) * spec.bytes_per_token
    block = jnp.ones((64 << 20,), jnp.float32)
    read = median_seconds(jax.jit(jnp.sum), block) / block.nbytes
    head, layers = matrices(model)
    return {
        "to read weights and cache": nbytes * read,
        "to multiply in a step": multiply_seconds([*layers, head], batch),
        "to multiply in the prefill": prefill_seconds(batch, model),
    }


def arrays(model: LanguageModel) -> list[jax.Array]:
    return [weight for weight in model.weights if isinstance(weight, jax.Array)]


def matrices(model: LanguageModel) -> tuple[jax.Array, list[jax.Array]]:
    """Return the head's weight, and those of the layers' projections."""
    head, *layers = sorted((w for w in arrays(model) if w.ndim == 2), key=lambda w: -w.size)
    return head, layers


def prefill_seconds(batch: int, model: LanguageModel) -> float:
    """Return the seconds of the prefill's products in XLA; the head has one row a prompt."""
    head, layers = matrices(model)
    return multiply_seconds(layers, batch * PROMPT) + multiply_seconds([head], batch)


def multiply_seconds(weights: list[jax.Array], rows: int) -> float:
    """Return the seconds of the model's own products, and nothing else, with this many rows."""
    inputs = {width: jnp.ones((rows, 1, width)) for width in {weight.shape[1] for weight in weights}}

    @jax.jit
    def products(inputs: dict[int, jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
        # One entry of each, or the paging of all results would be timed; the barrier keeps products whole.
        results = (dense(inputs[weight.shape[1]], weight) for weight in weights)
        return [jax.lax.optimization_barrier(result)[0, 0, 0] for result in results]

    return median_seconds(products, inputs, weights)


def median_seconds(function, *arguments) -> float:
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(batch: int, times: dict[str, list[tuple[float, float]]], limit: dict[str, float]) -> None:
    print(
        f"\nbatch {batch}, prompt {PROMPT}, {NEW} new tokens, {os.cpu_count()} cores, jax {jax.__version__}"
    )
    print("float32 limits: " + ", ".join(f"{1e3 * seconds:.1f} ms {what}" for what, seconds in limit.items()))
    base = times["transformers float32"]
    header = ("system", "prefill tok/s", "step ms", "least", "prefill ratio", "step ratio")
    print("{:24}{:>14}{:>10}{:>8}{:>15}{:>12}".format(*header))
    for name, runs in times.items():
        prefill, step = (statistics.median(run[i] for run in runs) for i in (0, 1))
        ratios = [statistics.median(b[i] / a[i] for a, b in zip(runs, base, strict=True)) for i in (0, 1)]
        cells = f"{batch * PROMPT / prefill:14.0f}{step * 1e3:10.1f}{min(run[1] for run in runs) * 1e3:8.1f}"
        print(f"{name:24}{cells}{ratios[0]:15.2f}{ratios[1]:12.2f}", flush=True)


def report_products(
    batch: int, times: dict[str, list[tuple[float, float]]], model: LanguageModel, python: str
) -> None:
    """Print what the prefill's products alone take, and the prefill ratio were there nothing else."""
    head, layers = matrices(model)
    shapes = [*((batch * PROMPT, *weight.shape) for weight in layers), (batch, *head.shape)]
    operations = sum(2 * rows * out * width for rows, out, width in shapes)
    base = statistics.median(prefill for prefill, _ in times["transformers float32"])
    seconds = {
        "XLA": prefill_seconds(batch, model),
        "torch": torch_seconds(shapes, python),
        "NumPy": numpy_seconds(shapes),
    }
    print("the prefill's products alone, and the prefill ratio were there nothing else:")
    for name, each in seconds.items():
        rate = operations / each / 1e9
        print(f"{name:24}{each * 1e3:11.1f} ms{rate:10.1f} GFLOP/s{base / each:7.2f}", flush=True)


def torch_seconds(shapes: list[tuple[int, ...]], python: str) -> float:
    """Return the seconds of products of shapes `(rows, out, width)`, as transformers multiplies."""
    done = subprocess.run(
        [python, "-c", _TORCH_PRODUCTS],
        input=json.dumps(shapes),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=peer_environment(),
    )
    return float(done.stdout)


def numpy_seconds(shapes: list[tuple[int, ...]]) -> float:
    """Return the seconds of the same products in NumPy's BLAS, into arrays that are there."""
    inputs = {(rows, width): np.ones((rows, width), np.float32) for rows, _, width in shapes}
    results = {(rows, out): np.empty((rows, out), np.float32) for rows, out, _ in shapes}
    weights = [np.ones((out, width), np.float32) for _, out, width in shapes]

    def multiply() -> None:
        for (rows, out, width), weight in zip(shapes, weights, strict=True):
            np.matmul(inputs[rows, width], weight.T, out=results[rows, out])

    return median_seconds(multiply)


if __name__ == "__main__":
    main()
