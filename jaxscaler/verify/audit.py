"""What the partitioner does with a planned step: its collectives, without compiling.

Shardy's own passes run on a copy of the lowered step: shardings propagate, every disagreement of an
op with its operands becomes an explicit reshard, reshards become collectives. What is left is read
into `Node`s and brought into normal form. It needs no device and works for any size of mesh.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax.extend.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from jaxscaler.errors import PlanError
from jaxscaler.verify import normal_form as nf
from jaxscaler.verify.module import read, shape, sharding_of

# A pass on the wrong level of nesting ends the process, not the call: keep these under test.
POPULATE_RULES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
PROPAGATE = "builtin.module(sdy-propagation-pipeline)"
RESHARD = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
COLLECTIVES = "builtin.module(func.func(sdy-reshard-to-collectives))"
CLEAN_UP = "builtin.module(canonicalize)"


def audit(lowered: Any, trip_counts: Mapping[str, int] | None = None) -> tuple[nf.Collective, ...]:
    """The collectives of a step in normal form, in program order.

    `lowered`: what `jax.jit(step, in_shardings=...).lower(...)` returns (on devices or on an
    abstract mesh), or its StableHLO module; it is not changed. `trip_counts`: runs of a loop per
    entry, by the loop's path (`.../while`), for loops that do not count up to a constant; a loop
    with collectives that is in neither way known counts once, with a warning.

    Faithful for steps whose layouts are constrained; where they are not, the compiler's own
    partitioner may choose otherwise. Raises PlanError when a pass refuses the step.
    """
    return nf.normal_form(read(partition(lowered), trip_counts))


def partition(lowered: Any) -> Any:
    """A copy of the step's StableHLO module with its collectives written out (`sdy.all_gather`,
    ...), as an MLIR operation."""
    module = lowered.compiler_ir("stablehlo") if hasattr(lowered, "compiler_ir") else lowered
    copy = module.operation.clone()
    with copy.context, ir.Location.unknown():
        _attach_rules(copy)
        _run(PROPAGATE, copy)  # drops the rules, but for those marked custom
        _attach_rules(copy, unmark=True)
        _sum_before_cutting(copy)
        for pipeline in (RESHARD, COLLECTIVES, CLEAN_UP):
            _run(pipeline, copy)
    return copy


def _run(pipeline: str, module: Any) -> None:
    try:
        passmanager.PassManager.parse(pipeline).run(module)
    except ir.MLIRError as error:
        raise PlanError(
            f"Shardy's pipeline {pipeline} failed on the step; compile it instead of auditing it, "
            f"and report this: {error}"
        ) from error


def _sum_before_cutting(module: Any) -> None:
    """Have products and sums over a split dim summed up before they are cut along the same axes.

    XLA's partitioner sums up what every device has, and keeps a slice; Shardy's explicit reshards
    may move the operands instead, where those are smaller.
    """

    def visit(op: Any) -> Any:
        attributes = op.attributes
        if op.name in _SUMS and "sdy.sharding_rule" in attributes and "sdy.sharding" in attributes:
            summed = _summed_axes(op, sdy.OpShardingRuleAttr(attributes["sdy.sharding_rule"]))
            results = sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings
            if summed:
                attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get(
                    [_without(sharding, summed) for sharding in results]
                )
        return ir.WalkResult.ADVANCE

    module.walk(visit)


_SUMS = ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.scatter")


def _summed_axes(op: Any, rule: Any) -> set[str]:
    """The axes that cut a contracted dim, in all operands alike."""
    found: set[str] = set()
    for factor in rule.reduction_factors:
        cuts = []
        for operand, mapping in zip(op.operands, rule.operand_mappings):
            sharding = sharding_of(operand)
            for dim, factors in enumerate(_dims(mapping)):
                if factors == [factor]:
                    axes = () if sharding is None else tuple(map(str, _axes_of(sharding, dim)))
                    cuts.append(axes)
        if cuts and all(axes == cuts[0] for axes in cuts):
            found.update(cuts[0])
    return found


def _axes_of(sharding: Any, dim: int) -> Any:
    dims = sdy.TensorShardingAttr(sharding).dimension_shardings
    return sdy.DimensionShardingAttr(dims[dim]).axes


def _without(sharding: Any, axes: set[str]) -> Any:
    """A sharding that leaves dims whole which these axes cut."""
    old = sdy.TensorShardingAttr(sharding)
    dims = []
    for dim in map(sdy.DimensionShardingAttr, old.dimension_shardings):
        left = [axis for axis in dim.axes if str(axis) not in axes]
        dims.append(sdy.DimensionShardingAttr.get(left, is_closed=dim.is_closed))
    return sdy.TensorShardingAttr.get(
        old.mesh_or_ref, dims, old.replicated_axes, old.unreduced_axes
    )


# --- rules for ops that Shardy has none for ---------------------------------------------------

# Ops that need no rule: nothing goes in, or their regions and edges say it.
_RULELESS = re.compile(
    r"(sdy|func|builtin)\..*"
    r"|stablehlo\.(constant|iota|while|case|if|return|partition_id|replica_id|create_token"
    r"|after_all|tuple|get_tuple_element|infeed|outfeed|send|recv|all_reduce|all_gather"
    r"|reduce_scatter|all_to_all|collective_permute|collective_broadcast)"
)


def _attach_rules(module: Any, unmark: bool = False) -> None:
    """Give every op a sharding rule, so that none is a hole in which a split disappears.

    `unmark`: rules that are marked custom (custom_partitioning, LAPACK calls) lose the mark, which
    would exempt the op from explicit reshards.
    """
    _run(POPULATE_RULES, module)

    def visit(op: Any) -> Any:
        attributes = op.attributes
        if "sdy.sharding_rule" not in attributes:
            values = [*op.operands, *op.results]
            tensors = all(isinstance(v.type, ir.RankedTensorType) for v in values)  # no tokens
            if op.operands and op.results and tensors and not _RULELESS.fullmatch(op.name):
                attributes["sdy.sharding_rule"] = _rule(op)
        elif unmark and op.name == "stablehlo.custom_call":
            rule = sdy.OpShardingRuleAttr(attributes["sdy.sharding_rule"])
            if rule.is_custom:
                attributes["sdy.sharding_rule"] = _plain(rule)
        return ir.WalkResult.ADVANCE

    module.walk(visit)


def _rule(op: Any) -> Any:
    """The rule of an op that Shardy does not know: elementwise where all shapes agree, batched in
    all but the last dim for top_k, otherwise every operand whole on every device."""
    shapes = [shape(v) for v in op.operands], [shape(v) for v in op.results]
    elementwise = op.name.startswith("chlo.") and len({*shapes[0], *shapes[1]}) == 1
    shared = shapes[0][0] if elementwise else ()
    if op.name == "chlo.top_k":
        shared = shapes[0][0][:-1]
    sizes = list(shared)

    def mapping(dims: tuple[int, ...]) -> Any:
        own = range(len(sizes), len(sizes) + len(dims) - len(shared))
        sizes.extend(dims[len(shared) :])
        return _mapping([[f] for f in (*range(len(shared)), *own)])

    operands, results = ([mapping(s) for s in side] for side in shapes)
    whole = list(range(len(shared), len(sizes)))
    return sdy.OpShardingRuleAttr.get(sizes, operands, results, [], whole)


def _plain(rule: Any) -> Any:
    """A custom rule without its mark; a factor that only one side has can not be split."""
    sides = [
        {f for t in maps for d in _dims(t) for f in d}
        for maps in (rule.operand_mappings, rule.result_mappings)
    ]
    reduced = set(rule.reduction_factors)
    whole = sorted({*rule.need_replication_factors, *(sides[0] ^ sides[1])} - reduced)
    return sdy.OpShardingRuleAttr.get(
        rule.factor_sizes,
        rule.operand_mappings,
        rule.result_mappings,
        rule.reduction_factors,
        whole,
        [f for f in rule.permutation_factors if f not in whole],
        [f for f in rule.blocked_propagation_factors if f not in whole],
    )


def _dims(tensor: Any) -> list[list[int]]:
    dims = sdy.TensorMappingAttr(tensor).dim_mappings
    return [list(sdy.DimMappingAttr(d).factor_indices) for d in dims]


def _mapping(dims: list[list[int]]) -> Any:
    return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get(d) for d in dims])
