"""Rules by hand: where the partitioner states none, or states one that is not safe to use.

`HAND` maps a primitive's name to a function from an equation to its `Rule`; adding an entry
teaches the planner a new primitive. `restrict` freezes factors of a rule that was read from the
partitioner; what was seen to compile wrong or badly is listed in `denied`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxscaler import _compat
from jaxscaler.graph import kinds
from jaxscaler.graph.denied import freeze
from jaxscaler.graph.ir import FROZEN, PASS, REDUCE, SHIFT, Factor, Rule

Label = Hashable  # names a factor while a rule is written; None: a FROZEN factor of its own
Dim = Label | list[tuple[str, int]]  # a list: a compound dim of (label, size), major first
Labels = Sequence[Sequence[Dim]]


def shapes_of(atoms: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of an equation's operands or results; () for what has none (tokens)."""
    return tuple(tuple(getattr(a.aval, "shape", ())) for a in atoms)


def write(
    eqn: Any,
    operands: Labels,
    results: Labels,
    kind: Mapping[Label, tuple[str, str]] | None = None,
    note: str = "",
) -> Rule:
    """A rule from one label per dim; equal labels are one factor, PASS unless `kind` says other."""
    kind = kind or {}
    factors: list[Factor] = []
    index: dict[Label, int] = {}

    def factor(label: Label, size: int) -> int:
        if label is None or label not in index:
            what = (FROZEN, "") if label is None else kind.get(label, (PASS, ""))
            factors.append(Factor(size, *what))
            if label is None:
                return len(factors) - 1
            index[label] = len(factors) - 1
        assert factors[index[label]].size == size, (eqn.primitive.name, label, size)
        return index[label]

    def dims(labels: Sequence[Dim], shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        assert len(labels) == len(shape), (eqn.primitive.name, labels, shape)
        return tuple(
            tuple(factor(name, n) for name, n in label if n != 1)
            if isinstance(label, list)
            else ((factor(label, size),) if size != 1 else ())
            for label, size in zip(labels, shape)
        )

    ins, outs = shapes_of(eqn.invars), shapes_of(eqn.outvars)
    return Rule(
        operands=tuple(dims(labels, shape) for labels, shape in zip(operands, ins, strict=True)),
        results=tuple(dims(labels, shape) for labels, shape in zip(results, outs, strict=True)),
        factors=tuple(factors),
        note=note,
    )


# ------------------------------------------------------------------ families


def frozen(eqn: Any, note: str = "") -> Rule:
    """Nothing may be split: every dim is a FROZEN factor of its own."""
    return write(
        eqn,
        [[None] * len(s) for s in shapes_of(eqn.invars)],
        [[None] * len(s) for s in shapes_of(eqn.outvars)],
        note=note,
    )


def elementwise(eqn: Any) -> Rule:
    """Result dim d meets dim d of each operand; scalars and size-1 dims are broadcast."""
    rank = len(eqn.outvars[0].aval.shape)
    return write(
        eqn,
        [range(rank) if s else () for s in shapes_of(eqn.invars)],
        [range(rank) for _ in eqn.outvars],
    )


def identity(eqn: Any) -> Rule:
    """Result i is operand i."""
    labels = [[(i, d) for d in range(len(s))] for i, s in enumerate(shapes_of(eqn.outvars))]
    return write(eqn, labels, labels)


def source(eqn: Any) -> Rule:
    """Each result element is made where it is needed: result dims PASS, operands whole."""
    return write(
        eqn,
        [[None] * len(s) for s in shapes_of(eqn.invars)],
        [[(i, d) for d in range(len(s))] for i, s in enumerate(shapes_of(eqn.outvars))],
    )


def whole_axis(axis: str, note: str = "") -> Callable:
    """All operands and results alike, but for the axis that a parameter names: FROZEN."""

    def rule(eqn: Any) -> Rule:
        rank = len(eqn.invars[0].aval.shape)
        labels = [None if d == eqn.params[axis] % rank else d for d in range(rank)]
        return write(eqn, [labels] * len(eqn.invars), [labels] * len(eqn.outvars), note=note)

    return rule


def opaque(eqn: Any) -> Rule:
    name = eqn.primitive.name
    return frozen(eqn, f"{name}: an opaque call; every device runs it whole")


# ------------------------------------------------------------------ single primitives


def pallas_call(eqn: Any) -> Rule:
    """Dims that the grid walks block by block, each run of the kernel for itself, may be split."""

    def labels(tensors: Sequence) -> list[list[Dim]]:
        return [
            [d and [(("grid", d[0]), grid[d[0]]), (("block", d), d[1])] for d in dims]
            for dims in tensors
        ]

    grid, blocks = _compat.pallas_grid(eqn), _compat.pallas_blocks(eqn)
    if not any(d for dims in blocks for d in dims):
        return opaque(eqn)
    inside: dict[Label, tuple[str, str]] = {
        ("block", d): (FROZEN, "") for dims in blocks for d in dims if d
    }
    ins = len(eqn.invars)
    return write(eqn, labels(blocks[:ins]), labels(blocks[ins:]), inside)


def random_bits(eqn: Any) -> Rule:
    """Bits of a counter-based generator are free to split; others depend on the split."""
    impl = getattr(eqn.invars[0].aval.dtype, "_impl", None)
    if impl is not None and impl.tag != "fry":
        return frozen(eqn, f"random_bits: the bits of {impl.name} depend on how they are split")
    if not getattr(eqn.ctx, "threefry_partitionable", True):
        return frozen(eqn, "random_bits: set jax_threefry_partitionable to split random numbers")
    return source(eqn)


def matrices(eqn: Any) -> Rule:
    """A dense factorisation or solve: leading batch dims PASS, the matrices whole."""
    batch = range(len(eqn.invars[0].aval.shape) - 2)

    def labels(atoms):
        return [[*batch, *[None] * (len(s) - len(batch))] for s in shapes_of(atoms)]

    return write(eqn, labels(eqn.invars), labels(eqn.outvars))


def ragged_dot(eqn: Any) -> Rule:
    """Batch, free and contracting dims as in a dot; ragged and group dims are whole.

    Groups are consecutive runs of rows along the ragged dim: a part of it, or a part of the groups,
    does not know where its runs begin.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    lhs_shape, rhs_shape, *_ = shapes_of(eqn.invars)
    lhs: list[Label] = [("l", d) for d in range(len(lhs_shape))]
    rhs: list[Label] = [("r", d) for d in range(len(rhs_shape))]
    kind = {}
    for i, j in zip(contract_l, contract_r):
        rhs[j] = lhs[i] = ("k", i)
        kind[lhs[i]] = (REDUCE, "sum")
    for i, j in zip(batch_l, batch_r):
        rhs[j] = lhs[i]
    for d in groups:
        rhs[d] = None
    for d in ragged:
        rhs = [None if label == lhs[d] else label for label in rhs]
        lhs[d] = None
    out = [lhs[d] for d in batch_l]
    out += [x for d, x in enumerate(lhs) if d not in contract_l and d not in batch_l]
    out += [x for d, x in enumerate(rhs) if d not in (*contract_r, *batch_r, *groups)]
    rank = len(eqn.outvars[0].aval.shape)
    out = [None] * (rank - len(out)) + out  # ragged contraction: one result per group, in front
    rest = [[None] * len(s) for s in shapes_of(eqn.invars)[2:]]
    note = "ragged_dot: the ragged dim and the group dim stay whole"
    return write(eqn, [lhs, rhs, *rest], [out], kind, note)


def fused_attention(eqn: Any) -> Rule:
    """cuDNN's attention, forward and backward: batch and (key) heads are free, the rest whole.

    As its own partitioner asks. Operands: query, key, value, bias, then lengths, offsets and page
    tables, and for the backward pass the softmax statistics, result and its cotangent.
    """
    q, k, _, bias, *extra = shapes_of(eqn.invars)
    name = eqn.primitive.name
    if any(any(s) for s in (bias, *extra[:6])):
        return frozen(eqn, f"{name}: bias, lengths, offsets and pages are not planned")
    heads_first = eqn.params["layout"] == 1  # BNTH; 0 is BTNH
    kv = k[1 if heads_first else 2]
    shared = q[1 if heads_first else 2] // kv  # query heads per key head
    heads: Dim = "k" if shared == 1 else [("k", kv), ("g", shared)]

    def tensor(n: Dim) -> list[Dim]:
        return ["b", n, None, None] if heads_first else ["b", None, n, None]

    query, key = tensor(heads), tensor("k")
    statistics: list[Dim] = ["b", heads, None]
    rest: list[list[Dim]] = [[None] * len(s) for s in (bias, *extra[:6])]
    kind: dict[Label, tuple[str, str]] = {"g": (FROZEN, "")}
    if name.endswith("bwd_wrapper"):
        operands = [query, key, key, *rest, statistics, query, query]
        return write(eqn, operands, [query, key, key], kind)
    return write(eqn, [query, key, key, *rest], [query, statistics][: len(eqn.outvars)], kind)


def custom_partitioning(eqn: Any) -> Rule:
    rule = eqn.params.get("sharding_rule")
    if not hasattr(rule, "operand_mappings"):  # none, or a function of a mesh
        return opaque(eqn)
    return from_sharding_rule(eqn, rule)


def ring_shift(eqn: Any) -> Rule:
    """Every device hands the edge of its block of the dim to the next one."""
    dims = range(len(eqn.invars[0].aval.shape))
    return write(eqn, [dims], [dims], {eqn.params["dim"]: (PASS, SHIFT)})


def from_sharding_rule(eqn: Any, rule: Any) -> Rule:
    """The `Rule` of a parsed JAX sharding rule (`SdyShardingRule`, "i k, k j -> i j")."""
    ins, outs = shapes_of(eqn.invars), shapes_of(eqn.outvars)
    shapes = (*ins, *outs)
    mappings = (*rule.operand_mappings, *rule.result_mappings)
    # One tuple of factor names per dim; "…" stands for leading batch dims.
    tensors: list[list[tuple[str, ...]]] = [
        [
            name
            for dim in mapping
            for name in (
                [(f"{dim}{n}",) for n in range(len(shape) - len(mapping) + 1)]
                if isinstance(dim, str) and dim.startswith("…")
                else [(dim,) if isinstance(dim, str) else tuple(dim)]
            )
        ]
        for mapping, shape in zip(mappings, shapes, strict=True)
    ]
    sizes: dict[str, int] = dict(rule.factor_sizes)
    for dims, shape in zip(tensors, shapes):
        sizes |= {dim[0]: n for dim, n in zip(dims, shape) if len(dim) == 1}
    taken, made = (
        {name for dims in side for dim in dims for name in dim}
        for side in (tensors[: len(ins)], tensors[len(ins) :])
    )
    kind: dict[Label, tuple[str, str]] = dict.fromkeys(taken ^ made, (FROZEN, ""))
    kind |= dict.fromkeys(rule.reduction_factors, (REDUCE, "sum"))
    kind |= dict.fromkeys(rule.need_replication_factors, (FROZEN, ""))
    kind |= dict.fromkeys(rule.permutation_factors, (FROZEN, ""))
    labels = [
        [dim[0] if len(dim) == 1 else [(name, sizes[name]) for name in dim] for dim in dims]
        for dims in tensors
    ]
    return write(eqn, labels[: len(ins)], labels[len(ins) :], kind)


HAND: dict[str, Callable[..., Rule]] = {
    **dict.fromkeys(kinds.ELEMENTWISE, elementwise),
    **dict.fromkeys(kinds.IDENTITY, identity),
    **dict.fromkeys(kinds.OPAQUE, opaque),
    "pallas_call": pallas_call,
    **dict.fromkeys(("scan", "while", "cond", "custom_lin"), opaque),
    # Keys are a few bytes: whole on every device.
    **dict.fromkeys(
        kinds.names(
            "random_seed random_split random_fold_in random_wrap random_unwrap random_clone"
        ),
        frozen,
    ),
    **dict.fromkeys(
        ("rng_bit_generator", "rng_uniform", "random_gamma"),
        lambda eqn: frozen(eqn, f"{eqn.primitive.name}: its values depend on how it is split"),
    ),
    **dict.fromkeys(
        kinds.names(
            "cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd "
            "triangular_solve tridiagonal"
        ),
        matrices,
    ),
    "random_bits": random_bits,
    "threefry2x32": elementwise,
    "iota": source,
    "empty2": source,
    "top_k": whole_axis("axis", "top_k: the axis it searches stays whole"),
    "approx_top_k": whole_axis("reduction_dimension", "approx_top_k: its axis stays whole"),
    "split": whole_axis("axis", "split: the axis it cuts stays whole"),
    "ragged_dot_general": ragged_dot,
    "custom_partitioning": custom_partitioning,
    "dot_product_attention_fwd_wrapper": fused_attention,
    "dot_product_attention_bwd_wrapper": fused_attention,
    _compat.SHIFT: ring_shift,
}


# ------------------------------------------------------------------ restrictions


def _untouched(eqn: Any, operand: int, other) -> set[int]:
    """Dims in which `other` has the extent of the operand: nothing of them is cut away."""
    shape = eqn.invars[operand].aval.shape
    return {d for d, (n, m) in enumerate(zip(shape, other)) if n == m}


def _conv_free(eqn: Any) -> tuple[set[int], set[int], set[int]]:
    """Dims (of lhs, rhs, result) of a convolution that may be split.

    Spatial dims need halos. Of a depthwise convolution only the batch; of another grouped one
    nothing, since the compiler gathers its batch (openxla/xla#47945; seen on CPU and H100). With
    batch groups (the weight gradient of a grouped one) the contracted features are the data batch.
    """
    p = eqn.params
    lhs, rhs, out = (
        p["dimension_numbers"].lhs_spec,
        p["dimension_numbers"].rhs_spec,
        p["dimension_numbers"].out_spec,
    )
    if p["batch_group_count"] > 1:
        return {lhs[1]}, {rhs[1]}, set()
    if p["feature_group_count"] > 1:
        depthwise = eqn.invars[1].aval.shape[rhs[1]] == 1
        return ({lhs[0]}, set(), {out[0]}) if depthwise else (set(), set(), set())
    return set(lhs[:2]), set(rhs[:2]), set(out[:2])


def _free_dims(eqn: Any) -> tuple[list[set[int] | None], list[set[int] | None]] | None:
    """Per operand and result, the dims that may be split (None: all); None: no restriction."""
    name = eqn.primitive.name
    if name == "conv_general_dilated":
        lhs, rhs, out = _conv_free(eqn)
        return [lhs, rhs], [out]
    if name in ("slice", "pad", "dynamic_slice"):
        free = _untouched(eqn, 0, eqn.outvars[0].aval.shape)
        if name == "pad":  # equal extents may still be shifted: (-1, +1)
            free -= {d for d, c in enumerate(eqn.params["padding_config"]) if any(c)}
        return [free] + [None] * (len(eqn.invars) - 1), [free]
    if name == "dynamic_update_slice":
        free = _untouched(eqn, 0, eqn.invars[1].aval.shape)
        return [free, free] + [None] * (len(eqn.invars) - 2), [free]
    if name == "rev":
        free = set(range(len(eqn.outvars[0].aval.shape))) - set(eqn.params["dimensions"])
        return [free], [free]
    if name == "fft":
        free = set(range(len(eqn.outvars[0].aval.shape) - len(eqn.params["fft_lengths"])))
        return [free], [free]
    if name == "concatenate":
        free = set(range(len(eqn.outvars[0].aval.shape))) - {eqn.params["dimension"]}
        return [free] * len(eqn.invars), [free]
    if name in kinds.CUMULATIVE:
        free = set(range(len(eqn.outvars[0].aval.shape))) - {eqn.params["axis"]}
        return [free], [free]
    if name == "sort":
        free = set(range(len(eqn.outvars[0].aval.shape))) - {eqn.params["dimension"]}
        return [free] * len(eqn.invars), [free] * len(eqn.outvars)
    return None


def _masked_lookup(eqn: Any, rule: Rule) -> Rule:
    """A lookup in a split table is a sum of masked lookups, NaN for rows out of bounds included.

    Read from the operations alone the combiner is "other", as a select stands behind the lookup;
    NaN + anything is NaN, so the sum may be taken behind the select too.
    """
    fill, dtype = eqn.params["fill_value"], eqn.outvars[0].aval.dtype
    if not kinds.is_inexact(dtype) or (fill is not None and fill == fill):
        return rule
    factors = tuple(f._replace(combiner="sum") if f.kind == REDUCE else f for f in rule.factors)
    return replace(rule, factors=factors)


def restrict(eqn: Any, rule: Rule) -> Rule:
    """Freeze what must not be split although the partitioner's rule would allow it."""
    if eqn.primitive.name == "gather":
        return _masked_lookup(eqn, rule)
    free = _free_dims(eqn)
    if free is None:
        return rule
    bad: set[int] = set()
    for tensors, allowed in ((rule.operands, free[0]), (rule.results, free[1])):
        for dims, keep in zip(tensors, allowed, strict=True):
            for d, factors in enumerate(dims):
                if keep is not None and d not in keep:
                    bad.update(factors)
    return freeze(rule, bad, f"{eqn.primitive.name}: what it cuts, shifts or scans stays whole")
