"""The front door: `parallelize` a train step, or `plan` it without any device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscaler import planner
from jaxscaler.cache import find_cache
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.profile import Profile
from jaxscaler.errors import ConstraintError
from jaxscaler.given import as_cluster, author_of, nnx_for, traced_step
from jaxscaler.parallel import ParallelStep
from jaxscaler.pipeline.front import pipelined
from jaxscaler.pipeline.joint import SearchedStep, candidates
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.plan import Plan
from jaxscaler.program import Statement
from jaxscaler.trace import refuse_other_devices
from jaxscaler.verify.loop import plan_verified


def plan(
    step: Callable,
    *args: Any,
    cluster: str | Cluster,
    constraints: Sequence[Statement | Plan] | Plan | str | Path = (),
    memory: float = planner.MEMORY,
    time_limit: float = planner.TIME_LIMIT,
    seed: int = 0,
    progress: planner.Progress | None = None,
    roles: Mapping[str, str] = {},
    cache: bool | str | Path = True,
    mesh: Any = None,
    specs: Mapping[str, Any] = {},
    verify: bool | int | str = False,
    profile: Profile | str | Path | None = None,
    loops: bool = True,
    pipelines: bool = False,
    simplest: float = 0.0,
    **kwargs: Any,
) -> Plan | PipelinePlan:
    """Plan a train step for a cluster; no device of it needs to be present.

    `args` and `kwargs` are the step's, arrays or `jax.ShapeDtypeStruct`s. `cluster`: such as
    "h100:8x4", or a `Cluster`. `constraints`: lines of the language (docs/language.md), or the path
    of a YAML file of them; a `Plan` among them is kept wherever it still fits. `memory`: the share
    of a device's memory that may be filled.
    `time_limit`: seconds of search; what is left open then is in `plan.search.gap`. `roles`: what
    arguments are, by globs of their paths, where data flow does not tell: {"frozen/*": "parameter"}
    (or "optimizer", "batch", "rng"; of several that match, the last counts). `cache`: whether, or
    in which folder, plans are kept for the next start of the program (see `jaxscaler.cache`).
    `mesh`: the only mesh to be searched, a `jax.sharding.Mesh` or {name: size}, major first; the
    plan's axes have its names, and sharding constraints in the step, which speak of them, are kept.
    `specs`: where arguments lie at rest, {glob of paths: `PartitionSpec` on that mesh}. `verify`:
    compile the planned step with the cluster's own compiler, and plan again, with what was learned
    of its temporaries, until it fits; a number: of meshes whose best plans are compiled, of which
    the fastest by the compiler's word is taken; "present": compile for the devices present. See
    docs/verify.md. `profile`: what `jaxscaler calibrate` measured on such devices, or the path of
    it: prices are made of that (docs/calibrate.md).
    `loops`: whether to look, where memory decides and a loss is marked, for parts of it that run
    as loops (co-shards, gradient accumulation); those that constraints ask for are taken anyway.
    `pipelines`: whether pipelines compete with plans without stages (docs/pipelines.md): the result
    is a `PipelinePlan` where one is faster. `simplest`: of the plans that are slower by this share
    at most, the simplest.
    """
    if pipelines:
        if mesh is not None or specs or verify:
            raise ConstraintError(
                "pipelines=True: stages have meshes of their own, and are not verified as one "
                "program: leave mesh=, specs= and verify= out"
            )
        found = candidates(
            step, *args, cluster=cluster, roles=roles, profile=profile, **kwargs,
            options=dict(constraints=constraints, memory=memory, time_limit=time_limit,
                         simplest=simplest, progress=progress),
        )  # fmt: skip
        return found.plan
    if simplest:
        raise ConstraintError("simplest= chooses among what pipelines=True tries: give both")
    author, cluster = author_of(mesh, specs), as_cluster(cluster, profile=profile)
    nnx = nnx_for(step, (args, kwargs))
    if nnx:
        args, kwargs, _ = nnx.take_call(step, args, kwargs)
        step = nnx.functional(step)
    traced = traced_step(step, args, kwargs, roles, mesh, cluster.device)
    refuse_other_devices(traced.jaxpr, cluster.num_devices)
    author = nnx.with_own_words(author, traced) if nnx else author
    search = functools.partial(
        planner.plan_step,
        traced,
        cluster,
        time_limit=time_limit,
        seed=seed,
        progress=progress,
        cache=find_cache(cache),
        loops=loops,
    )
    if not verify:
        return search(author=author, constraints=constraints, memory=memory).plan
    lines = planner.listed(constraints)
    return plan_verified(search, cluster, memory, verify, lines, author, progress).plan


def with_step(plan: Plan, step: Callable, *args: Any, mesh: Any = None, **kwargs: Any) -> Plan:
    """A plan that was read from a file, with the step and arguments that it was made for, so that
    it can be audited and verified. PlanError where they are others. `mesh` as in `plan`.
    """
    if nnx := nnx_for(step, (args, kwargs)):
        args, kwargs, _ = nnx.take_call(step, args, kwargs)
        step = nnx.functional(step)
    device = Cluster.from_dict(plan.cluster).device
    return planner.follow_plan(traced_step(step, args, kwargs, {}, mesh, device), plan).plan


def parallelize(step: Callable | None = None, /, **options: Any) -> Any:
    """Run a single-device train step on a cluster, by a plan searched when its types are known.

        @parallelize(cluster="h100:8x4")
        def train_step(state, batch): ...

    A step may take flax.nnx objects (Module, Optimizer, Rngs, Metric ...) and change them; it may
    have gone through `jax.jit` or `nnx.jit`, whose static and donated arguments then count.

    Options: `cluster` (None: the devices that JAX sees), `constraints`, `memory`, `time_limit`,
    `seed`, `progress`, `roles`, `cache`, `profile`, `loops` as in `plan`; `devices`: to run on
    (default: all); `plan`: a `Plan`, or the path of a saved one, to be followed instead of
    searched; `donate`: indices of arguments that give up their buffers (True, the default: those
    that the step gives back, as a train step its state; False for a step whose arguments are used
    again); `follow`: a planned step, or a `Plan`, whose state this step takes too: it lies as it
    does there, and the rest is searched; `mesh` and `specs` as in `plan`: a mesh and layouts to
    be kept as they are; `verify` as in `plan`.

    Once planned, a step may be called with batches of other shapes: it is planned for each, with
    the state where it is. See docs/state.md.

    With `micro_batches` the step is a pipeline: its options are those of `PipelinedStep` then
    (`schedule`, `stages`, `submeshes` ...; docs/pipelines.md), or with `one_program=True` the ones
    above and `stages` (docs/pipelines-one-program.md). With `pipelines=True` it is planned with
    stages or without, as is faster: options are `cluster`, `devices`, `roles`, `profile` and those
    of `pipeline.search.search_pipelines` (`constraints`, `micro`, `stages`, `simplest` ...).
    """
    if options.pop("pipelines", False):
        kind: Callable = SearchedStep
    else:
        kind = pipelined if "micro_batches" in options else ParallelStep
    return functools.partial(kind, **options) if step is None else kind(step, **options)
