"""The configuration as frozen dataclasses: model, cache, engine, and the whole.

Knows what each value may be; reads no file and imports no JAX.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import Field

from jkv.config.mesh import MeshSection
from jkv.config.section import Conflict, Count, Real, Section, Text
from jkv.config.sizes import SizesSection

UncalibratedCodec = Literal["f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "int4_token"]
CalibratedCodec = Literal["int8_static", "fp8_e4m3_static", "fp8_e5m2_static"]
CodecName = Literal[UncalibratedCodec, CalibratedCodec]


@dataclass(frozen=True)
class ModelSection(Section):
    """Which weights, and in what precision.

    Attributes:
        path: a bundled model's name, a GGUF file, a checkpoint folder, or a Hugging Face hub id.
        dtype: activations.
        weights: how weights are stored.
        sizes: of the model, for planning without its files; null reads them.
        has_random_weights: they are drawn, of the sizes, and no file is read: to measure, not to read.
    """

    path: Text
    dtype: Literal["float32", "bfloat16"] = "float32"
    weights: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    sizes: SizesSection | None = None
    has_random_weights: bool = False

    def conflicts(self) -> list[Conflict]:
        """Those of the sizes, without which there is nothing to draw."""
        if self.sizes is not None:
            return [(("sizes", *path), reason) for path, reason in self.sizes.conflicts()]
        reason = "must be given for random weights, got none; name a model of configs/models"
        return [(("sizes",), reason)] if self.has_random_weights else []


@dataclass(frozen=True)
class CacheSection(Section):
    """How keys and values are kept.

    Attributes:
        layout: dense keeps every token in pages of the sequence's own; window does too, but of layers with a
            window no more than they see; paged is as window, from a pool that all sequences share. auto is
            window where layers have one, else dense.
        page_size: tokens of a page.
        pool_layout: how the tokens of a page lie in memory; auto is tpu on TPUs and plain elsewhere.
        capacity: tokens a sequence may hold; auto is its prompt and new tokens.
        num_pages: pages of the pool, of each group of layers, for layout paged; auto is what the batch needs.
        codec: how keys are stored, and values unless they have a codec of their own.
        value_codec: how values are stored; null is as keys.
        window_codec: how layers with a window store keys and values; null is as the other layers.
        scales: file of calibrated scales, which the static codecs need.
    """

    layout: Literal["auto", "dense", "paged", "window"]
    page_size: Count = 16
    pool_layout: Literal["auto", "plain", "tpu", "gpu"] = "auto"
    capacity: Count | Literal["auto"] = "auto"
    num_pages: Count | Literal["auto"] = "auto"
    codec: CodecName = "f32"
    value_codec: CodecName | None = None
    window_codec: CodecName | None = None
    scales: Text | None = None

    def conflicts(self) -> list[Conflict]:
        """A shared pool alone has a number of pages, and codecs that need scales alone have them."""
        found = self._scale_conflicts()
        if self.layout != "paged" and self.num_pages != "auto":
            reason = f'must be auto without a shared pool, got {self.num_pages}; choose layout "paged"'
            found.append((("num_pages",), reason))
        return found

    def _scale_conflicts(self) -> list[Conflict]:
        codecs = [codec for codec in (self.codec, self.value_codec, self.window_codec) if codec is not None]
        needs_scales = not set(codecs).isdisjoint(get_args(CalibratedCodec))
        if needs_scales and self.scales is None:
            reason = f"must name a file for {', '.join(codecs)}, got none"
            return [(("scales",), f"{reason}; jkv calibrate writes it")]
        if not needs_scales and self.scales is not None:
            reason = f"must be left out for {', '.join(codecs)}"
            return [(("scales",), f'{reason}, got "{self.scales}"; it is for codecs that end in _static')]
        return []


@dataclass(frozen=True)
class SamplingSection(Section):
    """How the next token is chosen where a request does not say.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: likeliest tokens kept; 0 keeps all.
        top_p: probability kept, likeliest tokens first; 1 keeps all.
        min_p: least probability kept, as a share of the likeliest token's.
        repetition_penalty: divides positive logits of tokens seen, multiplies negative ones; 1 is none.
        presence_penalty: subtracted from the logits of tokens generated.
        frequency_penalty: subtracted from a logit for each time its token was generated.
        max_new_tokens: tokens generated at most.
    """

    temperature: Annotated[Real, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(strict=True, ge=0)] = 0
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[Real, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Real, Field(gt=0)] = 1.0
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    max_new_tokens: Count = 128


@dataclass(frozen=True)
class EngineSection(Section):
    """Limits of one running engine.

    Attributes:
        max_sequences: rows of the batch that prompts are decoded in; a score and a benchmark have their own.
        prefill_buckets: widths of a prompt's steps, rising; each is compiled once.
        attention: the implementation; auto chooses by platform.
        seed: start of every random choice.
        sampling: see SamplingSection.
    """

    max_sequences: Count
    prefill_buckets: tuple[Count, ...] = (16, 64, 256, 512)
    attention: Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu"] = "auto"
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    sampling: SamplingSection = field(default_factory=SamplingSection)

    def conflicts(self) -> list[Conflict]:
        """There are buckets, and they rise."""
        buckets = list(self.prefill_buckets)
        if not buckets or buckets != sorted(set(buckets)):
            reason = f"must be one width or more, rising, got {buckets}"
            return [(("prefill_buckets",), f"{reason}; sort them and keep each once")]
        return []


@dataclass(frozen=True)
class DecodeConfig:
    """Everything that a decode is configured by; hashable.

    Attributes:
        model: which weights, and in what precision.
        cache: how keys and values are kept.
        mesh: the devices and how arrays are split over them.
        engine: limits, and defaults of requests.
    """

    model: ModelSection
    cache: CacheSection
    mesh: MeshSection
    engine: EngineSection
