"""Plans with loops over parts as they are priced before any of them is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.cost.memory import Rules, buffers
from jaxscaler.errors import ConstraintError
from jaxscaler.graph.ir import FORWARD, OpGraph
from jaxscaler.loops.options import Pick
from jaxscaler.replan import Again
from jaxscaler.report.show import size_text
from jaxscaler.search import ENOUGH
from jaxscaler.solve import solve
from jaxscaler.solve.evaluate import profile_of
from jaxscaler.solve.shared import screen
from jaxscaler.space.loops import Looped, Reach, divisible, reach, with_loops
from jaxscaler.space.nodes import Node
from jaxscaler.space.price import Tabled, tabulate
from jaxscaler.space.problem import Model, Priced, tensor_bytes
from jaxscaler.space.recompute import Recomputation
from jaxscaler.why import Session

BETTER = 0.995  # of the best plan's seconds, which a loop must reach to be kept
SCREEN, SEARCH = (0.1, 0.5), 2.0  # work of bounding an estimate, and of searching it


@dataclass(frozen=True)
class View:
    """The space in which loops are priced: recomputation, if there are segments, is open in it."""

    session: Session
    again: Again | None
    loops: dict = field(default_factory=dict)  # what is known of a loop: (option, first) -> Reach

    @property
    def model(self) -> Model:
        return self.session.model

    def covered(self, picks: Sequence[Pick]) -> list[tuple[Looped, Reach]]:
        return [(p.option.looped(p.parts, p.first), self.reach(p)) for p in picks]

    def with_loops(self, picks: Sequence[Pick]) -> tuple[Model, Recomputation | None]:
        """The model with these loops; what they hold in parts is not kept."""
        covered = self.covered(picks)
        model = with_loops(self.model, covered)
        if self.again is None:
            return model, None
        never: set[int] = set()
        parts: dict[int, int] = {}
        for loop, found in covered:
            if loop.again:
                never |= found.values
            else:
                parts |= dict.fromkeys(found.values, loop.parts)
        return self.again.on(model, self.session.cluster.device.vendor, never, parts)

    def reach(self, pick: Pick) -> Reach:
        key = id(pick.option), pick.first
        if key not in self.loops:
            self.loops[key] = reach(self.model.graph, pick.option.looped(pick.parts, pick.first))
        return self.loops[key]


@dataclass(frozen=True)
class Estimate:
    """A plan with loops as it is priced before they are traced.

    seconds: None where none fits. need: bytes that no plan goes below, by each node alone.
    price: per row of memory, what a byte less in it is worth, relative.
    """

    priced: Priced | None
    what: Recomputation | None
    choice: np.ndarray | None
    seconds: float | None
    need: float
    price: np.ndarray

    def __str__(self) -> str:
        if self.seconds is None:
            return f"does not fit, {size_text(self.need)} at least"
        return f"{self.seconds:.4g} s"

    def better_than(self, other: Estimate) -> bool:
        if self.seconds is None or other.seconds is None:
            fits = self.seconds is not None
            return fits or (other.seconds is None and self.need < 0.99 * other.need)
        return self.seconds < BETTER * other.seconds


def estimated(view: View, mesh: Mesh, picks: Sequence[Pick], share: float = 1.0) -> Estimate:
    """The best plan on a mesh with these loops, for counted work, in a share of the memory."""
    session = view.session
    model, what = view.with_loops(picks)
    variant = next(v for v in session.variants(session.bind(session.program)) if v.mesh == mesh)
    device, limit = session.cluster.device, int(share * session.limit)
    divides = divisible(model, view.covered(picks))

    def keep(node: Node, rows: np.ndarray, mesh: Mesh) -> np.ndarray:
        mask = variant.keep(node, rows, mesh) & divides(node, rows, mesh)
        if not mask.any():
            raise ConstraintError(f"{node.name}: the program cuts it more often than a part of it")
        return mask

    rows_of_memory = max(len(model.lives.moment), 1)
    try:
        tabled = tabulate(model, mesh, device, limit, keep)
    except ConstraintError:
        return Estimate(None, what, None, None, float("inf"), np.zeros(rows_of_memory))
    shared, ptr = tabled.shared, tabled.shared.rest.node_ptr
    screened = screen(shared, work=SCREEN[0], most=SCREEN[1])
    need, rows, least = _least(tabled)
    choice, seconds = None, None
    alive = screened.alive(None)
    if np.logical_or.reduceat(alive, ptr[:-1]).all() and need <= limit:
        kept = np.flatnonzero(alive)
        part = shared.restricted(alive).whole()
        found = solve(part, work_limit=SEARCH, gap=ENOUGH)
        if found.choice is not None and found.cost is not None:
            choice = kept[part.node_ptr[:-1] + found.choice] - ptr[:-1]
            seconds = found.cost * tabled.unit
    price = np.zeros(rows_of_memory + 1)
    if seconds is None and need > limit:
        price[:-1] = _over(rows, least, limit - model.fixed_bytes, len(price) - 1)
    else:
        for row, worth in screened.prices.items():
            price[row] = worth
    return Estimate(tabled.priced(), what, choice, seconds, need, price[:-1])


def peak(graph: OpGraph, rules: Rules) -> float:
    """Bytes at the fullest moment of a step in which nothing is cut."""
    lives = buffers(graph, rules._replace(late=None))
    sizes = [tensor_bytes(v.shape, v.dtype) for v in graph.values]
    size = np.array([sizes[v] for v in lives.value.tolist()]) * lives.share
    return float(profile_of(lives.lo, lives.hi + 1, size.astype(np.int64))[1].max(initial=0))


def hopeless(view: View) -> bool:
    """Whether without loops no plan fits, on any mesh, by what each node takes at least."""
    session = view.session
    bound = session.bind(session.program)
    device, limit = session.cluster.device, int(session.limit)
    return all(
        _least(tabulate(view.model, v.mesh, device, limit, v.keep))[0] > limit
        for v in session.variants(bound)
    )


def _least(tabled: Tabled) -> tuple[float, np.ndarray, np.ndarray]:
    """(bytes that no plan goes below, first rows of levels, what each node takes at least there)"""
    rest = tabled.shared.rest
    least = np.minimum.reduceat(rest.usages, rest.usage_ptr[:-1])
    rows, levels = profile_of(rest.usage_lo, rest.usage_hi, least)
    return float(levels.max()) + tabled.model.fixed_bytes, rows, levels


def _over(rows: np.ndarray, usage: np.ndarray, limit: float, count: int) -> np.ndarray:
    """Per row by how much a profile (`rows`: first row of each level) is over a limit."""
    out = np.zeros(count)
    ends = np.append(rows[1:], count)
    for a, b, used in zip(rows.tolist(), ends.tolist(), usage.tolist()):
        out[a:b] = max(used - limit, 0.0)
    return out


def ways_of(view: View, pick: Pick, estimate: Estimate) -> int:
    """Into how many parts the mesh cuts the factor of a loop, in an estimated plan."""
    assert estimate.priced is not None and estimate.choice is not None
    model, sizes = view.model, estimate.priced.mesh.shape
    cuts = pick.option.looped(pick.parts, pick.first).cuts
    found: dict[int, float] = {}
    for op in model.graph.ops:
        known = cuts.get((op.origin.loss, op.origin.key)) if op.origin else None
        if known is None or op.phase != FORWARD or len(known) != len(op.outputs):
            continue
        for v, dim in zip(op.outputs, known):
            spot = model.space.made.get(int(model.folded.value_class[v])) if v >= 0 else None
            if spot is not None and dim is not None:
                layout = estimate.priced.layout(spot, estimate.choice)
                ways = prod(n for n, d in zip(sizes, layout) if d == dim)
                found[ways] = found.get(ways, 0.0) + prod(model.graph.values[v].shape)
    return max(found, key=lambda ways: found[ways], default=1)
