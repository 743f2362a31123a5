"""The plan of a pipeline: plain data with a JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxscaler import planner
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import PlanError
from jaxscaler.plan import Plan, read_json, write_json
from jaxscaler.rewrite.assign import places_of
from jaxscaler.rewrite.changes import Change, Stages, from_data, to_data
from jaxscaler.rewrite.stage_step import StageStep
from jaxscaler.rewrite.stages import Staged
from jaxscaler.schedule.simulate import Timeline, simulate
from jaxscaler.schedule.tasks import Edge, Order, Pipeline, StageWork, Task
from jaxscaler.trace import Traced

VERSION = 1


@dataclass(frozen=True)
class PipelinePlan:
    """A step as a pipeline: how it is cut, a plan per place, and the order of tasks.

    changes: of the marked loss, its `Stages` and `Accumulate` among them. clusters: the devices of
    each place, which begin with device number `first`. plans: of each place's stage step. order:
    per device group, its tasks. pipeline: seconds and bytes of every stage, which `timeline`
    simulates. dispatch: seconds of the host's thread per task.
    """

    cluster: Mapping[str, Any]
    changes: tuple[Change, ...]
    clusters: tuple[Mapping[str, Any], ...]
    first: tuple[int, ...]
    plans: tuple[Plan, ...]
    order: Order
    pipeline: Pipeline = field(repr=False)
    notes: tuple[str, ...] = ()
    dispatch: float = 0.0
    # the cut step and what was planned of it; None in a plan that was read from a file
    parts: Parts | None = field(default=None, compare=False, repr=False)

    @property
    def micro(self) -> int:
        """Micro-batches of a step."""
        return self.pipeline.micro

    @property
    def copies(self) -> int:
        """Of every stage: 2 where the pipeline runs in both directions, else 1."""
        return len(self.pipeline.stages) // len(self.places)

    @property
    def sites(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """[copy][place]: (first device, how many); those of second copies are in reverse."""
        down = tuple(zip(self.first, self.devices))
        return (down, down[::-1])[: self.copies]

    @property
    def places(self) -> tuple[int, ...]:
        """[stage]: the place where it runs; a place that is visited again has several stages."""
        return places_of(next(c for c in self.changes if isinstance(c, Stages)))

    def show(self, console: Any = None) -> None:
        """Print what each stage takes, and the simulated step."""
        from jaxscaler.report.pipeline import show_pipeline

        show_pipeline(self, console)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices per place."""
        return tuple(Cluster.from_dict(c).num_devices for c in self.clusters)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "cluster": self.cluster,
            "changes": [to_data(change) for change in self.changes],
            "clusters": list(self.clusters),
            "first": self.first,
            "plans": [plan.to_dict() for plan in self.plans],
            "order": self.order,
            "pipeline": asdict(self.pipeline),
            "notes": self.notes,
            "dispatch": self.dispatch,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PipelinePlan:
        """Raises PlanError on a plan of another version or with missing parts."""
        if data.get("version") != VERSION or "pipeline" not in data:
            raise PlanError(
                f"no pipeline's plan of version {VERSION}, which this jaxscaler reads: plan again"
            )
        try:
            given = data["pipeline"]
            pipeline = Pipeline(
                tuple(StageWork(**{k: _frozen(v) for k, v in s.items()}) for s in given["stages"]),
                given["micro"],
                tuple(Edge(*edge) for edge in given["edges"]),
                tuple(given["limits"]),
                given["barrier"],
            )
            return PipelinePlan(
                cluster=data["cluster"],
                changes=tuple(map(from_data, data["changes"])),
                clusters=tuple(data["clusters"]),
                first=tuple(data["first"]),
                plans=tuple(map(Plan.from_dict, data["plans"])),
                order=tuple(tuple(Task(*task) for task in mine) for mine in data["order"]),
                pipeline=pipeline,
                notes=tuple(data["notes"]),
                dispatch=data.get("dispatch", 0.0),
            )
        except (KeyError, TypeError) as error:
            raise PlanError(f"not a pipeline's plan: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        write_json(path, self.to_dict())

    @staticmethod
    def load(path: str | Path) -> PipelinePlan:
        """Read a plan. Raises PlanError, naming the file, when it is not one."""
        return read_json(path, PipelinePlan.from_dict)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step: seconds, bubbles, bytes."""
        return simulate(self.pipeline, self.order, self.dispatch)

    @property
    def seconds(self) -> float:
        """Predicted, of a step."""
        return self.timeline.seconds


@dataclass(frozen=True)
class Parts:
    """A step (`whole`, with its changes) that is cut; per place its stage step, planned."""

    whole: Traced
    staged: Staged
    steps: tuple[StageStep, ...]
    planned: tuple[planner.Planned, ...]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
