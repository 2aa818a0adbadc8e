"""Pools laid out in rows of lanes, in columns of slots, beside the shapes that say where a slot is."""

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
    if pool.ndim > 3 and width < num_lanes:
        num_rows = math.ceil(num_slots / (num_lanes // width))
    matrices = np.full((*outer, num_rows, num_lanes), fill, pool.dtype)
    for slot in range(num_slots):
        for entry in range(num_entries):
            if pool.ndim == 3:
                row, lane = divmod(slot, num_lanes)
            elif width < num_lanes:
                row, lane = slot % num_rows, slot // num_rows * width + entry
            else:
                row, lane = entry // num_lanes * num_slots + slot, entry % num_lanes
            matrices[..., row, lane] = pool.reshape(*outer, num_slots, num_entries)[..., slot, entry]
    return matrices
