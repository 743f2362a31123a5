"""Where a pipeline's step computes what is outside of its loop over micro-batches (`stages.py`).

Two walks over those equations. Forward: where each value can be had without a transfer (anywhere,
or at some places). Backward: where each is wanted, and computed. Levels follow: what reads another
place's result of the update waits one level longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscaler import _compat
from jaxscaler.rewrite import parts as s
from jaxscaler.trace import Traced

Places = frozenset[int]
SCALAR = 1  # elements: what costs nothing to have anywhere


def place_outside(
    traced: Traced, loop: s.Loop, places: tuple[int, ...], body: tuple[s.Where | None, ...]
) -> tuple:
    """(prepare, update, homes, result homes, sends): the last fields of `stages.Staged`."""
    return _Outside(traced, loop, places, body).run()


class _Outside:
    def __init__(self, traced: Traced, loop: s.Loop, places: tuple[int, ...], body: tuple):
        self.traced, self.loop, self.places, self.body = traced, loop, places, body
        jaxpr = traced.jaxpr.jaxpr
        self.jaxpr, self.eqns = jaxpr, jaxpr.eqns
        self.everywhere = frozenset(places)
        self.maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.late: set[int] = set()  # equations that depend on the loop
        after = set(self.eqns[loop.at].outvars)
        for i, eqn in enumerate(self.eqns):
            if i != loop.at and not after.isdisjoint(s.variables(eqn.invars)):
                self.late.add(i)
                after.update(eqn.outvars)
        self.readers: dict[Any, list[int]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            for v in s.variables(eqn.invars):
                self.readers[v].append(i)
        self.ends = self.loop_ends()
        self.read_by_loop = self.loop_reads()

    def run(self) -> tuple:
        had = self.had()
        results = tuple(
            0 if _compat.is_literal(v) else min(had.get(v, self.everywhere))
            for v in self.jaxpr.outvars
        )
        self.wanted, self.at = self.placed(had, results)
        homes = {self.jaxpr.invars[i]: results[o] for i, o in self.traced.state_pairs}
        prepared, level = self.levels()
        ours = sorted(self.everywhere)
        prepare = {p: self.part(sorted(prepared[p]), p, results) for p in ours}
        levels: list[dict[int, s.Part]] = []
        for n in range(1 + max(level.values(), default=0)):
            mine = {p: [i for i, q in level if q == p and level[i, q] == n] for p in ours}
            levels.append({p: self.part(sorted(mine[p]), p, results) for p in ours if mine[p]})
        return prepare, tuple(levels), homes, results, self.sends(homes)

    # -- what the loop reads and makes -------------------------------------------------------------

    def loop_reads(self) -> dict[Any, Places]:
        """Variables outside -> places whose tasks read them in the loop."""
        eqns, pulled = self.loop.body.eqns, [w is None for w in self.body]
        found: dict[Any, set[int]] = defaultdict(set)
        for p in self.everywhere:
            own = [i for i, w in enumerate(self.body) if w is not None and self.places[w[0]] == p]
            for i in s.with_pulled(eqns, own, pulled):
                for v in s.variables(eqns[i].invars):
                    outside = self.loop.consts.get(v, self.loop.slices.get(v))
                    if outside is not None and not _compat.is_literal(outside):
                        found[outside].add(p)
        for carry in self.loop.carries:
            if not _compat.is_literal(carry.first):
                found[carry.first].add(self.ends[carry.last])
        return {v: frozenset(found[v]) for v in found}

    def loop_ends(self) -> dict[Any, int]:
        """Results of the loop -> the place that has them."""
        maker = {v: i for i, eqn in enumerate(self.loop.body.eqns) for v in eqn.outvars}
        pairs = [(c.result, c.last) for c in self.loop.carries] + list(self.loop.stacks)
        found = {}
        for inside, outside in pairs:
            where = None if _compat.is_literal(inside) else self.body[maker[inside]]
            found[outside] = self.places[where[0] if where else 0]
        return found

    # -- where values can be had, and are wanted ---------------------------------------------------

    def had(self) -> dict[Any, Places]:
        """Per variable, the places that can have it without a transfer; none said: everywhere."""
        wanted: dict[Any, set[int]] = defaultdict(set)
        for v, where in self.read_by_loop.items():
            wanted[v].update(where)
        for i in reversed(range(self.loop.at)):
            for v in s.variables(self.eqns[i].invars):
                for made in self.eqns[i].outvars:
                    wanted[v].update(wanted.get(made, ()))
        state = {self.jaxpr.invars[i] for i, _ in self.traced.state_pairs}
        had: dict[Any, Places] = {
            v: frozenset(wanted[v]) for v in state if wanted.get(v) and v.aval.size > SCALAR
        }
        had.update((v, frozenset((p,))) for v, p in self.ends.items())
        for i, eqn in enumerate(self.eqns):
            if i == self.loop.at:
                continue
            read = [v for v in s.variables(eqn.invars) if v in had]
            if not read:
                continue
            common = frozenset.intersection(*(had[v] for v in read))
            if not common or (i in self.late and len(common) > 1):
                common = frozenset((self.vote(read, had, common),))
            had.update((v, common) for v in eqn.outvars)
        return had

    def vote(self, read: Sequence, had: Mapping[Any, Places], among: Places) -> int:
        """The place (first of equal ones) that has most bytes of what is read."""
        votes: dict[int, float] = defaultdict(float)
        for v in read:
            for p in had[v]:
                votes[p] += s.nbytes(v)
        return max(among or votes, key=lambda p: (votes[p], -p))

    def placed(
        self, had: Mapping[Any, Places], results: Sequence[int]
    ) -> tuple[dict[Any, set[int]], dict[int, Places]]:
        """(variable -> places that read it, equation -> places that compute it)."""
        wanted: dict[Any, set[int]] = defaultdict(set)
        for v, where in self.read_by_loop.items():
            wanted[v].update(where)
        for v, p in zip(self.jaxpr.outvars, results):
            if not _compat.is_literal(v):
                wanted[v].add(p)
        at: dict[int, Places] = {}
        for i in reversed(range(len(self.eqns))):
            if i == self.loop.at:
                continue
            eqn = self.eqns[i]
            readers = {p for v in eqn.outvars for p in wanted.get(v, ())}
            can = had.get(eqn.outvars[0], self.everywhere) if eqn.outvars else self.everywhere
            here = readers & can
            if readers - can or not readers:
                here = here | {min(can)}
            at[i] = frozenset(here)
            for v in s.variables(eqn.invars):
                wanted[v].update(here)
        return wanted, at

    # -- levels ------------------------------------------------------------------------------------

    def levels(self) -> tuple[dict[int, set[int]], dict[tuple[int, int], int]]:
        """(place -> equations before the loop, (equation, place) -> level of the update)."""
        at = self.at
        prepared: dict[int, set[int]] = {p: set() for p in self.everywhere}
        for i in reversed(range(len(self.eqns))):
            if i == self.loop.at or i in self.late:
                continue
            for p in at[i]:
                for v in self.eqns[i].outvars:
                    read = any(j in prepared[p] for j in self.readers[v])
                    if p in self.read_by_loop.get(v, ()) or self.sent(v, i, p) or read:
                        prepared[p].add(i)
        level: dict[tuple[int, int], int] = {}
        for i, eqn in enumerate(self.eqns):
            if i not in self.late:
                continue
            (p,) = at[i]
            level[i, p] = max(
                (
                    level[j, q] + (q != p)
                    for v in s.variables(eqn.invars)
                    if (j := self.maker.get(v)) in self.late
                    for q in at[j]
                ),
                default=0,
            )
        for i in reversed(range(len(self.eqns))):  # what only the update reads, when it does
            if i == self.loop.at or i in self.late:
                continue
            for p in at[i]:
                if i not in prepared[p]:
                    reads = [
                        level[j, p]
                        for v in self.eqns[i].outvars
                        for j in self.readers[v]
                        if (j, p) in level
                    ]
                    level[i, p] = min(reads, default=0)
        return prepared, level

    def sent(self, v: Any, i: int, p: int) -> bool:
        """Whether place `p` sends result `v` of equation `i` to others: the first that has it."""
        return p == min(self.at[i]) and not self.wanted.get(v, set()) <= self.at[i]

    def part(self, mine: Sequence[int], p: int, results: Sequence[int]) -> s.Part:
        """Equations that run as one at place `p`, and what others there, or elsewhere, read."""
        own = set(mine)
        kept = {
            v for v, q in zip(self.jaxpr.outvars, results) if q == p and not _compat.is_literal(v)
        }
        makes = []
        for v in s.made_by(self.eqns, mine):
            later = any(
                j != self.loop.at and p in self.at[j] and j not in own for j in self.readers[v]
            )
            looped = p in self.read_by_loop.get(v, ())
            if v in kept or later or looped or self.sent(v, self.maker[v], p):
                makes.append(v)
        return s.part_of(self.eqns, mine, makes)

    def sends(self, homes: Mapping[Any, int]) -> dict[Any, Places]:
        found: dict[Any, Places] = {}
        for v, where in self.wanted.items():
            if v in self.ends:
                has: Places = frozenset((self.ends[v],))
            elif v in self.maker:
                has = self.at[self.maker[v]]
            elif v in homes:
                has = frozenset((homes[v],))
            else:
                continue  # data of the step: given to every place that reads it
            if rest := frozenset(where) - has:
                found[v] = rest
        maker = {v: w for eqn, w in zip(self.loop.body.eqns, self.body) if w for v in eqn.outvars}
        for eqn, w in zip(self.loop.body.eqns, self.body):
            if w is not None:
                for v in s.variables(eqn.invars):
                    if v in maker and self.places[maker[v][0]] != self.places[w[0]]:
                        found[v] = found.get(v, frozenset()) | {self.places[w[0]]}
        return found
