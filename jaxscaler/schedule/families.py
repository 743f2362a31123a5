"""Well-known orders: functions from a pipeline to an order. Users write their own alike.

None of them looks at times or bytes. Each works on F and B alone; W tasks then follow their B (in
zero-bubble after a number of others), updates come last. A family that does not apply to a pipeline
raises a ScheduleError that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from jaxscaler.errors import ScheduleError
from jaxscaler.schedule.greedy import capped, greedy, heights
from jaxscaler.schedule.simulate import simulate
from jaxscaler.schedule.tasks import (
    BACKWARD,
    FORWARD,
    NO_MICRO,
    UPDATE,
    WEIGHT,
    Edge,
    Order,
    Pipeline,
    Task,
    task_graph,
)

Lines = Sequence[Sequence[Task]]


def gpipe(pipeline: Pipeline) -> Order:
    """All forward tasks, then all backward tasks (Huang et al., GPipe, 2019)."""
    bare = _bare(pipeline)

    def after(task: Task) -> Iterable[Task]:
        if task.phase == BACKWARD:
            for g in bare.stages[task.stage].groups:
                for s in bare.stages_of(g):
                    for m in bare.micros(s)[-1:]:
                        yield Task(s, m, FORWARD)

    return _finish(pipeline, greedy(bare, after))


def one_f_one_b(pipeline: Pipeline) -> Order:
    """Backward as soon as it can be; a stage holds a micro-batch for each stage up to the end.

    Narayanan et al., PipeDream, 2019, with the flush of PipeDream-2BW, 2021. On a chain with a
    stage a group, group i begins with p - i forward tasks and then alternates. Stages that share
    groups, or have several ends, follow the same rule.
    """
    bare = _bare(pipeline)
    return _finish(pipeline, greedy(bare, capped(bare, heights(bare))))


def n_f_one_b(pipeline: Pipeline) -> Order:
    """1F1B where a micro-batch visits the groups several times before it comes back.

    The 3F1B of nnScaler (Lin et al., OSDI 2024) for AlphaFold2, whose recyclings but the last are
    not differentiated: visits without B are stages of the same groups.
    """
    visits = [
        s
        for s in pipeline.each
        if pipeline.stages[s].backward is None
        and any(
            pipeline.stages[t].groups == pipeline.stages[s].groups
            and pipeline.stages[t].backward is not None
            for t in pipeline.each[s + 1 :]
        )
    ]
    if not visits:
        raise ScheduleError(
            "nf1b needs visits without backward tasks before one with them, on the same groups"
        )
    return one_f_one_b(pipeline)


def interleaved(pipeline: Pipeline) -> Order:
    """Megatron's interleaved 1F1B: every group has several chunks, taken in turns.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021. Micro-
    batches pass in rounds of p; where p does not divide them the rounds are larger, never smaller,
    and as even as can be, which keeps the bubble that the formula gives.
    """
    p, count = pipeline.groups, len(pipeline.stages)
    _chain(pipeline, "interleaved", count)
    if count % p or any(stage.groups != (s % p,) for s, stage in enumerate(pipeline.stages)):
        raise ScheduleError(
            f"interleaved needs stage s on group s % {p} alone, the same number on every group"
        )
    _differentiated(pipeline, "interleaved")
    v, m = count // p, pipeline.micro
    if v == 1:
        return one_f_one_b(pipeline)
    rounds = max(1, m // p)
    sizes = [m // rounds + (r < m % rounds) for r in range(rounds)]
    forward, backward, first = [], [], 0
    for size in sizes:
        micros = range(first, first + size)
        forward += [(c, k) for c in range(v) for k in micros]
        backward += [(c, k) for c in reversed(range(v)) for k in micros]
        first += size
    lines = []
    for g in range(p):
        warm = min(len(forward), 2 * (p - g - 1) + (v - 1) * max(sizes))
        f = [Task(c * p + g, k, FORWARD) for c, k in forward]
        b = [Task(c * p + g, k, BACKWARD) for c, k in backward]
        pairs = zip(f[warm:], b)
        lines.append([*f[:warm], *(t for pair in pairs for t in pair), *b[len(f) - warm :]])
    return _finish(pipeline, lines)


def zero_bubble(pipeline: Pipeline) -> Order:
    """ZB-H1: 1F1B whose weight gradients wait, so that all groups hold as much as the first.

    Qi et al., Zero Bubble Pipeline Parallelism, 2024. Group i runs W of a micro-batch after B of
    the i-th one after it, and the rest at the end.
    """
    return _zero_bubble(pipeline, "zero-bubble", 1)


def zero_bubble_2(pipeline: Pipeline) -> Order:
    """ZB-H2: nearly twice the micro-batches in flight, so that no group waits once it has begun."""
    return _zero_bubble(pipeline, "zero-bubble-2", 2)


def _zero_bubble(pipeline: Pipeline, name: str, times: int) -> Order:
    _one_each(pipeline, name)
    if all(stage.weight is None for stage in pipeline.stages):
        raise ScheduleError(f"{name} needs stages with weight gradients apart (`weight` seconds)")
    bare = _bare(pipeline)
    height = heights(bare)
    order = greedy(bare, capped(bare, [times * (h - 1) + 1 for h in height]))
    return _finish(pipeline, order, [times * (max(height) - h) for h in height])


def chimera(pipeline: Pipeline) -> Order:
    """Two 1F1B pipelines in opposite directions, one's tasks in the other's gaps (`mirrored`).

    Li and Hoefler, Chimera, 2021; units of p micro-batches follow each other directly. With F = B
    = 1, forward task j of a direction's unit starts at group i of its way in slot i + 2 j, its
    backward task in slot 2 p - 1 - i + 2 j: p even, so no two meet.
    """
    p, count = pipeline.groups, len(pipeline.stages)
    mirror = count == 2 * p and all(
        stage.groups == ((s,) if s < p else (2 * p - 1 - s,)) and stage.micros == (s // p, 2)
        for s, stage in enumerate(pipeline.stages)
    )
    if p % 2 or not mirror:
        raise ScheduleError(
            "chimera needs an even number of groups and a chain with a stage a group in both "
            "directions: mirrored(pipeline)"
        )
    _chain(pipeline, "chimera", p)
    _differentiated(pipeline, "chimera")
    slots: list[list[tuple[int, Task]]] = [[] for _ in range(p)]
    for s in pipeline.each:
        way = s % p
        for j, m in enumerate(pipeline.micros(s)):
            unit, place = divmod(j, p // 2)
            at = 2 * p * unit + 2 * place
            slots[pipeline.stages[s].groups[0]] += [
                (at + way, Task(s, m, FORWARD)),
                (at + 2 * p - 1 - way, Task(s, m, BACKWARD)),
            ]
    return _finish(pipeline, [[task for _, task in sorted(line)] for line in slots])


def interlaced(pipeline: Pipeline) -> Order:
    """1F1B of the stages on one group each; stages on several run between its ticks.

    nnScaler's plan for huge vocabularies (Lin et al., OSDI 2024): embedding and head are cut over
    all devices instead of burdening the first and the last stage. Forward tasks of a wide stage run
    when the next tick needs them, backward tasks as soon as they can.
    """
    bare = _bare(pipeline)
    wide = {s for s in bare.each if len(bare.stages[s].groups) > 1}
    narrow = [s for s in bare.each if s not in wide]
    alone = {g for s in narrow for g in bare.stages[s].groups}
    if not wide or len(alone) < bare.groups:
        raise ScheduleError(
            "interlaced needs stages on several groups, and on each group a stage of its own"
        )
    inner = _contracted(bare, narrow)
    timeline = simulate(
        replace(inner, stages=tuple(_unit(stage) for stage in inner.stages)), one_f_one_b(inner)
    )
    ticks: dict[float, list[Task]] = {}
    for task, start in zip(timeline.tasks, timeline.start):
        ticks.setdefault(start, []).append(task._replace(stage=narrow[task.stage]))

    graph = task_graph(bare)
    done: set[Task] = set()
    lines: list[list[Task]] = [[] for _ in range(bare.groups)]

    def run(task: Task) -> None:
        """Append a task, the wide ones that it needs before it."""
        if task not in done:
            for need in graph.needs[graph.index[task]]:
                if graph.tasks[need.task].stage in wide:
                    run(graph.tasks[need.task])
            done.add(task)
            for g in bare.stages[task.stage].groups:
                lines[g].append(task)

    back = [task for task in graph.tasks if task.stage in wide and task.phase == BACKWARD]
    for _, tick in sorted(ticks.items()):
        for task in tick:
            run(task)
        for task in back:
            needs = graph.needs[graph.index[task]]
            if task not in done and all(graph.tasks[n.task] in done for n in needs):
                run(task)
    for task in graph.tasks:
        if task.stage in wide:
            run(task)
    return _finish(pipeline, lines)


def inference(pipeline: Pipeline) -> Order:
    """Forward only: micro-batches one after the other, what is further on its way first."""
    if any(stage.backward is not None for stage in pipeline.stages):
        raise ScheduleError("inference is for pipelines without backward tasks")
    bare = _bare(pipeline)
    return _finish(pipeline, greedy(bare))


FAMILIES: dict[str, Callable[[Pipeline], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zero-bubble-2": zero_bubble_2,
    "chimera": chimera,
    "nf1b": n_f_one_b,
    "interlaced": interlaced,
    "inference": inference,
}


def family(name: str, pipeline: Pipeline) -> Order:
    """The order of a family by name; ScheduleError if there is none or it does not apply."""
    if name not in FAMILIES:
        raise ScheduleError(f"no schedule family {name!r}; there are {', '.join(FAMILIES)}")
    return FAMILIES[name](pipeline)


def _bare(pipeline: Pipeline) -> Pipeline:
    """F and B alone."""
    stages = tuple(replace(stage, weight=None, update=None) for stage in pipeline.stages)
    return replace(pipeline, stages=stages, barrier=None)


def _unit(stage):
    return replace(stage, forward=1.0, backward=None if stage.backward is None else 1.0)


def _contracted(pipeline: Pipeline, kept: list[int]) -> Pipeline:
    """The stages `kept`, with an edge where a way leads through others only."""
    place = {s: k for k, s in enumerate(kept)}
    after: list[set[int]] = [set() for _ in pipeline.stages]  # the next kept stages
    for s in reversed(pipeline.each):
        for e in pipeline.feeds[s]:
            after[s] |= {e.target} if e.target in place else after[e.target]
    edges = tuple(Edge(place[s], place[t]) for s in kept for t in sorted(after[s]))
    return replace(pipeline, stages=tuple(pipeline.stages[s] for s in kept), edges=edges)


def _finish(pipeline: Pipeline, lines: Lines, lags: Sequence[int] | None = None) -> Order:
    """F and B tasks, W after the B of `lags[stage]` micro-batches later, updates at the end."""
    whole = []
    for g, line in enumerate(lines):
        out: list[Task] = []
        waiting: dict[int, list[Task]] = {s: [] for s in pipeline.stages_of(g)}
        for task in line:
            out.append(task)
            stage, queue = pipeline.stages[task.stage], waiting[task.stage]
            if task.phase == BACKWARD and stage.weight is not None:
                queue.append(task._replace(phase=WEIGHT))
                if len(queue) > (lags[task.stage] if lags else 0):
                    out.append(queue.pop(0))
        out += [task for queue in waiting.values() for task in queue]
        out += [Task(s, NO_MICRO, UPDATE) for s in waiting if pipeline.stages[s].update is not None]
        whole.append(tuple(out))
    return tuple(whole)


def _chain(pipeline: Pipeline, name: str, length: int) -> None:
    """Every stage reads the one before it alone, in chains of `length`."""
    ways = {(e.source, e.target) for e in pipeline.edges or ()}
    if ways != {(s, s + 1) for s in pipeline.each[:-1] if (s + 1) % length}:
        raise ScheduleError(f"{name} is for chains: every stage reads the one before it alone")


def _one_each(pipeline: Pipeline, name: str) -> None:
    if any(stage.groups != (s,) for s, stage in enumerate(pipeline.stages)):
        raise ScheduleError(f"{name} needs stage s on group s alone")


def _differentiated(pipeline: Pipeline, name: str) -> None:
    if any(stage.backward is None for stage in pipeline.stages):
        raise ScheduleError(f"{name} is for pipelines whose stages all have backward tasks")
