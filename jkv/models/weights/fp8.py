"""FP8 checkpoints: weights multiplied by their stored scales while they are read.

Knows the names that scales go by; knows no format and no model.
"""

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jkv.models.weights.source import TensorInfo, TensorSource

_FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
# "_inv" is DeepSeek's name for a scale that multiplies too.
_SCALES = ("_scale_inv", "_scale")
# What an activation would be divided by before an FP8 product; weights are widened here instead.
_ACTIVATION_SCALE = ".input_scale"


class Fp8Source:
    """Reads another source's FP8 weights as float32, scaled; its scale tensors are not listed.

    A weight's scale is a number, a column of one a row, or one a block.

    Args:
        source: the checkpoint.
        block: rows and columns of a block (`weight_block_size` of config.json), where there are blocks.

    Raises:
        ValueError: an FP8 weight has no scale, or one of another shape; the message names them.
    """

    def __init__(self, source: TensorSource, block: tuple[int, int] | None):
        self._source = source
        infos = source.tensors
        weights = [name for name, info in infos.items() if info.dtype in _FP8]
        self._scales = {name: scale for name in weights if (scale := _scale_name(name, infos))}
        unscaled = sorted(set(weights) - set(self._scales))
        if unscaled:
            raise ValueError(f"FP8 weights must have scales, got none for {unscaled}")
        self._blocks = {
            name: _block(name, infos[name].shape, infos[scale].shape, block)
            for name, scale in self._scales.items()
        }
        consumed = set(self._scales.values())
        self._infos = {
            name: replace(info, dtype=np.dtype(np.float32)) if name in self._scales else info
            for name, info in infos.items()
            if name not in consumed and not name.endswith(_ACTIVATION_SCALE)
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor but the scales, by its name in the file."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Shaped[np.ndarray, "..."]:
        """Return a tensor's piece, whole along the axes that `index` leaves out."""
        stored = self._source.read(name, index)
        if name not in self._scales:
            return stored
        shape = self._infos[name].shape
        index = (*index, *(slice(None),) * (len(shape) - len(index)))
        places = [
            np.arange(size)[piece] // span
            for piece, size, span in zip(index, shape, self._blocks[name], strict=True)
        ]
        scale = self._source.read(self._scales[name]).astype(np.float32)
        spread = scale.reshape(_num_blocks(shape, self._blocks[name]))[np.ix_(*places)]
        return np.multiply(stored.astype(np.float32), spread, out=spread)


def _scale_name(name: str, infos: Mapping[str, TensorInfo]) -> str | None:
    return next((name + suffix for suffix in _SCALES if name + suffix in infos), None)


def _num_blocks(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // span) for size, span in zip(shape, block, strict=True))


def _block(
    name: str, shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, ...]:
    """Return the rows and columns that one number of the scale covers."""
    if scale in ((), (1,)):
        return shape
    if scale == (shape[0], 1):
        return (1, shape[1])
    if block is not None and scale == _num_blocks(shape, block):
        return block
    raise ValueError(
        f"the scale of {name} {shape} must be a number, a column or one a block {block}, got {scale}"
    )
