"""Pools laid out in rows of lanes, slot after slot, beside the shapes that say where a slot is."""

import math

import numpy as np


def in_rows(pool: np.ndarray, num_lanes: int, fill: float = np.nan) -> np.ndarray:
    """Lay `[page, kv_head, slot, *entry]` out in rows of `num_lanes`, with `fill` where nothing is held."""
    *outer, num_slots = pool.shape[:3]
    num_entries = math.prod(pool.shape[3:])
    width = num_entries
    while num_lanes % width and width % num_lanes:
        width += 1
    num_rows = math.ceil(num_slots * width / num_lanes)
    flat = np.full((*outer, num_rows * num_lanes), fill, pool.dtype)
    slots = flat[..., : num_slots * width].reshape(*outer, num_slots, width)
    slots[..., :num_entries] = pool.reshape(*outer, num_slots, num_entries)
    flat[..., : num_slots * width] = slots.reshape(*outer, -1)
    return flat.reshape(*outer, num_rows, num_lanes)
