"""Well-known plans as short programs. The search decides what they leave open.

Programs are lists: what two recipes say together is their sum, as in `zero(1) + [...]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxscaler.holes import hole
from jaxscaler.program import (
    ALL,
    ANY,
    AT_LEAST_TWO,
    NOWHERE,
    SAME_DEVICE,
    Number,
    Replicate,
    Split,
    Statement,
    forbid,
    op_assign,
    op_trans,
    ops,
    region,
    values,
)

COMPUTE = ("forward", "backward")
STATE = ("parameter", "optimizer")
PRODUCTS = ops(primitive="*_general*", phase="forward", parameter="*")  # products with weights
MOST = 2**20  # devices
Program = list[Statement]


def data_parallel() -> Program:
    """Every op on samples, state whole on every device, its update replicated."""
    return [
        op_trans(ops(phase=COMPUTE), Split("batch"), ALL),
        op_trans(values(role=STATE), Replicate()),
        op_trans(ops(phase="update"), Replicate()),
    ]


def zero(stage: int = 3) -> Program:
    """Data parallelism with optimizer state (1), gradients (2), parameters (3) split at rest.

    Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models, 2020.
    """
    gradients = values(role="gradient", to=ops(phase="update"))
    return [
        op_trans(ops(phase=COMPUTE), Split("batch"), ALL),
        op_trans(values(role=STATE if stage > 2 else "optimizer"), Split(ANY), ALL),
        *([op_trans(gradients, Split(ANY), ALL)] if stage == 2 else []),
        *([op_trans(values(role="parameter"), Replicate())] if stage < 3 else []),
    ]


def hybrid(inner: str = "device", outer: str = "node") -> Program:
    """Data parallelism with state split inside a node and whole across nodes (hybrid sharding).

    Zhao et al., PyTorch FSDP: experiences on scaling fully sharded data parallel, 2023.
    """
    return [
        op_trans(ops(phase=COMPUTE), Split("batch"), ALL),
        op_assign(op_trans(values(role=STATE), Split(ANY), ALL), inner),
        op_assign(op_trans(values(role=STATE), Replicate()), outer),
    ]


def tensor_parallel(sequence: bool = False) -> Program:
    """Products and convolutions with weights split on features; never on samples or tokens.

    `sequence`: what lies between those products may be split on tokens. Shoeybi et al.,
    Megatron-LM, 2019; Korthikanti et al., Reducing activation recomputation in large transformer
    models, 2022.
    """
    whole = PRODUCTS if sequence else ops(phase=COMPUTE)
    return [
        forbid(op_trans(ops(phase=COMPUTE), Split("batch"))),
        forbid(op_trans(whole, Split("sequence"))),
        op_trans(PRODUCTS, Split(ANY), ALL),
    ]


def context_parallel() -> Program:
    """Every op on tokens."""
    return [
        forbid(op_trans(ops(phase=COMPUTE), Split("batch"))),
        op_trans(ops(phase=COMPUTE), Split("sequence"), ALL),
    ]


def expert_parallel(
    weights: Sequence[str] = ("experts/gate", "experts/up", "experts/down"),
    dim: int = 0,
    num: Number = AT_LEAST_TWO,
) -> Program:
    """The experts, dim `dim` of the `weights` at these paths, apart: at rest and in use.

    Lepikhin et al., GShard: scaling giant models with conditional computation, 2020.
    """
    lines: Program = []
    for path in weights:
        compute = ops(phase=COMPUTE)
        lines.append(op_trans(values(path, role="parameter"), Split(dim), num))
        lines.append(op_trans(values(path, role="parameter", to=compute), Split(dim), num))
    return lines


def two_d() -> Program:
    """Tensor parallelism in groups, data parallelism across: batch in dp parts, dp is searched."""
    dp = hole("dp", 2, MOST)
    return [
        op_trans(ops(phase=COMPUTE), Split("batch"), dp),
        forbid(op_trans(PRODUCTS, Split("batch"), ALL)),
        forbid(op_trans(PRODUCTS, Split("sequence"))),
        op_trans(PRODUCTS, Split(ANY), ALL),
    ]


def three_d() -> Program:
    """The same with the state split over the data parallel groups too."""
    return [*two_d(), op_trans(values(role=STATE), Split(ANY), ALL)]


def recompute_all() -> Program:
    """All activations of all layers are made again in the backward pass.

    Needs a loss that `jaxscaler.value_and_grad` (or `grad`) marks. Chen et al., Training deep nets
    with sublinear memory cost, 2016.
    """
    return [op_assign(values(role="activation"), NOWHERE)]


def recompute_selective(scores: str = "*q*,*k*->*qk", weighted: str = "*qk,*k*->*q*") -> Program:
    """Attention's scores and their softmax are made again; the search decides the rest.

    `scores`, `weighted`: paths of the products that make the scores and that read their softmax, by
    default as einsums name them. Needs a loss that `jaxscaler.value_and_grad` (or `grad`) marks.
    Korthikanti et al., Reducing activation recomputation in large transformer models, 2022.
    """
    return [
        op_assign(values(scores, role="activation"), NOWHERE),
        op_assign(values(role="activation", to=ops(weighted, phase="forward")), NOWHERE),
    ]


def co_shard(path: str = "*attn*", factor: str | tuple[str, ...] = ANY, num: Number = 4) -> Program:
    """Attention (or what else is at `path`) in `num` parts of a factor, one after another on a
    device, each made again in the backward pass.

    Needs a loss that `jaxscaler.value_and_grad` (or `grad`) marks. Lin et al., nnScaler, 2024.
    """
    return [op_assign(op_trans(region(path, phase="forward"), Split(factor), num), SAME_DEVICE)]


def accumulate(num: Number = 4) -> Program:
    """Gradients of `num` parts of the batch, one after another, are summed: micro-batches.

    Needs a loss that `jaxscaler.value_and_grad` (or `grad`) marks.
    """
    return [op_assign(op_trans(ops(phase=COMPUTE), Split("batch"), num), SAME_DEVICE)]


# Those that change the forward pass need a marked loss.
RECIPES: Mapping[str, Callable[[], Program]] = {
    "data_parallel": data_parallel,
    "zero_1": lambda: zero(1),
    "zero_2": lambda: zero(2),
    "zero_3": zero,
    "hybrid": hybrid,
    "tensor_parallel": tensor_parallel,
    "tensor_sequence_parallel": lambda: tensor_parallel(sequence=True),
    "context_parallel": context_parallel,
    "expert_parallel": expert_parallel,
    "two_d": two_d,
    "three_d": three_d,
    "recompute_all": recompute_all,
    "recompute_selective": recompute_selective,
    "co_shard": co_shard,
    "accumulate": accumulate,
}
