"""Planning with loops over parts, where memory binds: co-shards and gradient accumulation.

A loop's work, buffers and collectives are priced as all else is: the step is traced anew with it
and planned. So the search is an outer one, over few programs: candidates by what they could save,
each in more and more parts while that helps, what helped being kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxscaler import _compat
from jaxscaler.errors import InfeasibleError, RewriteError
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.ir import BATCH, FORWARD, OpGraph
from jaxscaler.replan import binds
from jaxscaler.rewrite.accumulate import batch_division
from jaxscaler.rewrite.candidates import candidates
from jaxscaler.rewrite.changes import Accumulate, Change
from jaxscaler.space.segments import segmentations
from jaxscaler.trace import Traced

PARTS = (2, 4, 8, 16)
TRIES = 12  # programs
BETTER = 0.995  # of the best plan's seconds, which a loop must reach to be kept
# (group of segments, what, changes by parts and lanes, size of the factor: 1 if it is refused)
Option = tuple[str, str, Callable[[int, int], tuple[Change, ...]], int]


def plan_with_loops(
    search: Callable[[Traced, OpGraph, float], Any],
    traced: Traced,
    graph: OpGraph,
    loops: bool | Sequence[Change],
    devices: int,
    time_limit: float,
    say: Callable[[str, str], None],
) -> Any:
    """The planned step (`planner.Planned`), with loops over parts where that is cheaper.

    `search(traced, graph, seconds)` plans a step with the changes that it has. Its plan is the
    answer where no loss is marked, or memory costs nothing. `loops`: whether to look for any, or
    those to take. All programs beside the first share `time_limit` seconds. Raises InfeasibleError
    if no program that was tried fits. The plan's notes say what was tried, and what it came to.
    """
    if not isinstance(loops, bool):
        step = traced.changed(loops)
        taken = search(step, build(step), time_limit)
        return replace(taken, plan=replace(taken.plan, changes=taken.traced.changes))
    best, error = _planned(search, traced, graph, time_limit)
    if not (loops and traced.losses) or (
        best is not None and not best.plan.changes and not binds(best)
    ):
        if error is not None:
            raise error
        return best
    end = time.perf_counter() + time_limit
    kept: dict[str, tuple[str, tuple[Change, ...]]] = {}  # group of segments -> label, changes
    tried: list[str] = []
    for group, what, changes_in, size in _options(traced, graph):
        if size == 1:
            tried.append(what)
        more = kept
        worse: set[int] = set()  # numbers of lanes, of which more parts make no better plan
        for parts, lanes in _numbers(size, devices):
            if lanes in worse:
                continue
            left = end - time.perf_counter()
            if len(tried) >= TRIES or left < 0:
                tried.append("no more were tried")
                return _answer(best, error, kept, tried)
            label = f"{what}, {parts} parts" + (f" in {lanes} lanes" if lanes > 1 else "")
            say("loops", label)
            more = {**kept, group: (label, changes_in(parts, lanes))}
            step = traced.changed([c for _, some in more.values() for c in some])
            found, _ = _planned(search, step, build(step), left / (TRIES - len(tried)))
            tried.append(f"{label}: {_seconds(found)}")
            if found is not None:
                if best is not None and _cost(found) > BETTER * _cost(best):
                    worse.add(lanes)
                else:
                    best, kept = found, more
        if best is None:  # not enough alone
            kept = more
    return _answer(best, error, kept, tried)


def _numbers(size: int, devices: int) -> Iterator[tuple[int, int]]:
    """(parts, lanes) to try of a factor: every device keeps sums, or as the plan lays them out."""
    for parts in PARTS:
        for lanes in dict.fromkeys((devices, 1)):
            if size % (parts * lanes) == 0:
                yield parts, lanes


def _answer(best: Any, error: Exception | None, kept: dict, tried: Sequence[str]) -> Any:
    if best is None:
        assert error is not None
        raise InfeasibleError(f"{error}\nnor with loops over parts: {'; '.join(tried) or 'none'}")
    notes = [f"loops over parts that were tried: {'; '.join(tried) or 'none is legal'}"]
    if kept:
        notes.insert(0, f"loops over parts: {', '.join(label for label, _ in kept.values())}")
    plan = replace(best.plan, changes=best.traced.changes, notes=(*best.plan.notes, *notes))
    return replace(best, plan=plan)


def _planned(
    search: Callable, step: Traced, graph: OpGraph, seconds: float
) -> tuple[Any, InfeasibleError | None]:
    """(plan of a step with its changes, None), or (None, why none fits)."""
    try:
        return search(step, graph, seconds), None
    except InfeasibleError as error:
        return None, error


def _cost(planned: Any) -> float:
    return planned.plan.predicted.seconds


def _seconds(planned: Any) -> str:
    return "does not fit" if planned is None else f"{_cost(planned):.4g} s"


# -- what may be looped over -------------------------------------------------------------------


def _options(traced: Traced, graph: OpGraph) -> Iterator[Option]:
    """What may be tried, what makes nothing twice first; of one group at most one is kept."""
    for loss, jaxpr in enumerate(traced.losses):
        batch = batch_of(graph, loss, jaxpr)
        try:
            size = batch_division(jaxpr, dict(batch)).size
        except RewriteError as error:
            yield "", f"no gradient accumulation: {error}", _accumulation(loss, batch), 1
        else:
            yield f"loss {loss}", f"gradient accumulation {loss}", _accumulation(loss, batch), size
    segments = next(iter(segmentations(graph, fold(graph))), ())
    for candidate in candidates(traced.losses, segments):
        yield str(candidate.segments[0]), str(candidate), candidate.changes, candidate.size


def _accumulation(loss: int, batch: tuple) -> Callable[[int, int], tuple[Change, ...]]:
    return lambda parts, lanes: (Accumulate(loss, parts, batch, lanes),)


def batch_of(graph: OpGraph, loss: int, jaxpr: Any) -> tuple[tuple[int, int], ...]:
    """(argument of a loss, constants first; 0) of what comes from the step's batch, as the op that
    reads it first in the whole step's graph tells."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    position = {v: i for i, v in enumerate((*inner.constvars, *inner.invars))}
    found: set[int] = set()
    for op in graph.ops:
        origin = op.origin
        if origin is None or (origin.loss, len(origin.key)) != (loss, 1) or op.phase != FORWARD:
            continue
        eqn = inner.eqns[origin.key[0]]
        if len(eqn.invars) != len(op.inputs):
            continue  # a part of a loop or call
        for var, value in zip(eqn.invars, op.inputs):
            if value >= 0 and not _compat.is_literal(var) and var in position:
                known = graph.values[value]
                if known.role == BATCH and known.shape:
                    found.add(position[var])
    return tuple((i, 0) for i in sorted(found))
