"""Kernels that the planner does not look into, with the rules that users state for them.

A rule names the factors of every dim, in the notation of JAX's `custom_partitioning`. Where a plan
cuts a kernel, every device runs it on its part alone (`lower/interpret.py`), so a factor may be
named in several tensors only if the kernel's result on parts is the parts of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, overload

import jax

from jaxscaler import _compat
from jaxscaler.errors import ConstraintError
from jaxscaler.graph import denied, hazards
from jaxscaler.graph.ir import Rule

PRIMITIVE = "registered_kernel"
Count = float | Callable[..., float] | None  # a number, or a function of the operands' types


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function or primitive, its rule and its price. Equal only to itself."""

    name: str
    text: str
    parsed: Any  # JAX's SdyShardingRule
    flops: Count = None
    nbytes: Count = None
    function: Callable | None = None

    def rule(self, eqn: Any) -> Rule:
        """The rule of an equation. ConstraintError, naming the factor, where it does not fit."""
        shapes = (*hazards.shapes_of(eqn.invars), *hazards.shapes_of(eqn.outvars))
        _check_fit(self, shapes, len(eqn.invars))
        rule = hazards.from_sharding_rule(eqn, self.parsed)
        if eqn.primitive.name != "pallas_call":
            return rule
        return denied.freeze(
            rule, _off_grid(eqn, rule), f"{self.name}: its grid does not walk what the rule frees"
        )

    def count(self, what: Count, eqn: Any) -> float | None:
        if not callable(what):
            return None if what is None else float(what)
        return float(what(*[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]))


def _off_grid(eqn: Any, rule: Rule) -> set[int]:
    """Factors of a Pallas kernel that its grid does not walk one element at a time, apart."""
    blocks = _compat.pallas_blocks(eqn)
    tensors = (*rule.operands, *rule.results)
    return {
        f
        for dims, walked in zip(tensors, blocks)
        for factors, at in zip(dims, walked)
        for f in factors
        if at is None or at[1] != 1 or len(factors) > 1
    }


_named: dict[str, Kernel] = {}


def find(eqn: Any) -> Kernel | None:
    """What is registered for an equation."""
    if eqn.primitive.name == PRIMITIVE:
        return eqn.params["kernel"]
    if not _named:
        return None
    name = eqn.params["name"] if eqn.primitive.name == "pallas_call" else eqn.primitive.name
    return _named.get(name)


@overload
def register_rule(kernel: Callable, rule: str, **options: Any) -> Callable: ...
@overload
def register_rule(kernel: str, rule: str, **options: Any) -> None: ...
def register_rule(
    kernel: Callable | str,
    rule: str,
    *,
    flops: Count = None,
    bytes: Count = None,
    need_replication_factors: tuple[str, ...] = (),
    **factor_sizes: int,
) -> Callable | None:
    """Tell the planner how an opaque kernel may be split, and what it costs.

        attend = register_rule(
            flash, "b q h d, b k h d, b k h d -> b q h d",
            need_replication_factors=("q", "k", "d"),
            flops=lambda q, k, v: 4 * q.size * k.shape[1],
        )

    `kernel`: a function of arrays that returns an array or a tuple of arrays; the result is the
    same function, to be called in the step, that the planner sees as one op. Or the name of a
    primitive, whose parameters must hold no shapes of its operands, or of a Pallas kernel (which
    without a rule is split as its grid allows). `rule`: one factor per dim,
    "operands -> results" as in `jax.experimental.custom_partitioning`; a compound dim is "(h g)",
    sizes of its parts are keywords. A factor may be cut where all parts can be computed apart:
    name those that can not in `need_replication_factors`. Factors that only operands, or only
    results have are never cut. `flops`, `bytes`: of one run on whole operands, numbers or functions
    of their types; by default no FLOPs, and the bytes of all operands and results.

    A function has no derivative of its own: register the forward and the backward pass, and tie
    them by `jax.custom_vjp`. What the backward pass needs is a result of the forward one.

    Raises ConstraintError for a rule that can not be read, and, when a step is planned, for one
    that does not fit, naming the factor.
    """
    name = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", repr(kernel))
    parsed = _parse(name, rule, tuple(need_replication_factors), factor_sizes)
    if isinstance(kernel, str):
        _named[kernel] = Kernel(name, rule, parsed, flops, bytes)
        return None
    known = Kernel(name, rule, parsed, flops, bytes, kernel)

    def marked(*args: Any) -> Any:
        made = _primitive.bind(*args, kernel=known)
        return made[0] if len(known.parsed.result_mappings) == 1 else tuple(made)

    marked.__name__, marked.__doc__ = name, kernel.__doc__
    return marked


def _run(kernel: Kernel, *args: Any) -> tuple:
    made = kernel.function(*args)  # type: ignore[misc]
    made = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    if len(made) != len(kernel.parsed.result_mappings):
        raise ConstraintError(
            f"kernel {kernel.name!r} returns {len(made)} arrays, its rule {kernel.text!r} says "
            f"{len(kernel.parsed.result_mappings)}"
        )
    return made


@cache  # equal equations have one kernel
def _batched(kernel: Kernel, mapped: tuple[bool, ...]) -> Kernel:
    """`kernel` under `vmap`: a factor more, outside of all dims of what is mapped and of results.

    Its price is a run's, times the runs. ConstraintError for a rule with leading dims "...".
    """
    parsed = kernel.parsed
    operands, results = parsed.operand_mappings, parsed.result_mappings
    names = {
        name
        for mapping in (*operands, *results)
        for dim in mapping
        for name in ([dim] if isinstance(dim, str) else dim)
    }
    if any(name.startswith("…") for name in names):
        raise ConstraintError(
            f"kernel {kernel.name!r} is batched (vmap, or lanes of a loop), and its rule "
            f"{kernel.text!r} leaves leading dims open: name them"
        )
    lane = next(name for n in count() if (name := f"lane{n}") not in names)

    def text(mapping: tuple, inside: bool) -> str:
        return " ".join([lane] * inside + [_dim_text(dim) for dim in mapping])

    rule = (
        f"{', '.join(map(text, operands, mapped))} -> "
        f"{', '.join(text(mapping, True) for mapping in results)}"
    )
    special = {
        kind: getattr(parsed, kind)
        for kind in ("reduction_factors", "need_replication_factors", "permutation_factors")
    }

    def times(what: Count) -> Count:
        if what is None:
            return None

        def of_all(*types: jax.ShapeDtypeStruct) -> float:
            lanes = next(t.shape[0] for t, inside in zip(types, mapped) if inside)
            one = [
                jax.ShapeDtypeStruct(t.shape[1:], t.dtype) if inside else t
                for t, inside in zip(types, mapped)
            ]
            return lanes * (float(what(*one)) if callable(what) else float(what))

        return of_all

    made = _compat.parse_sharding_rule(rule, **special, **parsed.factor_sizes)
    assert kernel.function is not None
    run = jax.vmap(kernel.function, in_axes=tuple(0 if inside else None for inside in mapped))
    return Kernel(kernel.name, rule, made, times(kernel.flops), times(kernel.nbytes), run)


_primitive = _compat.new_kernel_primitive(PRIMITIVE, _run, _batched)


# --- reading and checking rules ---------------------------------------------------------------


def _parse(name: str, text: str, whole: tuple[str, ...], sizes: dict[str, int]) -> Any:
    try:
        plain = _compat.parse_sharding_rule(text, **sizes)
    except (ValueError, TypeError) as error:
        raise ConstraintError(f"the rule {text!r} of kernel {name!r}: {error}") from error
    named = {
        factor
        for mapping in (*plain.operand_mappings, *plain.result_mappings)
        for dim in mapping
        for factor in ([dim] if isinstance(dim, str) else dim)
    }
    for factor in whole:
        if factor not in named:
            raise ConstraintError(
                f"the rule {text!r} of kernel {name!r} has no factor {factor!r}, which is named in "
                f"need_replication_factors; it has {', '.join(sorted(named))}"
            )
    return _compat.parse_sharding_rule(text, need_replication_factors=whole, **sizes)


def _check_fit(kernel: Kernel, shapes: tuple, operands: int) -> None:
    head = f"the rule {kernel.text!r} of kernel {kernel.name!r}"
    mappings = (*kernel.parsed.operand_mappings, *kernel.parsed.result_mappings)
    stated = len(kernel.parsed.operand_mappings), len(kernel.parsed.result_mappings)
    if stated != (operands, len(shapes) - operands):
        raise ConstraintError(
            f"{head} has {stated[0]} operands and {stated[1]} results, the step gives it "
            f"{operands} and takes {len(shapes) - operands}"
        )
    given = dict(kernel.parsed.factor_sizes)
    sizes: dict[str, tuple[int, str]] = {f: (n, "its stated size") for f, n in given.items()}
    for n, (mapping, shape) in enumerate(zip(mappings, shapes)):
        where = f"operand {n}" if n < operands else f"result {n - operands}"
        if any(isinstance(dim, str) and dim.startswith("…") for dim in mapping):
            continue  # leading dims without names: JAX's own check
        if len(mapping) != len(shape):
            raise ConstraintError(
                f"{head}: {where} has shape {shape}, the rule gives it {len(mapping)} dims "
                f"({' '.join(map(_dim_text, mapping))})"
            )
        for dim, size in zip(mapping, shape):
            if isinstance(dim, str):
                known, other = sizes.setdefault(dim, (size, where))
                if known != size:
                    raise ConstraintError(
                        f"{head}: factor {dim!r} is {known} in {other} but {size} in {where}"
                    )
                continue
            product = 1
            for factor in dim:
                product *= given[factor]
            if product != size:
                raise ConstraintError(
                    f"{head}: {_dim_text(dim)} makes {product}, but {where} has {size} there"
                )


def _dim_text(dim: Any) -> str:
    return dim if isinstance(dim, str) else "(" + " ".join(dim) + ")"
