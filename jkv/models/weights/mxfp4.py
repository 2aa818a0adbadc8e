"""MXFP4 checkpoints: blocks of 32 four-bit numbers with a power of two, widened while they are read.

Knows the names that gpt-oss gives the two; knows no format and no model.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped

from jkv.models.weights.source import TensorInfo, TensorSource

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32
# E2M1, sign first (OCP Microscaling Formats 1.0, section 5.3.3); of a byte's two, the lower bits come first.
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_HALF, -_HALF])
# E8M0: a scale is two to the power of its byte less this.
_BIAS = 127


class Mxfp4Source:
    """Reads another source's pairs `X_blocks [..., out, in / 32, 16]` and `X_scales` as `X [..., in, out]`.

    Args:
        source: the checkpoint.

    Raises:
        ValueError: blocks have no scales, or those are of another shape; the message names them.
    """

    def __init__(self, source: TensorSource):
        self._source = source
        infos = source.tensors
        packed = {name.removesuffix(_BLOCKS): infos[name].shape for name in infos if name.endswith(_BLOCKS)}
        unfit = sorted(
            name
            for name, shape in packed.items()
            if name + _SCALES not in infos
            or infos[name + _SCALES].shape != shape[:-1]
            or shape[-1] != _BLOCK // 2
        )
        if unfit:
            raise ValueError(f"MXFP4 blocks must be of 16 bytes with a scale each, got others for {unfit}")
        widened = {
            name: TensorInfo((*outer, num_blocks * _BLOCK, rows), np.dtype(np.float32), "MXFP4")
            for name, (*outer, rows, num_blocks, _) in packed.items()
        }
        consumed = {name + suffix for name in packed for suffix in (_BLOCKS, _SCALES)}
        self._packed = packed.keys()
        self._infos = widened | {name: info for name, info in infos.items() if name not in consumed}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, blocks and scales as one, by its name in the file."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Shaped[np.ndarray, "..."]:
        """Return a tensor's piece, whole along the axes that `index` leaves out."""
        if name not in self._packed:
            return self._source.read(name, index)
        shape = self._infos[name].shape
        *outer, inputs, rows = (*index, *(slice(None),) * (len(shape) - len(index)))
        start, stop, _ = inputs.indices(shape[-2])
        first = start // _BLOCK
        stored = (*outer, rows, slice(first, -(-stop // _BLOCK)))
        blocks = self._source.read(name + _BLOCKS, stored)
        exponents = self._source.read(name + _SCALES, stored).astype(np.int32) - _BIAS
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], _BLOCK)
        values = np.ldexp(_VALUES[codes], exponents[..., None])
        values = values.reshape(*values.shape[:-2], -1)[..., start - first * _BLOCK : stop - first * _BLOCK]
        return values.swapaxes(-1, -2)
