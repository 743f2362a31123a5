"""Where the values of a staged step lie: who reads them, who makes them, in which layout.

A value goes from one place to another in a layout that cuts it into the same parts on both sides:
a copy that needs another cut would go through the host, and wait for it. That is what both layouts
share; between two meshes alike it is the maker's, where that cuts the value into more parts. The
reader's program lays it out anew.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

from jaxscaler import _compat
from jaxscaler.graph.ir import MARKERS, OpGraph
from jaxscaler.lower.emit import Emitter
from jaxscaler.lower.layouts import Layouts, Spec
from jaxscaler.rewrite.parts import Part, variables
from jaxscaler.rewrite.stage_step import StageStep
from jaxscaler.rewrite.stages import Staged


class Site(Protocol):
    """The devices of a place, and how the plan lays out values there."""

    mesh: Any  # a `jax.sharding.Mesh`; to price, anything with its `shape`

    def spec(self, var: Any) -> Spec:
        """Where a value lies that this place has or makes."""


class RunningSite(Site, Protocol):
    """A site whose parts run there."""

    def layouts(self, part: Part, inside: bool) -> Layouts:
        """Constraints inside of a part, by its own positions. inside: of the loop's body."""


def common_specs(rank: int, ours: tuple[Spec, Mapping], theirs: tuple[Spec, Mapping]) -> tuple:
    """The finest layouts that are coarser than `ours` and `theirs` (spec, sizes of its axes), and
    cut a value of `rank` dims into equal parts on both sides: (of ours, of theirs)."""
    pair: list[Spec] = [(), ()]
    for dim in range(rank):
        counts = [
            [1, *itertools.accumulate((sizes[a] for a in spec[dim]), lambda x, y: x * y)]
            for spec, sizes in (ours, theirs)
        ]
        shared = max({*counts[0]} & {*counts[1]})
        for side, (spec, _) in enumerate((ours, theirs)):
            pair[side] = (*pair[side], spec[dim][: counts[side].index(shared)])
    return tuple(pair)


def parts_of(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Into how many parts a layout cuts a value."""
    return prod(sizes[axis] for dim in spec for axis in dim)


class Places:
    """Readers, makers and layouts of all values of a staged step.

    tasks: (run, phase) -> part. wants: variable outside of the loop -> places that read it.
    readers: (variable made in the loop, place) -> how many tasks of a micro-batch read it there.
    """

    def __init__(
        self, staged: Staged, sites: Sequence[Site], tasks: Mapping[tuple[int, str], Part]
    ):
        self.staged, self.sites = staged, sites
        self.wants: dict[Any, set[int]] = defaultdict(set)
        self.readers: dict[tuple[Any, int], int] = Counter()
        self._read(tasks)
        self.source = dict(self._sources())
        self.sent: dict[tuple[Any, int], Spec] = {}  # (variable, reader) -> as its maker sends it
        self._specs: dict[tuple[Any, int], Spec] = {}
        for v, others in staged.sends.items():
            self._lay_out(v, others)
        for c in staged.loop.carries:  # the same before, in and after the loop
            place = self.source[c.last]
            spec = sites[place].spec(c.inside)
            self._specs.update(((v, place), spec) for v in (c.result, c.last))
            if not _compat.is_literal(c.first):
                self._specs[c.first, place] = spec

    def spec(self, v: Any, place: int) -> Spec:
        """How a value lies at a place."""
        found = self._specs.get((v, place))
        return self.sites[place].spec(v) if found is None else found

    def _read(self, tasks: Mapping[tuple[int, str], Part]) -> None:
        staged, loop = self.staged, self.staged.loop
        made = {v for part in tasks.values() for v in part.makes}
        for (run, _), part in tasks.items():
            place = staged.places[run]
            for v in part.reads:
                outside = loop.consts.get(v, loop.slices.get(v))
                if v in made:
                    self.readers[v, place] += 1
                elif outside is not None and not _compat.is_literal(outside):
                    self.wants[outside].add(place)
        for level in (staged.prepare, *staged.update):
            for place, part in level.items():
                for v in part.reads:
                    self.wants[v].add(place)
        for v, place in zip(staged.traced.jaxpr.jaxpr.outvars, staged.result_homes):
            if not _compat.is_literal(v):
                self.wants[v].add(place)

    def _sources(self) -> Iterable[tuple[Any, int]]:
        staged, loop = self.staged, self.staged.loop
        yield from staged.homes.items()
        for level in reversed((staged.prepare, *staged.update)):  # who has it first sends it
            for place, part in sorted(level.items(), reverse=True):
                yield from ((v, place) for v in part.makes)
        inside = {
            v: staged.places[where[0]]
            for eqn, where in zip(loop.body.eqns, staged.body)
            if where is not None
            for v in eqn.outvars
        }
        yield from inside.items()
        for v, outside in (*((c.result, c.last) for c in loop.carries), *loop.stacks):
            yield outside, 0 if _compat.is_literal(v) else inside.get(v, 0)

    def _lay_out(self, v: Any, others: Iterable[int]) -> None:
        source, rank = self.source[v], len(v.aval.shape)
        sizes = [site.mesh.shape for site in self.sites]
        ours = self.sites[source].spec(v)
        for place in others:
            pair = common_specs(
                rank, (ours, sizes[source]), (self.sites[place].spec(v), sizes[place])
            )
            alike = [*sizes[source].items()] == [*sizes[place].items()]
            if alike and parts_of(pair[0], sizes[source]) < parts_of(ours, sizes[source]):
                pair = ours, ours
            self.sent[v, place], self._specs[v, place] = pair
        ways = {self.sent[v, place] for place in others}
        if len(ways) == 1 and (v, source) not in self.readers and self._is_inside(v):
            self._specs[v, source] = ways.pop()  # made as it is sent

    def _is_inside(self, v: Any) -> bool:
        results = {c.result for c in self.staged.loop.carries}
        return v not in results and v not in self.wants and v not in self.staged.homes


def results_of(staged: Staged) -> set:
    return set(variables(staged.traced.jaxpr.jaxpr.outvars))


class Planned:
    """A site laid out by the plan of its stage step (`rewrite/stage_step.py`)."""

    def __init__(self, step: StageStep, planned: Any, mesh: Any):
        self.step, self.mesh = step, mesh
        of = planned
        self.emitter = Emitter(of.graph, of.folded, of.space, of.plan.axes, of.rows)
        self.plan_layouts = planned.layouts()
        self.values = _value_ids(step, planned.graph)
        jaxpr = step.traced.jaxpr.jaxpr
        self.rest = dict(zip(jaxpr.invars, self.plan_layouts.inputs))
        becomes = ((jaxpr.outvars[o], jaxpr.invars[i]) for i, o in step.traced.state_pairs)
        self.rest.update((new, self.rest[old]) for new, old in becomes if new not in self.rest)

    def spec(self, var: Any) -> Spec:
        if not var.aval.shape:  # a number; of a literal there is no value in the graph
            return ()
        var = self.step.received.get(var, var)
        if (spec := self.rest.get(var)) is not None:
            return spec
        return self.emitter.made(self.values[var])[0]

    def layouts(self, part: Part, inside: bool) -> Layouts:
        step, plan = self.step, self.plan_layouts
        new: dict[tuple[int, ...], int] = {}  # key in the stage step -> equation of the part
        for n, i in enumerate(part.eqns):
            new[(step.at, 0, step.body[i]) if inside else (step.outer[i],)] = n
        size = 3 if inside else 1

        def mine(table: Mapping) -> dict:
            return {
                (new[key[:size]], *key[size:]): found
                for key, found in table.items()
                if key[:size] in new
            }

        return Layouts(
            plan.axes,
            (None,) * len(part.reads),
            (None,) * len(part.makes),
            results=mine(plan.results),
            operands=mine(plan.operands),
            body_inputs=mine(plan.body_inputs),
            body_outputs=mine(plan.body_outputs),
            kernels=mine(plan.kernels),
        )


def _value_ids(step: StageStep, graph: OpGraph) -> dict[Any, int]:
    """Variable of a stage step, or of its loop's body -> value of its graph."""
    jaxpr = step.traced.jaxpr.jaxpr
    results: dict[tuple[tuple[int, ...], int], int] = {}
    inside: dict[tuple[tuple[int, ...], int], int] = {}  # (loop, operand of its body)
    for op in graph.ops:
        if graph.kinds[op.kind].primitive not in MARKERS:
            results.update(((op.key, r), v) for r, v in enumerate(op.outputs))
            continue
        sub, _, invar, _, result = op.spot
        if result >= 0:
            results[op.key, result] = op.outputs[0]
        if invar >= 0:
            inside[(*op.key, sub), invar] = op.outputs[0]
    found = dict(zip(jaxpr.invars, graph.inputs)) | dict(zip(jaxpr.constvars, graph.constants))

    def read(jaxpr: Any, key: tuple[int, ...]) -> None:
        for i, eqn in enumerate(jaxpr.eqns):
            here = (*key, i)
            if eqn.primitive.name in _compat.CALLS:  # written out in the graph
                inner = _compat.open_jaxpr(_compat.subjaxprs(eqn)[0])[0]
                found.update(
                    (v, found[x])
                    for v, x in zip(inner.invars, eqn.invars)
                    if not _compat.is_literal(x) and x in found
                )
                read(inner, (*here, 0))
                for v, x in zip(eqn.outvars, inner.outvars):
                    if not _compat.is_literal(x) and x in found:
                        found[v] = found[x]
            elif here == (step.at,):
                body = _compat.open_jaxpr(_compat.subjaxprs(eqn)[0])[0]
                for n, (v, x) in enumerate(zip(body.invars, eqn.invars)):
                    if ((*here, 0), n) in inside:
                        found[v] = inside[(*here, 0), n]
                    elif not _compat.is_literal(x):
                        found[v] = found[x]
                read(body, (*here, 0))
            elif eqn.primitive.name in ("name", "reduce_precision"):  # may be no op of its own
                found.update((eqn.outvars[0], found[x]) for x in eqn.invars if x in found)
            for r, v in enumerate(eqn.outvars):
                if (here, r) in results:
                    found[v] = results[here, r]

    read(jaxpr, ())
    return found
