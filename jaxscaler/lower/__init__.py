"""A plan's layouts put into a step: constraints in the jaxpr, shardings at its borders."""

from jaxscaler.lower.interpret import apply_layouts, constrain, named_sharding
from jaxscaler.lower.layouts import Constraint, Key, Layouts, Spec
from jaxscaler.lower.state import bytes_per_device, init_state, shardings_tree
from jaxscaler.lower.step import (
    Difference,
    MismatchError,
    PlannedStep,
    achieved,
    compile_step,
)

__all__ = [
    "Constraint",
    "Difference",
    "Key",
    "Layouts",
    "MismatchError",
    "PlannedStep",
    "Spec",
    "achieved",
    "apply_layouts",
    "bytes_per_device",
    "compile_step",
    "constrain",
    "init_state",
    "named_sharding",
    "shardings_tree",
]
