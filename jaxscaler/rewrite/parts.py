"""Parts of a jaxpr: equations that run as one, and the loop that a pipeline is cut from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from jaxscaler import _compat

Where = tuple[int, str]  # run, phase


class Leaf(NamedTuple):
    """An argument or result of a step by flat position; rows: of its first dim, [begin, end)."""

    position: int
    rows: tuple[int, int] | None = None

    def path(self, paths: Sequence[str]) -> str:
        return paths[self.position] + (f"[{self.rows[0]}:{self.rows[1]}]" if self.rows else "")


class Part(NamedTuple):
    """Equations (by index, in order) that run as one: what they read, what others read of them."""

    eqns: tuple[int, ...]
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]


class Carry(NamedTuple):
    """A sum over micro-batches: inside the loop before and after one, outside before and after."""

    inside: Any
    result: Any
    first: Any  # may be a literal
    last: Any  # may be dropped


@dataclass(frozen=True)
class Loop:
    """The loop over micro-batches, equation `at` of the step. consts, slices: variable of the body
    -> what it stands for outside; stacks: (result of the body, outside) per micro-batch."""

    at: int
    body: Any
    micro: int
    consts: Mapping[Any, Any]
    slices: Mapping[Any, Any]
    carries: tuple[Carry, ...]
    stacks: tuple[tuple[Any, Any], ...]


def variables(atoms: Iterable) -> list:
    return [v for v in atoms if not _compat.is_literal(v)]


def made_by(eqns: Sequence, indices: Iterable[int]) -> list:
    return [v for i in indices for v in eqns[i].outvars if not _compat.is_dropped(v)]


def part_of(eqns: Sequence, indices: Sequence[int], makes: Sequence) -> Part:
    made = set(made_by(eqns, indices))
    reads = dict.fromkeys(v for i in indices for v in variables(eqns[i].invars) if v not in made)
    return Part(tuple(indices), tuple(reads), tuple(dict.fromkeys(makes)))


def with_pulled(eqns: Sequence, own: Sequence[int], pulled: Sequence[bool]) -> list[int]:
    """`own` and the pulled equations that they need, in order."""
    found, needed = set(own), {v for i in own for v in variables(eqns[i].invars)}
    for i in reversed(range(len(eqns))):
        if pulled[i] and not needed.isdisjoint(eqns[i].outvars):
            found.add(i)
            needed.update(variables(eqns[i].invars))
    return sorted(found)


def nbytes(v: Any) -> int:
    aval = v.aval
    size = getattr(aval.dtype, "itemsize", 4)
    return prod(aval.shape) * size
