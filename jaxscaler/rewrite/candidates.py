"""Which segments are worth running as loops over parts, by which factor: the co-shards to try.

A layer's own factors are found at its largest values: each dim of such a value is a seed, and the
rules say how far its factor goes (`divide`). So a layer offers its batch, tokens, heads, hidden dim
and what else it has, and an attention or an MLP alone is a loop that covers no more than it.
What surrounds the largest value of a layer (`core_of`) is a segment of its own: some factors go no
further, as the queries of an attention whose map is rolled after it, or only in larger pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.graph import kinds
from jaxscaler.rewrite.apply import body_of, segment_of
from jaxscaler.rewrite.changes import CoShard, Segment, overlap
from jaxscaler.rewrite.divide import Division, divide, whole_or

LARGEST = 3  # values of a segment, of different shapes, whose dims are tried
LEAST = 0.15  # of a segment's activations a loop must cover


class Candidate(NamedTuple):
    """Equal segments that may be looped over by one factor, each with its own seed.

    A segment is from the first to the last equation of its loop. size: of the factor. saving:
    bytes, on all devices together, of activations of one segment that would be in memory one part
    at a time. where: the module and primitive at the seed. cuts: per equation of the loop, counted
    from its first, the dims of its results that are cut.
    """

    segments: tuple[Segment, ...]
    seeds: tuple[tuple[int, int, int], ...]
    size: int
    saving: float
    where: str
    cuts: tuple[tuple[int, tuple[int | None, ...]], ...]

    def changes(self, parts: int, lanes: int = 1, first: int | None = None) -> tuple[CoShard, ...]:
        """The change of the `first` segments, or of all; of the last ones, if it is negative."""
        pairs = list(zip(self.segments, self.seeds))
        pairs = pairs[first:] if first is not None and first < 0 else pairs[:first]
        return tuple(CoShard(segment, seed, parts, lanes) for segment, seed in pairs)

    def __str__(self) -> str:
        return f"{len(self.segments)} segments by a factor of {self.size} at {self.where}"


def candidates(
    losses: Sequence[Any],
    segments: Iterable[Segment],
    wanted: Callable[[Segment, int, int, int], bool] | None = None,
    free: bool = True,
) -> list[Candidate]:
    """The co-shards of the `segments` of marked losses (their forward jaxprs), the largest saving
    first. If `free`, also of what follows the last segment of a loss (head and loss), and of the
    cores of all. `wanted(segment, equation of its body, operand, dim)`: by which factors; all, if
    it is None.
    """
    given = list(segments)
    if free:
        given += _tails(losses, given)
        given += _cores(losses, given)
    found: list[Candidate] = []
    for group in _alike(losses, given):
        found += _of_group(losses, group, wanted)
    return sorted(found, key=lambda c: (-c.saving * len(c.segments), c.segments, c.seeds))


def _tails(losses: Sequence[Any], given: Sequence[Segment]) -> list[Segment]:
    """What follows the last of the given segments, per loss."""
    found = []
    for loss, jaxpr in enumerate(losses):
        top = [s.last for s in given if s.loss == loss and not s.inside]
        around = [s.inside[0] for s in given if s.loss == loss and s.inside]
        start = max((*top, *around), default=-1) + 1
        end = len(_compat.open_jaxpr(jaxpr)[0].eqns) - 1
        if start <= end:
            found.append(Segment(loss, start, end))
    return found


def _cores(losses: Sequence[Any], given: Sequence[Segment]) -> list[Segment]:
    """The cores of segments; not those that hold a whole segment, which is tried as it is."""
    found = []
    bodies: dict[tuple, list[Segment]] = {}
    for segment in given:
        bodies.setdefault((segment.loss, segment.inside), []).append(segment)
    for (loss, inside), its in bodies.items():
        eqns = body_of(losses[loss], inside).eqns
        for span in dict.fromkeys(cores(eqns, [(s.first, s.last) for s in its])):
            core = Segment(loss, *span, inside)
            if not any(_holds(core, segment) for segment in given):
                found.append(core)
    return found


def _holds(core: Segment, segment: Segment) -> bool:
    """Whether all of a segment is in a core, or in the body of a loop that is."""
    if core.inside == segment.inside:
        return overlap(core, segment) and core.first <= segment.first and segment.last <= core.last
    return len(core.inside) < len(segment.inside) and overlap(core, segment)


def cores(eqns: Sequence[Any], spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(first, last) of the equations around the largest values of each of the spans of a body.

    From such a value, made by more than arithmetic, to whatever makes or reads one of more than
    half as many elements: an attention from its scores to their product with the values, an MLP
    without its norm. A core may reach over the ends of its span.
    """
    makers = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    touching: dict[Any, list[int]] = {v: [i] for v, i in makers.items()}
    for i, eqn in enumerate(eqns):
        for v in eqn.invars:
            if not _compat.is_literal(v) and v in makers:
                touching[v].append(i)
    for first, last in spans:
        heavy = [e for e in eqns[first : last + 1] if e.primitive.name not in kinds.FUSABLE]
        made = sorted((v for e in heavy for v in e.outvars), key=_elements, reverse=True)
        least = _elements(made[0]) / 2 if made else 0
        wide: set = set()
        for top in made:
            if top in wide or _elements(top) <= least:
                continue
            wide.add(top)
            queue, found = [top], set()
            while queue:
                for i in touching[queue.pop()]:
                    found.add(i)
                    ends = (*eqns[i].invars, *eqns[i].outvars)
                    made_here = {v for v in ends if not _compat.is_literal(v) and v in makers}
                    more = [v for v in made_here - wide if _elements(v) > least]
                    wide.update(more)
                    queue += more
            yield min(found), max(found)


def _alike(losses: Sequence[Any], given: Iterable[Segment]) -> list[list[Segment]]:
    """Segments that are equal equation by equation, in groups."""
    groups: dict[Any, list[Segment]] = {}
    for segment in sorted(given):
        eqns = body_of(losses[segment.loss], segment.inside).eqns
        text = tuple(
            (e.primitive.name, *(str(v.aval) for v in (*e.invars, *e.outvars)))
            for e in eqns[segment.first : segment.last + 1]
        )
        groups.setdefault((segment.loss, segment.inside, text), []).append(segment)
    return list(groups.values())


def _of_group(
    losses: Sequence[Any], group: Sequence[Segment], wanted: Callable | None
) -> list[Candidate]:
    """A candidate for each factor at the largest values of the first segment of a group."""
    segment = group[0]
    jaxpr = body_of(losses[segment.loss], segment.inside)
    closed, _, _ = segment_of(jaxpr, segment.first, segment.last)
    inner, _ = _compat.open_jaxpr(closed)
    whole = _stored_bytes(inner, range(len(inner.eqns)))
    readers: dict[Any, tuple[int, int]] = {}
    for i, eqn in enumerate(inner.eqns):
        for n, v in enumerate(eqn.invars):
            if not _compat.is_literal(v):
                readers.setdefault(v, (i, n))
    made = {v for eqn in inner.eqns for v in eqn.outvars if v in readers}
    shapes: dict[tuple[int, ...], Any] = {}  # the largest first
    for var in sorted(made, key=lambda v: (-_nbytes(v), readers[v])):
        shapes.setdefault(tuple(sorted(var.aval.shape)), var)
    found: dict[frozenset, Candidate] = {}
    for var in list(shapes.values())[: LARGEST if wanted is None else None]:
        i, n = readers[var]
        for dim, size in enumerate(var.aval.shape):
            if wanted is not None and not wanted(segment, segment.first + i, n, dim):
                continue
            division = _try(inner, (i, n, dim), size)
            if division is None:
                continue
            saving = _stored_bytes(inner, division.loop)
            cut = frozenset((i, p.ins, p.outs) for i, p in division.loop.items())
            if (wanted or saving >= LEAST * whole) and cut not in found:
                seeds = tuple((other.first + i, n, dim) for other in group)
                a, b = min(division.loop), max(division.loop)
                spans = tuple(
                    s._replace(first=s.first + a, last=s.first + b) for s in group
                )  # the rest of a segment may be recomputed on its own
                cuts = tuple(
                    (j - a, tuple(map(whole_or, p.outs))) for j, p in division.loop.items()
                )
                where = _place_of(inner.eqns[i])
                found[cut] = Candidate(spans, seeds, division.size, saving, where, cuts)
    return list(found.values())


def _place_of(eqn: Any) -> str:
    scope = [p for p in str(eqn.source_info.name_stack).split("/") if p and "@" not in p]
    return f"{'/'.join(scope)} {eqn.primitive.name}".strip()


def _try(jaxpr: Any, seed: tuple[int, int, int], size: int) -> Division | None:
    if size < 2:
        return None
    try:
        return divide(jaxpr.eqns, jaxpr.outvars, [seed], size)
    except RewriteError:
        return None


def _stored_bytes(jaxpr: Any, equations: Iterable[int]) -> float:
    """Bytes of values, among those that these equations make, that are not fused into others."""
    read = {
        v
        for eqn in jaxpr.eqns
        if eqn.primitive.name not in kinds.FUSABLE
        for v in eqn.invars
        if not _compat.is_literal(v)
    }
    return sum(
        _nbytes(v)
        for i in equations
        for v in jaxpr.eqns[i].outvars
        if v in read or jaxpr.eqns[i].primitive.name not in kinds.FUSABLE
    )


def _elements(var: Any) -> int:
    return prod(getattr(var.aval, "shape", ()))


def _nbytes(var: Any) -> float:
    dtype = getattr(var.aval, "dtype", None)
    return float(_elements(var) * getattr(dtype, "itemsize", 4))
