"""The one door to `kernels_pallas`: checks the call, writes the new rows, chooses an implementation."""

from jkv.ops.attention import Attended, append, attend, attend_latent
from jkv.ops.causal import causal_attention
from jkv.ops.checks import Where
from jkv.ops.choice import Chosen, Implementation, choose
from jkv.ops.pools import read_pages
from kernels_pallas.latent_attention import UpProjections

__all__ = [
    "Attended",
    "Chosen",
    "Implementation",
    "UpProjections",
    "Where",
    "append",
    "attend",
    "attend_latent",
    "causal_attention",
    "choose",
    "read_pages",
]
