"""Writes a step's new keys and values into the pages that their sequences own."""

from kernels_pallas.page_write.xla import write_pages as xla

__all__ = ["xla"]
