"""The joint search for a step as it is written, and a step that runs whatever the search found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.cluster.profile import Profile
from jaxscaler.errors import PlanError
from jaxscaler.given import as_cluster, nnx_for, traced_step, without_objects
from jaxscaler.parallel import ParallelStep
from jaxscaler.pipeline.front import PipelinedStep
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.search import Found, search_pipelines
from jaxscaler.plan import Plan
from jaxscaler.trace import refuse_other_devices


def candidates(
    step: Callable,
    *args: Any,
    cluster: str | Cluster | Mixed,
    roles: Mapping[str, str] = {},
    profile: Profile | str | Path | None = None,
    options: Mapping[str, Any] = {},
    **kwargs: Any,
) -> Found:
    """All that a search over plans with stages and without tried for a step, and the best of it.

    `args` and `kwargs` are the step's, `cluster`, `roles`, `profile` as `plan` has them; `options`:
    of `pipeline.search.search_pipelines` (constraints, micro, stages, schedules, simplest, memory,
    time_limit ...). `Found.plan` is the `Plan` or `PipelinePlan`, `Found.show()` a table.
    """
    cluster = _cluster(cluster, None, profile)
    if nnx := nnx_for(step, (args, kwargs)):
        args, kwargs, _ = nnx.take_call(step, args, kwargs)
        step = nnx.functional(step)
    traced = traced_step(step, args, kwargs, roles, None, cluster.device)
    refuse_other_devices(traced.jaxpr, cluster.num_devices)
    return search_pipelines(traced, cluster, **options)


class SearchedStep:
    """A step that is planned with stages or without, as is faster, at the first call, or by
    `plan_for` or `init`; then it is a `ParallelStep` or a `PipelinedStep` (`chosen`).

    `cluster`, `devices`, `roles`, `profile`: as `parallelize` has them; other options are those of
    `search_pipelines`.
    """

    def __init__(
        self,
        step: Callable,
        *,
        cluster: str | Cluster | Mixed | None = None,
        devices: Sequence[jax.Device] | None = None,
        roles: Mapping[str, str] = {},
        profile: Profile | str | Path | None = None,
        **options: Any,
    ):
        functools.update_wrapper(self, step)
        self.step, self.devices, self.roles, self.options = step, devices, roles, options
        self.cluster = _cluster(cluster, devices, profile)
        self.found: Found | None = None
        self.chosen: Any = None

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan. PlanError before there is one."""
        if self.chosen is None:
            raise PlanError("the step is not planned yet: call it, init, or plan_for")
        return self.chosen.plan

    def plan_for(self, create: Callable, *args: Any, batch: Any) -> Plan | PipelinePlan:
        """Plan for `step(create(*args), batch)` on abstract values; nothing is allocated.

        `batch`: arrays or `jax.ShapeDtypeStruct`s; a tuple stands for several arguments.
        """
        made = jax.eval_shape(without_objects(create), *args)
        self._choose((made, *(batch if isinstance(batch, tuple) else (batch,))), {})
        return self.chosen.plan_for(create, *args, batch=batch)

    def init(self, create: Callable, *args: Any, batch: Any = None) -> Any:
        """`create(*args)`, every leaf made where the plan wants it; plans first if need be."""
        if self.chosen is None:
            if batch is None:
                raise PlanError("init: give batch=, so that the step is planned before its state")
            self.plan_for(create, *args, batch=batch)
        return self.chosen.init(create, *args, batch=batch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._choose(args, kwargs)
        return self.chosen(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What else the chosen step has: `place`, `gather`, `abstract_state` ..."""
        if name.startswith("_") or self.__dict__.get("chosen") is None:
            raise AttributeError(f"a step that is not planned yet has no {name!r}")
        return getattr(self.chosen, name)

    def _choose(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.chosen is not None:
            return
        self.found = candidates(
            self.step, *args, cluster=self.cluster, roles=self.roles, options=self.options, **kwargs
        )
        plan = self.found.plan
        common: dict[str, Any] = dict(cluster=self.cluster, devices=self.devices, roles=self.roles)
        if isinstance(plan, PipelinePlan):
            self.chosen = PipelinedStep(self.step, micro_batches=plan.micro, plan=plan, **common)
        else:
            self.chosen = ParallelStep(self.step, plan=replace(plan, step=None), **common)


def _cluster(cluster: Any, devices: Any, profile: Any) -> Cluster | Mixed:
    """As `as_cluster`; "a100-80:8+v100-32:8" has devices of two kinds."""
    if isinstance(cluster, str) and "+" in cluster:
        cluster = Mixed.parse(cluster)
    return cluster if isinstance(cluster, Mixed) else as_cluster(cluster, devices, profile)
