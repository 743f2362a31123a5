"""A plan compiled for the devices that are present, by their own backend, in the user's process.

What a compile ahead of time can not know, autotuning above all, is in it; nothing runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import device_grid
from jaxscaler.errors import ClusterError, PlanError
from jaxscaler.lower.step import PlannedStep, donated_arguments
from jaxscaler.plan import Plan
from jaxscaler.verify import module, targets
from jaxscaler.verify.compile import memory_of
from jaxscaler.verify.cycles import op_cycles
from jaxscaler.verify.hlo import hlo_collectives
from jaxscaler.verify.targets import Target
from jaxscaler.verify.worker import COMPILED, NO_TEXT, Compiled, Memory, status_of

_PLATFORM = {"gpu": targets.CUDA, "tpu": targets.TPU, "cpu": targets.CPU}


def compiled_here(plan: Plan, step: Any, cluster: Cluster) -> Compiled:
    """What the backend of the devices present makes of a planned step (`planner.Planned`).

    Raises ClusterError where there are fewer devices than the plan is for, PlanError in one of
    several processes. Memory is what the
    allocator may give out, or where it does not say, what the table has of the device.
    """
    if jax.process_count() > 1:
        raise PlanError(
            "'present' compiles in one process, and this is one of several: name a cluster, whose "
            "compiler needs no devices"
        )
    size = math.prod(n for _, n in plan.axes)
    devices = jax.devices()
    if len(devices) < size:
        raise ClusterError(
            f"the plan is for {size} devices ({cluster.name}), {len(devices)} are present"
        )
    names, shape = zip(*plan.mesh_axes)
    grid = device_grid(shape, devices[:size])
    mesh = jax.sharding.Mesh(grid, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    first = devices[0]
    platform = _PLATFORM.get(first.platform, first.platform)
    stats = first.memory_stats() or {}
    memory = stats.get("bytes_limit", cluster.device.hbm_bytes)
    target = Target(f"present: {size} x {first.device_kind}", platform, size, float(memory),
                    targets.PRESENT)  # fmt: skip
    options = dict(plan.compiler_options) if platform == targets.CUDA else {}
    layouts = step.layouts()
    donate = donated_arguments(step.traced, layouts)
    lowered = PlannedStep(step.traced, layouts, mesh, donate, options or None).lower()
    ir = lowered.compiler_ir("stablehlo")
    trips = module.trip_counts(ir)
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        status, needs = status_of(str(error))
        return Compiled(target, status, str(error)[:2000], needs=needs)
    found = Compiled(
        target, COMPILED, memory=Memory(**memory_of(compiled.runtime_executable())),
        seconds=time.perf_counter() - start, versions=targets.versions(target),
    )  # fmt: skip
    return _read(found, compiled, dict(plan.axes), trips)


def _read(
    found: Compiled, compiled: Any, axes: Mapping[str, int], trips: Mapping[str, int]
) -> Compiled:
    try:
        text = compiled.as_text()
        merge = found.target.platform == targets.CPU
        moved = hlo_collectives(text, axes, trips, merge)
    except (jax.errors.JaxRuntimeError, PlanError) as error:
        return replace(found, status=NO_TEXT, detail=str(error)[:2000])
    cycles = op_cycles(text, trips) if found.target.platform == targets.TPU else None
    return replace(found, collectives=moved, cycles=cycles, text=text)
