"""What any train step takes on a cluster: its plan's price, and its FLOPs by what does them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import ConfigError
from jaxscaler.estimate import failures
from jaxscaler.graph.ir import STATE_ROLES, OpGraph
from jaxscaler.plan import Plan
from jaxscaler.space.problem import tensor_bytes

PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class StepEstimate:
    """What a step takes. flops: of all devices, by "phase: products" and the rest. parts: seconds
    of compute and of exposed communication. memory: bytes of a device by role. mfu: of products
    alone, over the devices' peak. cost_per_step: None without a price per device-hour.
    """

    plan: Plan
    devices: int
    flops: Mapping[str, float]
    seconds: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    memory_limit: float
    mfu: float
    goodput: failures.Goodput
    cost_per_step: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "devices": self.devices, "flops": dict(self.flops), "seconds": self.seconds,
            "parts": dict(self.parts), "memory": dict(self.memory),
            "memory_limit": self.memory_limit, "mfu": self.mfu, "goodput": vars(self.goodput),
            "cost_per_step": self.cost_per_step, "axes": self.plan.axes,
        }  # fmt: skip

    def show(self) -> None:
        """Print tables."""
        from jaxscaler.estimate.show import parts_table

        console = Console()
        whole = sum(self.flops.values())
        console.print(
            f"{self.devices} devices, {whole:.4g} FLOPs and {self.seconds:.4g} s a step, "
            f"MFU {self.mfu:.1%}, goodput {self.goodput.share:.1%}"
        )
        if self.cost_per_step is not None:
            console.print(f"cost of 1,000 steps: {1000 * self.cost_per_step:.4g}")
        console.print(parts_table("FLOPs of a step", self.flops, 1e12, "TFLOP"))
        console.print(parts_table("a step", self.parts, 1.0, "s"))
        console.print(parts_table("memory of a device", self.memory, 1e9, "GB", self.memory_limit))


def estimate_step(
    step: Callable,
    *args: Any,
    cluster: str | Cluster,
    price_per_hour: float | None = None,
    mtbf_hours: float = failures.MTBF_HOURS,
    **options: Any,
) -> StepEstimate:
    """Plan a train step on its abstract arguments (as `jaxscaler.plan`, which takes `options`) and
    say what it takes there."""
    from jaxscaler.api import plan as plan_step

    if price_per_hour is not None and not 0 < price_per_hour < float("inf"):
        raise ConfigError(f"price_per_hour={price_per_hour!r}: a number above 0")
    plan = plan_step(step, *args, cluster=cluster, cache=False, **options)
    if not isinstance(plan, Plan):
        raise ConfigError("pipelines=True: a step is estimated by a plan without stages")
    found = Cluster.from_dict(plan.cluster)
    assert plan.step is not None
    graph = plan.step.graph
    work, peak_seconds = _flops(graph, found)
    state = sum(
        tensor_bytes(graph.values[v].shape, graph.values[v].dtype)
        for v in graph.inputs
        if graph.values[v].role in STATE_ROLES
    )
    p = plan.predicted
    goodput = failures.goodput(found.num_devices, state, mtbf_hours=mtbf_hours)
    cost = None
    if price_per_hour is not None and goodput.share:
        cost = p.seconds / goodput.share / 3600 * found.num_devices * price_per_hour
    return StepEstimate(
        plan, found.num_devices, work, p.seconds,
        {"compute": p.compute, "communication": p.communication},
        dict(p.memory), p.limit_bytes, peak_seconds / p.seconds / found.num_devices,
        goodput, cost,
    )  # fmt: skip


def _flops(graph: OpGraph, cluster: Cluster) -> tuple[dict[str, float], float]:
    """(FLOPs by phase and kind, seconds of one device's peak that products take)."""
    found: dict[str, float] = defaultdict(float)
    seconds = 0.0
    for op in graph.ops:
        kind = graph.kinds[op.kind]
        work = kind.flops * op.repeat
        product = kind.primitive in PRODUCTS or "heavy" in kind.traits
        found[f"{op.phase}: {'products' if product else 'the rest'}"] += work
        if product:
            seconds += work / cluster.device.flops(kind.operand_dtypes[0])
    return {name: work for name, work in found.items() if work}, seconds
