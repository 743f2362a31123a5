"""Changes of a forward computation, as plain data.

A *loss* is one call of `jaxscaler.value_and_grad` or `grad` in a step, counted in the order in
which they are traced; its forward jaxpr is the function it was given, traced on its arguments.
Equations are named by their index in a body of that jaxpr; `inside` says which body: () for the top
level, else the key (`Op.key`'s form: equation, (sub-jaxpr, equation) for each level) of the
equation that holds it, then which of its sub-jaxprs: (4, 0) is the body of the scan at equation 4.

All numbers of a list of changes are those of the jaxpr as it was traced, whatever other changes
there are. (`Exchange`s are made first: then that is the jaxpr which they leave.)
`rewrite/apply.py` walks it once, takes a segment out as a closed jaxpr (`segment_of`:
its arguments are what the segment reads, its results what is read later; equation i of it is
equation first + i of the body) and puts in its place the function that a rewriter makes of it:

    rewriter(closed: ClosedJaxpr, change) -> Callable[..., list]   same arguments, same results

A rewriter numbers by that closed jaxpr alone. Segments of one body do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args

Key = tuple[int, ...]  # as graph.ir.Op.key


class Segment(NamedTuple):
    """Equations `first` .. `last` (inclusive) of one body of one loss."""

    loss: int
    first: int
    last: int
    inside: Key = ()


def overlap(a: Segment, b: Segment) -> bool:
    """Whether two segments have equations in common, in bodies inside of them too."""
    depth = min(len(a.inside), len(b.inside))
    if a.loss != b.loss or a.inside[:depth] != b.inside[:depth]:
        return False
    (first, last), (begin, end) = (
        (s.inside[depth],) * 2 if len(s.inside) > depth else (s.first, s.last) for s in (a, b)
    )
    return first <= end and begin <= last


def around(segment: Segment, loops: Iterable[Segment]) -> list[Segment]:
    """What the `loops` leave of a segment, in pieces: none where one is in or around its body."""
    within = [loop for loop in loops if overlap(segment, loop)]
    if any(loop.inside != segment.inside for loop in within):
        return []
    pieces, first = [], segment.first
    for loop in sorted(within):
        pieces.append(segment._replace(first=first, last=loop.first - 1))
        first = loop.last + 1
    pieces.append(segment._replace(first=first))
    return [piece for piece in pieces if piece.first <= piece.last]


class Recompute(NamedTuple):
    """Between forward and backward a segment keeps only what is named; the rest is made again.

    kept, host: (equation, result) of the values that stay in device memory, or go to the host's.
    What flows into the segment stays too; equations are counted in the segment's body.
    """

    segment: Segment
    kept: tuple[tuple[int, int], ...] = ()
    host: tuple[tuple[int, int], ...] = ()

    def around(self, loops: Iterable[Segment]) -> list[Recompute]:
        """The same of what `loops` leave of the segment."""

        def named(names: tuple, piece: Segment) -> tuple:
            return tuple(name for name in names if piece.first <= name[0] <= piece.last)

        return [
            Recompute(piece, named(self.kept, piece), named(self.host, piece))
            for piece in around(self.segment, loops)
        ]


class CoShard(NamedTuple):
    """A segment runs as a loop over `parts` parts of one factor, on the same device, each made
    again in the backward pass. seed: (equation, operand position, dim) that has the factor,
    the equation counted in the segment's body. lanes: partial sums are kept that many times, and
    added after the loop (as many as the mesh axes that cut the factor have devices)."""

    segment: Segment
    seed: tuple[int, int, int]
    parts: int
    lanes: int = 1


class Accumulate(NamedTuple):
    """The loss and its gradients are summed over `parts` parts of the batch, one after another.

    batch: (argument of the loss, constants first; its batch dim). lanes: gradients are kept that
    many times, and added after the loop, as in `CoShard`."""

    loss: int
    parts: int
    batch: tuple[tuple[int, int], ...] = ()
    lanes: int = 1


class Fission(NamedTuple):
    """The scan at equation `scan` is cut into several, of `trips` iterations each (their sum is
    the scan's length). Changes inside its body hold in the pieces `only` ((): in all of them)."""

    loss: int
    scan: int
    trips: tuple[int, ...]
    only: tuple[int, ...] = ()


class Stages(NamedTuple):
    """The forward pass runs on the stages of a pipeline. points: (equation, iteration, place): from
    this equation of the loss's top level on, of a scan from this iteration on, ops run at a place
    (a set of devices, counted from 0), up to the next point; the first is (0, 0, place). A place
    may come several times. Needs an `Accumulate` of the same loss: its parts are micro-batches."""

    loss: int
    points: tuple[tuple[int, int, int], ...]


class Ring(NamedTuple):
    """The scan at equation `scan`, over layers, runs as a pipeline in one program: `stages` of
    equally many layers, which work on `micro` parts of the batch at the same time.

    seed: (carry of the scan, its batch dim). again: a stage is made again in the backward pass,
    which keeps what flows into it. lanes: gradients of weights are kept that many times, and added
    after the loop, as in `CoShard`."""

    loss: int
    scan: int
    stages: int
    micro: int
    seed: tuple[int, int] = (0, 0)
    again: bool = True
    lanes: int = 1


class Kernel(NamedTuple):
    """A registered function in the place of a segment (`rewrite/exchange.py`)."""

    segment: Segment
    name: str


class Cast(NamedTuple):
    """The products of a segment run in another dtype."""

    segment: Segment
    dtype: str


OfSegment = Recompute | CoShard | Kernel | Cast
Exchange = Kernel | Cast  # made first: all other changes count the equations that these leave
Change = OfSegment | Accumulate | Fission | Stages | Ring


def to_data(change: Change) -> dict[str, Any]:
    """A change as JSON takes it."""
    return {"change": type(change).__name__, **change._asdict()}


def from_data(data: Mapping[str, Any]) -> Change:
    """The change of `to_data`. Raises KeyError or TypeError on what is none."""
    kinds = {kind.__name__: kind for kind in get_args(Change)}
    fields = {k: _tuples(v) for k, v in data.items() if k != "change"}
    if "segment" in fields:
        fields["segment"] = Segment(*fields["segment"])
    return kinds[data["change"]](**fields)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list | tuple) else x
