"""The ways of `headline.py` to plan a step: the joint search, and what other systems would do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MEMORY = 0.92  # of a device


class Result(dict):
    """What a row says of a plan."""


def of_pipeline(plan: Any) -> Result:
    return Result(
        seconds=plan.seconds,
        peak_GB=max(p.bytes for p in plan.timeline.peak) / 1e9,
        plan=f"{len(plan.plans)} stages of {'+'.join(map(str, dict.fromkeys(plan.devices)))}, "
        f"{plan.micro} micro-batches",
    )


def of_plan(plan: Any) -> Result:
    kinds = [type(change).__name__ for change in plan.changes]
    counts = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
    mesh = "x".join(str(n) for _, n in plan.axes)
    return Result(
        seconds=plan.predicted.seconds,
        peak_GB=plan.predicted.peak_bytes / 1e9,
        plan=f"mesh {mesh}" + (f"; {counts}" if counts else ""),
    )


def searched(step: Any, cluster: Any, batch: int, limit: float, visits: int = 1) -> Result:
    from jaxscaler.pipeline.search import search_pipelines

    found = search_pipelines(step, cluster, memory=MEMORY, time_limit=limit, dispatch_limit=None)
    best = told(found)
    if visits > 1:
        ways = ((p, visits) for p in _powers(2, cluster.num_devices))
        best = min([best, *recycled(step, cluster, batch, ways)], key=lambda r: r["seconds"])
    return best


def told(found: Any) -> Result:
    pipelined = hasattr(found.best, "timeline")
    return of_pipeline(found.best) if pipelined else of_plan(found.best.plan)


def recycled(step: Any, cluster: Any, batch: int, ways: Any) -> Iterator[Result]:
    """nF1B: every visit of the stack cut alike, its pieces on the same devices, in 1F1B's order.

    Embeddings and what is between visits have gradients, so no visit is quite without any, as the
    family `nf1b` has it.
    """
    for count, visits in ways:
        runs = scans_of(step)[-visits:]
        if any(length % count for _, length in runs):
            continue
        lanes, cut = max(1, cluster.num_devices // count), visited(runs, count)
        for plan in _plans(step, cluster, cut, batch // lanes, "1f1b", (), lanes):
            yield of_pipeline(plan)


def visited(runs: Sequence[tuple[int, int]], count: int) -> Any:
    """A cut of visits (equation, layers) into `count` pieces each, alike."""
    from jaxscaler.rewrite.changes import Stages

    points = [(at, n * length // count, n) for at, length in runs for n in range(count)]
    return Stages(0, ((0, 0, 0), *points[1:]))


def megatron(step: Any, cluster: Any, batch: int, limit: float) -> Result | None:
    total, node = cluster.num_devices, cluster.levels[-1].size
    for parallel in _powers(1, total):
        found = []
        for tensor in _powers(1, min(parallel, node)):
            stages, data = parallel // tensor, total // parallel
            lines = megatron_lines(tensor, data)
            cuts = [stages, of_layers(stages, scans_of(step))] if stages > 1 else [1]
            for cut in cuts if batch % data == 0 else ():
                for plan in _plans(step, cluster, cut, batch // data, "1f1b", lines, data):
                    found.append(of_pipeline(plan))
        if found:
            return min(found, key=lambda result: result["seconds"])
    return None


def megatron_lines(tensor: int, data: int, table: bool = True) -> list:
    """Weights, and with `table` embeddings too, cut over the tensor axis; samples over data."""
    from jaxscaler.program import ANY, Split, if_possible, op_trans, ops, values
    from jaxscaler.recipes import COMPUTE

    compute = ops(phase=COMPUTE)
    lines: list = [op_trans(compute, Split("batch"), data)] if data > 1 else []
    if tensor > 1:
        weights = values("*kernel", role="parameter", to=compute)
        tables = values("*embedding", role="parameter", to=compute)
        lines.append(op_trans(weights, Split(ANY), tensor))
        lines += [if_possible(op_trans(tables, Split(ANY), tensor))] * table
    return lines


def of_layers(count: int, scans: list[tuple[int, int]]) -> Any:
    """A cut into stages of equal numbers of layers, of several loops over layers."""
    from jaxscaler.rewrite.changes import Stages

    total = sum(length for _, length in scans)
    where = [(eqn, n) for eqn, length in scans for n in range(length)]
    points = [(*where[k * total // count], k) for k in range(1, count)]
    return Stages(0, ((0, 0, 0), *points))


def _plans(
    step: Any, cluster: Any, stages: Any, micro: int, order: str, lines: Any, lanes: int
) -> Iterator[Any]:
    """The pipeline with the least recomputation that fits; none where nothing does."""
    from jaxscaler.errors import ConstraintError, InfeasibleError
    from jaxscaler.graph.build import build
    from jaxscaler.pipeline.again import cheap_again, layers_again
    from jaxscaler.pipeline.planner import plan_pipeline

    graph, least = build(step), None
    for again in (layers_again, lambda g, loss: (), cheap_again):
        try:
            found = plan_pipeline(
                step, cluster, stages=stages, micro=micro, order=order, constraints=lines,
                changes=again(graph, 0), lanes=lanes, memory=MEMORY, dispatch_limit=None,
            )  # fmt: skip
        except InfeasibleError:
            if least is None:
                return  # nor does it with more kept
            continue
        except ConstraintError as error:  # stages with an op that can not be laid out so
            warnings.warn(f"{stages} left out: {error}".splitlines()[0], stacklevel=2)
            return
        if least is not None:
            yield found
            return
        least = found
    if least is not None:
        yield least


def alone(recipe: str) -> Callable:
    """A plan without stages, of a recipe; loops over parts of a layer are not for it."""

    def way(step: Any, cluster: Any, batch: int, limit: float) -> Result | None:
        from jaxscaler import planner, recipes
        from jaxscaler.errors import InfeasibleError

        program = _dap() if recipe == "dap" else recipes.RECIPES[recipe]()
        try:
            found = planner.plan_step(
                step, cluster, constraints=[*_whole_layers(), *program], memory=MEMORY,
                time_limit=limit, loops=True, explained=False,
            )  # fmt: skip
        except InfeasibleError:
            return None
        return of_plan(found.plan)

    return way


def alpa(step: Any, cluster: Any, batch: int, limit: float) -> Result | None:
    from jaxscaler.errors import InfeasibleError
    from jaxscaler.pipeline.search import search_pipelines

    try:
        return told(search_pipelines(
            step, cluster, constraints=_whole_layers(), schedules=("1f1b",), memory=MEMORY,
            time_limit=limit, dispatch_limit=None,
        ))  # fmt: skip
    except InfeasibleError:
        return None


def _whole_layers() -> list:
    from jaxscaler.program import SAME_DEVICE, forbid, op_assign, region

    return [forbid(op_assign(region(phase="forward"), SAME_DEVICE))]


def _dap() -> list:
    from jaxscaler.program import Replicate, Split, forbid, op_trans, ops, values
    from jaxscaler.recipes import COMPUTE

    compute = ops(phase=COMPUTE)
    return [
        forbid(op_trans(compute, Split("batch"))),
        op_trans(values(role="parameter", to=compute), Replicate()),
    ]


WAYS: dict[str, Callable] = {
    "searched": searched, "megatron": megatron, "zero-3": alone("zero_3"),
    "tensor": alone("tensor_parallel"), "alpa": alpa, "dap": alone("dap"),
}  # fmt: skip


def _powers(first: int, last: int) -> list[int]:
    return [n for n in (2**k for k in range(20)) if first <= n <= last]


def scans_of(step: Any) -> list[tuple[int, int]]:
    """(equation, length) of the loops over layers of the loss."""
    return [
        (i, eqn.params["length"])
        for i, eqn in enumerate(step.losses[0].eqns)
        if eqn.primitive.name == "scan"
    ]
