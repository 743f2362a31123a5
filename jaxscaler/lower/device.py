"""The graph that one device runs under a plan: local shapes, and an op where a layout changes.

What is known of buffers and schedules of one device's program (`cost/memory.py`,
`cost/schedule.py`) can then be asked of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod

from jaxscaler.cost.schedule import CUT, GATHER, REDUCTION
from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import (
    ACTIVATION,
    CARRY,
    GRADIENT,
    SLICE,
    Barrier,
    Kind,
    Loop,
    Op,
    OpGraph,
    Region,
    Rule,
    Value,
)
from jaxscaler.graph.shorten import Gap, Short
from jaxscaler.lower.emit import Emitter
from jaxscaler.lower.layouts import Spec
from jaxscaler.space.nodes import Space


def device_graph(graph: OpGraph, folded: Folded, space: Space, axes, rows) -> OpGraph:
    """`graph` as each device of a mesh with `axes` runs it; `axes` and `rows` as in `emit`.

    Values have local shapes. Where `emit` puts a constraint that changes a layout, an op of kind
    "all_gather", "reduction" (of a partial sum) or "cut" (each device keeps its part) makes a copy,
    which all readers that want the layout share. Kinds keep their global shapes and rules.
    """
    return _Localizer(graph, folded, space, axes, rows).run()


def device_short(short: Short, space: Space, axes, rows) -> Short:
    """As `device_graph` of a graph with layers left out; the gaps lie where they lie there."""
    localizer = _Localizer(short.graph, short.folded, space, axes, rows)
    graph = localizer.run()
    first = [*localizer.first, len(graph.ops)]
    gaps = tuple(
        Gap(
            first[g.at],
            first[g.at] - first[g.at - g.period]
            if g.forward
            else first[g.at + g.period] - first[g.at],
            g.forward, first[g.first], first[g.last],
        )
        for g in short.gaps
    )  # fmt: skip
    return short._replace(graph=graph, gaps=gaps)


class _Localizer:
    def __init__(self, graph: OpGraph, folded: Folded, space: Space, axes, rows):
        self.graph = graph
        self.sizes = dict(axes)
        self.emitter = Emitter(graph, folded, space, axes, rows)
        self.values: list[Value] = []
        self.loop_of: list[Loop | None] = [None] * len(graph.ops)
        for loop in sorted(graph.loops):
            self.loop_of[loop.first : loop.last + 1] = [loop] * (loop.last + 1 - loop.first)
        none = Rule((), ((),), ((),))
        traits = {
            GATHER: frozenset[str](),
            REDUCTION: frozenset[str](),
            CUT: frozenset({"fusable"}),
        }
        self.kind_of = {name: len(graph.kinds) + i for i, name in enumerate(traits)}
        made = (Kind(name, (), (), (), (), none, 0.0, t) for name, t in traits.items())
        self.kinds = (*graph.kinds, *made)
        self.copies: dict[tuple[int, Spec, Loop | None], int] = {}
        self.before: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # (kind, in, out)
        self.summed: dict[int, int] = {}  # partial sum -> what a barrier lets through
        self.shapes: dict[tuple[tuple[int, ...], Spec], tuple[int, ...]] = {}

    def run(self) -> OpGraph:
        graph, emitter = self.graph, self.emitter
        at_rest = {v: emitter.at_rest(v) for v in (*graph.inputs, *graph.constants)}
        self.values = [
            self.local(value, at_rest.get(v) or emitter.made(v)[0])
            for v, value in enumerate(graph.values)
        ]
        barriers = [self.barrier(b) for b in graph.barriers]
        operands = [tuple(self.operand(op, n) for n in range(len(op.inputs))) for op in graph.ops]
        outputs = self.outputs(at_rest)
        ops: list[Op] = []
        first = self.first = []  # by op: the first of the ops put before it
        new: list[int] = []
        for op in graph.ops:
            first.append(len(ops))
            self.insert(ops, op.id, op)
            new.append(len(ops))
            ops.append(op._replace(id=len(ops), inputs=operands[op.id]))
        self.insert(ops, len(graph.ops), graph.ops[-1])
        return replace(
            graph, ops=tuple(ops), values=tuple(self.values), kinds=self.kinds, outputs=outputs,
            loops=tuple(Loop(new[a], new[b], trips) for a, b, trips in graph.loops),
            regions=tuple(Region(w, first[a], new[b]) for w, a, b in graph.regions if a <= b),
            barriers=tuple(b._replace(at=new[b.at]) for b in barriers),
        )  # fmt: skip

    def local(self, value: Value, spec: Spec) -> Value:
        key = (value.shape, spec)
        if key not in self.shapes:
            parts = [prod(self.sizes[axis] for axis in axes) for axes in spec]
            self.shapes[key] = tuple(-(-n // p) for n, p in zip(value.shape, parts))
        return value._replace(shape=self.shapes[key])

    def outputs(self, at_rest: dict[int, Spec]) -> tuple[int, ...]:
        graph, emitter = self.graph, self.emitter
        outputs = list(graph.outputs)
        replaced = {graph.outputs[o]: graph.inputs[i] for i, o in graph.state}
        for n, v in enumerate(outputs):
            if v >= 0:
                wanted = at_rest.get(replaced.get(v, -1)) or emitter.result(v)
                end = len(graph.ops)
                outputs[n] = self.changed(v, end, (wanted,), end, None)
        return tuple(outputs)

    def insert(self, ops: list[Op], at: int, like: Op) -> None:
        for kind, v, out in self.before.get(at, ()):
            ops.append(like._replace(id=len(ops), kind=kind, inputs=(v,), outputs=(out,), spot=()))

    def barrier(self, barrier: Barrier) -> Barrier:
        """The same on a device: of the copies of partial sums that are reduced before it."""
        values = list(barrier.values)
        for n, v in enumerate(values):
            at, path = self.emitter.summed.get(v, (-1, ()))
            if at == barrier.at:
                values[n] = self.changed(
                    v, int(self.graph.makers[v, 0]), path, at, self.loop_of[at]
                )
                self.summed[v] = values[n]
        return barrier._replace(values=tuple(values))

    def changed(self, v: int, o: int, path, at: int, loop: Loop | None) -> int:
        """A value as op `o` finds it, in one layout after another: copies made at `at`."""
        spec, partial = self.emitter.found(v, o)
        now = self.summed.get(v, v) if (spec, partial) != self.emitter.made(v) else v
        for wanted in path:
            if wanted != spec or partial:
                now = self.copy(v, now, spec, partial, wanted, at, loop)
            spec, partial = wanted, False
        return now

    def operand(self, op: Op, slot: int) -> int:
        """What an op reads in a slot: the value, or its copy in the layout that the op wants."""
        v = op.inputs[slot]
        if v < 0:
            return v
        path = self.emitter.on_the_way(op, slot)
        name = self.graph.kinds[op.kind].primitive
        loop, at = self.loop_of[op.id], op.id
        if slot == 0 and name in (CARRY, SLICE) and loop is not None:
            at, loop = loop.first, None  # before the loop that it enters
        elif name == CARRY:  # handed to the next iteration: changed where it is made
            at = int(self.graph.makers[v, 0]) + 1
        return self.changed(v, op.id, path, at, loop)

    def copy(self, origin: int, v: int, spec: Spec, partial: bool, wanted: Spec, at: int, loop):
        key = (origin, wanted, loop)
        if key not in self.copies:
            out = self.copies[key] = len(self.values)
            value = self.graph.values[origin]
            role = value.role if value.role == GRADIENT else ACTIVATION
            value = value._replace(id=out, path="", role=role)
            self.values.append(self.local(value, wanted))
            gathers = any(axis not in new for old, new in zip(spec, wanted) for axis in old)
            kind = self.kind_of[REDUCTION if partial else GATHER if gathers else CUT]
            self.before[at].append((kind, v, out))
        return self.copies[key]
