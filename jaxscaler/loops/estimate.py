"""Plans with loops over parts as they are priced before any of them is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.cost.memory import Rules, buffers
from jaxscaler.errors import ConstraintError
from jaxscaler.graph.ir import FORWARD, OpGraph
from jaxscaler.loops.asked import PARTS
from jaxscaler.loops.options import Option, Pick
from jaxscaler.replan import Again
from jaxscaler.search import ENOUGH, WIDE, Best, promising, same_choice
from jaxscaler.solve import solve
from jaxscaler.solve.evaluate import evaluate, profile_of, usage_profile
from jaxscaler.solve.problem import StrategyProblem
from jaxscaler.solve.shared import screen
from jaxscaler.space.again import Recomputation
from jaxscaler.space.loops import Looped, Reach, divisible, reach, with_loops
from jaxscaler.space.nodes import Node
from jaxscaler.space.price import Tabled, tabulate
from jaxscaler.space.problem import Model, Priced, tensor_bytes
from jaxscaler.why import Session

BETTER = 0.995  # of the best plan's seconds, which a loop must reach to be kept
SCREEN = (0.1, 0.5)  # work of bounding an estimate
SEARCH, GUESS = (2.0, ENOUGH), (0.5, 0.05)  # work and gap of searching it, in more memory too
LEVELS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, *(10.0 * 2**n for n in range(20)))


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

    def parts(self, option: Option, picks: Sequence[Pick]) -> int:
        """The most parts of an option beside loops that cut the same dims; 1: there is none."""
        cut = self.reach(Pick(option, option.most)).cut.items()
        others = (p for p in picks if cut & self.reach(p).cut.items())
        taken = prod(p.parts for p in others)
        return max((n for n in PARTS if option.size % (n * taken) == 0), default=1)

    def reach(self, pick: Pick) -> Reach:
        key = id(pick.option), pick.first
        if key not in self.loops:
            self.loops[key] = reach(self.model.graph, pick.option.looped(pick.parts, pick.first))
        return self.loops[key]


@dataclass(frozen=True)
class Estimate:
    """A plan with loops as it is priced before they are traced.

    level: of `LEVELS`, by which the memory was multiplied to find one; inf: none was found. cost:
    its seconds. used: its bytes on a device. over: by how many it is over the memory, added up over
    the rows of memory. price: per row, what a byte less in it is worth, relative.
    """

    priced: Priced | None
    what: Recomputation | None
    choice: np.ndarray | None
    level: float
    cost: float
    used: float
    over: float
    price: np.ndarray

    @property
    def seconds(self) -> float | None:
        """Of the plan, if it fits."""
        return self.cost if self.level == 1 else None

    def __str__(self) -> str:
        if self.level == np.inf:
            return "does not fit"
        some = "" if self.level == 1 else f" in {self.level:g} times the memory"
        return f"{self.cost:.4g} s{some}"

    def better_than(self, other: Estimate) -> bool:
        if self.level != other.level:
            return self.level < other.level
        if self.level == 1:
            return self.cost < BETTER * other.cost
        return self.over < 0.99 * other.over


def estimated(
    view: View, mesh: Mesh, picks: Sequence[Pick], share: float = 1.0, most: float = np.inf,
    begin: Estimate | None = None,
) -> Estimate:  # fmt: skip
    """The best plan on a mesh with these loops, for counted work, in a share of the memory.
    `begin`: the one on a coarser mesh, with the same loops.

    Where none fits: in the least multiple of it, up to `most`, in which there is one.
    """
    session = view.session
    model, what = view.with_loops(picks)
    variant = next(v for v in session.variants(session.bind(session.program)) if v.mesh == mesh)
    device, limit = session.cluster.device, share * session.limit
    divides = divisible(model, view.covered(picks))

    def keep(node: Node, rows: np.ndarray, mesh: Mesh) -> np.ndarray:
        mask = variant.keep(node, rows, mesh) & divides(node, rows, mesh)
        if not mask.any():
            raise ConstraintError(f"{node.name}: the program cuts it more often than a part of it")
        return mask

    rows = max(len(model.lives.moment), 1)
    nothing = Estimate(None, what, None, np.inf, np.inf, np.inf, np.inf, np.zeros(rows))
    try:
        tabled = tabulate(model, mesh, device, None, keep)
    except ConstraintError:
        return nothing
    need, hint = _least(tabled), None
    if begin is not None and begin.priced is not None and begin.choice is not None:
        hint = same_choice(Best(begin.priced, begin.choice, begin.cost, variant), tabled)
    levels = [x for x in LEVELS if x <= most and need <= x * limit]
    prices: Mapping[int, float] = {}
    best: tuple[float, np.ndarray, float] | None = None
    at = 0  # the least level first, then by halves
    low, high = -1, len(levels)
    while high - low > 1:
        usage = int(levels[at] * limit) - model.fixed_bytes
        work = SEARCH if at == 0 else GUESS
        choice, cost, prices = _solved(tabled, usage, prices, work, hint)
        if choice is None:
            low = at
        else:
            best, high = (levels[at], choice, cost), at
        at = (low + high) // 2
    if best is None:
        return nothing
    level, choice, cost = best
    priced, price = tabled.priced(), np.zeros(rows + 1)
    used = float(evaluate(priced.problem, choice)[1]) + model.fixed_bytes
    if level == 1:
        for row, worth in prices.items():
            price[row] = worth
    else:
        price[:-1] = _over(priced.problem, choice, limit - model.fixed_bytes, rows)
    return Estimate(priced, what, choice, level, cost, used, price.sum(), price[:-1])


def _solved(
    tabled: Tabled, usage: int, prices: Mapping[int, float], work: tuple[float, float],
    hint: np.ndarray | None = None,
) -> tuple[np.ndarray | None, float, Mapping[int, float]]:  # fmt: skip
    """(choice, its seconds, the multipliers of the rows of memory) under a limit of usage; of a
    wide problem among its most promising strategies."""
    shared, ptr = tabled.shared, tabled.shared.rest.node_ptr
    shared = replace(shared, rest=replace(shared.rest, usage_limit=usage))
    screened = screen(shared, work=SCREEN[0], most=SCREEN[1], prices=prices)
    alive = screened.alive(None)
    if not np.logical_or.reduceat(alive, ptr[:-1]).all():
        return None, np.inf, screened.prices
    if shared.entries(alive) > WIDE:
        alive = promising(shared, screened.floor, alive, hint)
    part, kept = shared.restricted(alive).whole(), np.flatnonzero(alive)
    found = solve(part, work_limit=work[0], gap=work[1])
    if found.choice is None or found.cost is None:
        return None, np.inf, screened.prices
    choice = kept[part.node_ptr[:-1] + found.choice] - ptr[:-1]
    return choice, found.cost * tabled.unit, screened.prices


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
        _least(tabulate(view.model, v.mesh, device, limit, v.keep)) > limit
        for v in session.variants(bound)
    )


def _least(tabled: Tabled) -> float:
    """Bytes that no plan goes below, by what each node takes at least."""
    rest = tabled.shared.rest
    least = np.minimum.reduceat(rest.usages, rest.usage_ptr[:-1])
    levels = profile_of(rest.usage_lo, rest.usage_hi, least)[1]
    return float(levels.max()) + tabled.model.fixed_bytes


def _over(problem: StrategyProblem, choice: np.ndarray, limit: float, count: int) -> np.ndarray:
    """Per row by how much a choice is over a limit."""
    out = np.zeros(count)
    rows, usage = usage_profile(problem, choice)
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
