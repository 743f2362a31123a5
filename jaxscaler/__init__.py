"""jaxscaler: plans how a single-device JAX train step runs on a cluster, and runs it.

Names are looked up when they are first used, so that `jaxscaler.solve` comes without JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxscaler import _lazy

__version__ = "0.1.0"

# A public name takes two rows: the module that has it here, and its import for type checkers below.
_MODULE = {
    "ALL": "program",
    "ANY": "program",
    "Cast": "program",
    "Cluster": "cluster.cluster",
    "ClusterError": "errors",
    "ConfigError": "errors",
    "ConstraintError": "errors",
    "HBM": "program",
    "HOST": "program",
    "InfeasibleError": "errors",
    "JaxscalerError": "errors",
    "Kernel": "program",
    "NOWHERE": "program",
    "OutOfTimeError": "errors",
    "ParallelStep": "api",
    "Plan": "plan",
    "PlanError": "errors",
    "Profile": "cluster.profile",
    "Replicate": "program",
    "RewriteError": "errors",
    "SAME_DEVICE": "program",
    "ScheduleError": "errors",
    "SolveError": "errors",
    "Split": "program",
    "Stage": "program",
    "TraceError": "errors",
    "candidates": "pipeline.joint",
    "dump_program": "program_text",
    "estimate": "estimate.estimate",
    "forbid": "program",
    "grad": "grad",
    "hole": "holes",
    "if_possible": "program",
    "op_assign": "program",
    "op_order": "program",
    "op_trans": "program",
    "ops": "program",
    "parallelize": "api",
    "plan": "api",
    "read_program": "program_text",
    "region": "program",
    "register_kernel": "rewrite.exchange",
    "register_rule": "graph.registry",
    "value_and_grad": "grad",
    "values": "program",
}

if TYPE_CHECKING:
    from jaxscaler.api import ParallelStep as ParallelStep
    from jaxscaler.api import parallelize as parallelize
    from jaxscaler.api import plan as plan
    from jaxscaler.cluster.cluster import Cluster as Cluster
    from jaxscaler.cluster.profile import Profile as Profile
    from jaxscaler.errors import ClusterError as ClusterError
    from jaxscaler.errors import ConfigError as ConfigError
    from jaxscaler.errors import ConstraintError as ConstraintError
    from jaxscaler.errors import InfeasibleError as InfeasibleError
    from jaxscaler.errors import JaxscalerError as JaxscalerError
    from jaxscaler.errors import OutOfTimeError as OutOfTimeError
    from jaxscaler.errors import PlanError as PlanError
    from jaxscaler.errors import RewriteError as RewriteError
    from jaxscaler.errors import ScheduleError as ScheduleError
    from jaxscaler.errors import SolveError as SolveError
    from jaxscaler.errors import TraceError as TraceError
    from jaxscaler.estimate.estimate import estimate as estimate
    from jaxscaler.grad import grad as grad
    from jaxscaler.grad import value_and_grad as value_and_grad
    from jaxscaler.graph.registry import register_rule as register_rule
    from jaxscaler.holes import hole as hole
    from jaxscaler.pipeline.joint import candidates as candidates
    from jaxscaler.plan import Plan as Plan
    from jaxscaler.program import ALL as ALL
    from jaxscaler.program import ANY as ANY
    from jaxscaler.program import HBM as HBM
    from jaxscaler.program import HOST as HOST
    from jaxscaler.program import NOWHERE as NOWHERE
    from jaxscaler.program import SAME_DEVICE as SAME_DEVICE
    from jaxscaler.program import Cast as Cast
    from jaxscaler.program import Kernel as Kernel
    from jaxscaler.program import Replicate as Replicate
    from jaxscaler.program import Split as Split
    from jaxscaler.program import Stage as Stage
    from jaxscaler.program import forbid as forbid
    from jaxscaler.program import if_possible as if_possible
    from jaxscaler.program import op_assign as op_assign
    from jaxscaler.program import op_order as op_order
    from jaxscaler.program import op_trans as op_trans
    from jaxscaler.program import ops as ops
    from jaxscaler.program import region as region
    from jaxscaler.program import values as values
    from jaxscaler.program_text import dump_program as dump_program
    from jaxscaler.program_text import read_program as read_program
    from jaxscaler.rewrite.exchange import register_kernel as register_kernel
else:
    __all__ = sorted(_MODULE)

    __getattr__ = _lazy.lazy(__name__, _MODULE)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE})
