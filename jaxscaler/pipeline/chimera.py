"""Chimera: every stage a second time, in the opposite direction, with a state of its own.

Of p stages the copy of stage k is on the devices of stage p - 1 - k, which are like those of stage
k, and has the plan of stage k. Even micro-batches go down, odd ones up. Gradients of both copies
are added on both sides, and both update.

Source: Li and Hoefler, Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
Pipelines, SC 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.links import Link
from jaxscaler.errors import ConstraintError, ScheduleError
from jaxscaler.pipeline.prices import pipeline_of, sums_of, transfer_seconds
from jaxscaler.rewrite.changes import Stages
from jaxscaler.rewrite.stage_step import StageStep
from jaxscaler.rewrite.stages import Staged
from jaxscaler.schedule.tasks import Pipeline, mirrored


def has_copies(order: Any, cut: Stages) -> bool:
    """Whether an order is of two copies of each stage: it is Chimera's, or names their tasks."""
    if isinstance(order, str) or callable(order):
        return order == "chimera"
    return any(task[0] >= len(cut.points) for mine in order for task in mine)


def check_copies(cut: Stages, clusters: Sequence[Cluster], groups: Sequence[tuple]) -> None:
    """Raises ScheduleError or ConstraintError where stages can not have copies."""
    last = len(groups) - 1
    apart = [(p,) for p in range(len(groups))]
    if len(groups) % 2 or len(cut.points) != len(groups) or list(groups) != apart:
        raise ScheduleError(
            "chimera needs an even number of stages, each once and on devices of its own; these "
            f"are {len(cut.points)} on {len(groups)} sets of devices"
        )
    for p, cluster in enumerate(clusters):
        other = clusters[last - p]
        if (cluster.device, cluster.levels) != (other.device, other.levels):
            raise ConstraintError(
                f"chimera: the copy of stage {p} is on the devices of stage {last - p}, so the two "
                f"need the same; they have {cluster.name} and {other.name}: change submeshes="
            )


def excess(peaks: Sequence[float], limits: Sequence[float], copies: bool) -> dict[int, float]:
    """Device group -> bytes by which its stage has to shrink. Where stages have copies, the two on
    a group share what it holds too much."""
    above = [max(0.0, peak - limit) for peak, limit in zip(peaks, limits)]
    if copies:
        above = [max(a, b) / 2 for a, b in zip(above, reversed(above))]
    return {g: size for g, size in enumerate(above) if size}


def in_both_directions(
    staged: Staged,
    steps: Sequence[StageStep],
    planned: Sequence[Any],
    groups: Sequence[tuple[int, ...]],
    links: Mapping[tuple[int, int], Link],
    limits: Sequence[float],
    split: bool = False,
) -> Pipeline:
    """`pipeline_of` with a copy of each stage (stage k + p of stage k), and what they exchange.

    A group receives the gradients of its stages' copies before it updates, and adds them; with a
    barrier (clipping) all of this is done before the norm.
    """
    last = len(steps) - 1
    back = {(a, b): links[last - a, last - b] for a, b in links}
    down, up = (
        pipeline_of(staged, steps, planned, groups, each, limits, split) if each else None
        for each in (links, None if back == links else back)
    )
    assert down is not None
    sums = sums_of(staged, steps, planned)
    seconds = [
        transfer_seconds(links[p, last - p], size) + 3 * size / _bandwidth(planned[p])
        for p, size in enumerate(sums)
    ]
    barrier = down.barrier
    if barrier is not None:
        barrier += max(seconds[p] + seconds[last - p] for p in range(len(steps)))
    stages = tuple(
        replace(
            work,
            update=(work.update or 0.0) + (seconds[p] if barrier is None else 0.0),
            updating=sums[p] + sums[last - p],
        )
        for p, work in enumerate(down.stages)
    )
    both = mirrored(replace(down, stages=stages, barrier=barrier))
    count = len(stages)
    other = [
        e._replace(source=e.source + count, target=e.target + count)
        for e in (up or down).edges or ()
    ]
    return replace(both, edges=(*(down.edges or ()), *other))


def _bandwidth(planned: Any) -> float:
    """Bytes a second of a device's memory: of two sums that are read, and one that is written."""
    return planned.plan.session.cluster.device.hbm_bandwidth
