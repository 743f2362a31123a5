"""A step whose scans over layers are planned as pipelines in one program (`rewrite/ring.py`).

How many stages and micro-batches is given. What the backward pass makes again, how many lanes
gradients have, and whether the batch goes through in several rounds, one after another, is tried,
the cheapest for the devices first: more is made again only where memory asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jaxscaler import _compat, planner
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import InfeasibleError, JaxscalerError, PlanError, RewriteError
from jaxscaler.exchange import exchanged
from jaxscaler.graph.build import build
from jaxscaler.graph.ir import BATCH
from jaxscaler.loops.planner import batch_of
from jaxscaler.program import Split, op_trans, ops
from jaxscaler.rewrite.changes import Accumulate, Change, Recompute, Ring, Segment
from jaxscaler.rewrite.ring import rings
from jaxscaler.trace import Traced


def plan_one_program(
    traced: Traced,
    cluster: Cluster,
    *,
    stages: int,
    micro: int,
    constraints: Any = (),
    time_limit: float = planner.TIME_LIMIT,
    progress: planner.Progress | None = None,
    **options: Any,
) -> planner.Planned:
    """Plan a step with every scan over layers, of a marked loss, that can be one as a pipeline.

    stages: of each scan, on equally many devices. micro: micro-batches of a step. `options`: others
    of `planner.plan_step`. Where memory decides also: layers are made again, and the batch goes
    through in rounds (`Accumulate`), each with a part of the micro-batches.

    Raises PlanError without a marked loss, RewriteError where no scan can be a pipeline, with the
    operation in the way, and as `planner.plan_step`: InfeasibleError if nothing fits.
    """
    say = progress or (lambda phase, detail: None)
    if not traced.losses:
        raise PlanError(
            "a pipeline needs to know the loss of the step: use jaxscaler.value_and_grad (or grad) "
            "in place of JAX's"
        )
    traced = traced.changed(()) if traced.changes else traced
    traced, rest = exchanged(traced, planner.listed(constraints))
    lines = (*rest, _on_stages(stages))
    notes: list[str] = []
    errors: list[JaxscalerError] = []

    def attempt(changes: Sequence[Change]) -> planner.Planned | None:
        say("pipeline", _said(changes))
        try:
            return planner.plan_step(
                traced, cluster, constraints=lines, time_limit=time_limit, progress=progress,
                **{**options, "loops": tuple(changes)},
            )  # fmt: skip
        except (InfeasibleError, RewriteError) as error:  # or a loss that has no rounds or lanes
            say("pipeline", str(error).splitlines()[0])
            errors.append(error)
            return None

    best: planner.Planned | None = None
    for rounds in _rounds(stages, micro):
        try:
            found = _rings(traced, stages, micro, rounds, notes)
        except RewriteError:
            if rounds == 1:
                raise
            continue
        before, searched = best, attempt(_not_again(found))
        best = _faster(best, searched)
        if searched is None or _recomputed(searched):  # memory decides
            for changes in _again(traced, found, searched):
                best = _faster(best, attempt(changes))
        if best is not None and (best is before or not _layers_again(best)):
            break
    if best is None:
        raise next((e for e in reversed(errors) if isinstance(e, InfeasibleError)), errors[0])
    if lanes := _with_lanes(best):
        best = _faster(best, attempt(lanes)) or best
    plan = replace(best.plan, notes=(*best.plan.notes, *dict.fromkeys(notes)))
    return replace(best, plan=plan)


def _on_stages(stages: int) -> Any:
    return op_trans(ops(phase=("forward", "backward")), Split("stage"), stages)


def _rounds(stages: int, micro: int) -> Iterator[int]:
    """How often the pipeline is filled: at least as many micro-batches as stages go through."""
    return (n for n in range(1, micro + 1) if micro % n == 0 and (n == 1 or micro // n >= stages))


def _rings(
    traced: Traced, stages: int, micro: int, rounds: int, notes: list[str]
) -> tuple[Change, ...]:
    """The changes of all scans that can be pipelines. RewriteError, with the reasons, if none."""
    found: list[Change] = []
    refused: list[str] = []
    for n, loss in enumerate(traced.losses):
        some, why = rings(n, loss, stages, micro // rounds)
        refused += why
        found += some
        if some and rounds > 1:
            found.append(Accumulate(n, rounds, batch_of(build(traced), n, loss)))
    if not found:
        raise RewriteError(
            "no scan over layers of the loss can be a pipeline in one program: "
            + ("; ".join(refused) or "it has none: scan over equal layers, or use the stage "
               "executor (one_program=False)")
        )  # fmt: skip
    notes += [f"no pipeline: {why}" for why in refused]
    return tuple(found)


def _not_again(found: Sequence[Change]) -> tuple[Change, ...]:
    """Nothing is made again but what a search says."""
    return tuple(c._replace(again=False) if isinstance(c, Ring) else c for c in found)


def _again(
    traced: Traced, found: Sequence[Change], searched: planner.Planned | None
) -> Iterator[tuple[Change, ...]]:
    """Whole stages made again; in these also layers; and of those kept what a search would keep."""
    yield tuple(found)
    bodies = tuple(_body(traced, c) for c in found if isinstance(c, Ring))
    yield (*found, *bodies)
    if searched is not None and _recomputed(searched) != bodies:
        yield (*found, *_recomputed(searched))


def _body(traced: Traced, change: Ring) -> Recompute:
    (body,) = _compat.subjaxprs(traced.losses[change.loss].eqns[change.scan])
    last = len(_compat.open_jaxpr(body)[0].eqns) - 1
    return Recompute(Segment(change.loss, 0, last, (change.scan, 0)))


def _recomputed(planned: planner.Planned) -> tuple[Change, ...]:
    return tuple(c for c in planned.plan.changes if isinstance(c, Recompute))


def _layers_again(planned: planner.Planned) -> bool:
    return any(c.segment.inside for c in planned.plan.changes if isinstance(c, Recompute))


def _faster(a: planner.Planned | None, b: planner.Planned | None) -> planner.Planned | None:
    """The one of less seconds, `a` of equal ones."""
    if a is None or b is None:
        return b if a is None else a
    return b if b.plan.predicted.seconds < a.plan.predicted.seconds else a


def _with_lanes(planned: planner.Planned) -> tuple[Change, ...]:
    """The changes with a lane for every part that the mesh cuts the batch into; () for one."""
    sizes = dict(planned.plan.axes)
    cut = [
        prod(sizes[a] for dim in t.spec for a in dim)
        for t in planned.plan.tensors
        if t.role == BATCH
    ]
    lanes = max(cut, default=1)
    if lanes == 1:
        return ()
    return tuple(
        c._replace(lanes=lanes) if isinstance(c, Ring | Accumulate) else c
        for c in planned.plan.changes
    )


def _said(changes: Sequence[Change]) -> str:
    """In words, for those who watch the search."""
    texts = []
    for c in changes:
        if isinstance(c, Ring):
            again = ", made again" if c.again else ""
            texts.append(f"scan {c.scan}: {c.stages} stages x {c.micro}{again}, {c.lanes} lanes")
        elif isinstance(c, Accumulate):
            texts.append(f"in {c.parts} rounds")
        else:
            texts.append("layers made again")
    return "; ".join(texts)
