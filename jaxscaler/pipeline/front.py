"""`parallelize(..., micro_batches=)`: a step that is planned as a pipeline, and then runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxscaler import planner
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import PlanError
from jaxscaler.given import as_cluster, nnx_for
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.planner import plan_pipeline, with_step
from jaxscaler.pipeline.step import PipelineStep
from jaxscaler.plan import Plan
from jaxscaler.program import Statement
from jaxscaler.trace import trace


class PipelinedStep:
    """A step that is planned as a pipeline at the first call, or by `plan_for` or `init`.

    The options are those of `pipeline.plan_pipeline`: `micro_batches` (its `micro`), `schedule`
    (`order`), `stages`, `submeshes`, `changes`, `lanes`, `constraints`, `memory`, `time_limit`,
    `progress`; and `cluster`, `devices`, `roles`, `donate` as `parallelize` has them. `plan`: a
    `PipelinePlan`, or the path of a saved one, to be followed and not searched. See
    docs/pipelines.md.
    """

    def __init__(
        self,
        step: Callable,
        *,
        micro_batches: int,
        schedule: Any = "1f1b",
        cluster: str | Cluster | None = None,
        constraints: Sequence[Statement | Plan] | Plan | str | Path = (),
        stages: Any = None,
        submeshes: Sequence[int | Cluster | str] | None = None,
        changes: Sequence[Any] = (),
        lanes: int = 1,
        memory: float = planner.MEMORY,
        time_limit: float = planner.TIME_LIMIT,
        progress: planner.Progress | None = None,
        devices: Sequence[jax.Device] | None = None,
        roles: Mapping[str, str] = {},
        donate: bool = True,
        plan: PipelinePlan | str | Path | None = None,
    ):
        functools.update_wrapper(self, step)
        self.step, self.devices, self.roles, self.donate = step, devices, roles, donate
        if cluster is None and isinstance(plan, PipelinePlan):
            cluster = Cluster.from_dict(plan.cluster)
        self.cluster = as_cluster(cluster, devices)
        self._search = functools.partial(
            plan_pipeline,
            cluster=self.cluster,
            stages=stages,
            micro=micro_batches,
            order=schedule,
            submeshes=submeshes,
            constraints=planner.listed(constraints),
            changes=changes,
            lanes=lanes,
            memory=memory,
            time_limit=time_limit,
            progress=progress,
        )
        self._given = PipelinePlan.load(plan) if isinstance(plan, str | Path) else plan
        self._plan: PipelinePlan | None = None
        self._run: PipelineStep | None = None

    @property
    def plan(self) -> PipelinePlan:
        """The plan. PlanError before there is one."""
        if self._plan is None:
            raise PlanError("the step is not planned yet: call it, init, or plan_for")
        return self._plan

    @property
    def run(self) -> PipelineStep:
        """The planned step on the devices at hand."""
        if self._run is None:
            self._run = PipelineStep(self.plan, self.devices, self.donate)
        return self._run

    def plan_for(self, create: Callable, *args: Any, batch: Any) -> PipelinePlan:
        """Plan for `step(create(*args), batch)` on abstract values; nothing is allocated.

        `batch`: arrays or `jax.ShapeDtypeStruct`s; a tuple stands for several arguments.
        """
        made = jax.eval_shape(create, *args)
        return self._planned((made, *(batch if isinstance(batch, tuple) else (batch,))), {})

    def init(self, create: Callable, *args: Any, batch: Any = None) -> Any:
        """`create(*args)`, every leaf made on the devices of its stage; plans first if need be."""
        if self._plan is None:
            if batch is None:
                raise PlanError("init: give batch=, so that the step is planned before its state")
            self.plan_for(create, *args, batch=batch)
        return self.run.init(create, *args)

    def place(self, state: Any) -> Any:
        """`state` (whole arrays) as the step takes it."""
        return self.run.place(state)

    def gather(self, state: Any) -> Any:
        """`state` with every leaf whole, on the host."""
        return self.run.gather(state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plan is None:
            self._planned(args, kwargs)
        return self.run(*args, **kwargs)

    def _planned(self, args: tuple, kwargs: dict[str, Any]) -> PipelinePlan:
        if nnx_for(self.step, (args, kwargs)):
            raise PlanError(
                "a pipeline takes a step on pytrees: split flax.nnx objects (nnx.split) outside of "
                "the step, or leave micro_batches= out"
            )
        traced = replace(trace(self.step, *args, **kwargs), roles=tuple(self.roles.items()))
        self._plan = with_step(self._given, traced) if self._given else self._search(traced)
        return self._plan
