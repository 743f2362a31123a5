"""Every rule, by numbers: split as it claims, run the parts, put them together, compare.

Off the mesh the equation itself runs on each part (NumPy does the splitting), which tells whether
the claim is true. On a mesh of eight simulated devices XLA runs the whole equation with the
claimed layouts, which tells whether the compiler keeps the promise, and without hidden transfers.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rule_cases import CASES

from jaxscaler import _compat
from jaxscaler.graph import denied, kinds, rules
from jaxscaler.graph.ir import FROZEN, PASS, REDUCE, Factor, Rule

# Where running a part alone cannot give a part of the result: it would have to know which part it
# is, or to combine pairs. For these factors the check on the mesh is the one that counts.


def combined(c: Any, f: int) -> bool:
    return c.rule.factors[f].kind == REDUCE


def written(c: Any, f: int) -> bool:  # a dim of the operand that the updates lack
    return not any(f in d for d in c.rule.operands[2])


MESH_ONLY = {
    "gather": combined,  # needs masked lookups
    **dict.fromkeys(  # needs masked writes
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"), written
    ),
    "iota": lambda c, f: True,  # counts from the part's offset
    "random_bits": lambda c, f: True,  # draws from the part's offset
    "argmax": combined,  # the index of the larger of two parts
    "argmin": combined,
    "reduce": combined,  # its own combiner, on pairs
}


# Parameters that repeat shapes, for one part: (equation, local operand and result shapes).
LOCAL_PARAMS = {
    "reshape": lambda eqn, ins, outs: {"new_sizes": outs[0]},
    "broadcast_in_dim": lambda eqn, ins, outs: {"shape": outs[0]},
    "slice": lambda eqn, ins, outs: {"limit_indices": cut(eqn, ins, "limit_indices")},
    "dynamic_slice": lambda eqn, ins, outs: {"slice_sizes": outs[0]},
    "gather": lambda eqn, ins, outs: {"slice_sizes": cut(eqn, ins, "slice_sizes")},
}


def cut(eqn: Any, ins: Any, name: str) -> tuple[int, ...]:
    """A parameter that equals the operand's extent wherever the operand is split."""
    whole = eqn.invars[0].aval.shape
    return tuple(n if old == m else old for n, m, old in zip(ins[0], whole, eqn.params[name]))


# The programs are tiny: compile time is all the time there is.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# Operands that enter a sum once, not once per part: what the other parts get instead.
ONCE = {"scatter-add": (0, 0.0), "scatter-mul": (0, 1.0)}

COMBINE = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
OTHER = {"reduce_prod": np.multiply, "scatter-mul": np.multiply, "reduce_xor": np.bitwise_xor}


@dataclass(frozen=True)
class Checked:
    """An equation under test with its operands and results as one device computes them."""

    name: str
    eqn: Any
    rule: Rule
    operands: list[Any]
    results: list[Any]

    @property
    def tensors(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return (*self.rule.operands, *self.rule.results)


@pytest.fixture(scope="module", autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def leaves(closed: Any, args: Any, found: list) -> list[Any]:
    """Results of a jaxpr; appends (equation, operands, results) of each equation, calls inlined."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))

    def read(v: Any) -> Any:
        return jnp.asarray(v.val, v.aval.dtype) if isinstance(v, jex.Literal) else env[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        bodies = _compat.subjaxprs(eqn)
        if bodies:
            results = leaves(bodies[0], operands, found)
        else:
            results = _compat.bind_equation(eqn, operands)
            found.append((eqn, operands, results))
        env.update(zip(eqn.outvars, results))
    return [read(v) for v in jaxpr.outvars]


@functools.cache
def checked() -> tuple[Checked, ...]:
    """The distinct equations under test, all run in one compiled program."""
    kept: dict[Any, tuple[str, Any]] = {}

    def run(args: Any) -> Any:
        values = []
        for case, operands in zip(CASES, args):
            found: list = []
            leaves(jax.make_jaxpr(case.fn)(*operands), operands, found)
            mine = [e for e in found if e[0].primitive.name == case.primitive]
            assert mine, (
                f"{case.name}: no such primitive in {sorted({e[0].primitive.name for e in found})}"
            )
            for eqn, ins, outs in mine:
                key = rules.signature(eqn)
                if key not in kept:
                    kept[key] = (case.name, eqn)
                    values.append((ins, outs))
        return values

    args = [case.operands() for case in CASES]
    values = jax.jit(run).lower(args).compile(QUICK)(args)
    found = rules.rules_for([eqn for _, eqn in kept.values()])
    return tuple(
        Checked(name, eqn, rule, ins, outs)
        for (name, eqn), rule, (ins, outs) in zip(kept.values(), found, values, strict=True)
    )


def splits(rule: Rule, parts: int) -> list[int]:
    """Factors that a rule lets us split into equal parts, standing first in each of their dims."""
    dims = [d for t in (*rule.operands, *rule.results) for d in t]
    return [
        f
        for f, factor in enumerate(rule.factors)
        if factor.kind != FROZEN
        and factor.size % parts == 0
        and all(d[0] == f for d in dims if f in d)
    ]


def close(a: Any, b: Any, what: str) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, what
    exact = not np.issubdtype(a.dtype, np.inexact)
    rtol = 0 if exact else 1e-5 if a.dtype.itemsize == 4 else 1e-10
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=what)


# ------------------------------------------------------------------ off the mesh


def axis_of(dims: Any, f: int) -> int | None:
    return next((d for d, factors in enumerate(dims) if f in factors), None)


def part(x: Any, dims: Any, f: int, k: int, parts: int) -> Any:
    axis = axis_of(dims, f)
    return x if axis is None else np.split(np.asarray(x), parts, axis)[k]


def test_parts_put_together_give_the_whole() -> None:
    """Each factor off the mesh: parts concatenate (PASS) or combine (REDUCE) to the whole."""
    parts = 2
    jobs = [
        (c, f)
        for c in checked()
        for f in splits(c.rule, parts)
        if not MESH_ONLY.get(c.eqn.primitive.name, lambda *_: False)(c, f)
    ]
    assert len(jobs) > 300
    compare_parts(jobs, parts)


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("cumsum", Rule((Factor(8, PASS), Factor(16, PASS)), (((0,), (1,)),), (((0,), (1,)),))),
        ("sort", Rule((Factor(8, PASS), Factor(16, PASS)), (((1,), (0,)),), (((1,), (0,)),))),
        (
            "reduce_max",
            Rule((Factor(8, REDUCE, "sum"), Factor(4, PASS)), (((1,), (0,)),), (((1,),),)),
        ),
        ("transpose", Rule((Factor(4, PASS),) * 3, (((0,), (1,), (2,)),), (((0,), (2,), (1,)),))),
    ],
)
def test_a_wrong_claim_is_caught(name: str, claim: Rule) -> None:
    c = next(c for c in checked() if c.eqn.primitive.name == name)
    sizes = [n for v in c.eqn.invars for n in v.aval.shape]
    by_dim = {d[0]: n for d, n in zip(claim.operands[0], sizes)}
    factors = tuple(f._replace(size=by_dim[i]) for i, f in enumerate(claim.factors))
    wrong = replace(c, rule=replace(claim, factors=factors))
    with pytest.raises(AssertionError):
        compare_parts([(wrong, 0)], 2)


def compare_parts(jobs: list[tuple[Checked, int]], parts: int) -> None:
    """Raise AssertionError unless the parts of each (equation, factor) make the whole."""

    def operands(c: Checked, f: int, k: int) -> list[Any]:
        ins = [part(x, d, f, k, parts) for x, d in zip(c.operands, c.rule.operands)]
        if c.rule.factors[f].kind == REDUCE and c.eqn.primitive.name in ONCE and k:
            which, neutral = ONCE[c.eqn.primitive.name]
            ins[which] = np.full_like(ins[which], neutral)
        return ins

    def run(args: Any) -> Any:
        return [local(c, f, ins, parts) for (c, f), ins in zip(jobs, args)]

    args = [[operands(c, f, k) for c, f in jobs] for k in range(parts)]
    compiled = jax.jit(run).lower(args[0]).compile(QUICK)
    for (c, f), *pieces in zip(jobs, *(compiled(a) for a in args)):
        for r, (dims, whole) in enumerate(zip(c.rule.results, c.results)):
            together = put_together(c, f, dims, [np.asarray(p[r]) for p in pieces])
            close(together, whole, f"{c.name}: {c.rule} factor {f}")


def put_together(c: Checked, f: int, dims: Any, pieces: list[np.ndarray]) -> np.ndarray:
    axis, factor = axis_of(dims, f), c.rule.factors[f]
    if axis is not None:
        return np.concatenate(pieces, axis)
    if factor.kind == PASS:  # whole on every part
        close(pieces[1], pieces[0], f"{c.name}: a result differs between parts of {f}")
        return pieces[0]
    combine = COMBINE.get(factor.combiner) or OTHER[c.eqn.primitive.name]
    return functools.reduce(combine, pieces)


def local(c: Checked, f: int, operands: Any, parts: int) -> list[Any]:
    """The equation on one part."""

    def shapes(side: Any, atoms: Any) -> list[tuple[int, ...]]:
        return [
            tuple(n // parts if f in d else n for d, n in zip(dims, v.aval.shape))
            for dims, v in zip(side, atoms)
        ]

    eqn, params = c.eqn, dict(c.eqn.params)
    ins, outs = shapes(c.rule.operands, eqn.invars), shapes(c.rule.results, eqn.outvars)
    if eqn.primitive.name in LOCAL_PARAMS:
        params |= LOCAL_PARAMS[eqn.primitive.name](eqn, ins, outs)
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


# ------------------------------------------------------------------ on the mesh

AXES = ("a", "b", "c")  # two devices each


def spec_of(dims: Any, assign: dict[int, tuple[str, ...]]) -> PartitionSpec:
    axes = [tuple(a for f in d for a in assign.get(f, ())) for d in dims]
    return PartitionSpec(*[a or None for a in axes])


def expressible(rule: Rule, assign: dict[int, tuple[str, ...]]) -> bool:
    """Divisible, and in each dim only the last split factor is split in part."""
    if any(rule.factors[f].together and axes != AXES for f, axes in assign.items()):
        return False
    for f, axes in assign.items():
        if rule.factors[f].kind == FROZEN or rule.factors[f].size % 2 ** len(axes):
            return False
    for dim in (d for t in (*rule.operands, *rule.results) for d in t):
        whole = True  # every factor before is split to the last element
        for f in dim:
            if f in assign and not whole:
                return False
            whole &= f in assign and 2 ** len(assign[f]) == rule.factors[f].size
    return True


def assignments(rule: Rule, elementwise: bool) -> list[dict[int, tuple[str, ...]]]:
    """Each pair of factors on two of the three axes; a factor without partner alone.

    One pair is enough for an elementwise rule; compound dims are also split over two axes.
    """
    factors = range(len(rule.factors))
    pairs = [{f: ("a",), g: ("b",)} for f, g in itertools.combinations(factors, 2)]
    pairs = [p for p in pairs if expressible(rule, p)][: 1 if elementwise else None]
    paired = {f for p in pairs for f in p}
    alone: list[dict[int, tuple[str, ...]]] = [{f: ("a",)} for f in factors if f not in paired]
    if any(len(d) > 1 for t in (*rule.operands, *rule.results) for d in t):
        alone += [{f: ("a", "b")} for f in factors]
    alone += [{f: AXES} for f in factors if rule.factors[f].together]
    return pairs + [a for a in alone if expressible(rule, a)]


COLLECTIVE = re.compile(r" = .* (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(")


@pytest.mark.parametrize("shard", range(4))
def test_the_compiler_keeps_the_promise(shard: int, devices: list[jax.Device]) -> None:
    """Each factor, and each pair, on a mesh: the same numbers, and no hidden data movement."""
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), AXES)
    jobs = [
        (c, a)
        for c in checked()[shard::4]
        for a in assignments(c.rule, kinds.is_elementwise(c.eqn))
    ]

    def sharding(dims: Any, assign: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(dims, assign))

    def run(operands: Any) -> Any:
        out = []
        for n, ((c, assign), ins) in enumerate(zip(jobs, operands)):
            with jax.named_scope(f"job{n}_"):
                ins = [
                    jax.lax.with_sharding_constraint(x, sharding(d, assign))
                    for x, d in zip(ins, c.rule.operands)
                ]
                results = _compat.bind_equation(c.eqn, ins)
                out.append(
                    [
                        jax.lax.with_sharding_constraint(x, sharding(d, assign))
                        for x, d in zip(results, c.rule.results)
                    ]
                )
        return out

    placed = [
        [jax.device_put(x, sharding(d, a)) for x, d in zip(c.operands, c.rule.operands)]
        for c, a in jobs
    ]
    compiled = jax.jit(run).lower(placed).compile(QUICK)
    for (c, assign), results in zip(jobs, compiled(placed)):
        for r, (mine, whole) in enumerate(zip(results, c.results)):
            close(mine, whole, f"{c.name}: {c.rule} with {assign}, result {r}")
    hidden = set()
    for line in compiled.as_text().splitlines():
        kind, job = COLLECTIVE.search(line), re.search(r"job(\d+)_", line)
        if kind and job:
            c, assign = jobs[int(job[1])]
            # "other" results (argmax) are combined from gathered partial results
            may = {"sum": "all-reduce", "other": "all-gather all-reduce", "": ""}
            combiners = {c.rule.factors[f].combiner for f in assign}
            if not any(kind[1] in may.get(x, "all-reduce") for x in combiners if x):
                hidden.add(c.eqn.primitive.name)
    assert hidden <= {h.primitive for h in denied.GATHERED}, hidden


def test_denied_factors_are_still_wrong(devices: list[jax.Device]) -> None:
    """Each entry of the deny-list, undone, fails here: an entry that no longer does can go."""
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), AXES)
    wrong = set()
    for c in checked():
        listed = [d for d in denied.DENIED if d.primitive == c.eqn.primitive.name]
        if not listed:
            continue
        trusting = rules.read([c.eqn])[0]
        for d in listed:
            for f in denied.ROLES[d.factor](c.eqn, trusting):
                assert c.rule.factors[f].kind == FROZEN or c.rule.factors[f].together, c.rule
                assign = {f: ("a",)}
                ins = [
                    jax.device_put(x, NamedSharding(mesh, spec_of(dims, assign)))
                    for x, dims in zip(c.operands, trusting.operands)
                ]
                whole = [NamedSharding(mesh, spec_of(dims, assign)) for dims in trusting.results]
                run = jax.jit(functools.partial(bind, c.eqn), out_shardings=whole)
                try:
                    close(run(*ins)[0], c.results[0], c.name)
                except (AssertionError, jax.errors.JaxRuntimeError):
                    wrong.add(d)
    assert wrong == set(denied.DENIED)


def bind(eqn: Any, *operands: Any) -> list[Any]:
    return _compat.bind_equation(eqn, operands)
