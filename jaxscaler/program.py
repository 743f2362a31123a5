"""The language: what may be said about a plan.

    op_trans(subject, algo, num)   a subject is split by `algo` into `num` parts
    op_assign(subject, place)      its parts go to a level (or mesh axis) of the cluster

A plan is a program of such lines without holes; a constraint is one with holes: `ANY` for
"whichever factor", a range `(low, high)` or `ALL` (every device) for the number. `forbid(line)`
says the opposite.

    constraints=[
        op_trans(ops(phase=("forward", "backward")), Split("batch"), ALL),
        op_trans(values(role="parameter"), Replicate()),
    ]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from jaxscaler.errors import ConstraintError
from jaxscaler.graph import ir

ANY = "any"  # whichever factor
ALL = "all"  # as many parts as there are devices
AT_LEAST_TWO = (2, sys.maxsize)

PHASES = (ir.FORWARD, ir.BACKWARD, ir.UPDATE)
ROLES = (ir.PARAMETER, ir.OPTIMIZER, ir.BATCH)


@dataclass(frozen=True)
class Ops:
    """Ops by module path (a glob), primitive (a glob), phase, and whether they read a parameter."""

    path: str = "*"
    primitive: str = "*"
    phase: tuple[str, ...] = PHASES
    reads_parameter: bool | None = None

    def __str__(self) -> str:
        return _call("ops", self, Ops())


@dataclass(frozen=True)
class Values:
    """Arguments of the step by pytree path (a glob) and role, as they lie at rest."""

    path: str = "*"
    role: tuple[str, ...] = ROLES

    def __str__(self) -> str:
        return _call("values", self, Values())


@dataclass(frozen=True)
class Split:
    """Split along a factor: its name ("batch", "sequence" ...), ANY, or, of a value, a dim."""

    factor: str | int = ANY

    def __str__(self) -> str:
        return f"Split({'ANY' if self.factor == ANY else repr(self.factor)})"


@dataclass(frozen=True)
class Replicate:
    """Whole on every device."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Line:
    """One line of a program. `num`: parts, (least, most), or ALL; `place`: a level or axis name."""

    subject: Ops | Values
    algo: Split | Replicate | None = None
    num: int | tuple[int, int] | str = AT_LEAST_TWO
    place: str | None = None
    forbidden: bool = False
    source: str = ""

    def __str__(self) -> str:
        if self.place is not None:
            text = f"op_assign({self.subject}, {self.place!r})"
        else:
            open_range = self.num == AT_LEAST_TWO
            num = "" if isinstance(self.algo, Replicate) or open_range else f", {_number(self.num)}"
            text = f"op_trans({self.subject}, {self.algo}{num})"
        return f"forbid({text})" if self.forbidden else text


def ops(path: str = "*", primitive: str = "*", phase: str | tuple[str, ...] = PHASES,
        reads_parameter: bool | None = None) -> Ops:  # fmt: skip
    """Ops whose module path and primitive match the globs, in these phases."""
    phases = (phase,) if isinstance(phase, str) else tuple(phase)
    _known("phase", phases, PHASES)
    return Ops(path, primitive, phases, reads_parameter)


def values(path: str = "*", role: str | tuple[str, ...] = ROLES) -> Values:
    """Leaves of the step's arguments whose pytree path matches the glob, of these roles."""
    roles = (role,) if isinstance(role, str) else tuple(role)
    _known("role", roles, ROLES)
    return Values(path, roles)


def op_trans(
    subject: Ops | Values,
    algo: Split | Replicate,
    num: int | tuple[int, int] | str = AT_LEAST_TWO,
) -> Line:
    """`subject` is split by `algo` into `num` parts: a number, a range, ALL; else 2 or more."""
    if not isinstance(subject, Ops | Values):
        raise ConstraintError(f"op_trans: {subject!r} is no subject; use ops(...) or values(...)")
    if not isinstance(algo, Split | Replicate):
        raise ConstraintError(f"op_trans: {algo!r} is no algorithm; use Split(...) or Replicate()")
    if isinstance(algo, Replicate) and num != AT_LEAST_TWO:
        raise ConstraintError(f"op_trans: Replicate() makes no parts; leave num={num!r} out")
    if isinstance(algo, Split):
        _check_factor(subject, algo.factor)
    _check_num(num)
    return Line(subject, algo, num, source=_caller())


def _check_factor(subject: Ops | Values, factor: Any) -> None:
    if isinstance(factor, str):
        return
    if isinstance(factor, bool) or not isinstance(factor, int) or factor < 0:
        raise ConstraintError(
            f"Split({factor!r}): a factor is a name, ANY, or a dim counted from 0"
        )
    if isinstance(subject, Ops):
        raise ConstraintError(
            f"Split({factor}): an op has no dims of its own; name a factor of it "
            '("batch", "sequence", "contraction" ...) or say ANY'
        )


def _check_num(num: Any) -> None:
    if isinstance(num, str):
        if num != ALL:
            raise ConstraintError(f"op_trans: num {num!r} is no number, range or ALL")
        return
    ends = num if isinstance(num, tuple) and len(num) == 2 else (num, num)
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in ends)
    if not whole or not 1 <= ends[0] <= ends[1]:
        raise ConstraintError(
            f"op_trans: num {num!r}: a number of parts from 1, a range (least, most), or ALL"
        )


def op_assign(subject: Ops | Values, place: str) -> Line:
    """The parts of `subject` go to `place`: a level of the cluster ("node", "device", "x" ...)."""
    if not isinstance(subject, Ops | Values):
        raise ConstraintError(f"op_assign: {subject!r} is no subject; use ops(...) or values(...)")
    if not isinstance(place, str):
        raise ConstraintError(f"op_assign: place {place!r} is no name of a level or mesh axis")
    return Line(subject, None, place=place, source=_caller())


def forbid(line: Line) -> Line:
    """The plan must not do what `line` says."""
    return replace(line, forbidden=not line.forbidden, source=line.source or _caller())


def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches whole components of a path, as "h_*/mlp" in "model/h_3/mlp/up"."""
    around = (pattern, f"*/{pattern}", f"{pattern}/*", f"*/{pattern}/*")
    return any(fnmatchcase(path, p) for p in around)


def _number(num: Any) -> str:
    return "ALL" if num == ALL else str(num)


def _known(what: str, given: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for name in given:
        if name not in allowed:
            raise ConstraintError(f"no {what} {name!r}; there are {', '.join(allowed)}")


def _call(name: str, value: Ops | Values, default: Ops | Values) -> str:
    """A subject as it was written: what is as by default is left out."""
    parts = [
        f"{k}={(v[0] if isinstance(v, tuple) and len(v) == 1 else v)!r}"
        for k, v in vars(value).items()
        if v != getattr(default, k)
    ]
    return f"{name}({', '.join(parts)})"


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
