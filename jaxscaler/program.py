"""The language: what may be said about a plan.

    op_trans(subject, algo, num)   a subject is split by `algo` into `num` parts
    op_assign(subject, place)      it, or the parts that a line makes, go to a place
    op_order(first, then)          what runs before what

A plan is a program of such lines without holes; a constraint is one with holes: `ANY` for
"whichever factor", a range `(low, high)` or `ALL` (every device) for the number, or a named hole
that ties numbers together. `forbid(line)` says the opposite, `if_possible(line)` gives way.

    tp = hole("tp", 1, 8)
    constraints=[
        op_trans(ops(phase=("forward", "backward")), Split("batch"), ALL),
        op_assign(op_trans(values(role="parameter"), Split(ANY), tp), "device"),
        tp * 2 <= hole("dp", 1, 64),
    ]

The same words as YAML: program_text.py. What they do to a search: space/constraints.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from jaxscaler.errors import ConstraintError
from jaxscaler.graph import ir
from jaxscaler.holes import Hole, Linear, Relation, hole

__all__ = [
    "ALL", "ANY", "HBM", "HOST", "NOWHERE", "SAME_DEVICE", "Cast", "Hole", "Kernel", "Line",
    "Linear", "Ops", "Order", "Region", "Relation", "Replicate", "Split", "Stage", "Values",
    "forbid", "hole", "if_possible", "matches", "op_assign", "op_order", "op_trans", "ops",
    "region", "values",
]  # fmt: skip

ANY = "ANY"  # whichever factor
ALL = "ALL"  # as many parts as there are devices (at the place, if one is named)
AT_LEAST_TWO = (2, sys.maxsize)

SAME_DEVICE = "SAME_DEVICE"  # all parts on one device, one after another
HBM = "HBM"  # a value's memory: the device's own
HOST = "HOST"  # the host's
NOWHERE = "NOWHERE"  # kept nowhere: made again when it is read
MEMORIES = (HBM, HOST, NOWHERE)

PLAN = "plan"  # source of the lines of a plan

PHASES = (ir.FORWARD, ir.BACKWARD, ir.UPDATE)
AT_REST = (ir.PARAMETER, ir.OPTIMIZER, ir.BATCH)
ROLES = (*AT_REST, ir.ACTIVATION, ir.GRADIENT, ir.OUTPUT)


# -- subjects: what is spoken of -------------------------------------------------------------------


@dataclass(frozen=True)
class Ops:
    """Ops; every selector narrows.

    path: glob of the module path. primitive: glob. phase: of these. parameter: glob of the path of
    a parameter that the op reads. layers: (first, last), by the first number in the path. source:
    "file.py", "file.py:12" or "file.py:12-20" of the line that made the op. name: one decision, as
    a plan lists it; the only selector then.
    """

    path: str = "*"
    primitive: str = "*"
    phase: tuple[str, ...] = PHASES
    parameter: str | None = None
    layers: tuple[int, int] | None = None
    source: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        return _call(type(self).__name__.lower(), self)


@dataclass(frozen=True)
class Region(Ops):
    """The same ops as one unit, with what flows between them."""


@dataclass(frozen=True)
class Values:
    """Tensors; every selector narrows.

    path: glob of the pytree path of an argument, or of the module path of the op that makes it.
    role: of these. primitive: glob, of the op that makes it. layers, name: as of ops. to: as it is
    handed to these ops, instead of where it lies.
    """

    path: str = "*"
    role: tuple[str, ...] = AT_REST
    primitive: str = "*"
    layers: tuple[int, int] | None = None
    to: Ops | None = None
    name: str | None = None

    def __str__(self) -> str:
        return _call("values", self)


Subject = Ops | Values


def ops(path: str = "*", primitive: str = "*", phase: str | tuple[str, ...] = PHASES,
        parameter: str | None = None, layers: int | tuple[int, int] | None = None,
        source: str | None = None, name: str | None = None) -> Ops:  # fmt: skip
    """Ops that match every selector that is given (see `Ops`)."""
    return _ops(Ops, path, primitive, phase, parameter, layers, source, name)


def region(path: str = "*", primitive: str = "*", phase: str | tuple[str, ...] = PHASES,
           parameter: str | None = None, layers: int | tuple[int, int] | None = None,
           source: str | None = None, name: str | None = None) -> Region:  # fmt: skip
    """The same as one unit (see `Region`)."""
    return _ops(Region, path, primitive, phase, parameter, layers, source, name)


def _ops(
    kind: Any, path: str, primitive: str, phase: Any, parameter: str | None, layers: Any,
    source: str | None, name: str | None,
) -> Any:  # fmt: skip
    for what, text in (("path", path), ("primitive", primitive)):
        _is_text(what, text)
    for what, said in (("parameter", parameter), ("source", source), ("name", name)):
        _is_text(what, said, True)
    phases = _names("phase", phase, PHASES)
    found = kind(path, primitive, phases, parameter, _layers(layers), source, name)
    return _alone(found, kind(name=name))


def values(path: str = "*", role: str | tuple[str, ...] = AT_REST, primitive: str = "*",
           layers: int | tuple[int, int] | None = None, to: Ops | None = None,
           name: str | None = None) -> Values:  # fmt: skip
    """Tensors that match every selector that is given (see `Values`); by default, arguments."""
    for what, text in (("path", path), ("primitive", primitive)):
        _is_text(what, text)
    _is_text("name", name, True)
    if to is not None and not isinstance(to, Ops):
        raise ConstraintError(f"values: to={to!r} is no ops(...)")
    found = Values(path, _names("role", role, ROLES), primitive, _layers(layers), to, name)
    return _alone(found, Values(name=name, to=to))


# -- algorithms and places: what becomes of it -----------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Split along a factor: its name ("batch", "sequence", "trips" of a loop ...), any of several
    names, ANY, or, of a value, a dim."""

    factor: str | int | tuple[str, ...] = ANY

    def __str__(self) -> str:
        return f"Split({'ANY' if self.factor == ANY else repr(self.factor)})"


@dataclass(frozen=True)
class Replicate:
    """Whole on every device (of the place, if one is named)."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Cast:
    """Products of ops in another dtype: what they read travels in it, and so do their partial sums.

    Compression, which loses bits; what they make is cast back."""

    dtype: str

    def __str__(self) -> str:
        return f"Cast({self.dtype!r})"


@dataclass(frozen=True)
class Kernel:
    """A region by an equivalent function, which `jaxscaler.register_kernel` names."""

    name: str

    def __str__(self) -> str:
        return f"Kernel({self.name!r})"


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, counted from 0."""

    index: int

    def __str__(self) -> str:
        return f"Stage({self.index})"


Algo = Split | Replicate | Cast | Kernel
Number = int | tuple[int, int] | str | Hole
Place = str | tuple[str, ...] | Stage
TaskName = tuple[int, int, str]  # stage, micro-batch, phase: a `schedule.Task` is one


# -- lines -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A transformation, a placement, or (both) the placement of a transformation's parts."""

    subject: Subject
    algo: Algo | None = None
    num: Number = AT_LEAST_TWO
    place: Place | None = None
    forbidden: bool = False
    yielding: bool = False
    source: str = ""

    def __str__(self) -> str:
        text = str(self.subject)
        if self.algo is not None:
            text = f"op_trans({text}, {self.algo}{_number(self.num)})"
        if self.place is not None:
            place = str(self.place) if isinstance(self.place, Stage) else _place(self.place)
            text = f"op_assign({text}, {place})"
        if self.forbidden:
            text = f"forbid({text})"
        return f"if_possible({text})" if self.yielding else text


@dataclass(frozen=True)
class Order:
    """All of `first` run before any of `then`: ops, or tasks of a pipeline."""

    first: Ops | TaskName
    then: Ops | TaskName
    source: str = ""

    def __str__(self) -> str:
        return f"op_order({self.first}, {self.then})"


Statement = Line | Order | Relation


def op_trans(subject: Subject, algo: Algo, num: Number = AT_LEAST_TWO) -> Line:
    """`subject` becomes parts by `algo`: a number, a range, ALL or a hole; else 2 or more."""
    _is_subject("op_trans", subject)
    if not isinstance(algo, Split | Replicate | Cast | Kernel):
        raise ConstraintError(f"op_trans: {algo!r} is no algorithm; use Split(...) or Replicate()")
    if not isinstance(algo, Split) and num is not AT_LEAST_TWO:
        raise ConstraintError(f"op_trans: {algo} makes no parts; leave num={num!r} out")
    if isinstance(algo, Split):
        _check_factor(subject, algo.factor)
        _check_num(num)
    return Line(subject, algo, num, source=_caller())


def op_assign(subject: Subject | Line, place: Place) -> Line:
    """`subject`, or the parts that an `op_trans` line makes, go to `place`.

    A level of the cluster or an axis of the mesh ("node", "device", "x" ...), several, SAME_DEVICE,
    `Stage(k)`; of values also a memory: HBM, HOST or NOWHERE.
    """
    line = subject if isinstance(subject, Line) else None
    if line is not None and (line.place is not None or line.forbidden or line.yielding):
        raise ConstraintError(f"op_assign: {line} is no op_trans line")
    if line is None:
        _is_subject("op_assign", subject)
    if isinstance(place, list):
        place = tuple(place)
    names = place if isinstance(place, tuple) else (place,)
    if not names or not (isinstance(place, Stage) or all(isinstance(n, str) for n in names)):
        raise ConstraintError(f"op_assign: place {place!r} is no name of a level or mesh axis")
    of = line.subject if line is not None else subject
    if place in MEMORIES and not isinstance(of, Values):
        raise ConstraintError(f"op_assign: {place} is a memory: only values(...) go there")
    if isinstance(place, Stage) and (isinstance(place.index, bool) or place.index < 0):
        raise ConstraintError(f"op_assign: {place}: stages are counted from 0")
    if line is not None:
        return replace(line, place=place, source=_caller())
    assert isinstance(subject, Subject)
    return Line(subject, place=place, source=_caller())


def op_order(first: Ops | TaskName, then: Ops | TaskName) -> Order:
    """All ops of `first` run before any of `then`; of a pipeline, a task (stage, micro-batch,
    "F", "B" or "W") before another one."""
    if isinstance(first, tuple) and isinstance(then, tuple):
        for task in (first, then):
            if len(task) != 3 or task[2] not in ("F", "B", "W"):
                raise ConstraintError(
                    f'op_order: {task} is no task (stage, micro-batch, "F", "B" or "W")'
                )
        return Order((*first,), (*then,), _caller())  # plain tuples: equal lines are equal text
    for subject in (first, then):
        if not isinstance(subject, Ops):
            raise ConstraintError(f"op_order: {subject!r} is no ops(...) or region(...)")
    return Order(first, then, _caller())


def forbid(line: Line) -> Line:
    """The plan must not do what `line` says."""
    if not isinstance(line, Line):
        raise ConstraintError(f"forbid: {line} is no op_trans or op_assign line")
    return replace(line, forbidden=not line.forbidden, source=line.source or _caller())


def if_possible(line: Line) -> Line:
    """As `line` says wherever that leaves a choice; where it does not, it gives way."""
    if not isinstance(line, Line):
        raise ConstraintError(f"if_possible: {line} is no op_trans or op_assign line")
    return replace(line, yielding=True, source=line.source or _caller())


def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches whole components of a path, as "h_*/mlp" in "model/h_3/mlp/up"."""
    around = (pattern, f"*/{pattern}", f"{pattern}/*", f"*/{pattern}/*")
    return any(fnmatchcase(path, p) for p in around)


def holes_of(line: Statement) -> tuple[Hole, ...]:
    """The named holes that stand in a line."""
    if isinstance(line, Relation):
        return line.holes
    return (line.num,) if isinstance(line, Line) and isinstance(line.num, Hole) else ()


# -- checks and text -------------------------------------------------------------------------------


def _is_subject(word: str, subject: Any) -> None:
    if not isinstance(subject, Subject):
        raise ConstraintError(f"{word}: {subject!r} is no subject; use ops(...) or values(...)")


def _alone(subject: Any, named: Subject) -> Any:
    if subject.name is not None and subject != named:
        raise ConstraintError(f"{subject}: a name selects one decision; leave the rest out")
    return subject


def _is_text(what: str, text: Any, optional: bool = False) -> None:
    if not isinstance(text, str) and not (optional and text is None):
        raise ConstraintError(f"{what}={text!r} is no text")


def _check_factor(subject: Subject, factor: Any) -> None:
    if isinstance(factor, str):
        return
    if isinstance(factor, tuple) and factor and all(isinstance(f, str) for f in factor):
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
    if isinstance(num, Hole):
        return
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


def _layers(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    ends = tuple(given) if isinstance(given, tuple | list) else (given, given)
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in ends)
    if len(ends) != 2 or not whole or not 0 <= ends[0] <= ends[1]:
        raise ConstraintError(f"layers={given!r}: a number from 0, or (first, last)")
    return ends


def _names(what: str, given: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in allowed:
            raise ConstraintError(f"no {what} {name!r}; there are {', '.join(allowed)}")
    return names


def _number(num: Number) -> str:
    if num == AT_LEAST_TWO:
        return ""
    return f", {num}"


def _place(place: str | tuple[str, ...]) -> str:
    return place if place in (*MEMORIES, SAME_DEVICE) else repr(place)


def _call(name: str, value: Subject) -> str:
    """A subject as it was written: what is as by default is left out."""
    default = type(value)()
    parts = [
        f"{k}={v if isinstance(v, Ops) else repr(short(v))}"
        for k, v in vars(value).items()
        if v != getattr(default, k)
    ]
    return f"{name}({', '.join(parts)})"


def short(value: Any) -> Any:
    """A name alone for one name; a number for a range of one."""
    if isinstance(value, tuple) and (len(value) == 1 or (value and len(set(value)) == 1)):
        return value[0]
    return value


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
