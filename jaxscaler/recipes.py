"""Well-known plans as short programs. The search decides what they leave open."""

from __future__ import annotations

from jaxscaler.program import ALL, ANY, Line, Replicate, Split, forbid, op_trans, ops, values

COMPUTE = ("forward", "backward")


def data_parallel() -> list[Line]:
    """Every op on samples, state whole on every device, its update replicated."""
    return [
        op_trans(ops(phase=COMPUTE), Split("batch"), ALL),
        op_trans(values(role=("parameter", "optimizer")), Replicate()),
        op_trans(ops(phase="update"), Replicate()),
    ]


def zero(stage: int = 3) -> list[Line]:
    """Data parallelism with optimizer state (1), and parameters too (3), split at rest."""
    roles = ("optimizer",) if stage < 3 else ("parameter", "optimizer")
    return [
        op_trans(ops(phase=COMPUTE), Split("batch"), ALL),
        op_trans(values(role=roles), Split(ANY), ALL),
    ]


def tensor_parallel() -> list[Line]:
    """Products and convolutions with weights split on features; never on samples or tokens."""
    return [
        forbid(op_trans(ops(phase=COMPUTE), Split("batch"))),
        forbid(op_trans(ops(phase=COMPUTE), Split("sequence"))),
        op_trans(
            ops(primitive="*_general*", phase="forward", reads_parameter=True), Split(ANY), ALL
        ),
    ]
