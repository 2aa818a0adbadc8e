"""The memory of one device of a deployment, by cause, and the sequences that fit.

Every figure is a sum of array sizes; what is counted stands at the function that counts it. Knows no file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import ceil
from typing import Any

from jkv.cache.codec import DTYPES
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.config import MeshSection, SizesSection
from jkv.plan.decoder import ITEM_BYTES, Stored, attention_width, mlp_width, parameters
from jkv.plan.lengths import LengthMix, one_length

# `kernels_pallas.paged_attention.contract.Tiling`: tokens of one step of the online softmax.
_BLOCK_TOKENS = 128
# `kernels_pallas.hopper.splits` and its callers: tokens of a split at least, twice as many of latents; what
# they are a multiple of; splits of a table at most; bytes of partial results at most.
_SPLIT_TOKENS, _SPLIT_MULTIPLE, _MAX_SPLITS, _MAX_PARTIAL_BYTES = 512, 64, 128, 2**30
# Rows that the queries of a KV head, or of latents, are padded to a multiple of.
_HEAD_ROWS, _LATENT_ROWS = 8, 64
# Channels that are summed at once.
_CHANNELS = 64
_F32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
        weights: the device's part of the parameters.
        cache: keys and values that queries see, and calibrated scales.
        rounding: slots of the pages beyond them: a last page's rest, what a window keeps for its next step,
            and without a pool what the longest sequence has over the others.
        padding: what the layout's device adds to pages.
        recent: each sequence's latest keys as they were given, where a codec waits for more of them.
        tables: page tables, lengths, peaks and counts of refused tokens.
        activations: of a step's tokens, where a layer holds most: in its attention or its MLP.
        workspace: what attention holds beside them, of plain JAX or a GPU's kernel; 0 where the MLP is wider.
        logits: float32, of one token a sequence.
    """

    weights: int
    cache: int
    rounding: int
    padding: int
    recent: int
    tables: int
    activations: int
    workspace: int
    logits: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Deployment:
    """A model's cache on a mesh, and the sequences that it is to hold.

    Attributes:
        spec: the whole model's cache.
        mix: how long the sequences are.
        mesh: the devices, and what is split over them.
        sizes: of the model; None counts the cache alone.
        weights: how weights are stored.
        dtype: activations.
        step_tokens: new tokens of a step on a device; more sequences than that raise it, a token each.
        has_pool: sequences share a pool, of which each takes its own pages; without, all take the longest's.
        has_window_codec: layers with a window, the last group, keep their codec where the others' changes.
    """

    spec: CacheSpec
    mix: LengthMix
    mesh: MeshSection
    sizes: SizesSection | None = None
    weights: Stored = "bfloat16"
    dtype: str = "bfloat16"
    step_tokens: int = 512
    has_pool: bool = True
    has_window_codec: bool = False

    @property
    def held(self) -> LengthMix:
        """The lengths that sequences have room for."""
        return self.mix if self.has_pool else one_length(self.mix.longest)

    def memory(self, num_sequences: int) -> Memory:
        """Return the memory of the device that holds most of `num_sequences`."""
        rows = -(-num_sequences // self.mesh.shards("page"))
        spec = self.spec.split_heads(self.mesh.shards("kv_head"))
        seen = ceil(rows * self.mix.mean(lambda length: _seen_bytes(spec, length)))
        pages, padded = (
            ceil(rows * self.held.mean(one.bytes_for)) - rows * one.bytes_per_sequence
            for one in (replace(spec, layout="plain"), spec)
        )
        activations, workspace = self._step_bytes(spec, rows, self.partial_bytes(num_sequences))
        return Memory(
            weights=self._weight_bytes(),
            cache=seen + spec.scale_bytes,
            rounding=pages - seen,
            padding=padded - pages,
            recent=rows * spec.bytes_per_sequence,
            tables=spec.table_bytes(rows, self.mix.longest),
            activations=activations,
            workspace=workspace,
            logits=self._logit_bytes(rows),
        )

    def sequences_in(self, budget: int) -> int:
        """Return the most sequences whose memory is within `budget` bytes on each device; 0 where none is."""
        ways = self.mesh.shards("page")
        low, high = 0, 1
        while self.memory(high * ways).total <= budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.memory(middle * ways).total <= budget else (low, middle)
        return low * ways

    def partial_bytes(self, num_sequences: int) -> int:
        """Return what a decode step's kernel on GPUs holds of a layer: sums and log-sum-exp, float32.

        For each query of each split that a sequence's table has room for, and of the merged result. Nothing
        where the mesh's machine is no GPU, or where the kernel refuses as much.
        """
        if self.sizes is None or self.mesh.machine is None or self.mesh.machine.platform != "gpu":
            return 0
        rows = -(-num_sequences // self.mesh.shards("page"))
        spec = self.spec.split_heads(self.mesh.shards("kv_head"))
        heads = self.sizes.num_heads // self.mesh.shards("q_head")
        return max(_partial_bytes(spec, group, rows, heads, self.held.longest) for group in spec.groups)

    def with_cache(self, codec: str, page_size: int) -> "Deployment":
        """Return the deployment with keys and values in another codec and other pages.

        Raises:
            ValueError: the codec, the page size and the layout do not fit each other.
        """
        groups = [replace(group, codec=codec, value_codec=None) for group in self.spec.groups]
        if self.has_window_codec:
            groups[-1] = self.spec.groups[-1]
        sizes: dict[str, Any] = {
            name: getattr(self.spec, name) for name in ("max_chunk", "layout", "num_stripes")
        }
        spec = CacheSpec.create(groups, page_size=page_size, **sizes)
        return replace(self, spec=spec)

    def _weight_bytes(self) -> int:
        if self.sizes is None:
            return 0
        return sum(part.num_bytes(self.weights, self.mesh) for part in parameters(self.sizes))

    def _logit_bytes(self, rows: int) -> int:
        return rows * -(-self.sizes.vocab_size // self.mesh.shards("vocab")) * _F32 if self.sizes else 0

    def _step_bytes(self, spec: CacheSpec, rows: int, partial: int) -> tuple[int, int]:
        """Return the bytes of activations and of attention's workspace, where a layer holds most of both.

        The widest step has the tokens of prompts' chunks, or one a sequence.
        """
        if self.sizes is None:
            return 0, 0
        tokens = max(self.step_tokens, rows)
        item = tokens * ITEM_BYTES[self.dtype]
        # Decode steps and prompts do not run at once; prompts are counted as plain JAX attends to them.
        workspace = max(partial, self._workspace_bytes(self.sizes, spec, tokens, rows))
        attending = (item * attention_width(self.sizes, self.mesh), workspace)
        return max(attending, (item * mlp_width(self.sizes, self.mesh), 0), key=sum)

    def _workspace_bytes(self, sizes: SizesSection, spec: CacheSpec, tokens: int, rows: int) -> int:
        """Return what attention holds beside its operands and result, one block of tokens at a time.

        For each new token and query head: a sum as wide as a head, a peak and a total, a block of logits and
        one of probabilities, all float32. For each sequence: the block's keys and values of the widest layer,
        in float32 where they have scales.
        """
        block = max(spec.page_size, _BLOCK_TOKENS // spec.page_size * spec.page_size)
        heads = sizes.num_heads // self.mesh.shards("q_head")
        width = max(group.head_dim for group in spec.groups)
        stored = max(_token_bytes(group) for group in spec.groups)
        return tokens * heads * (width + 2 + 2 * block) * _F32 + rows * block * stored


def _partial_bytes(spec: CacheSpec, group: CacheGroup, rows: int, num_heads: int, length: int) -> int:
    """Return the bytes of partial results of one layer, and of what they are merged to."""
    capacity = spec.stripe_pages(length, spec.groups.index(group)) * spec.page_size
    is_latent = group.kind == "latent"
    split = max(_SPLIT_TOKENS * (2 if is_latent else 1), -(-capacity // _MAX_SPLITS))
    split = -(-split // _SPLIT_MULTIPLE) * _SPLIT_MULTIPLE
    num_splits = -(-capacity // split) + 1
    padding = _LATENT_ROWS if is_latent else _HEAD_ROWS
    num_queries = group.num_kv_heads * -(-num_heads // group.num_kv_heads // padding) * padding
    width = -(-group.dims[0] // _CHANNELS) * _CHANNELS
    if rows * num_splits * num_queries * width * _F32 > _MAX_PARTIAL_BYTES:
        return 0
    return rows * (num_splits + 1) * num_queries * (width + 1) * _F32


def _token_bytes(group: CacheGroup) -> int:
    """Return the bytes of a token's keys and values in one layer, as attention reads them."""
    sizes = zip(group.codecs, group.dims, strict=True)
    return group.num_kv_heads * sum(
        dim * (ITEM_BYTES[DTYPES[codec.entry]] if codec.scaling == "none" else _F32) for codec, dim in sizes
    )


def _seen_bytes(spec: CacheSpec, length: int) -> Fraction:
    """Return the bytes of the tokens that a sequence's next query sees, its last page's rest left out."""
    return sum(
        (
            Fraction(group.page_bytes(spec.page_size), spec.page_size) * _seen_tokens(spec, group, length)
            for group in spec.groups
        ),
        Fraction(),
    )


def _seen_tokens(spec: CacheSpec, group: CacheGroup, length: int) -> int:
    """Return the tokens that are seen on a device: of several stripes the first, which has most."""
    seen = length if group.window is None else min(length, group.window)
    pages, rest = divmod(seen, spec.page_size)
    rounds, more = divmod(pages, spec.num_stripes)
    return (rounds + (more > 0)) * spec.page_size + (rest if more == 0 else 0)


@dataclass(frozen=True)
class Choice:
    """One way to store the cache.

    Attributes:
        codec: of keys and values.
        page_size: tokens of a page.
        bytes_per_token: in all layers, padding left out.
        num_sequences: that fit.
        refusal: why there are none such; None where the sizes fit each other.
    """

    codec: str
    page_size: int
    bytes_per_token: int | None
    num_sequences: int | None
    refusal: str | None = None


def choices(
    deployment: Deployment, budget: int, codecs: Sequence[str], page_sizes: Sequence[int]
) -> list[Choice]:
    """Return what fits in `budget` bytes a device with each codec and page size."""
    found = []
    for codec in codecs:
        for page_size in page_sizes:
            try:
                other = deployment.with_cache(codec, page_size)
            except ValueError as error:
                found.append(Choice(codec, page_size, None, None, str(error)))
                continue
            fitting = other.sequences_in(budget)
            found.append(Choice(codec, page_size, other.spec.bytes_per_token, fitting))
    return found
