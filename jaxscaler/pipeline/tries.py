"""Prices of candidates, kept: the part of a joint search that knows what has been tried."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from jaxscaler import planner
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.errors import ConstraintError, InfeasibleError, JaxscalerError
from jaxscaler.pipeline.balance import Works
from jaxscaler.pipeline.found import Found, Row, kind_of, plainness
from jaxscaler.pipeline.guess import Guesses
from jaxscaler.pipeline.memo import Memo, named
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.planner import plan_pipeline
from jaxscaler.pipeline.space import TWICE, Candidate, Shape, Space, every_candidate
from jaxscaler.program import ALL, ANY, Split, if_possible, op_trans, ops, values
from jaxscaler.recipes import COMPUTE
from jaxscaler.schedule.tasks import Order
from jaxscaler.trace import Traced

STAGE, LEAST = 1 / 60, 0.75  # of the time, and seconds, for planning one stage at most
SEARCHES = 8  # that planning without stages may take: with recomputation and loops over parts


@dataclass
class Tries:
    """What was priced of a space, in turn."""

    traced: Traced
    cluster: Cluster | Mixed
    space: Space
    lines: tuple  # but those that say stages
    others: tuple  # but those that order tasks: what holds without stages
    schedules: tuple[str, ...]
    memory: float
    time_limit: float
    dispatch_limit: float | None
    say: planner.Progress
    lanes: Sequence[int] | None = None
    exhaustive: bool = False
    dispatch: bool = True
    simplest: float = 0.0
    spmd: planner.Planned | None = None
    rows: list[Row] = field(default_factory=list)
    known: dict[Candidate, Row] = field(default_factory=dict)
    orders: dict[Candidate, Order] = field(default_factory=dict)
    misfits: set[Shape] = field(default_factory=set)
    left: set[Shape] = field(default_factory=set)  # as guesses are against them
    notes: list[str] = field(default_factory=list)
    errors: list[JaxscalerError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = time.perf_counter()
        self.memo = Memo(self.traced, self.others, one_mesh=not self.exhaustive)
        self.works = Works(self.space)
        self.guesses = Guesses(self.works)
        parts = self.cluster.parts if isinstance(self.cluster, Mixed) else (self.cluster,)
        self.limit = min(part.device.hbm_bytes for part in parts) * self.memory

    def late(self) -> bool:
        return time.perf_counter() - self.start - self.memo.tracing > self.time_limit

    @property
    def best(self) -> float:
        """Seconds."""
        return min((r.seconds for r in self.rows if r.seconds is not None), default=inf)

    def take(self, known: Sequence[PipelinePlan]) -> None:
        """Plans that compete as they are."""
        for plan in known:
            peak = max(p.bytes for p in plan.timeline.peak)
            text = f"given: {len(plan.places)} stages, {plan.micro} micro-batches"
            self.rows.append(Row(text, "given", None, plan.seconds, peak, given=plan))

    # -- prices ------------------------------------------------------------------------------------

    def without_stages(self, given: bool | planner.Planned) -> None:
        if given is False:
            return
        row = Row("no stages", "no stages", None)
        if isinstance(self.cluster, Mixed):
            kinds = "devices of several kinds: without stages a plan is for devices of one"
            self.rows.append(replace(row, why=kinds))
            return
        try:
            if given is True:
                given = planner.plan_step(
                    self.traced, self.cluster, constraints=self.others, memory=self.memory,
                    time_limit=self.time_limit / SEARCHES, loops=True, progress=self.say,
                    explained=False,
                )  # fmt: skip
            self.spmd = given
            said = given.plan.predicted
            row = replace(row, seconds=said.seconds, peak_bytes=said.peak_bytes)
        except (InfeasibleError, ConstraintError) as error:
            row = self.refused(row, error)
        self.rows.append(row)

    def refused(self, row: Row, error: JaxscalerError) -> Row:
        self.errors.append(error)
        need = error.need if isinstance(error, InfeasibleError) else None
        return replace(row, why=str(error).splitlines()[0], need=need)

    def plan(self, candidate: Candidate) -> PipelinePlan:
        shape = candidate.shape
        seconds = max(STAGE * self.time_limit, LEAST)
        return plan_pipeline(
            self.traced,
            self.cluster,
            stages=self.space.cut(candidate),
            micro=shape.micro,
            order=self.orders.get(candidate, candidate.schedule),
            submeshes=self.space.submeshes(shape),
            constraints=self.lines_of(shape),
            changes=self.space.changes(candidate),
            lanes=shape.lanes,
            memory=self.memory,
            time_limit=seconds * (len(shape.sizes) + shape.wide),
            dispatch_limit=self.dispatch_limit,
            dispatch=self.dispatch,
            loss=self.space.loss,
            memo=self.memo,
        )

    def lines_of(self, shape: Shape) -> tuple:
        """What lanes are for: stages split the batch by as many, so that they hand values over as
        they lie. What a stage receives every device sends a share of."""
        if self.exhaustive or shape.lanes == 1:
            return self.lines
        received = values("received/*", role="batch")
        return (
            *self.lines,
            if_possible(op_trans(ops(phase=COMPUTE), Split("batch"), shape.lanes)),
            if_possible(op_trans(received, Split(ANY), ALL)),
        )

    def price(self, candidate: Candidate) -> PipelinePlan | None:
        """The pipeline, and a row of what it takes; None: it is known, or refused."""
        if candidate in self.known:
            return None
        row, plan = Row(str(candidate), kind_of(candidate.shape), candidate), None
        try:
            plan = self.plan(candidate)
            peak = max(p.bytes for p in plan.timeline.peak)
            row = replace(row, seconds=plan.seconds, peak_bytes=peak)
            works = plan.pipeline.stages[: len(plan.places)]
            self.works.learn(candidate.shape, candidate.ends, works)
            self.guesses.learn(candidate, plan)
        except JaxscalerError as error:
            row = self.refused(row, error)
            if isinstance(error, InfeasibleError) and candidate.schedule != TWICE:
                self.misfits.add(candidate.shape)
        self.known[candidate] = row
        self.rows.append(row)
        took = "refused" if row.seconds is None else f"{row.seconds:.4g} s"
        self.say("pipeline", f"{candidate}: {took}")
        return plan

    def exhaust(self) -> None:
        """Price all of the space."""
        for candidate in every_candidate(self.space, self.schedules):
            if self.lanes is not None and candidate.shape.lanes not in self.lanes:
                continue
            if self.late():
                self.notes.append("out of time: the space was not priced to its end")
                return
            self.price(candidate)

    # -- the answer --------------------------------------------------------------------------------

    def ranked(self) -> list[Candidate]:
        """Pipelines that fit, the fastest first."""
        good = [r for r in self.rows if r.seconds is not None]
        good.sort(key=lambda r: (r.seconds, plainness(r)))
        return [r.candidate for r in good if r.candidate is not None]

    @property
    def seconds(self) -> float:
        """Of the best pipeline."""
        good = (r.seconds for r in self.rows if r.candidate is not None)
        return min((s for s in good if s is not None), default=inf)

    def answer(self, simplest: float) -> Found:
        good = [r for r in self.rows if r.seconds is not None]
        if not good:
            raise self.none()
        least = min(r.seconds for r in good if r.seconds is not None)
        within = [r for r in good if r.seconds is not None and r.seconds <= least * (1 + simplest)]
        row = min(within, key=lambda r: (plainness(r), r.seconds))
        best: planner.Planned | PipelinePlan
        if row.given is not None:
            best = row.given
        elif row.candidate is None:
            assert self.spmd is not None
            best = self.spmd
        else:
            best = with_names(self.plan(row.candidate))
        rows, notes = tuple(self.rows), tuple(self.notes)
        return Found(best, rows, self.spmd, notes, self.memo.tracing)

    def none(self) -> JaxscalerError:
        """What to raise where nothing fits."""
        kinds: dict[str, list[float]] = {}
        for row in self.rows:
            kinds.setdefault(row.kind, [])
            if row.need is not None:
                kinds[row.kind].append(row.need)
        if not any(isinstance(e, InfeasibleError) for e in self.errors) and self.errors:
            return self.errors[0]
        least = "; ".join(
            f"{kind}: {min(needs) / 1e9:.3g} GB" if needs else f"{kind}: refused ({self.why(kind)})"
            for kind, needs in kinds.items()
        )
        error = InfeasibleError(
            f"nothing fits {self.limit / 1e9:.3g} GB a device of {self.cluster.name}, with stages "
            f"or without; the least memory found by kind: {least or 'none was tried'}; use more or "
            "larger devices, smaller micro-batches, or drop constraints"
            + "".join(f"\n{note}" for note in self.notes)
        )
        error.need = min(itertools.chain(*kinds.values()), default=None)
        return error

    def why(self, kind: str) -> str:
        return next((r.why for r in self.rows if r.kind == kind and r.why), "nothing was priced")


def with_names(plan: PipelinePlan) -> PipelinePlan:
    """A pipeline's plan with the names of its own step in every stage."""
    assert plan.parts is not None
    planned = tuple(map(named, plan.parts.planned))
    parts = replace(plan.parts, planned=planned)
    return replace(plan, plans=tuple(p.plan for p in planned), parts=parts)
