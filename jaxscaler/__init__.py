"""jaxscaler: plans how a single-device JAX train step runs on a cluster, and runs it."""

from jaxscaler.api import ParallelStep, parallelize, plan
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import (
    ClusterError,
    ConstraintError,
    InfeasibleError,
    JaxscalerError,
    PlanError,
    SolveError,
    TraceError,
)
from jaxscaler.graph.registry import register_rule
from jaxscaler.plan import Plan
from jaxscaler.program import ALL, ANY, Replicate, Split, forbid, op_assign, op_trans, ops, values

__version__ = "0.1.0"

__all__ = [
    "ALL", "ANY", "Cluster", "ClusterError", "ConstraintError", "InfeasibleError", "JaxscalerError",
    "ParallelStep", "Plan", "PlanError", "Replicate", "SolveError", "Split", "TraceError", "forbid",
    "op_assign", "op_trans", "ops", "parallelize", "plan", "register_rule", "values",
]  # fmt: skip
