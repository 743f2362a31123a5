"""Planning with loops over parts, where memory binds: co-shards and gradient accumulation.

Loops are chosen by what they would do to the priced plan (`space/loops.py`), on the mesh of the
best plan, with recomputation and layouts searched beside them: first those that hold most of what
is in the rows of memory that cost something. A loop that touches no such row can not help, and is
not looked at. Only what is chosen is traced, and then has its true price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from jaxscaler import _compat
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import Mesh
from jaxscaler.cost.memory import Rules
from jaxscaler.errors import InfeasibleError, JaxscalerError, RewriteError
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.ir import OpGraph
from jaxscaler.loops.asked import Asked, loop_lines, taken
from jaxscaler.loops.estimate import BETTER, Estimate, View, estimated, hopeless, peak, ways_of
from jaxscaler.loops.options import Option, Pick, batch_of, more_parts, options
from jaxscaler.loops.picking import picked
from jaxscaler.program import HOST, NOWHERE, Line, Statement
from jaxscaler.replan import binds, space_of
from jaxscaler.report.show import size_text
from jaxscaler.rewrite.changes import (
    Accumulate,
    Change,
    CoShard,
    Fission,
    Recompute,
    Segment,
    around,
    overlap,
)
from jaxscaler.space.recompute import changes_of
from jaxscaler.space.segments import segmentations
from jaxscaler.space.subjects import Subjects
from jaxscaler.trace import Traced
from jaxscaler.why import Session

TRIES = 4  # sets of loops that are traced on a mesh, each for less memory than the last
SHRINK = 0.95  # of what the last was estimated to take, at most
CUTS = 3  # of a scan, that are tried
ROUGH = 1.15  # times the best: an accumulation alone is traced, if it is estimated to take no more


def plan_with_loops(
    search: Callable[[Traced, OpGraph, float], Any],
    ask: Callable[..., Any],
    traced: Traced,
    graph: OpGraph,
    program: Sequence[Statement],
    loops: bool | Sequence[Change],
    cluster: Cluster,
    memory: float,
    time_limit: float,
    rules: Rules,
    say: Callable[[str, str], None],
) -> Any:
    """The planned step (`planner.Planned`), with loops over parts where that is cheaper.

    `search(traced, graph, seconds)` plans a step with the changes that it has, recomputation
    searched. Its plan is the answer where no loss is marked, or memory costs nothing.
    `ask(traced, graph, program, memory, seconds, again=, mesh=, ask=)` plans it as it is, or hands
    its session to `ask`. `program`: all lines; those that speak of loops ask for one, or forbid it.
    `loops`: whether to look for any, or those to take. Raises InfeasibleError if no program that
    was tried fits, ConstraintError for lines that no loop carries out. The plan's notes say what
    was tried.
    """
    if not isinstance(loops, bool):
        step = traced.changed(loops)
        found = search(step, build(step), time_limit)
        return replace(found, plan=replace(found.plan, changes=found.traced.changes))
    lines, rest = loop_lines(program)
    if not traced.losses or not (loops or lines):
        return search(traced, graph, time_limit)
    asked, wanted, best, error = None, None, None, None
    if lines:
        asked = ask(traced, graph, (), memory, time_limit, ask=partial(_bound, lines, traced))
        wanted = asked.wanted()
    if wanted:
        best = taken(search, traced, wanted, cluster.num_devices, time_limit)
        traced = traced.changed(_loops(best.traced.changes))
        graph = build(traced)
    more = _Search(search, ask, traced, graph, rest, asked, memory, time_limit, rules, say)
    room = cluster.num_devices * cluster.device.hbm_bytes * memory
    if best is None and not (loops and peak(graph, rules) > room and hopeless(more.view)):
        try:
            best = search(traced, graph, time_limit)
        except InfeasibleError as cause:
            if not loops:
                raise
            error = cause
    if loops and (best is None or best.plan.changes or binds(best)):
        more.best, more.error = best, error
        best = more.run()
    assert best is not None
    return best


def _bound(lines: Sequence[Line], traced: Traced, session: Session, _: Any) -> Asked:
    model = session.model
    batch = {n: batch_of(model.graph, n, jaxpr) for n, jaxpr in enumerate(traced.losses)}
    return Asked(lines, Subjects(model.graph, model.folded, model.space), traced.losses, batch)


def _loops(changes: Sequence[Change]) -> tuple[Change, ...]:
    return tuple(change for change in changes if not isinstance(change, Recompute))


@dataclass
class _Search:
    search: Callable
    ask: Callable
    traced: Traced
    graph: OpGraph
    program: tuple[Statement, ...]
    asked: Asked | None
    memory: float
    time_limit: float
    rules: Rules
    say: Callable[[str, str], None]
    best: Any = None
    error: InfeasibleError | None = None
    tried: list[str] = field(default_factory=list)
    need: float | None = None  # bytes of the step of least memory that does not fit
    least: tuple[float, str] | None = None  # of estimates that do not: (bytes, what it is)

    def __post_init__(self) -> None:
        self.places = tuple(
            x for x in self.program if isinstance(x, Line) and x.place in (NOWHERE, HOST)
        )
        self.program = tuple(x for x in self.program if x not in self.places)

    def run(self) -> Any:
        found = [x for x in options(self.traced, self.graph, self.cover, self.tried)
                 if not self.left_out(x)]  # fmt: skip
        kept: tuple[Pick, ...] = ()
        if found:
            view = self.view
            ways = self.promising(view, found)
            for mesh, picks, priced in ways:
                kept = self.on_mesh(view, mesh, found, picks, priced) or kept
                kept = self.accumulated(view, mesh, picks) or kept
            if self.best is None:
                kept = self.searched(view, ways[0][1])
        if self.best is not None:
            self.split_scans()
        return self.answer(kept)

    def left_out(self, option: Option) -> bool:
        """Whether a line forbids an option, or loops that are asked for leave it no room."""
        keys = {key for cuts in option.cuts for key in cuts}
        if self.asked is not None and self.asked.forbids(not option.again, keys):
            return True
        taken = self.traced.changes
        if not option.again:
            return any(isinstance(change, Accumulate) for change in taken)
        spans = [change.segment for change in taken if isinstance(change, CoShard)]
        return any(overlap(a, b) for a in option.segments for b in spans)

    @cached_property
    def cover(self) -> tuple[Segment, ...]:
        """Disjoint segments: the coarsest segmentation, and what finer ones have beside it."""
        loops = [c.segment for c in self.traced.changes if isinstance(c, CoShard)]
        cover: list[Segment] = []
        for segments in segmentations(self.graph, fold(self.graph), loops):
            pieces = (piece for s in segments for piece in around(s, loops))
            cover += [s for s in pieces if not any(overlap(s, other) for other in cover)]
        return tuple(sorted(cover))

    @cached_property
    def view(self) -> View:
        """The space in which loops are priced."""
        step, graph, again = self.traced, self.graph, None
        if self.cover:
            again, step, graph = space_of(self.traced, self.cover, self.places, self.rules)
        self.say("loops", f"{len(self.cover)} segments, {len(graph.ops)} ops")
        return self.ask(
            step, graph, self.program, self.memory, self.time_limit, again=again,
            ask=lambda session, _: View(session, again),
        )  # fmt: skip

    def promising(
        self, view: View, found: Sequence[Option]
    ) -> list[tuple[Mesh, tuple[Pick, ...], Estimate]]:
        """The mesh of the best plan; where there is none, all, those on which loops are estimated
        to do best first. With these loops: what serves one mesh serves most others."""
        known = None if self.best is None else self.best.plan.session.best.priced.mesh
        ways: list[tuple[Mesh, tuple[Pick, ...], Estimate]] = []
        picks: tuple[Pick, ...] = ()
        for mesh in view.session.meshes if known is None else (known,):
            begin = ways[-1][2] if ways and ways[-1][1] == picks else None
            priced = estimated(view, mesh, picks, begin=begin)
            if not ways or priced.cost < min(p.cost for *_, p in ways) or priced.seconds is None:
                other = picked(view, mesh, found, self.say, 1.0, picks)
                if not ways or other[1].better_than(priced):
                    picks, priced = other
            label = _label(picks) or "none"
            self.say("loops", f"mesh {mesh}: {label}: {priced}")
            if priced.seconds is None and priced.used < (self.least or (np.inf,))[0]:
                self.least = priced.used, f"{label}, on mesh {mesh}"
            ways.append((mesh, picks, priced))
        return sorted(ways, key=lambda way: (way[2].level, way[2].cost))

    # -- traced ------------------------------------------------------------------------------------

    def split_scans(self) -> None:
        """Where a scan's body is made again: only in its first iterations, as many as must be. The
        last ones keep all, and give it back first."""
        scans = {
            (c.segment.loss, c.segment.inside[0])
            for c in self.best.traced.changes
            if isinstance(c, Recompute) and len(c.segment.inside) == 2
        }
        # one that is not differentiated has no backward pass to run again in
        origins = (op.origin for op in self.best.graph.ops if op.origin is not None)
        scans &= {(o.loss, o.key[0]) for o in origins if o.again}
        for loss, scan in sorted(scans):
            _, _, length = _compat.scan_sizes(self.traced.losses[loss].eqns[scan])
            low, high = 0, length  # so many iterations must be made again: more than, at most
            changes, mesh = self.best.traced.changes, self.best.plan.session.best.priced.mesh
            for _ in range(CUTS):
                if high - low < 2:
                    break
                first = (low + high) // 2
                pieces = Fission(loss, scan, (first, length - first), (0,))
                self.say("loops", f"scan {scan}: the first {first} of {length} made again")
                found = self.planned((*changes, pieces), mesh)
                self.tried.append(f"scan {scan} in two, {first} made again: {_seconds(found)}")
                if found is not None and self.is_better(found):
                    self.best, high = found, first
                else:
                    low = first

    def planned(self, changes: Sequence[Change], mesh: Mesh) -> Any:
        """The plan of the step with these changes, and no others, on a mesh; None: none fits."""
        try:
            step = self.traced.changed(changes)
            return self.ask(step, build(step), self.program, self.memory, self.time_limit,
                            mesh=mesh)  # fmt: skip
        except (InfeasibleError, RewriteError) as error:  # or loops that do not go together
            self.say("loops", str(error).splitlines()[0])
            self.missed(error)
            return None

    def missed(self, error: JaxscalerError) -> None:
        """Keep in mind how much memory a step took that does not fit."""
        if (need := getattr(error, "need", None)) is not None:
            self.need = min(self.need or need, need)

    def on_mesh(
        self, view: View, mesh: Mesh, found: Sequence[Option], picks: tuple[Pick, ...],
        priced: Estimate,
    ) -> tuple[Pick, ...]:  # fmt: skip
        """What is kept of the loops that are picked for a mesh: `best` is the plan with them.

        Where a step traced with loops needs more memory than they were estimated to, they are
        picked again for less; where it costs more, each is tried alone.
        """
        share = 1.0
        for turn in range(TRIES):
            if turn:
                share *= min(priced.used * SHRINK / (share * view.session.limit), SHRINK)
                picks, priced = picked(view, mesh, found, self.say, share, picks)
            self.say("loops", f"in {share:.0%} of the memory: {_label(picks) or 'none'}: {priced}")
            if not picks or not self.promises(priced):
                break
            fits = self.take(view, mesh, picks, priced)
            if fits is not None:
                return picks if fits else self.each(view, mesh, picks, share)
        return ()

    def searched(self, view: View, picks: tuple[Pick, ...]) -> tuple[Pick, ...]:
        """These loops in as many parts as can be, if layouts and recomputation searched for the
        step traced with them make it fit."""
        picks = tuple(Pick(p.option, p.option.most) for p in picks)
        if picks:
            loops = [change for pick in picks for change in pick.changes(1)]
            try:
                step = self.traced.changed((*self.traced.changes, *loops))
                self.best = self.search(step, build(step), self.time_limit)
                return picks
            except (InfeasibleError, RewriteError) as cause:
                self.missed(cause)
                self.tried.append(f"{_label(picks)}: does not fit, whatever else is made again")
        return ()

    def each(
        self, view: View, mesh: Mesh, picks: tuple[Pick, ...], share: float
    ) -> tuple[Pick, ...]:
        """The first of these loops that is better alone."""
        for pick in picks if len(picks) > 1 else ():
            priced = estimated(view, mesh, (pick,), share)
            if self.promises(priced) and self.take(view, mesh, (pick,), priced):
                return (pick,)
        return ()

    def accumulated(self, view: View, mesh: Mesh, picks: tuple[Pick, ...]) -> tuple[Pick, ...]:
        """The accumulation of these loops without their co-shards, in as many parts as it then
        needs, if traced it is better. Estimates tell too little between the two."""
        sums = [pick for pick in picks if not pick.option.again]
        for pick in sums if len(sums) < len(picks) else ():
            for some in (pick, *more_parts(pick)):
                priced = estimated(view, mesh, (some,))
                if priced.seconds is not None:
                    if self.promises(priced, ROUGH) and self.take(view, mesh, (some,), priced):
                        return (some,)
                    break
        return ()

    def promises(self, priced: Estimate, times: float = BETTER) -> bool:
        """Whether an estimated plan is better than so many times the best one."""
        if priced.seconds is None:
            return False
        return self.best is None or priced.seconds <= times * _cost(self.best)

    def take(
        self, view: View, mesh: Mesh, picks: tuple[Pick, ...], priced: Estimate
    ) -> bool | None:
        """Whether the step traced with these loops is the best one now; None: it does not fit."""
        fits = None
        for lanes in (True, False):
            found = self.plan_of(view, mesh, picks, priced, lanes)
            if found is not None and self.is_better(found):
                self.best = found
                return True
            fits = fits if found is None else False
        return fits

    def is_better(self, found: Any) -> bool:
        return self.best is None or _cost(found) < BETTER * _cost(self.best)

    def loops(
        self, view: View, picks: Sequence[Pick], priced: Estimate, lanes: bool
    ) -> list[Change]:
        """The changes of loops; with `lanes`, as many as their factor is cut into on the mesh."""
        found: list[Change] = []
        for pick in picks:
            ways = ways_of(view, pick, priced) if lanes else 1
            found += pick.changes(ways if pick.option.size % (pick.parts * ways) == 0 else 1)
        return found

    def plan_of(
        self, view: View, mesh: Mesh, picks: Sequence[Pick], priced: Estimate, lanes: bool
    ) -> Any:
        """The plan of the step traced with loops, and with the recomputation found beside them."""
        loops = self.loops(view, picks, priced, lanes)
        if lanes and loops == self.loops(view, picks, priced, False):
            return None  # the same as without
        spans = [change.segment for change in loops if isinstance(change, CoShard)]
        again: list[Recompute] = []
        if priced.what is not None and priced.priced is not None and priced.choice is not None:
            for change in changes_of(priced.what, priced.priced, priced.choice):
                again += change.around(spans)
        most = max(change.lanes for change in loops if isinstance(change, Accumulate | CoShard))
        label = _label(picks) + (f", in {most} lanes" if lanes else "")
        self.say("loops", f"traced with {label}")
        found = self.planned((*self.traced.changes, *loops, *again), mesh)
        self.tried.append(f"{label}: {_seconds(found)}, {priced.seconds:.4g} s as estimated")
        return found

    def without(self, tried: str) -> Any:
        """The plan without loops, where `hopeless` said that there is none: InfeasibleError."""
        try:
            if self.error is not None:
                raise self.error
            return self.search(self.traced, self.graph, self.time_limit)
        except InfeasibleError as cause:
            text = f"{cause}\nnor with loops over parts: {tried}"
            if self.least is not None:
                need, label = self.least
                text += f"\nthe least that one is estimated to take is {size_text(need)}: {label}"
                self.need = min(self.need or need, need)
            error = type(cause)(text)
            error.session = cause.session
            self.missed(cause)
            error.need = self.need
            raise error from None

    def answer(self, kept: Sequence[Pick]) -> Any:
        tried = "; ".join(self.tried) or "none"
        if self.best is None:
            self.best = self.without(tried)
        notes = [f"loops over parts that were tried: {tried}"]
        if kept:
            notes.insert(0, f"loops over parts: {', '.join(map(str, kept))}")
        plan = self.best.plan
        plan = replace(plan, changes=self.best.traced.changes, notes=(*plan.notes, *notes))
        return replace(self.best, plan=plan)


def _label(picks: Sequence[Pick]) -> str:
    return "; ".join(map(str, picks))


def _cost(planned: Any) -> float:
    return planned.plan.predicted.seconds


def _seconds(planned: Any) -> str:
    return "does not fit" if planned is None else f"{_cost(planned):.4g} s"
