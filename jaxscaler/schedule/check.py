"""Whether an order can run: every task once, no cycle, and no group holds more than it may."""

from __future__ import annotations

from jaxscaler.errors import ScheduleError
from jaxscaler.schedule.linear import SHOWN
from jaxscaler.schedule.simulate import ROUNDING, Timeline, simulate
from jaxscaler.schedule.tasks import FORWARD, Order, Pipeline, Task


def check(pipeline: Pipeline, order: Order, dispatch: float = 0.0) -> Timeline:
    """The simulated step of an order that can run.

    ScheduleError: tasks are missing, twice, unknown or on a group of other stages; tasks wait for
    each other (the cycle is named); a group would hold more than its limit (the tasks whose bytes
    it holds then are named).
    """
    timeline = simulate(pipeline, order, dispatch)
    for g, (limit, peak) in enumerate(zip(pipeline.limits, timeline.peak)):
        if peak.bytes > limit * (1 + ROUNDING):
            raise ScheduleError(
                f"group {g} would hold {peak.bytes:.4g} bytes at {peak.seconds:.4g} s and may hold "
                f"{limit:.4g}: {_holders(timeline, g, peak.seconds)}; start fewer forward tasks "
                "before backward tasks, use more or smaller stages, or recompute"
            )
    return timeline


def _holders(timeline: Timeline, group: int, at: float) -> str:
    """What a group holds at a moment: parameters and such, and micro-batches by stage."""
    pipeline, when = timeline.pipeline, timeline.when
    static = sum(pipeline.stages[s].static for s in pipeline.stages_of(group))
    found = []
    for s in pipeline.stages_of(group):
        stage = pipeline.stages[s]
        last = (stage.phases if stage.kept_weight else stage.phases.replace("W", ""))[-1]
        held = [
            m
            for m in pipeline.micros(s)
            if when[Task(s, m, FORWARD)][0] <= at < when[Task(s, m, last)][1]
        ]
        if held and (stage.kept or stage.kept_weight):
            names = ", ".join(map(str, held[:SHOWN])) + (" ..." if len(held) > SHOWN else "")
            found.append(f"F of micro-batches {names} on stage {pipeline.called(s)}")
    return f"{static:.4g} static and what is kept of " + ("; ".join(found) or "no micro-batch")
