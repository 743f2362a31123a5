"""Plans by the partitioner's and the compiler's word: without surprises, and the best of several.

`without_surprises` asks Shardy for collectives that a plan does not know, forbids the cuts that
they come from, and plans again. `best_of` plans on the best meshes of a search, one by one, and
keeps the plan that is fastest with what the compiler made of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import named_mesh
from jaxscaler.errors import ConstraintError, InfeasibleError, PlanError
from jaxscaler.plan import Plan
from jaxscaler.program import Line, Split, forbid, op_trans, ops, region
from jaxscaler.report.show import time_text
from jaxscaler.verify.normal_form import Collective
from jaxscaler.verify.report import Verified, audited, moving_seconds

ROUNDS = 2  # of planning again for what Shardy moves besides
WORTH = 0.01  # of a step's seconds that unplanned collectives must take, to be planned away

Search = Callable[..., Any]  # (memory=, constraints=more lines, axes=the only mesh) -> Planned


def without_surprises(search: Search, given: tuple = (), rounds: int = ROUNDS) -> Search:
    """`search`, but its plans are audited.

    Where Shardy makes collectives that a plan does not know, and that take more than `WORTH` of the
    step, the cuts of the ops that they stand at are forbidden, on top of the constraints `given`,
    and the step is planned again, as long as that makes plan and surprises together quicker. What
    remains after `rounds` is in the plan's notes.
    """

    def careful(**options: Any) -> Any:
        planned, lines = search(constraints=given, **options), []
        surprises, cost = surprise(planned.plan)
        for _ in range(rounds):
            more = [line for c in surprises for line in pins(planned, c) if line not in lines]
            if not more:
                break
            try:
                again = search(constraints=(*given, *lines, *more), **options)
            except (InfeasibleError, ConstraintError):
                break
            left, its_cost = surprise(again.plan)
            if its_cost >= cost:
                break
            planned, surprises, cost, lines = again, left, its_cost, [*lines, *more]
        notes = [f"planned again without what Shardy moves besides: {line}" for line in lines]
        notes += [
            f"not in the plan: Shardy also makes {c.count} x {c.kind} over {','.join(c.axes)} of "
            f"{c.bytes} bytes, {c.scope} at {c.source or 'an unknown line'}"
            for c in surprises
        ]
        return _noted(planned, notes)

    return careful


def surprise(plan: Plan) -> tuple[tuple[Collective, ...], float]:
    """(unplanned collectives that are worth a search, the most first; seconds of a step with all
    that is unplanned)."""
    mesh = named_mesh(Cluster.from_dict(plan.cluster), plan.axes)
    unplanned = audited(plan).unplanned if plan.axes else ()
    seconds = [moving_seconds((c,), mesh) for c in unplanned]
    worth = WORTH * plan.predicted.seconds
    found = tuple(c for c, s in zip(unplanned, seconds) if s > worth)
    return found, plan.predicted.seconds + sum(seconds)


def pins(planned: Any, c: Collective) -> list[Line]:
    """Lines that forbid what the ops at a collective's place are cut by along its axes."""
    graph, space = planned.graph, planned.space
    decided = {d.subject: d for d in planned.plan.decisions}
    axes = {re.sub(r":\(.*", "", axis) for axis in c.axes}
    found: dict[Line, None] = {}
    for op in graph.ops:
        kind = graph.kinds[op.kind]
        at = space.node_of.get(int(planned.folded.op_class[op.id]))
        if at is None or not _stands_at(c, op.scope, kind.primitive, op.source):
            continue
        decision = decided[space.nodes[at].name]
        word = {"op": ops, "cluster": region}.get(decision.what)
        if word is None:
            continue
        for axis, factor in decision.cuts:
            if axis in axes:
                found[forbid(op_trans(word(name=decision.subject), Split(factor)))] = None
    return list(found)


def _stands_at(c: Collective, scope: str, primitive: str, source: str) -> bool:
    """Whether an op of the graph is the one that a collective names by path and line."""
    if c.source and source and c.source != source:
        return False
    parts = [part for part in re.split(r"[/()]", c.scope) if part]
    # what moves between layouts stands at a constraint, and no longer names the primitive
    named = parts[-1:] in ([primitive], ["sharding_constraint"])
    return named and set(scope.split("/")) <= {*parts, ""}


def best_of(
    first: Any,
    count: int,
    search_on: Callable[[Sequence[tuple[str, int]]], Any],
    check: Callable[[Plan], Verified],
) -> Any:
    """The planned step that is fastest by the compiler's word (`Verified.seconds`): `first`, or the
    best one of each of the `count - 1` meshes that its search found next best.

    `search_on(axes)` plans, until it fits, on one mesh. A plan that does not fit, or whose compiled
    text is not to be had, is not chosen. What each came to is in the notes.
    """
    others = sorted(
        (seconds, name)
        for name, _, seconds in first.plan.search.meshes
        if _axes(name) not in (None, first.plan.axes)
    )
    told, best, least = [], first, _seconds(first, check)
    told.append(f"{_name(first)}: {_said(least)}")
    for _, name in others[: count - 1]:
        try:
            other = search_on(_axes(name) or ())
        except (InfeasibleError, ConstraintError, PlanError) as error:
            told.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        seconds = _seconds(other, check)
        told.append(f"{_name(other)}: {_said(seconds)}")
        if seconds is not None and (least is None or seconds < least):
            best, least = other, seconds
    return _noted(best, [f"by the compiler's word, {'; '.join(told)}"])


def _seconds(planned: Any, check: Callable[[Plan], Verified]) -> float | None:
    found = check(planned.plan)
    return found.seconds if found.fits else None


def _said(seconds: float | None) -> str:
    return "not verified" if seconds is None else f"{time_text(seconds)} a step"


def _axes(mesh: str) -> tuple[tuple[str, int], ...] | None:
    """The axes that a mesh's text names; None for one device, and for numbers in holes."""
    found = re.fullmatch(r"\w+=\d+(,\w+=\d+)*", mesh)
    pairs = (part.split("=") for part in mesh.split(",")) if found else ()
    return tuple((name, int(size)) for name, size in pairs) or None


def _name(planned: Any) -> str:
    return ",".join(f"{name}={size}" for name, size in planned.plan.axes) or "one device"


def _noted(planned: Any, notes: Sequence[str]) -> Any:
    plan = planned.plan
    return replace(planned, plan=replace(plan, notes=(*plan.notes, *notes)))
