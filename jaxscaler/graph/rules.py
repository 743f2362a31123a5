"""Which factors an equation has, asked of the partitioner that will run it.

Distinct equations are lowered into one module, Shardy annotates each operation with its factors,
and the operations of one equation are composed into one `Rule` by unifying factors through the
values between them; a factor's kind is the strictest that any operation gives it. Primitives for
which Shardy states no rule, or an unsafe one, are in `hazards`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from jaxscaler import _compat
from jaxscaler.graph import denied, hazards, kinds, registry
from jaxscaler.graph.ir import FROZEN, PASS, REDUCE, Factor, Rule

# A function-level pass: nested otherwise it aborts the process.
POPULATE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
RULE = "sdy.sharding_rule"
PLATFORMS = ("cpu", "cuda", "tpu")  # equations are lowered for the first that can

_STRICT = {PASS: 0, REDUCE: 1, FROZEN: 2}
_COMBINER = {  # the operation of a reducing region -> combiner
    "stablehlo.add": "sum",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}
_SUMS = kinds.names("stablehlo.dot_general stablehlo.dot stablehlo.convolution stablehlo.gather")
# A partial result may pass through these; anything else needs it combined first.
_LINEAR = kinds.names("stablehlo.convert stablehlo.reshape stablehlo.transpose")
# What may stand behind a reduction in one equation: masks of lookups out of bounds, ...
_GUARDS = kinds.names("stablehlo.select stablehlo.and stablehlo.or stablehlo.broadcast_in_dim")
_SOURCES = kinds.names("stablehlo.constant stablehlo.iota stablehlo.create_token")

_cache: dict[Hashable, Rule] = {}


def rules_for(eqns: Sequence) -> list[Rule]:
    """The rule of each equation (`jax.extend.core.JaxprEqn`), literal operands included.

    Equal equations (by `signature`) are asked for once per process. An equation that cannot be
    lowered, or has an operation without a rule, is FROZEN with a note that names the primitive.
    """
    keys = [signature(e) for e in eqns]
    asked = {}
    for key, eqn in zip(keys, eqns):
        if (kernel := registry.find(eqn)) is not None:
            _cache[key] = kernel.rule(eqn)  # may have been registered since
            continue
        if key in _cache or key in asked:
            continue
        rule = _by_hand(eqn)
        if rule is None:
            asked[key] = eqn
        else:
            _cache[key] = denied.deny(eqn, rule)
    for (key, eqn), rule in zip(asked.items(), read(list(asked.values()))):
        _cache[key] = denied.deny(eqn, rule)
    return [_cache[key] for key in keys]


def _by_hand(eqn: Any) -> Rule | None:
    name = eqn.primitive.name
    plain = all(_is_plain(v.aval) for v in (*eqn.invars, *eqn.outvars))
    if not plain and name not in kinds.RANDOM:
        return hazards.frozen(eqn)  # random keys are a few bytes; tokens have no dims
    if name in hazards.HAND:
        try:
            rule = hazards.HAND[name](eqn)
            rule.verify(hazards.shapes_of(eqn.invars), hazards.shapes_of(eqn.outvars))
        except Exception as error:  # a rule that a user wrote may raise anything
            return hazards.frozen(eqn, f"{name}: its rule does not fit the equation ({error!r})")
        return rule
    return hazards.elementwise(eqn) if kinds.is_elementwise(eqn) else None


def _is_plain(aval: Any) -> bool:
    return hasattr(aval, "shape") and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def read(eqns: Sequence) -> list[Rule]:
    """Shardy's rule of each equation, with the restrictions of `hazards.restrict`."""
    if not eqns:
        return []
    try:
        module = _lower(eqns)
    except Exception as error:  # a lowering rule, maybe of another package, may raise anything
        if len(eqns) == 1:
            reason = str(error).strip().split("\n")[0]
            note = f"{eqns[0].primitive.name}: cannot be lowered alone ({reason})"
            return [hazards.frozen(eqns[0], note)]
        half = len(eqns) // 2
        return read(eqns[:half]) + read(eqns[half:])
    with module.context:
        passmanager.PassManager.parse(POPULATE).run(module.operation)
        blocks = {
            function.attributes["sym_name"].value: function.regions[0].blocks[0]
            for function in module.body.operations
            if function.operation.name == "func.func"
        }
        main = blocks["main"]
        arguments, results = iter(main.arguments), iter(_last(main).operands)
        return [
            hazards.restrict(
                eqn,
                _compose(
                    eqn,
                    [next(arguments) for _ in eqn.invars],
                    [next(results) for _ in eqn.outvars],
                    blocks,
                ),
            )
            for eqn in eqns
        ]


def _lower(eqns: Sequence) -> Any:
    """A module whose `main` runs every equation once, on arguments of its own."""

    def main(args: Any) -> Any:
        return [_compat.bind_equation(e, a) for e, a in zip(eqns, args)]

    avals = [
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
         for v in e.invars]
        for e in eqns
    ]  # fmt: skip
    traced = jax.jit(main, keep_unused=True).trace(avals)
    for platform in PLATFORMS:
        try:
            return traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
        except NotImplementedError as error:
            missing = error
    raise missing


# ------------------------------------------------------------------ signatures


def signature(eqn: Any) -> Hashable:
    """What equal equations share: primitive, parameters, shapes, dtypes, which are literals."""
    key = unchecked_signature(eqn)
    try:
        hash(key)
    except TypeError:
        return structural_signature(eqn)
    return key


def unchecked_signature(eqn: Any) -> Any:
    """The same, for one look-up: raises TypeError there if a parameter can not be hashed."""
    name = eqn.primitive.name
    if name in _BY_STRUCTURE:
        return structural_signature(eqn)
    return (
        name,
        tuple([(v.aval.shape, v.aval.dtype, hasattr(v, "val")) for v in eqn.invars]),
        tuple([(v.aval.shape, v.aval.dtype) for v in eqn.outvars]),
        tuple(eqn.params.values()),
    )


# Parameters with jaxprs, functions, NaNs or dtypes of tokens: compared by what they say.
_BY_STRUCTURE = (
    kinds.OPAQUE
    | kinds.RANDOM
    | kinds.names(
        "after_all create_token custom_linear_solve gather pad reduce reduce_window scan scatter "
        "scatter-add scatter-max scatter-min scatter-mul scatter-sub while cond"
    )
)
_printed: WeakKeyDictionary = WeakKeyDictionary()  # jaxpr -> its text


def structural_signature(eqn: Any) -> Hashable:
    """The same for an equation whose parameters are compared by what they say."""
    return (
        eqn.primitive.name,
        tuple((str(v.aval), hasattr(v, "val")) for v in eqn.invars),
        tuple(str(v.aval) for v in eqn.outvars),
        # the function of a `reduce` stands there as a jaxpr too
        tuple((k, _key(v)) for k, v in eqn.params.items() if k != "computation"),
        # the one setting of the context that changes a rule (`hazards.random_bits`)
        getattr(eqn.ctx, "threefry_partitionable", None),
    )


def _key(value: Any) -> Hashable:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        if value not in _printed:
            _printed[value] = str(value)
        return _printed[value]
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, (tuple, list)):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value if value == value else repr(value)  # NaN is not equal to itself


# ------------------------------------------------------------------ composition


Tensor = list[list[int]]  # a list of dims, each a list of factors, major first


class _Factors:
    """Factors while they are unified: a forest of equal ones, some split into (major, minor)."""

    def __init__(self) -> None:
        self.same: list[int] = []
        self.size: list[int] = []
        self.kind: list[str] = []
        self.combiner: list[str] = []
        self.parts: dict[int, tuple[int, int]] = {}

    def new(self, size: int, kind: str = PASS, combiner: str = "") -> int:
        self.same.append(len(self.same))
        self.size.append(size)
        self.kind.append(kind)
        self.combiner.append(combiner)
        return len(self.same) - 1

    def tensor(self, shape: Iterable[int]) -> Tensor:
        return [[self.new(n)] if n != 1 else [] for n in shape]

    def leaves(self, dim: Iterable[int]) -> list[int]:
        found: list[int] = []
        for atom in dim:
            while self.same[atom] != atom:
                atom = self.same[atom]
            found += self.leaves(self.parts[atom]) if atom in self.parts else [atom]
        return found

    def mark(self, dim: Iterable[int], kind: str, combiner: str = "") -> None:
        """Make the factors of a dim at least as strict as `kind`."""
        for atom in self.leaves(dim):
            if _STRICT[kind] > _STRICT[self.kind[atom]]:
                self.kind[atom], self.combiner[atom] = kind, combiner
            elif kind == self.kind[atom] == REDUCE and combiner != self.combiner[atom]:
                self.combiner[atom] = "other"

    def unify(self, a: Iterable[int], b: Iterable[int]) -> None:
        """Make two dims the same, splitting factors; FROZEN where their sizes do not divide."""
        left, right = self.leaves(a), self.leaves(b)
        while left and right:
            x, y = left[0], right[0]
            if x == y:
                del left[0], right[0]
            elif self.size[x] == self.size[y]:
                self.mark([x], self.kind[y], self.combiner[y])
                self.same[y] = x
                del left[0], right[0]
                # x or y may stand again in either list
                left, right = self.leaves(left), self.leaves(right)
            else:
                big, small = (x, y) if self.size[x] > self.size[y] else (y, x)
                if self.size[small] == 0 or self.size[big] % self.size[small]:
                    break
                self.parts[big] = (
                    self.new(self.size[small], self.kind[big], self.combiner[big]),
                    self.new(
                        self.size[big] // self.size[small], self.kind[big], self.combiner[big]
                    ),
                )
                left, right = self.leaves(left), self.leaves(right)
        self.mark(left + right, FROZEN)


def _compose(eqn: Any, arguments: Sequence, results: Sequence, blocks: dict[str, Any]) -> Rule:
    """One rule of the operations between an equation's arguments and results."""
    factors = _Factors()
    notes: dict[str, None] = {}
    partial: dict[int, list[int]] = {}  # id of a tensor -> REDUCE factors it is a partial value of

    def read(env: dict, value: Any) -> Tensor:
        if value not in env:
            env[value] = factors.tensor(ir.ShapedType(value.type).shape)
        return env[value]

    def run(operations: Iterable, env: dict) -> None:
        for op in operations:
            if op.name in _SOURCES or op.name == "func.return":
                continue
            ins = [read(env, v) for v in op.operands]
            if op.name == "func.call":
                body = blocks[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
                inner = dict(zip(body.arguments, ins))
                run((o.operation for o in body.operations), inner)
                env.update(zip(op.results, [read(inner, v) for v in _last(body).operands]))
                continue
            outs = [read(env, v) for v in op.results]
            pending = [f for t in ins for f in partial.get(id(t), ())]
            if op.name not in _LINEAR:  # partial results are combined before this operation
                factors.mark(pending, *((REDUCE, "other") if op.name in _GUARDS else (FROZEN,)))
                pending = []
            if RULE in op.attributes:
                pending += _apply(factors, op, ins, outs)
            elif op.name == "stablehlo.optimization_barrier":
                _tie(factors, ins, outs)
            elif op.name.startswith("chlo.") and len({len(t) for t in ins + outs}) == 1:
                _tie(factors, ins, outs * len(ins))
            else:
                for dim in (d for t in ins + outs for d in t):
                    factors.mark(dim, FROZEN)
                notes[f"{eqn.primitive.name}: the partitioner has no rule for {op.name}"] = None
            partial.update((id(t), pending) for t in outs)

    operands = [factors.tensor(s) for s in hazards.shapes_of(eqn.invars)]
    env = dict(zip(arguments, operands))
    run(_slice(results), env)
    return _finish(factors, operands, [read(env, v) for v in results], "; ".join(notes))


def _last(block: Any) -> Any:
    *_, terminator = block.operations
    return terminator.operation


def _slice(results: Sequence) -> list:
    """The operations that `results` are computed by, operands before users."""
    found: dict = {}
    stack = [(v.owner, False) for v in results]
    while stack:
        owner, ready = stack.pop()
        if isinstance(owner, ir.Block) or owner in found:
            continue
        if ready:
            found[owner] = None
        else:
            stack.append((owner, True))
            stack += [(v.owner, False) for v in owner.operands]
    return list(found)


def _tie(factors: _Factors, left: list[Tensor], right: list[Tensor]) -> None:
    """Unify tensors pairwise, dim by dim."""
    for a, b in zip(left, right):
        for x, y in zip(a, b):
            factors.unify(x, y)


def _apply(factors: _Factors, op: Any, ins: list[Tensor], outs: list[Tensor]) -> list[int]:
    """Unify an operation's tensors as its rule says; returns the REDUCE factors."""
    rule = sdy.OpShardingRuleAttr(op.attributes[RULE])
    sizes = list(rule.factor_sizes)
    maps = [
        [list(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(t).dim_mappings]
        for t in (*rule.operand_mappings, *rule.result_mappings)
    ]
    kind = dict.fromkeys(range(len(sizes)), PASS)
    sides = [[False, False] for _ in sizes]
    shapes = [ir.ShapedType(v.type).shape for v in (*op.operands, *op.results)]
    misfit = []  # factors of dims that are not their product: something is cut or added
    for n, (dims, shape) in enumerate(zip(maps, shapes)):
        for dim, size in zip(dims, shape):
            for f in dim:
                sides[f][n >= len(ins)] = True
            if prod(sizes[f] for f in dim) != size:
                misfit += dim
    for f, (operand, result) in enumerate(sides):
        # New dims of a broadcast are free. What else stands on one side only is not understood.
        if not operand or not result:
            kind[f] = PASS if op.name == "stablehlo.broadcast_in_dim" and result else FROZEN
    kind.update(dict.fromkeys(rule.reduction_factors, REDUCE))
    for group in (
        rule.need_replication_factors,
        rule.permutation_factors,
        rule.blocked_propagation_factors,
        misfit,
    ):
        kind.update(dict.fromkeys(group, FROZEN))
    combiner = _combiner(op)
    own = [
        factors.new(n, kind[f], combiner if kind[f] == REDUCE else "") for f, n in enumerate(sizes)
    ]
    for tensor, dims, shape in zip(ins + outs, maps, shapes):
        for mine, dim, size in zip(tensor, dims, shape):
            if size == 1:
                continue
            if prod(sizes[f] for f in dim) != size:
                factors.mark(mine, FROZEN)
                continue
            # A FROZEN factor is never split, so it need not be the same one elsewhere.
            factors.unify(
                mine,
                [
                    factors.new(sizes[f], FROZEN) if kind[f] == FROZEN else own[f]
                    for f in dim
                    if sizes[f] != 1
                ],
            )
    return [own[f] for f in rule.reduction_factors if kind[f] == REDUCE]


def _combiner(op: Any) -> str:
    """How partial results of this operation's reduction factors combine."""
    if op.name in _SUMS or op.name == "stablehlo.custom_call":
        return "sum"
    if op.name not in ("stablehlo.reduce", "stablehlo.scatter"):
        return "other"
    body = [o.operation.name for o in op.regions[0].blocks[0].operations]
    return _COMBINER.get(body[0], "other") if len(body) == 2 else "other"


def _finish(factors: _Factors, operands: list[Tensor], results: list[Tensor], note: str) -> Rule:
    """Number the factors; freeze what is not understood or can't be reached."""
    ins = [[factors.leaves(d) for d in t] for t in operands]
    outs = [[factors.leaves(d) for d in t] for t in results]
    made = {f for t in outs for d in t for f in d}
    for dims in ins:
        for f in (f for d in dims for f in d):
            # An operand's factor must show in the result, unless it is contracted.
            if (f in made) == (factors.kind[f] == REDUCE):
                factors.mark([f], FROZEN)
    dims = [d for t in ins + outs for d in t]
    changed = True
    while changed:  # a factor behind a FROZEN one in a dim can't be split either
        changed = False
        for dim in dims:
            kinds_ = [factors.kind[f] for f in dim]
            if FROZEN in kinds_:
                behind = dim[kinds_.index(FROZEN) :]
                changed |= any(factors.kind[f] != FROZEN for f in behind)
                factors.mark(behind, FROZEN)
    number = {f: n for n, f in enumerate(dict.fromkeys(f for d in dims for f in d))}

    def numbered(tensors: list[Tensor]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(tuple(tuple(number[f] for f in d) for d in t) for t in tensors)

    def factor(f: int) -> Factor:
        kind = factors.kind[f]
        return Factor(factors.size[f], kind, factors.combiner[f] if kind == REDUCE else "")

    return Rule(tuple(factor(f) for f in number), numbered(ins), numbered(outs), note)
