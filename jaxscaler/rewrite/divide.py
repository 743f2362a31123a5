"""A segment divided by a factor: what runs before, in, and after a loop over its parts.

From its seeds a factor goes forward: whatever reads a part belongs to the loop, up to sums over the
factor, which are finished after it. What parts are needed besides is sliced from whole values; but
an equation whose results are only ever read in parts moves into the loop, so that no whole value
of it exists. The rest that the loop reads is made before it, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.graph import kinds
from jaxscaler.rewrite.factor import SUM, Placing, Regrain, Spot, makes_zero, place, refuse

Seed = tuple[int, int, int]  # (equation, operand, dim)


@dataclass(frozen=True)
class Division:
    """Equations by index, in order; values by variable.

    size: of the factor. loop: what runs on parts, with what is cut of it. before, after: what runs
    once, whole. slices: (variable, dim) read in parts from whole values. stacked: variable -> dim
    of values made in parts and needed whole. sums: variables finished by a sum over the parts.
    same: variables that the loop makes alike for each part.
    """

    size: int
    before: tuple[int, ...]
    loop: dict[int, Placing]
    after: tuple[int, ...]
    slices: tuple[tuple[Any, int], ...]
    stacked: dict[Any, int]
    sums: tuple[Any, ...]
    same: tuple[Any, ...]


def divide(
    eqns: Sequence,
    outvars: Iterable,
    seeds: Sequence[Seed],
    size: int,
    whole: Collection[int] = (),
) -> Division:
    """Divide `eqns`, of which `outvars` are read later, by the factor of `size` at the seeds.

    whole: equations that may run before the loop although they read what is cut, if they can not
    run on parts. Only a major part of the factor is taken where the rest can not be followed.
    Raises RewriteError, naming the operation, where there is no such loop.
    """
    while True:
        try:
            return _Divider(eqns, outvars, size, frozenset(whole)).run(seeds)
        except Regrain as smaller:
            size = smaller.size


@dataclass
class _Divider:
    eqns: Sequence
    outvars: Iterable
    size: int
    whole: frozenset[int]
    loop: dict[int, Placing] = field(default_factory=dict)
    known: dict[int, dict[Spot, int]] = field(default_factory=dict)
    cuts: dict[Any, int] = field(default_factory=dict)  # of what the loop makes
    sums: dict[Any, int] = field(default_factory=dict)  # variable -> equation
    kept_whole: list[RewriteError] = field(default_factory=list)  # why what may run whole does

    def __post_init__(self) -> None:
        self.maker = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self.readers: dict[Any, list[tuple[int, int]]] = {}
        for i, eqn in enumerate(self.eqns):
            for n, v in enumerate(eqn.invars):
                if not _compat.is_literal(v):
                    self.readers.setdefault(v, []).append((i, n))
        self.escaping = {v for v in self.outvars if not _compat.is_literal(v)}

    def run(self, seeds: Sequence[Seed]) -> Division:
        for seed in seeds:
            self.forward(seed)
        if not self.loop:
            why = f": {self.kept_whole[0]}" if self.kept_whole else ""
            raise RewriteError(f"nothing can run on parts of the factor{why}")
        after = self.after()
        self.check(after)
        self.backward()
        return self.result(after)

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, seed: Seed) -> None:
        queue = deque([seed])
        while queue:
            i, operand, dim = queue.popleft()
            known = {**self.known.get(i, {}), (0, operand): dim}
            if known == self.known.get(i):
                continue
            try:
                placing = place(self.eqns[i], known, self.size)
            except RewriteError as error:
                if i in self.whole:
                    self.kept_whole.append(error)
                    continue
                raise
            if placing.partial and i in self.whole:
                continue
            self.known[i], self.loop[i] = known, placing
            for var, cut in zip(self.eqns[i].outvars, placing.outs):
                if cut == SUM:
                    self.sums[var] = i
                elif cut is not None and var not in self.cuts:
                    self.cuts[var] = cut
                    queue.extend((j, n, cut) for j, n in self.readers.get(var, ()))

    def after(self) -> set[int]:
        """What reads results of the loop, itself not in it, and whatever reads of that."""
        late = {v for i in self.loop for v in self.eqns[i].outvars}
        found = set()
        for i, eqn in enumerate(self.eqns):
            if i not in self.loop and i not in self.whole and late.intersection(_vars(eqn.invars)):
                found.add(i)
                late.update(eqn.outvars)
        return found

    def check(self, after: Collection[int]) -> None:
        """Refuse what the loop would need before it is there."""
        for i, placing in self.loop.items():
            eqn = self.eqns[i]
            for var, dim in zip(eqn.invars, placing.ins):
                if _compat.is_literal(var):
                    continue
                j = self.maker.get(var)
                if dim == SUM and (j is None or not makes_zero(self.eqns[j])):
                    raise refuse(eqn, "a sum over parts begins with what every part has whole")
                if var in self.sums or j in after:
                    made = self.eqns[self.sums[var] if j is None else j]
                    what = f"`{made.primitive.name}` at {_compat.source_line(made) or '?'}"
                    raise refuse(eqn, f"a part needs what all parts make together: {what}")
                if var in self.cuts and self.cuts[var] != dim and j not in self.whole:
                    raise refuse(eqn, "it needs whole, or cut otherwise, what is made in parts")

    # -- backward ----------------------------------------------------------------------------------

    def backward(self) -> None:
        """Move into the loop what only serves parts."""
        drawn = self.drawn()
        moved: dict[int, Placing] = {}
        queue = [w for i in self.loop for w in self.wants(i, self.loop[i])]
        while queue:
            var, dim = queue.pop()
            i = self.maker.get(var)
            if i is None or i in self.loop or i in drawn:
                continue
            spot = (1, list(self.eqns[i].outvars).index(var))
            try:
                placing = place(self.eqns[i], {spot: dim}, self.size)
            except (RewriteError, Regrain):
                continue
            if i not in moved and not placing.partial:
                moved[i] = placing
                queue.extend(self.wants(i, placing))
        while bad := [i for i in moved if not self.serves(i, moved)]:
            for i in bad:
                del moved[i]
        self.loop |= moved
        for i, placing in moved.items():
            cut = zip(self.eqns[i].outvars, placing.outs)
            self.cuts.update((v, d) for v, d in cut if d is not None)

    def wants(self, i: int, placing: Placing) -> list[tuple[Any, int]]:
        cut = zip(self.eqns[i].invars, placing.ins)
        return [(v, d) for v, d in cut if d not in (None, SUM) and not _compat.is_literal(v)]

    def serves(self, i: int, moved: dict[int, Placing]) -> bool:
        """Whether all readers of an equation's results read them as it would make them."""
        for var, dim in zip(self.eqns[i].outvars, moved[i].outs):
            if var in self.escaping:
                return False
            for j, n in self.readers.get(var, ()):
                reader = moved.get(j) or self.loop.get(j)
                if reader is None or dim is None or reader.ins[n] != dim:
                    return False
        return True

    def drawn(self) -> set[int]:
        """Random draws and what is made of nothing else: masks are made whole, and sliced."""
        found: set[int] = set()
        for i, eqn in enumerate(self.eqns):
            if i in self.loop:
                continue
            made = [(v, self.maker.get(v)) for v in _vars(eqn.invars)]
            random = eqn.primitive.name in kinds.RANDOM
            if random or (
                any(j in found for _, j in made)
                and all(j in found or self.is_number(v) for v, j in made)
            ):
                found.add(i)
        return found

    def is_number(self, var: Any) -> bool:
        """Whether a value is one number, or one number everywhere."""
        if prod(var.aval.shape) == 1:
            return True
        i = self.maker.get(var)
        return i is not None and all(prod(v.aval.shape) == 1 for v in _vars(self.eqns[i].invars))

    # -- result ------------------------------------------------------------------------------------

    def result(self, after: set[int]) -> Division:
        slices: dict[tuple[Any, int], None] = {}
        needed: set = set()  # before the loop
        late: dict = {}  # made by it, needed after
        for i, placing in self.loop.items():
            for var, dim in zip(self.eqns[i].invars, placing.ins):
                if not _compat.is_literal(var) and not self.from_loop(var, dim):
                    needed.add(var)
                    if dim not in (None, SUM):
                        slices[var, dim] = None
        last = sorted(after)
        for var in (*(v for i in last for v in _vars(self.eqns[i].invars)), *self.escaping):
            if self.maker.get(var) in self.loop:
                late[var] = None
            elif self.maker.get(var) not in after:
                needed.add(var)
        before = []
        for i in reversed(range(len(self.eqns))):
            if i not in after and needed.intersection(self.eqns[i].outvars):
                before.append(i)
                needed.update(_vars(self.eqns[i].invars))
        return Division(
            self.size,
            tuple(reversed(before)),
            dict(sorted(self.loop.items())),
            tuple(last),
            tuple(slices),
            {v: self.cuts[v] for v in late if v in self.cuts},
            tuple(v for v in late if v in self.sums),
            tuple(v for v in late if v not in self.cuts and v not in self.sums),
        )

    def from_loop(self, var: Any, dim: int | None) -> bool:
        """Whether the loop itself makes what it reads of `var`."""
        return self.maker.get(var) in self.loop and self.cuts.get(var) == whole_or(dim)


def whole_or(dim: int | None) -> int | None:
    """The dim in which a value is sliced; the parts of a sum of nothing are nothing."""
    return None if dim == SUM else dim


def _vars(atoms: Iterable) -> list:
    return [v for v in atoms if not _compat.is_literal(v)]
