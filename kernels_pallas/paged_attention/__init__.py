"""Causal attention of a step's new tokens over the pages that their sequences own."""

from kernels_pallas.paged_attention.contract import PagedArguments, Pages, PageSizes, Stripe, Tiling, check
from kernels_pallas.paged_attention.reference import paged_attention as reference
from kernels_pallas.paged_attention.xla import paged_attention as xla

__all__ = ["PageSizes", "PagedArguments", "Pages", "Stripe", "Tiling", "check", "reference", "xla"]
