"""The joint search: plans without stages and pipelines compete in one answer.

What decides is the price of `plan_pipeline`, never an estimate. An exhaustive search prices the
whole space (`space.every_candidate`). Else shapes are climbed: from one whose stages hold the state
on one node each, to neighbours (more or fewer stages or micro-batches, recomputation, lanes,
chunks) until none is better; each is cut where `balance.py` says, which learns from every price.
Then come sub-meshes that are not equal, and orders searched by CP-SAT, for the best.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxscaler import planner
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.errors import ConstraintError, ScheduleError
from jaxscaler.exchange import exchanged
from jaxscaler.pipeline.balance import Works
from jaxscaler.pipeline.climb import Climb
from jaxscaler.pipeline.dispatch import LIMIT
from jaxscaler.pipeline.found import Found
from jaxscaler.pipeline.guess import Guesses
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.planner import is_task_order
from jaxscaler.pipeline.space import KEPT, PLANNED, SCHEDULES, TWICE, VISITS, space_of
from jaxscaler.rewrite.changes import Change, Recompute, Stages
from jaxscaler.rewrite.cuts import is_stage_line
from jaxscaler.trace import Traced


def search_pipelines(
    traced: Traced,
    cluster: Cluster | Mixed,
    *,
    constraints: Any = (),
    micro: int | Sequence[int] | None = None,
    stages: int | Sequence[int] | Stages | None = None,
    schedules: Sequence[str] | None = None,
    changes: Sequence[Sequence[Change]] | None = None,
    lanes: Sequence[int] | None = None,
    simplest: float = 0.0,
    memory: float = planner.MEMORY,
    time_limit: float = 2 * planner.TIME_LIMIT,
    known: Sequence[PipelinePlan] = (),
    exhaustive: bool = False,
    spmd: bool | planner.Planned = True,
    dispatch_limit: float | None = LIMIT,
    dispatch: bool = True,
    loss: int = 0,
    progress: planner.Progress | None = None,
) -> Found:
    """The fastest plan of a step on a cluster, with stages or without.

    `constraints`: as `plan_pipeline` has them; lines with Stage(k) fix the cut. `micro`, `stages`:
    numbers to be looked at (default: all that divide), or a cut. `schedules`: of
    `space.SCHEDULES`, which are the default (with a cut that is said, nf1b too), and chimera;
    orders are also searched. `changes`: kinds of recomputation to be looked at (default: none, all
    but products, every layer, what the plan without stages makes again). `lanes`: as
    `plan_pipeline` (default: 1, and as many as a stage may split the batch by).
    `simplest`: of the plans within this share of the best, the simplest: without stages before
    pipelines, then fewer stages, fewer micro-batches, no recomputation, the plainer schedule.
    `known`: plans of this step and cluster that compete as they are; the search begins from their
    shapes too. `exhaustive`: price the whole space of cuts (before any operation), sub-meshes,
    micro-batches, changes, lanes and schedules: for small steps. `spmd`: whether plans without
    stages compete, or such a plan. `time_limit`: seconds beyond tracing after which nothing else is
    begun; notes say what was left. Pipelines have half of it at least. `dispatch`: as
    `plan_pipeline` has it.

    Raises InfeasibleError, naming the least memory per kind, where nothing fits; PlanError without
    a marked loss; ConstraintError for lines that leave nothing.
    """
    say = progress or (lambda phase, detail: None)
    traced, lines = exchanged(traced, planner.listed(constraints))
    assigned: list[Any] = [line for line in lines if is_stage_line(line)]
    rest = tuple(line for line in lines if not is_stage_line(line))
    others = tuple(line for line in rest if not is_task_order(line))
    if simplest < 0:
        raise ConstraintError(f"simplest={simplest}: the share by which a plan may be slower, >= 0")
    names = _names(schedules, bool(assigned) or isinstance(stages, Stages))
    given = None
    if changes is not None:
        given = {", ".join(map(str, c)) or KEPT: tuple(c) for c in changes}
    space = space_of(
        traced, cluster, stages=stages, lines=assigned, micro=micro, again=given, loss=loss,
        every=exhaustive,
    )  # fmt: skip
    run = Climb(
        traced,
        cluster,
        space,
        rest,
        others,
        names,
        memory,
        time_limit,
        dispatch_limit,
        say,
        lanes,
        exhaustive,
        dispatch,
        simplest,
    )
    run.take(known)
    run.without_stages(spmd)
    run.start = max(run.start, time.perf_counter() - time_limit / 2)
    if changes is None and run.spmd is not None and not exhaustive:
        again = tuple(c for c in run.spmd.plan.changes if isinstance(c, Recompute))
        if again and again not in space.again.values():
            run.space = space = replace(space, again={**space.again, PLANNED: again})
            run.works = Works(space)
            run.guesses = Guesses(run.works)
    (run.exhaust if exhaustive else run.climb)()
    return run.answer(simplest)


def _names(schedules: Sequence[str] | None, said: bool) -> tuple[str, ...]:
    """Those to be looked at. said: the cut is, and may visit a place several times."""
    usual = (*SCHEDULES, VISITS) if said else SCHEDULES
    if schedules is None:
        return usual
    every = (*usual, TWICE)
    if unknown := [name for name in schedules if name not in every]:
        raise ScheduleError(f"schedules: {unknown[0]!r} is none of {', '.join(every)}")
    return tuple(name for name in every if name in schedules)
