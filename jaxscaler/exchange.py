"""Lines that exchange what ops compute with: `Cast` and `Kernel`, carried out before the search.

op_trans(region("h_*/mlp"), Cast("bfloat16"))       its products, and what they read, in bfloat16
op_trans(region("h_*/attn/core"), Kernel("flash"))  a function of the user's in its place
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxscaler import _compat
from jaxscaler.errors import ConstraintError, PlanError
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.ir import OpGraph
from jaxscaler.graph.labels import factor_labels
from jaxscaler.program import Cast, Kernel, Line, Ops
from jaxscaler.rewrite import changes
from jaxscaler.rewrite.apply import body_of
from jaxscaler.rewrite.exchange import is_castable
from jaxscaler.space.build import build_space
from jaxscaler.space.selected import equations, runs
from jaxscaler.space.subjects import Subjects
from jaxscaler.trace import Traced

Exchange = changes.Cast | changes.Kernel


def exchange_lines(program: Sequence[Any]) -> tuple[tuple[Line, ...], tuple[Any, ...]]:
    """(the lines that cast, or name a kernel; the others)."""
    lines = tuple(x for x in program if isinstance(x, Line) and isinstance(x.algo, Cast | Kernel))
    return lines, tuple(x for x in program if x not in lines)


def exchanged(
    traced: Traced, program: Sequence[Any], graph: OpGraph | None = None
) -> tuple[Traced, tuple[Any, ...]]:
    """The step with what lines of its program exchange, and the other lines; `graph`: of the step.

    Without a marked loss they stay among the others, which refuse them. Raises ConstraintError,
    naming the line, for one that can not be carried out, or two that exchange the same equation.
    """
    lines, rest = exchange_lines(program)
    if not lines or not traced.losses:
        return traced, tuple(program)
    if graph is None or traced.changes:
        traced = traced.rewritten(())
        graph = build(traced)
    folded = fold(graph, merge=False)
    subjects = Subjects(graph, folded, build_space(graph, folded, factor_labels(graph, folded)))
    said: list[tuple[Line, Exchange]] = []
    for line in lines:
        for change in _changes(line, subjects, traced):
            for other, made in said:
                if changes.overlap(change.segment, made.segment):
                    raise ConstraintError(
                        f"{line} ({line.source}) and {other} ({other.source}): both exchange "
                        f"equation {max(change.segment.first, made.segment.first)} of the loss"
                    )
            said.append((line, change))
    try:
        traced = traced.rewritten([change for _, change in said])
    except PlanError as error:
        raise ConstraintError(f"{', '.join(map(str, lines))}: {error}") from error
    return traced, rest


def _changes(line: Line, subjects: Subjects, traced: Traced) -> list[Exchange]:
    algo = line.algo
    if not isinstance(line.subject, Ops):
        raise _refused(line, "values do not compute: say region(...) or ops(...), which read them")
    if line.place is not None:
        raise _refused(line, f"{algo} makes no parts, so there is nothing to assign")
    if line.forbidden or line.yielding:
        raise _refused(line, "nothing is exchanged that no line asks for: leave the line out")
    found = runs(subjects.graph, equations(subjects, line.subject))
    if not found:
        raise _refused(
            line, "it selects no op of the forward pass of a loss that "
            "jaxscaler.value_and_grad marks",
        )  # fmt: skip
    if isinstance(algo, Kernel):
        return [changes.Kernel(segment, algo.name) for segment in found]
    assert isinstance(algo, Cast)
    _check_dtype(line, algo.dtype)
    products = [segment for segment in found if _has_products(segment, traced)]
    if not products:
        raise _refused(line, "it selects no product of floating-point numbers")
    return [changes.Cast(segment, algo.dtype) for segment in products]


def _check_dtype(line: Line, name: str) -> None:
    try:
        floating = jax.numpy.issubdtype(jax.numpy.dtype(name), jax.numpy.floating)
    except TypeError:
        floating = False
    if not floating:
        raise _refused(line, f'{name!r} is no floating-point dtype, as "bfloat16" is')


def _has_products(segment: changes.Segment, traced: Traced) -> bool:
    body, _ = _compat.open_jaxpr(body_of(traced.losses[segment.loss], segment.inside))
    return any(is_castable(eqn) for eqn in body.eqns[segment.first : segment.last + 1])


def _refused(line: Line, why: str) -> ConstraintError:
    return ConstraintError(f"{line} ({line.source}): {why}")
