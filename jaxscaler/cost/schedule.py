"""When the ops of a device's program run: program order, but for what only the update reads.

XLA's latency-hiding scheduler goes through a program from its end, and puts what is on nobody's way
as late as it can: a weight gradient's product runs after the whole backward pass, or beside one of
its collectives, the last ones first; its operands live until then. Seen in schedules of H100
programs (jax 0.10.2): all of them at the end with data parallelism, about one layer late with
ZeRO-3, all in the last layer with tensor parallelism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from jaxscaler.graph.ir import BACKWARD, SLICE, UPDATE, Loop, OpGraph

# Ops of the graph that one device runs (lower/device.py): a layout change with, without traffic.
GATHER, REDUCTION, CUT = "all_gather", "reduction", "cut"
SMALL = 1 << 17  # elements of a collective that hides nothing
# Products that run beside a gather of state, beside another collective.
BESIDE_STATE, BESIDE = 2, 4
LOOKS = 64  # fused values that are looked through


class Schedule(NamedTuple):
    """`place[op]`: the op id at which it runs; `kept`: what late reductions read, stored early."""

    place: list[int]
    kept: frozenset[int]


def schedule(
    graph: OpGraph,
    fusable: Sequence[bool],
    heavy: Sequence[bool],
    enclosing: Sequence[tuple[Loop, ...]],
) -> Schedule:
    """When each op of a device's graph runs. `fusable`, `heavy`: by kind."""
    return _Scheduler(graph, fusable, heavy, enclosing).run()


class _Scheduler:
    def __init__(self, graph, fusable, heavy, enclosing):
        self.graph, self.fusable, self.heavy, self.enclosing = graph, fusable, heavy, enclosing
        self.primitive = [kind.primitive for kind in graph.kinds]
        self.maker = graph.makers[:, 0].tolist()
        self.place = list(range(len(graph.ops)))
        self.kept: set[int] = set()

    def run(self) -> Schedule:
        self.products()
        self.producers()
        for op in self.graph.ops:
            for v in op.inputs:
                if v >= 0 and 0 <= self.maker[v] < op.id:
                    self.place[op.id] = max(self.place[op.id], self.place[self.maker[v]])
        for loop in self.graph.loops:
            for i in range(loop.first, loop.last + 1):
                self.place[i] = min(self.place[i], loop.last)
        return Schedule(self.place, frozenset(self.kept))

    def products(self) -> None:
        """Place products, and reductions, of the backward pass that lead to no other product."""
        graph, place, feeds = self.graph, self.place, self.feeds()
        convolves = "conv_general_dilated" in self.primitive  # its norms' sums are not late
        beside: dict[Loop | None, list[int]] = defaultdict(list)  # where late products may run
        last: dict[Loop | None, int] = {}  # where the backward pass, or a loop, ends
        merged, alike, late = False, set[int](), 0
        for op in reversed(graph.ops):
            if op.phase == UPDATE:
                continue
            loops = self.enclosing[op.id]
            loop = loops[-1] if loops else None
            name, on = self.primitive[op.kind], any(feeds[v] for v in op.outputs if v >= 0)
            if loop is not None:
                last[loop] = loop.last
                last.setdefault(None, loops[0].last + 1)
            elif on:
                last.setdefault(None, op.id)
            if self.heavy[op.kind] and on:
                merged = False
            if op.phase != BACKWARD:
                continue
            if name in (GATHER, REDUCTION) and on:
                large = prod(graph.values[op.outputs[0]].shape) > SMALL
                outside = loop is None and graph.loops and name != GATHER  # of the loops
                if large and not merged and not outside:
                    room = BESIDE_STATE if self.of_state(op.inputs[0]) else BESIDE
                    beside[loop].extend([op.id] * room)
                    merged = True  # neighbours run as one
            elif self.heavy[op.kind] and not on:
                if alike.isdisjoint(op.inputs):  # products of one operand run as one
                    free = beside[loop]
                    alike, late = set(op.inputs), free.pop(0) if free else last.get(loop, op.id)
                place[op.id] = max(late, op.id)
            elif name.startswith("reduce_") and not on and not convolves:
                place[op.id] = max(late, op.id)
                if place[op.id] > op.id and not self.awaits(op.inputs[0]):
                    self.kept.add(op.inputs[0])

    def producers(self) -> None:
        """What only late ops read is computed when they run."""
        graph, place = self.graph, self.place
        soonest = [len(graph.ops)] * len(graph.values)
        early = bytearray(len(graph.values))  # read by an op that is not late
        for op in reversed(graph.ops):
            made = [v for v in op.outputs if v >= 0]
            waits = op.phase == BACKWARD and self.fusable[op.kind] and place[op.id] == op.id
            if waits and made and not any(early[v] or v in self.kept for v in made):
                place[op.id] = min(min(soonest[v] for v in made), len(graph.ops) - 1)
            for v in op.inputs:
                if v >= 0:
                    soonest[v] = min(soonest[v], place[op.id])
                    early[v] |= place[op.id] == op.id

    def feeds(self) -> bytearray:
        """Whether a value leads to a product of the forward or backward pass."""
        graph, feeds = self.graph, bytearray(len(self.graph.values))
        for _ in range(2 if graph.loops else 1):  # again for what a loop hands on
            for op in reversed(graph.ops):
                if op.phase == UPDATE:
                    continue
                if self.heavy[op.kind] or any(feeds[v] for v in op.outputs if v >= 0):
                    for v in op.inputs:
                        if v >= 0:
                            feeds[v] = 1
        return feeds

    def of_state(self, v: int) -> bool:
        """Whether a value is an argument, a loop's slice of one, or a cast of those."""
        while self.maker[v] >= 0:
            op = self.graph.ops[self.maker[v]]
            if not self.fusable[op.kind] or len(op.inputs) != 1 or op.inputs[0] < 0:
                return self.primitive[op.kind] == SLICE
            v = op.inputs[0]
        return True

    def awaits(self, v: int) -> bool:
        """Whether a fused value is computed from what a collective brings."""
        left, seen = [v], set[int]()
        while left and len(seen) < LOOKS:
            v = left.pop()
            if self.maker[v] < 0 or v in seen:
                continue
            seen.add(v)
            op = self.graph.ops[self.maker[v]]
            if self.primitive[op.kind] in (GATHER, REDUCTION):
                return True
            if self.fusable[op.kind]:
                left.extend(u for u in op.inputs if u >= 0)
        return False
