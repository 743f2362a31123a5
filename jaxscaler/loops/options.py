"""What a step offers to be run as loops over parts: its layers, its head, its whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.graph.ir import BATCH, FORWARD, OpGraph
from jaxscaler.loops.asked import MORE, PARTS
from jaxscaler.rewrite.accumulate import batch_division
from jaxscaler.rewrite.candidates import candidates
from jaxscaler.rewrite.changes import Accumulate, Change, Segment, overlap
from jaxscaler.rewrite.divide import Division, whole_or
from jaxscaler.space.loops import Looped
from jaxscaler.trace import Traced


@dataclass(frozen=True)
class Option:
    """What may be looped over: by `changes(parts, lanes, first)`. Of one group one is kept.

    cuts: per segment, (loss, key) of each equation of the loop and what is cut of its results.
    """

    group: Any
    what: str
    size: int
    changes: Callable[[int, int, int | None], tuple[Change, ...]]
    cuts: tuple[Mapping, ...]
    again: bool
    segments: tuple[Segment, ...] = ()

    @property
    def most(self) -> int:
        """The largest number of parts that it is tried in."""
        return max(p for p in PARTS if self.size % p == 0)

    def looped(self, parts: int, first: int | None) -> Looped:
        """The loop over so many parts, of the first segments (the last, if negative) or of all."""
        back = first is not None and first < 0
        some = self.cuts[first:] if back else self.cuts[:first]
        segment = {key: n for n, cuts in enumerate(some) for key in cuts}
        return Looped(
            parts, self.size, {k: v for cuts in some for k, v in cuts.items()}, self.again, segment
        )


@dataclass(frozen=True)
class Pick:
    """An option, in so many parts, of so many of its segments."""

    option: Option
    parts: int
    first: int | None = None

    def changes(self, lanes: int) -> tuple[Change, ...]:
        return self.option.changes(self.parts, lanes, self.first)

    def __str__(self) -> str:
        some = "" if self.first is None else f", the {'last' if self.first < 0 else 'first'} "
        some += "" if self.first is None else str(abs(self.first))
        return f"{self.option.what}{some}: {self.parts} parts"


def clash(a: Option, b: Option) -> bool:
    return a.group == b.group or any(overlap(x, y) for x in a.segments for y in b.segments)


def options(
    traced: Traced, graph: OpGraph, segments: Sequence[Segment], refused: list[str]
) -> Iterator[Option]:
    """What may be tried, what makes nothing twice first; `refused` is told why something is not."""
    for loss, jaxpr in enumerate(traced.losses):
        batch = batch_of(graph, loss, jaxpr)
        try:
            division = batch_division(jaxpr, dict(batch))
        except RewriteError as error:
            refused.append(f"no gradient accumulation: {error}")
            continue
        if any(division.size % p == 0 for p in PARTS):
            yield Option(
                f"loss {loss}", f"gradient accumulation {loss}", division.size,
                _accumulation(loss, batch), (_cuts_of(loss, division),), False,
            )  # fmt: skip
    for found in candidates(traced.losses, segments):
        if any(found.size % p == 0 for p in PARTS):
            cuts = tuple(
                {(s.loss, (*s.inside, s.first + i)): outs for i, outs in found.cuts}
                for s in found.segments
            )
            yield Option(found.segments, str(found), found.size, found.changes, cuts, True,
                         found.segments)  # fmt: skip


def _cuts_of(loss: int, division: Division) -> dict:
    return {(loss, (i,)): tuple(map(whole_or, p.outs)) for i, p in division.loop.items()}


def _accumulation(loss: int, batch: tuple) -> Callable:
    return lambda parts, lanes, first: (Accumulate(loss, parts, batch, lanes),)


def batch_of(graph: OpGraph, loss: int, jaxpr: Any) -> tuple[tuple[int, int], ...]:
    """(argument of a loss, constants first; 0) of what comes from the step's batch, as the op that
    reads it first in the whole step's graph tells."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    position = {v: i for i, v in enumerate((*inner.constvars, *inner.invars))}
    found: set[int] = set()
    for op in graph.ops:
        origin = op.origin
        if origin is None or (origin.loss, len(origin.key)) != (loss, 1) or op.phase != FORWARD:
            continue
        eqn = inner.eqns[origin.key[0]]
        if len(eqn.invars) != len(op.inputs):
            continue  # a part of a loop or call
        for var, value in zip(eqn.invars, op.inputs):
            if value >= 0 and not _compat.is_literal(var) and var in position:
                known = graph.values[value]
                if known.role == BATCH and known.shape:
                    found.add(position[var])
    return tuple((i, 0) for i in sorted(found))


# -- fewer ------------------------------------------------------------


def fewer_segments(pick: Pick) -> Iterator[Pick]:
    """Half of the segments, at either end."""
    count = len(pick.option.cuts)
    if count > 1:
        yield replace(pick, first=count // 2)
        yield replace(pick, first=-(count // 2))


def more_parts(pick: Pick) -> Iterator[Pick]:
    """An accumulation in more parts, also than are tried at first; few first."""
    if not pick.option.again:
        for parts in (*PARTS, *MORE):
            if parts > pick.parts and pick.option.size % parts == 0:
                yield replace(pick, parts=parts)


def fewer_parts(pick: Pick) -> Iterator[Pick]:
    """The same segments in fewer parts, few first."""
    return (replace(pick, parts=parts) for parts in PARTS if parts < pick.parts)
