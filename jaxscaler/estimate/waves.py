"""Waves of tiles: how long products take longer where a device's last wave is not full.

A product's result is cut into tiles, which go to multiprocessors one wave after the other; a wave
with few tiles takes as long as a full one. Libraries choose among sizes of tiles, small ones at a
loss. Source: NVIDIA, "Matrix Multiplication Background User's Guide", sections "Tile Quantization",
"Wave Quantization" and "Typical Tile Dimensions"; what small tiles lose is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# Streaming multiprocessors: NVIDIA's whitepapers and datasheets.
MULTIPROCESSORS: Mapping[str, int] = {
    "v100-16": 80, "v100-32": 80, "a100-40": 108, "a100-80": 108, "l4": 58,
    "h100": 132, "h100-96": 132, "h800": 132, "h200": 132, "b200": 148, "gb200": 148, "gb300": 160,
}  # fmt: skip
# Elements of a tile, and its speed beside that of the largest.
TILES = ((256 * 128, 1.0), (128 * 128, 0.9), (128 * 64, 0.75), (64 * 64, 0.55))


def idle(device: str, elements: float) -> float:
    """Time lost by waves beside the time of a product that results in `elements` on a device.

    0 for devices without multiprocessors that are known.
    """
    count = MULTIPROCESSORS.get(device)
    if not count or elements < 1:
        return 0.0
    spent = min(
        math.ceil(elements / (count * area) - 1e-9) * count * area / speed for area, speed in TILES
    )
    return spent / elements - 1
