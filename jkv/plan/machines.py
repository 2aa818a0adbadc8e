"""What one device of a machine can do: memory, bandwidth, arithmetic and links.

Knows figures and where they are from; imports no JAX.
"""

from dataclasses import dataclass

_TPU = "jax 0.11.2, tpu_info.py; cloud.google.com/tpu/docs"
_GPU = "NVIDIA's data sheet, dense"


@dataclass(frozen=True)
class Machine:
    """A device, as JAX counts them: half a TPU7x.

    Attributes:
        hbm_bytes: memory that programs get.
        hbm_bandwidth: bytes a second.
        flops: bfloat16 operations a second, a multiplication and an addition each.
        link_bandwidth: bytes a second that a device sends by all its links together.
        source: where the figures are from.
    """

    hbm_bytes: int
    hbm_bandwidth: float
    flops: float
    link_bandwidth: float
    source: str


# A TPU's memory is what libtpu 0.0.48 lets programs have. Links: v5e 1,600 and v6e 3,200 Gbit/s a chip each
# way; v5p and TPU7x 1,200 GB/s a chip, both ways together; NVLink 900 GB/s, both ways together.
MACHINES = {
    "v5e": Machine(int(15.75 * 2**30), 0.82e12, 197e12, 200e9, _TPU),
    "v5p": Machine(int(95.73 * 2**30), 2.46e12, 459e12, 600e9, _TPU),
    "v6e": Machine(int(31.24 * 2**30), 1.64e12, 920e12, 400e9, _TPU),
    "tpu7x": Machine(int(94.74 * 2**30), 3.70e12, 1155e12, 300e9, _TPU),
    "h100": Machine(80 * 10**9, 3.35e12, 989e12, 450e9, _GPU),
    "h200": Machine(141 * 10**9, 4.80e12, 989e12, 450e9, _GPU),
}
