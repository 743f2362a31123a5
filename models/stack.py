"""Layers in a row: unrolled (`name_0`, `name_1`, ...) or a loop over stacked parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn


def stacked(
    block: Any, *config: Any, layers: int, name: str, scan: bool = False, remat: bool = False
) -> Callable[..., Any]:
    """The function (x, *given) -> x of `layers` blocks; every block is given the same.

    `block`: a linen module class; `block(*config)` maps (x, *given) to (x, None), the pair that
    `nn.scan` wants. Called in a compact method; the function may be called several times, which
    visits the same parameters again. `scan` makes it one loop, with parameters stacked in `name`.
    """
    # A loop's body can not be merged with its recomputation, so it needs no barrier.
    block = nn.remat(block, prevent_cse=not scan) if remat else block
    if scan:
        block = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=layers,
        )
        modules = [block(*config, name=name)]
    else:
        modules = [block(*config, name=f"{name}_{i}") for i in range(layers)]

    def run(x: Any, *given: Any) -> Any:
        for module in modules:
            x, _ = module(x, *given)
        return x

    return run
