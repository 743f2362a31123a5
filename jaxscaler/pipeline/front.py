"""`parallelize(..., micro_batches=)`: a step that is planned as a pipeline, and then runs.

By the stage executor, or (`one_program=True`) as a jitted step as any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxscaler import planner
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.cluster.profile import Profile
from jaxscaler.errors import PlanError
from jaxscaler.given import StepOnObjects, as_cluster, without_objects
from jaxscaler.parallel import ParallelStep
from jaxscaler.pipeline.dispatch import LIMIT
from jaxscaler.pipeline.one_program import plan_one_program
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.planner import plan_pipeline, with_step
from jaxscaler.pipeline.step import PipelineStep
from jaxscaler.plan import Plan
from jaxscaler.program import Statement
from jaxscaler.trace import trace


def pipelined(step: Callable, *, one_program: bool = False, **options: Any) -> Any:
    """A `PipelinedStep`, or a `OneProgramStep`."""
    return OneProgramStep(step, **options) if one_program else PipelinedStep(step, **options)


class OneProgramStep(ParallelStep):
    """A `ParallelStep` whose scans over layers run as pipelines in one program.

    `micro_batches`, `stages`: as `pipeline.one_program.plan_one_program` has them (`micro`);
    all other options are those of `ParallelStep`. See docs/pipelines-one-program.md.
    """

    def __init__(
        self,
        step: Callable,
        *,
        micro_batches: int,
        stages: int | None = None,
        schedule: str = "gpipe",
        **options: Any,
    ):
        for name in ("submeshes", "changes", "lanes", "loops", "dispatch_limit"):
            if name in options:
                raise PlanError(
                    f"{name}= is not for a pipeline in one program: its stages are equal parts of "
                    "the mesh and of a scan, and what the loss is changed to follows from them; "
                    "leave it out, or one_program="
                )
        if schedule != "gpipe":
            raise PlanError(
                f"schedule={schedule!r}: a pipeline in one program runs all forward ticks before "
                'all backward ticks ("gpipe"), in rounds where memory asks for it; other orders '
                "are for the stage executor: leave schedule= or one_program= out"
            )
        if not isinstance(stages, int):
            raise PlanError("a pipeline in one program needs its number of stages: stages=")
        super().__init__(step, **options)
        self._search = functools.partial(
            plan_one_program, stages=stages, micro=micro_batches, **self._search.keywords
        )
        keywords = self._like.keywords | dict(micro_batches=micro_batches, stages=stages)
        del keywords["loops"]
        self._like = functools.partial(OneProgramStep, step, **keywords)  # type: ignore[assignment]


class PipelinedStep(StepOnObjects):
    """A step that is planned as a pipeline at the first call, or by `plan_for` or `init`.

    The options are those of `pipeline.plan_pipeline`: `micro_batches` (its `micro`), `schedule`
    (`order`), `stages`, `submeshes`, `changes`, `lanes`, `constraints`, `memory`, `time_limit`,
    `progress`, `dispatch_limit`; and `cluster`, `devices`, `roles`, `donate`, `profile` as
    `parallelize` has them. `cluster` may name several kinds: "a100-80:8+h100:8". `plan`: a
    `PipelinePlan`, or the path of a saved one, to be followed and not searched. See
    docs/pipelines.md.
    """

    def __init__(
        self,
        step: Callable,
        *,
        micro_batches: int,
        schedule: Any = "1f1b",
        cluster: str | Cluster | Mixed | None = None,
        constraints: Sequence[Statement | Plan] | Plan | str | Path = (),
        stages: Any = None,
        submeshes: Sequence[int | Cluster | str] | None = None,
        changes: Sequence[Any] = (),
        lanes: int = 1,
        memory: float = planner.MEMORY,
        time_limit: float = planner.TIME_LIMIT,
        progress: planner.Progress | None = None,
        dispatch_limit: float | None = LIMIT,
        devices: Sequence[jax.Device] | None = None,
        roles: Mapping[str, str] = {},
        donate: bool = True,
        profile: Profile | str | Path | None = None,
        plan: PipelinePlan | str | Path | None = None,
    ):
        functools.update_wrapper(self, step)
        self.step, self.devices, self.roles, self.donate = step, devices, roles, donate
        self._given = PipelinePlan.load(plan) if isinstance(plan, str | Path) else plan
        if cluster is None and self._given is not None:
            kind = Mixed if "parts" in self._given.cluster else Cluster
            cluster = kind.from_dict(self._given.cluster)
        elif isinstance(cluster, str) and "+" in cluster:
            cluster = Mixed.parse(cluster)
        self.cluster: Cluster | Mixed
        if not isinstance(cluster, Mixed):
            self.cluster = as_cluster(cluster, devices, profile)
        elif profile is None:
            self.cluster = cluster
        else:
            raise PlanError(f"profile= is of one kind of device, {cluster.name} of several")
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
            dispatch_limit=dispatch_limit,
        )
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
        made = jax.eval_shape(without_objects(create), *args)
        rest = batch if isinstance(batch, tuple) else (batch,)
        return self._planned(*self._meet((*self._as_arguments(made, rest), *rest), {}))

    def init(self, create: Callable, *args: Any, batch: Any = None) -> Any:
        """`create(*args)`, every leaf made on the devices of its stage; plans first if need be."""
        if self._plan is None:
            if batch is None:
                raise PlanError("init: give batch=, so that the step is planned before its state")
            self.plan_for(create, *args, batch=batch)
        return self._given_back(self.run.init(without_objects(create), *args))

    def abstract_state(self) -> Any:
        """The state as `jax.ShapeDtypeStruct`s with shardings: what to restore into."""
        return self._given_back(self.run.abstract_state())

    def place(self, state: Any) -> Any:
        """`state` (whole arrays, or what `abstract_state` says) as the step takes it."""
        return self._on_pytrees(self.run.place, state)

    def gather(self, state: Any) -> Any:
        """`state` with every leaf whole, on the host."""
        return self._on_pytrees(self.run.gather, state)

    def jit(self, fn: Callable) -> Callable:
        """`fn` for functions on the state, whose results lie as the state does."""
        return self.run.jit(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plan is None:
            self._planned(*self._meet(args, kwargs))
        if self._nnx is None:
            return self.run(*args, **kwargs)
        args, kwargs, references = self._nnx.take_call(self.step, args, kwargs)
        return self._nnx.renew(references, self.run(*args, **kwargs))

    def _given_back(self, state: Any) -> Any:
        return self._nnx.give(state) if self._nnx else state

    def _on_pytrees(self, function: Callable, state: Any) -> Any:
        return self._given_back(function(self._nnx.take(state) if self._nnx else state))

    def _planned(self, args: tuple, kwargs: dict[str, Any]) -> PipelinePlan:
        traced = replace(trace(self.step, *args, **kwargs), roles=tuple(self.roles.items()))
        self._plan = with_step(self._given, traced) if self._given else self._search(traced)
        return self._plan
