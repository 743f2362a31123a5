"""Orders of a pipeline's tasks: families, checks, simulation, search. Knows no JAX."""

from jaxscaler.schedule.bound import least_seconds
from jaxscaler.schedule.check import check
from jaxscaler.schedule.families import FAMILIES, family
from jaxscaler.schedule.search import Found, best_family, search
from jaxscaler.schedule.simulate import Timeline, dispatch_order, fits, simulate
from jaxscaler.schedule.tasks import (
    NO_MICRO,
    Edge,
    Order,
    Pipeline,
    StageWork,
    Task,
    mirrored,
    task_graph,
    tasks,
    uniform,
)

__all__ = [
    "FAMILIES",
    "NO_MICRO",
    "Edge",
    "Found",
    "Order",
    "Pipeline",
    "StageWork",
    "Task",
    "Timeline",
    "best_family",
    "check",
    "dispatch_order",
    "family",
    "fits",
    "least_seconds",
    "mirrored",
    "search",
    "simulate",
    "task_graph",
    "tasks",
    "uniform",
]
