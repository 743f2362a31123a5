"""A deep stack of equal layers from compiles of shallow ones.

Unrolled layers make a program, and the time to compile it, grow with depth. What a compile says
grows evenly: each layer more adds the same bytes, collectives and cycles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import PlanError
from jaxscaler.plan import Plan
from jaxscaler.verify.normal_form import Collective, totals
from jaxscaler.verify.report import by_layer, verified
from jaxscaler.verify.worker import EXTRAPOLATED, Compiled, Memory

# Layers. In a stack of 2, TPU compilers keep other values in VMEM than in deeper ones, around the
# layers too. Two apart, so that such a difference weighs half.
SHALLOW = (3, 5)


def compiled_at_depth(
    plan_at: Callable[[int], Plan],
    layers: int,
    target: str | Cluster | None = None,
    shallow: tuple[int, int] = SHALLOW,
    **options: Any,
) -> Compiled:
    """What a target's compiler would make of `layers` layers, from compiles of two shallow stacks.

    `plan_at(n)`: the plan of the step with n layers, all in the layouts of the deep one (as
    `plan(..., constraints=deep_plan)`, on its mesh). `options` as in `Plan.verify`. Raises
    PlanError for other meshes. A compile that fails is returned as it is.
    """
    plans = [plan_at(n) for n in shallow]
    if plans[0].axes != plans[1].axes:
        raise PlanError(
            f"{shallow[0]} and {shallow[1]} layers were planned on other meshes, "
            f"{dict(plans[0].axes)} and {dict(plans[1].axes)}: give both the deep plan's"
        )
    found = []
    for plan in plans:
        found.append(verified(plan, target, **options).compiled)
        if not found[-1].ok:
            return found[-1]
    return extrapolate((found[0], found[1]), shallow, layers)


def extrapolate(compiled: tuple[Compiled, Compiled], at: tuple[int, int], layers: int) -> Compiled:
    """`layers` layers from compiles `at` two depths: memory by kind, collectives (one for each kind
    and axes, of all bytes), cycles by path without the layers' numbers; each grows evenly.
    """
    low, high = compiled
    a, b = at

    def grown(x: float, y: float) -> int:
        return round(x + (y - x) * (layers - a) / (b - a))

    def all_grown(x: Counter, y: Counter) -> Counter:
        return Counter({key: grown(x[key], y[key]) for key in {**x, **y}})

    assert low.memory is not None and high.memory is not None, "compiles that came to an end"
    kinds = [f.name for f in fields(Memory)]
    memory = Memory(**{k: grown(getattr(low.memory, k), getattr(high.memory, k)) for k in kinds})
    collectives = cycles = None
    if low.collectives is not None and high.collectives is not None:
        moved = all_grown(*(_bytes(c) for c in (low.collectives, high.collectives)))
        collectives = tuple(
            Collective(kind, axes, size, "") for (kind, axes), size in sorted(moved.items()) if size
        )
    if low.cycles is not None and high.cycles is not None:
        cycles = tuple(all_grown(by_layer(low.cycles), by_layer(high.cycles)).most_common())
    return replace(
        high,
        status=EXTRAPOLATED,
        detail=f"{layers} layers from compiles of {a} and {b}",
        memory=memory,
        collectives=collectives,
        cycles=cycles,
        seconds=low.seconds + high.seconds,
        cached=low.cached and high.cached,
        text=None,
    )


def _bytes(collectives: tuple[Collective, ...]) -> Counter:
    return Counter({key: size for key, (_, size) in totals(collectives).items()})
