"""An order of few micro-batches as one of many: what repeats in its middle is repeated further."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jaxscaler.errors import ScheduleError
from jaxscaler.schedule.pattern import repeats
from jaxscaler.schedule.simulate import Timeline, fits, simulate
from jaxscaler.schedule.tasks import NO_MICRO, Order, Pipeline, Task

LENGTHS = (1, 2, 3)  # patterns of so many micro-batches are tried


def few(micro: int, least: int, pipeline: Pipeline) -> int:
    """At least `least` micro-batches from which `extended` comes to `micro`."""
    step = 6 * repeats(pipeline)  # a multiple of all LENGTHS
    return micro if micro <= least + step else least + (micro - least) % step


def extended(timeline: Timeline, pipeline: Pipeline) -> Timeline | None:
    """The best order of all the pipeline's micro-batches that begins and ends as `timeline`.

    timeline: of the same pipeline with fewer micro-batches, `few`. It is cut at a moment in its
    middle, and what each group runs next (so many of each kind of task) is repeated there. None: no
    such order runs, or fits into memory.
    """
    more = pipeline.micro - timeline.pipeline.micro
    if not more:
        return timeline
    best = None
    for order in _candidates(timeline, pipeline, more):
        try:
            found = simulate(pipeline, order)
        except ScheduleError:  # what comes after the cut repeats in another way, or not at all
            continue
        if (best is None or found.seconds < best.seconds) and fits(found):
            best = found
    return best


def _candidates(timeline: Timeline, pipeline: Pipeline, more: int) -> Iterator[Order]:
    unit, small = repeats(pipeline), timeline.pipeline
    middle = timeline.seconds / 2
    source = timeline.order[0][0].stage
    moments = sorted(
        (timeline.when[Task(source, m, "F")][0] for m in small.micros(source)),
        key=lambda t: abs(t - middle),
    )
    seen = set()
    for moment in moments[:3]:
        for length in LENGTHS:
            step = unit * length
            if small.micro >= 2 * step and more % step == 0:
                order = tuple(
                    _repeated(timeline, pipeline, line, moment, step, more)
                    for line in timeline.order
                )
                if order not in seen:
                    seen.add(order)
                    yield order


def _repeated(timeline, pipeline, line, moment: float, step: int, more: int) -> tuple[Task, ...]:
    cut = sum(timeline.when[t][0] < moment for t in line if t.micro != NO_MICRO)
    rest, block, taken = line[cut:], [], Counter()
    for task in rest:
        kind = (task.stage, task.phase)
        if task.micro != NO_MICRO and taken[kind] < step // pipeline.stages[task.stage].micros[1]:
            taken[kind] += 1
            block.append(task)
    out = list(line[:cut])
    for first in range(0, more, step):
        out += [task._replace(micro=task.micro + first) for task in block]
    return (*out, *(t if t.micro == NO_MICRO else t._replace(micro=t.micro + more) for t in rest))
