"""`jkv plan`: what a model's cache costs on a device, and how many sequences fit.

Knows flags and words; the arithmetic is `jkv.plan`'s.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, Literal

from jkv.cache.codec import CODECS, PoolLayout, choose_layout
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.cli.compiled import compile_shown, describe_compiled
from jkv.cli.fits import check_divides, check_packs, declared_meshes
from jkv.cli.options import Flag, check_output, parse_alone
from jkv.config import CacheSection, CodecName, MeshSection, ModelSection, SizesSection, load_config
from jkv.config.compose import section_names
from jkv.config.errors import did_you_mean
from jkv.models.sizes import config_of, sizes_of
from jkv.models.weights.locate import is_hub_id
from jkv.models.weights.model import open_model
from jkv.plan.capacity import Deployment, choices
from jkv.plan.compiled import Job
from jkv.plan.decoder import cache_groups, parameters
from jkv.plan.lengths import LengthMix, one_length, read_mix
from jkv.plan.page import Settings, page
from jkv.plan.plot import plot

_PAGE_SIZES = (16, 64, 256)
_COUNTS = ("batch", "context", "page_size", "devices", "step_tokens", "layers", "kv_heads", "head_dim")
# Sums and products of what is below it can still be shown as floats.
_LIMIT = 2**63
_RESERVE = 0.1
_STEP_TOKENS = 512
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", 1)
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show what a cache costs by cause, and how many sequences fit; needs neither device nor weights.

    Name a model, or --layers, --kv-heads and --head-dim, which count the cache alone.
    """

    model: str | None = None
    """Preset of configs/models, bundled model's name, GGUF file or folder; nothing is downloaded."""
    layers: int | None = None
    """Layers, without --model."""
    kv_heads: int | None = None
    """Key and value heads, without --model."""
    head_dim: int | None = None
    """Entries of a head, without --model."""
    hbm: str | None = None
    """Memory of a device, as 141GB, 80GiB or 16e9."""
    reserve: float | None = None
    """Share of that memory left to the runtime, its programs and fragmentation of its allocator; 0.1."""
    devices: int | None = None
    """Devices that share heads, MLP and vocabulary."""
    mesh: str | None = None
    """Mesh of configs/meshes, in place of --devices."""
    batch: int | None = None
    """Sequences; as many as fit if left out."""
    context: int | None = None
    """Tokens of every sequence; the longest that the model reads if left out."""
    context_mix: Path | None = None
    """File of lengths and their shares, as `8192, 0.25`, one a line."""
    cache: str = "paged-bf16"
    """Cache of configs/caches: paged gives sequences what each needs, others what the longest does; dense
    ignores windows."""
    codec: CodecName | None = None
    """How keys are stored, and values unless --value-codec says otherwise."""
    value_codec: CodecName | None = None
    """How values are stored."""
    window_codec: CodecName | None = None
    """How layers with a sliding window store keys and values; as the others if left out."""
    page_size: int | None = None
    """Tokens of a page."""
    pool_layout: PoolLayout | None = None
    """Device whose padding counts; the cache's, else plain; with --compile the machine's."""
    weights: Literal["float32", "bfloat16", "int8", "int4"] | None = None
    """How weights are stored; as the preset says, else bfloat16."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Activations; as the preset says, else bfloat16."""
    step_tokens: int | None = None
    """New tokens of a step on a device, of prompts' chunks, 512; a window keeps room for them."""
    compile: Flag = False
    """Compile prefill and decode for the machine that --mesh names, and count what its compiler says; the
    machine need not be here, its compiler is in jkv[aot]."""
    json: Flag = False
    """Print one JSON object."""
    plot: Path | None = None
    """File that gets a picture, as plan.png; needs --hbm and matplotlib."""
    html: Path | None = None
    """File that gets a page with the same arithmetic to play with; may be given alone."""


def run(argv: Sequence[str]) -> None:
    """Plan as the command line says, and print the plan."""
    arguments = parse_alone(Arguments, argv, "plan")
    for flag, file in (("--plot", arguments.plot), ("--html", arguments.html)):
        if file is not None:
            check_output(flag, file)
    if arguments.html is not None and _cache(arguments).window_codec is not None:
        raise ValueError("--html writes a page of one codec for all layers; drop it, or the window_codec")
    if arguments.html is not None and arguments == Arguments(html=arguments.html):
        group = CacheGroup(80, 8, 128, _cache(arguments).codec)
        write_page(arguments.html, Settings(_spec(arguments, [group])))
        return
    if arguments.compile:
        compiled = compile_plan(arguments)
        print(json.dumps(compiled) if arguments.json else describe_compiled(compiled))
        return
    shown = plan(arguments)
    print(json.dumps(shown) if arguments.json else describe(shown))
    if arguments.plot is not None:
        print(f"wrote {arguments.plot}", file=sys.stderr)
    if arguments.html is not None:
        write_page(arguments.html, make_settings(arguments, shown))


def write_page(file: Path, settings: Settings) -> None:
    """Write the calculator, and say so on standard error."""
    models = {name: model.sizes for name, model in _presets() if model.sizes is not None}
    file.write_text(page(models, settings), encoding="utf-8")
    print(f"wrote {file}", file=sys.stderr)


def make_settings(arguments: Arguments, shown: dict[str, Any]) -> Settings:
    """Return what the page shows first: one device's part of the plan, all sequences of the mean length."""
    deployment = make_deployment(arguments)
    mesh = deployment.mesh
    memory = shown["hbm"] or 141 * 10**9
    return Settings(
        spec=replace(deployment.spec.split_heads(mesh.shards("kv_head")), num_stripes=1),
        num_sequences=-(-shown["num_sequences"] // mesh.shards("page")),
        num_tokens=ceil(deployment.held.mean(lambda length: length) / mesh.shards("context")),
        memory=memory,
        taken=shown["reserve"] + shown["total"] - shown["pool_bytes"],
    )


def plan(arguments: Arguments) -> dict[str, Any]:
    """Return what the deployment costs and what fits.

    Raises:
        ValueError: arguments are missing, exclude or do not fit each other.
    """
    deployment, cache = make_deployment(arguments), _cache(arguments)
    ways = deployment.mesh.shards("kv_head")
    hbm = None if arguments.hbm is None else parse_bytes(arguments.hbm)
    if hbm is None and arguments.plot is not None:
        raise ValueError("--plot needs --hbm, the memory that it draws against")
    if hbm is None and arguments.batch is None:
        raise ValueError("--hbm or --batch must be given: the memory to fill, or the sequences to hold")
    if hbm is None and arguments.reserve is not None:
        raise ValueError("--reserve is a share of --hbm; give the memory, or drop it")
    share = _RESERVE if arguments.reserve is None else arguments.reserve
    if not 0 <= share < 1:
        raise ValueError(f"--reserve must be a share from 0 to 1, got {share}")
    reserve = 0 if hbm is None else int(hbm * Fraction(str(share)))
    fitting = None if hbm is None else deployment.sequences_in(hbm - reserve)
    num_sequences = arguments.batch if arguments.batch is not None else fitting or 1
    memory = deployment.memory(num_sequences)
    spec = deployment.spec
    pages = sorted({*_PAGE_SIZES, spec.page_size})
    dynamic = [name for name, codec in CODECS.items() if codec.scaling != "static"]
    found = [] if hbm is None else choices(deployment, hbm - reserve, dynamic, pages)
    if arguments.plot is not None and hbm is not None:
        plot(arguments.plot, deployment, memory=hbm, budget=hbm - reserve, found=found)
    sizes = deployment.sizes
    if sizes is not None:
        sizes = replace(sizes, num_kv_heads=sizes.num_kv_heads // deployment.mesh.kv_copies)
    return {
        "model": arguments.model,
        "parameters": sizes and sum(part.num_parameters() for part in parameters(sizes)),
        "kv_copies": deployment.mesh.kv_copies,
        "devices": dict(deployment.mesh.axes),
        "lengths": [{"tokens": length, "share": float(share)} for length, share in deployment.mix.shares],
        "cache": cache.layout,
        "codec": cache.codec,
        "value_codec": cache.value_codec or cache.codec,
        "window_codec": cache.window_codec,
        "page_size": spec.page_size,
        "layout": spec.layout,
        "bytes_per_token": spec.bytes_per_token,
        "device_bytes_per_token": spec.split_heads(ways).padded_bytes_per_token,
        "num_sequences": num_sequences,
        "pool_bytes": memory.cache + memory.rounding + memory.padding + memory.recent,
        "memory": asdict(memory),
        "total": memory.total,
        "hbm": hbm,
        "reserve": reserve,
        "free": hbm and hbm - reserve - memory.total,
        "fits": fitting,
        "choices": [asdict(choice) for choice in found],
    }


def compile_plan(arguments: Arguments) -> dict[str, Any]:
    """Return what the deployment's programs take on the machine of its mesh, as its compiler says.

    Raises:
        ValueError: as `plan`, the mesh names no machine, or what is asked does not fit it.
    """
    for name in ("hbm", "reserve", "pool_layout", "devices", "context_mix", "plot", "html", "layers"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--compile asks the machine of --mesh; drop --{name.replace('_', '-')}")
    if arguments.model is None or arguments.mesh is None:
        raise ValueError(f"--compile needs --model and --mesh; meshes of machines: {', '.join(_targets())}")
    try:
        job = make_job(arguments)
    except ValueError as error:
        # Where no mesh will do, it is not the mesh that is wrong.
        fitting = " or ".join(name for name, _ in _jobs(arguments))
        raise ValueError(f"{error}; meshes that divide it: {fitting}" if fitting else str(error)) from error
    model = {"model": arguments.model, "mesh": arguments.mesh, "cache": asdict(_cache(arguments))}
    return model | compile_shown(job, arguments.batch, lambda: _jobs(arguments))


def make_job(arguments: Arguments) -> Job:
    """Return what is to be compiled."""
    target = _mesh(arguments).machine
    if target is None:
        raise ValueError(f"--compile needs a mesh with a target, got {arguments.mesh}, which names none")
    deployment = make_deployment(replace(arguments, pool_layout=choose_layout("auto", target.platform)))
    if deployment.weights in ("int8", "int4"):
        raise ValueError(f"--compile takes --weights float32 or bfloat16, got {deployment.weights}")
    if (arguments.batch or 0) % deployment.mesh.shards("seq"):
        raise ValueError(
            f"--batch must be a multiple of the {deployment.mesh.shards('seq')} parts that the mesh splits "
            f"sequences into, got {arguments.batch}"
        )
    assert deployment.sizes is not None
    return Job(deployment, config_of(deployment.sizes), target)


def _targets() -> list[str]:
    """Return the names of the meshes that name a machine."""
    return [name for name, mesh in declared_meshes() if mesh.target is not None]


def _jobs(arguments: Arguments) -> Iterator[tuple[str, Job]]:
    """Find the meshes of machines that divide the model, and what would be compiled for them."""
    for name in _targets():
        with contextlib.suppress(ValueError):
            yield name, make_job(replace(arguments, mesh=name))


def make_deployment(arguments: Arguments) -> Deployment:
    """Return the deployment that the arguments name.

    Raises:
        ValueError: as `plan`.
    """
    for name in _COUNTS:
        if (value := getattr(arguments, name)) is not None and not 1 <= value < _LIMIT:
            bound = "at least 1" if value < 1 else "below 2**63"
            raise ValueError(f"--{name.replace('_', '-')} must be {bound}, got {value}")
    model = _model(arguments)
    sizes = model and model.sizes
    mix = _mix(arguments, sizes)
    if sizes is not None and mix.longest > sizes.max_length:
        raise ValueError(
            f"the model reads at most {sizes.max_length:,} tokens, got {mix.longest:,}; shorten the context"
        )
    mesh = _mesh(arguments)
    if mesh.kv_copies > 1:
        sizes = _with_kv_copies(sizes, mesh.kv_copies)
    weights = arguments.weights or (model.weights if model else "bfloat16")
    if sizes is not None:
        check_divides(sizes, mesh, name=arguments.model or "")
        check_packs(sizes, weights, mesh)
    cache = _cache(arguments)
    if cache.layout == "window" and (sizes is None or sizes.window is None):
        raise ValueError(
            f"--cache {arguments.cache} needs a --model whose layers have a sliding window, got one without; "
            "use dense"
        )
    if cache.window_codec is not None and (sizes is None or sizes.window is None):
        raise ValueError(
            f"window_codec {cache.window_codec} needs a --model whose layers have a sliding window, got one "
            "without; leave it out"
        )
    return Deployment(
        spec=_spec(arguments, _groups(arguments, sizes), mesh.shards("context")),
        mix=mix,
        mesh=mesh,
        sizes=sizes,
        weights=weights,
        dtype=arguments.dtype or (model.dtype if model else "bfloat16"),
        step_tokens=arguments.step_tokens or _STEP_TOKENS,
        has_pool=cache.layout == "paged",
        has_window_codec=cache.window_codec is not None,
    )


def parse_bytes(text: str) -> int:
    """Return the bytes that a text as `141GB`, `80GiB` or `16e9` names.

    Raises:
        ValueError: it names none.
    """
    found = re.fullmatch(r"\s*(\d{1,19}(?:\.\d{0,19})?(?:[eE]\d{1,2})?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    unit = units.get(found[2].lower(), 0) if found else 0
    size = int(Fraction(found[1]) * unit) if found else 0
    if not size:
        raise ValueError(f"--hbm must be bytes, as 141GB, 80GiB or 16e9, got {text!r}")
    if size >= _LIMIT:
        raise ValueError(f"--hbm must be below 2**63 bytes, got {text!r}")
    return size


def preset_names() -> list[str]:
    """Return the names of the bundled models, and of those in the working folder's configs/models."""
    return section_names("model")


def load_preset(name: str) -> ModelSection:
    """Return a preset by its name.

    Raises:
        ValueError: its file has no sizes.
    """
    model = load_config("smollm2-cpu", ["--model", name]).model
    if model.sizes is None:
        raise ValueError(f"{name}.yaml must have sizes to be planned, got none; add them")
    return model


def _presets() -> Iterator[tuple[str, ModelSection]]:
    """Find the presets that can be planned; what is wrong with a file is told to who names it."""
    for name in preset_names():
        with contextlib.suppress(ValueError):
            yield name, load_preset(name)


def _mix(arguments: Arguments, sizes: SizesSection | None) -> LengthMix:
    if arguments.context_mix is not None:
        if arguments.context is not None:
            raise ValueError("--context and --context-mix exclude each other, got both")
        return read_mix(arguments.context_mix)
    if arguments.context is not None:
        return one_length(arguments.context)
    if sizes is None:
        raise ValueError("--context or --context-mix must be given where no --model says how much it reads")
    return one_length(sizes.max_length)


def _model(arguments: Arguments) -> ModelSection | None:
    """Return the named model with its sizes; None where only those of the cache are given."""
    bare = (arguments.layers, arguments.kv_heads, arguments.head_dim)
    if arguments.model is None:
        if None in bare:
            raise ValueError("--model must be given, or all of --layers, --kv-heads and --head-dim")
        for name in ("weights", "dtype", "step_tokens"):
            if getattr(arguments, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"without --model the cache alone is counted; give one, or drop {flag}")
        return None
    if any(value is not None for value in bare):
        raise ValueError("--model names the sizes; drop --layers, --kv-heads and --head-dim")
    names = preset_names()
    if arguments.model in names:
        return load_preset(arguments.model)
    if is_hub_id(arguments.model):
        return _preset_of(arguments.model, names)
    if not Path(arguments.model).expanduser().exists():
        hint = did_you_mean(arguments.model, names) or f"; presets: {', '.join(names)}"
        raise ValueError(f"--model must be a preset or an existing path, got {arguments.model!r}{hint}")
    sizes = sizes_of(open_model(arguments.model).config)
    return ModelSection(arguments.model, "bfloat16", "bfloat16", sizes)


def _preset_of(hub_id: str, names: Sequence[str]) -> ModelSection:
    """Return the preset of a model on the hub, from which nothing is downloaded."""
    found = next((model for _, model in _presets() if model.path == hub_id), None)
    if found is None:
        raise ValueError(
            f"--model must lie on this machine or be one of {', '.join(names)}, got {hub_id!r}, "
            "which is on the hub; give its downloaded folder"
        )
    return found


def _with_kv_copies(sizes: SizesSection | None, copies: int) -> SizesSection:
    """Return the sizes with copies of the KV heads, which `with_kv_copies` then loads."""
    if sizes is None or sizes.latent is not None or sizes.num_heads // sizes.num_kv_heads % copies:
        heads = "no model" if sizes is None else f"{sizes.num_kv_heads} KV heads for {sizes.num_heads}"
        raise ValueError(
            f"a mesh with kv_copies needs a --model with query heads for each copy, got {copies} and {heads}"
        )
    return replace(sizes, num_kv_heads=copies * sizes.num_kv_heads)


def _groups(arguments: Arguments, sizes: SizesSection | None) -> list[CacheGroup]:
    cache = _cache(arguments)
    if sizes is not None:
        return cache_groups(
            sizes,
            cache.codec,
            cache.value_codec,
            window_codec=cache.window_codec,
            keeps_all=cache.layout == "dense",
        )
    assert arguments.layers is not None
    assert arguments.kv_heads is not None
    assert arguments.head_dim is not None
    shape = (arguments.layers, arguments.kv_heads, arguments.head_dim)
    return [CacheGroup(*shape, cache.codec, cache.value_codec)]


def _cache(arguments: Arguments) -> CacheSection:
    """Return the named cache with what flags change.

    Raises:
        ValueError: there is none of the name.
    """
    cache = load_config("smollm2-cpu", ["--cache", arguments.cache]).cache
    given = {name: getattr(arguments, name) for name in ("codec", "value_codec", "window_codec", "page_size")}
    return replace(cache, **{name: value for name, value in given.items() if value is not None})


def _spec(arguments: Arguments, groups: Sequence[CacheGroup], num_stripes: int = 1) -> CacheSpec:
    """Return the cache; all tokens of a step may be of one sequence, and its windows keep room for them."""
    cache = _cache(arguments)
    layout = arguments.pool_layout or cache.pool_layout
    return CacheSpec.create(
        groups,
        page_size=cache.page_size,
        max_chunk=arguments.step_tokens or _STEP_TOKENS,
        layout="plain" if layout == "auto" else layout,
        num_stripes=num_stripes,
    )


def _mesh(arguments: Arguments) -> MeshSection:
    """Return the named mesh, or one whose devices all split the model."""
    if arguments.mesh is not None and arguments.devices is not None:
        raise ValueError("--mesh names the devices; drop --devices")
    if arguments.mesh is not None:
        return load_config("smollm2-cpu", ["--mesh", arguments.mesh]).mesh
    single = load_config("smollm2-cpu").mesh
    return MeshSection((("data", 1), ("model", arguments.devices or 1)), single.axis_types, single.rules)


_WORDS = {"rounding": "page rounding", "recent": "recent keys"}


def describe(shown: dict[str, Any]) -> str:
    """Return a plan as people read it."""
    axes = " x ".join(f"{name} {size}" for name, size in shown["devices"].items())
    codecs = " / ".join(dict.fromkeys((shown["codec"], shown["value_codec"])))
    if shown["window_codec"]:
        codecs += f", {shown['window_codec']} in windows"
    lines = []
    if shown["parameters"]:
        lines.append(f"model: {shown['model']}, {shown['parameters']:,} parameters")
    if shown["kv_copies"] > 1:
        lines.append(f"KV heads: each on {shown['kv_copies']} devices")
    lines += [
        f"devices: {axes}",
        f"cache: {shown['bytes_per_token']:,} bytes a token ({shown['cache']}, {codecs}, pages of "
        f"{shown['page_size']}, {shown['layout']}), {shown['device_bytes_per_token']:,} on a device",
        f"lengths: {', '.join(f'{part["tokens"]:,} ({part["share"]:.3g})' for part in shown['lengths'])}",
        "",
        f"a device with its part of {shown['num_sequences']:,} sequence{'s' * (shown['num_sequences'] > 1)}:",
        *(_row(_WORDS.get(name) or name, size) for name, size in shown["memory"].items()),
        _row("total", shown["total"]),
    ]
    if not shown["parameters"]:
        lines.append("  weights, activations and logits are counted with --model")
    if shown["hbm"] is not None:
        free = shown["free"]
        lines += [
            _row("reserve", shown["reserve"]),
            _row("free" if free >= 0 else "too much", abs(free)),
            _row("memory", shown["hbm"]),
        ]
        lines += ["", f"sequences that fit: {shown['fits']:,}", *_table(shown["choices"])]
    return "\n".join(lines)


def _row(name: str, size: int) -> str:
    return f"  {name:16}{size:>20,} bytes{size / 1e9:>10.2f} GB{size / 2**30:>10.2f} GiB"


def _table(found: list[dict[str, Any]]) -> list[str]:
    pages = sorted({choice["page_size"] for choice in found})
    rows = [f"  {'codec':12}{'bytes/token':>12}" + "".join(f"{f'page {page}':>12}" for page in pages)]
    for codec in dict.fromkeys(choice["codec"] for choice in found):
        own = [choice for choice in found if choice["codec"] == codec]
        sizes = [choice["bytes_per_token"] for choice in own if choice["bytes_per_token"] is not None]
        cells = ["-" if choice["num_sequences"] is None else f"{choice['num_sequences']:,}" for choice in own]
        rows.append(f"  {codec:12}{min(sizes, default=0):>12,}" + "".join(f"{cell:>12}" for cell in cells))
    refusals = dict.fromkeys(choice["refusal"] for choice in found if choice["refusal"])
    return [*rows, *(f"  - {refusal}" for refusal in refusals)]
