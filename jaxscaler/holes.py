"""Named holes: numbers that several lines of a program share, and linear relations of them.

With `tp = hole("tp", 1, 8)` and `dp = hole("dp", 1, 64)`, both `tp * 2 <= dp` and `tp == dp` are
relations: lines of a program like any other, so that comparing holes is never true or false by
accident.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from keyword import iskeyword
from typing import Any

from jaxscaler.errors import ConstraintError


class _Sum:
    """What `Hole` and `Linear` have in common: arithmetic and comparison."""

    def __add__(self, other: Any) -> Linear:
        a, b = _linear(self), _linear(other)
        terms = dict(a.terms)
        for name, n in b.terms:
            terms[name] = terms.get(name, 0) + n
        return Linear(tuple((h, n) for h, n in terms.items() if n), a.constant + b.constant)

    __radd__ = __add__

    def __mul__(self, n: Any) -> Linear:
        if isinstance(n, bool) or not isinstance(n, int):
            raise ConstraintError(
                f"{self} * {n!r}: relations of holes are linear, in whole numbers"
            )
        a = _linear(self)
        return Linear(tuple((h, m * n) for h, m in a.terms if n), a.constant * n)

    __rmul__ = __mul__

    def __neg__(self) -> Linear:
        return self * -1

    def __sub__(self, other: Any) -> Linear:
        return self + _linear(other) * -1

    def __rsub__(self, other: Any) -> Linear:
        return _linear(other) + self * -1

    def __le__(self, other: Any) -> Relation:
        return Relation(_linear(self), "<=", _linear(other), _caller())

    def __ge__(self, other: Any) -> Relation:
        return Relation(_linear(self), ">=", _linear(other), _caller())

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, Hole | Linear | int) or isinstance(other, bool):
            return NotImplemented
        return Relation(_linear(self), "==", _linear(other), _caller())


@dataclass(frozen=True, eq=False)
class Hole(_Sum):
    """A number of parts from `low` to `high`, the same wherever the name stands."""

    name: str
    low: int
    high: int

    def __hash__(self) -> int:
        return hash((self.name, self.low, self.high))

    def __str__(self) -> str:
        return f"hole({self.name!r}, {self.low}, {self.high})"

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class Linear(_Sum):
    """A sum of holes, each times a whole number, and a constant."""

    terms: tuple[tuple[Hole, int], ...]
    constant: int = 0

    def __hash__(self) -> int:
        return hash((self.terms, self.constant))

    def value(self, numbers: dict[str, int]) -> int:
        """The sum, with a number for each hole by name."""
        return self.constant + sum(n * numbers[h.name] for h, n in self.terms)

    def text(self, names: bool = False) -> str:
        """As it is written; `names`: holes by their names alone."""
        parts = []
        for h, n in self.terms:
            shown = h.name if names else str(h)
            parts.append(shown if n == 1 else f"{shown} * {n}")
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, eq=False)
class Relation:
    """`left` compared with `right`: which numbers go together."""

    left: Linear
    compare: str
    right: Linear
    source: str = ""

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(h for side in (self.left, self.right) for h, _ in side.terms)

    def holds(self, numbers: dict[str, int]) -> bool:
        """Whether it is so with these numbers, by name of hole."""
        return COMPARE[self.compare](self.left.value(numbers), self.right.value(numbers))

    def text(self, names: bool = False) -> str:
        return f"{self.left.text(names)} {self.compare} {self.right.text(names)}"

    def __str__(self) -> str:
        return self.text()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Relation) and (self.text(), self.source) == (
            other.text(), other.source,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.text())

    def __bool__(self) -> bool:
        """Of `==`, whether both sides are one; lets lines with holes be compared."""
        if self.compare != "==":
            raise ConstraintError(
                f"{self} is a line of a program, neither true nor false: of a <= b <= c make two"
            )
        return self.left.text() == self.right.text()


def hole(name: str, low: int, high: int) -> Hole:
    """A named hole for a number of parts from `low` to `high`."""
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name) or name == "ALL":
        raise ConstraintError(f"hole: {name!r} is no name")
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (low, high))
    if not whole or not 1 <= low <= high:
        raise ConstraintError(f"hole({name!r}, {low!r}, {high!r}): whole numbers, 1 <= low <= high")
    return Hole(name, low, high)


def _linear(x: Any) -> Linear:
    if isinstance(x, Linear):
        return x
    if isinstance(x, Hole):
        return Linear(((x, 1),), 0)
    if isinstance(x, int) and not isinstance(x, bool):
        return Linear((), x)
    raise ConstraintError(f"{x!r} is no hole and no whole number")


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def fillings(
    used: Iterable[Hole], relations: Sequence[Relation], numbers: Sequence[int]
) -> list[dict[str, int]]:
    """Every way to give each hole one of `numbers` that is in its range and fits the relations.

    One empty way if there are no holes. ConstraintError for a name with two ranges, and for a hole
    that stands in relations only.
    """
    known: dict[str, Hole] = {}
    related = [(h, f"{r} ({r.source})") for r in relations for h in r.holes]
    for h, where in [*((h, str(h)) for h in used), *related]:
        if where != str(h) and h.name not in known:
            raise ConstraintError(f"{where}: hole {h.name!r} stands in no op_trans line")
        if str(known.setdefault(h.name, h)) != str(h):
            raise ConstraintError(f"{h} and {known[h.name]}: one name, two ranges")
    choices = [[n for n in numbers if h.low <= n <= h.high] for h in known.values()]
    ways = (dict(zip(known, way)) for way in product(*choices))
    return [way for way in ways if all(r.holds(way) for r in relations)]
