"""What a search over pipelines tried, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxscaler import planner
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.space import KEPT, Candidate, Shape

PLAINEST = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2", "interlaced")


@dataclass(frozen=True)
class Row:
    """What was tried: predicted seconds of a step and bytes of a device, or why not.

    candidate: None: the plan without stages, or a plan that was given. need: bytes of a device that
    it would take, if known.
    """

    what: str
    kind: str
    candidate: Candidate | None
    seconds: float | None = None
    peak_bytes: float | None = None
    why: str = ""
    need: float | None = None
    given: PipelinePlan | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Found:
    """best: a `planner.Planned` without stages, or a `PipelinePlan`. tried: rows, in the order in
    which they were priced. spmd: the plan without stages, if there is one. notes: what was left.
    tracing: CPU seconds of the search in which the step was traced with its cuts."""

    best: planner.Planned | PipelinePlan
    tried: tuple[Row, ...]
    spmd: planner.Planned | None
    notes: tuple[str, ...] = ()
    tracing: float = 0.0

    @property
    def plan(self) -> Any:
        """The `Plan`, or `PipelinePlan`."""
        return self.best if isinstance(self.best, PipelinePlan) else self.best.plan

    @property
    def seconds(self) -> float:
        """Predicted, of a step."""
        plan = self.plan
        return plan.seconds if isinstance(plan, PipelinePlan) else plan.predicted.seconds

    def rows(self) -> list[dict[str, Any]]:
        """What was tried, as JSON takes it."""
        return [
            {"plan": r.what, "seconds": r.seconds, "peak_bytes": r.peak_bytes, "refused": r.why}
            for r in self.tried
        ]

    def show(self, console: Any = None) -> None:
        """Print the candidates as a table, the best first."""
        from jaxscaler.report.candidates import show_candidates

        show_candidates(self, console)


def kind_of(shape: Shape) -> str:
    """What pipelines are told apart by where nothing fits."""
    return f"{len(shape.sizes)} stages, {shape.again}"


def plainness(row: Row) -> tuple:
    """The simpler, the less."""
    if row.given is not None:
        runs, micro = row.given.places, row.given.micro
        return 1, len(runs), micro, False, len({*row.given.devices}) > 1, False, len(PLAINEST)
    if row.candidate is None:
        return (0,)
    shape, name = row.candidate.shape, row.candidate.schedule
    rank = PLAINEST.index(name) if name in PLAINEST else len(PLAINEST)
    return (
        1, shape.stages + 2 * shape.wide, shape.micro, shape.again != KEPT,
        len({*shape.sizes}) > 1, shape.lanes > 1, rank,
    )  # fmt: skip
