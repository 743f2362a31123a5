"""When the ops of a device's program run: program order, but for what only the update reads.

XLA's latency-hiding scheduler goes through a program from its end, and puts what is on nobody's way
as late as it can: a weight gradient's product runs after the whole backward pass, or beside one of
its collectives, the last ones first; its operands live until then. Seen in schedules of H100
programs (jax 0.10.2): all of them at the end with data parallelism, one to four layers late with
ZeRO-3. With tensor parallelism each collective, however small, hides one product: 13 or 14 of them
in a layer of Llama that makes 5 products, so those of 12 layers all run in the last four and a half
(19 and 4 in GPT: the last three). None runs behind a barrier that wants its result
(rewrite/early.py).
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from jaxscaler.cost.deep import Deep
from jaxscaler.graph.ir import BACKWARD, SLICE, UPDATE, Loop, Op, OpGraph, dtype_bytes

# Ops of the graph that one device runs (lower/device.py): a layout change with, without traffic.
GATHER, REDUCTION, CUT = "all_gather", "reduction", "cut"
SMALL = 1 << 17  # elements of a gather of state that hides nothing
MERGED = 64 * 2**20  # bytes that one of two products may read and make if they run as one
# Where late products run: some beside each collective, the last ones first; or all of them before
# the next segment that is computed again.
BESIDE, BEFORE = "beside", "before"
OF_STATE, OF_OTHERS = 3, 1  # products that run beside a gather of state, beside another collective
OPEN = 16  # … beside all gathers of state behind them; else those of ZeRO-3 fell back in each layer


class Schedule(NamedTuple):
    """`place[op]`: the op id at which it runs; `kept`: what late reductions read, stored early.

    Of a deep step `place` is a moment (`cost/deep.py`), and `late` the time at which a late op
    runs, by its time in program order.
    """

    place: list[int]
    kept: frozenset[int]
    late: dict[int, int]


def schedule(
    graph: OpGraph,
    fusable: Sequence[bool],
    heavy: Sequence[bool],
    enclosing: Sequence[tuple[Loop, ...]],
    how: str,
    deep: Deep | None = None,
) -> Schedule:
    """When each op of a device's graph runs. `fusable`, `heavy`: by kind; `how`: BESIDE, BEFORE."""
    return _Scheduler(graph, fusable, heavy, enclosing, how, deep).run()


class _Scheduler:
    def __init__(self, graph, fusable, heavy, enclosing, how, deep):
        self.graph, self.fusable, self.heavy, self.enclosing = graph, fusable, heavy, enclosing
        self.primitive = [kind.primitive for kind in graph.kinds]
        self.matters = [  # products, sums, and where a layout changes with traffic: by kind
            h or n in (GATHER, REDUCTION) or n.startswith("reduce_")
            for h, n in zip(heavy, self.primitive)
        ]
        self.maker = graph.makers[:, 0].tolist()
        self.deep, self.how = deep, how
        self.segment = [-1] * len(graph.ops)  # that is computed again
        for n, (what, first, end) in enumerate(graph.regions):
            if what == "remat":
                self.segment[first : end + 1] = [n] * (end + 1 - first)
        self.begins: dict[Loop | None, list[tuple[tuple[int, int], int]]] = defaultdict(list)
        self.free: dict[Loop | None, dict[int, deque[int]]] = defaultdict(
            lambda: {OF_STATE: deque(maxlen=OPEN), OF_OTHERS: deque()}
        )
        self.base = list(range(len(graph.ops) + 1)) if deep is None else deep.base.tolist()
        self.place = self.base[:-1]
        self.late: dict[int, int] = {}
        self.kept: set[int] = set()

    def run(self) -> Schedule:
        kinds = {self.primitive[op.kind] for op in self.graph.ops}
        if kinds & {GATHER, REDUCTION}:  # else there is nothing to hide: all runs in program order
            self.products()
            self.producers()
        for op in self.graph.ops:
            for v in op.inputs:
                if v >= 0 and 0 <= self.maker[v] < op.id:
                    self.place[op.id] = max(self.place[op.id], self.place[self.maker[v]])
        for loop in self.graph.loops:
            for i in range(loop.first, loop.last + 1):
                self.place[i] = min(self.place[i], loop.last)
        return Schedule(self.place, frozenset(self.kept), self.late)

    def products(self) -> None:
        """Place products, and reductions, of the backward pass that lead to no other product."""
        feeds, awaited = self.feeds(), self.awaited()
        due = self.due()
        convolves = "conv_general_dilated" in self.primitive  # its norms' sums are not late
        last: dict[Loop | None, int] = {}  # where the backward pass, or a loop, ends
        merged, alike, late = False, set[tuple[int, int]](), 0
        merges = False  # whether the last product runs as one with any other of its operands
        for op, layer, at in self.backwards():
            if op.phase == UPDATE:
                continue
            loops = self.enclosing[op.id]
            loop = loops[-1] if loops else None
            name, on = self.primitive[op.kind], any(feeds[v] for v in op.outputs if v >= 0)
            if loop is not None:
                last[loop] = loop.last
                last.setdefault(None, loops[0].last + 1)
            elif on:
                last.setdefault(None, at)
            if self.heavy[op.kind] and on:
                merged = False
            if op.phase != BACKWARD:
                continue
            segment = (self.segment[op.id], layer)
            if self.matters[op.kind] and segment[0] >= 0:
                begins = self.begins[loop]
                if begins and begins[-1][0] == segment:
                    begins.pop()
                begins.append((segment, at))
            if name in (GATHER, REDUCTION) and on:
                room = 0 if self.how == BEFORE else self.room(op, loop)
                if room == OF_STATE:
                    room = 0 if merged else room  # neighbouring gathers of state run as one
                    merged = True
                if room:
                    self.free[loop][room].extend([at] * room)
            elif self.heavy[op.kind] and not on:
                operands, small = {(v, layer) for v in op.inputs}, self.small(op)
                if alike.isdisjoint(operands) or not (small or merges):
                    found = self.place_for(loop, segment)
                    alike, late = operands, last.get(loop, at) if found is None else found
                    merges = small
                self.wait(op.id, at, min(late, due[op.outputs[0]]))
            elif name.startswith("reduce_") and not on and not convolves:
                self.wait(op.id, at, min(late, due[op.outputs[0]]))
                if late > at and not awaited[op.inputs[0]]:
                    self.kept.add(op.inputs[0])

    def room(self, op: Op, loop: Loop | None) -> int:
        """How many late products run beside a collective."""
        outside = loop is None and self.graph.loops  # of the loops
        if outside and self.primitive[op.kind] != GATHER:
            return 0
        if not self.of_state(op.inputs[0]):
            return OF_OTHERS
        return OF_STATE if prod(self.graph.values[op.outputs[0]].shape) > SMALL else 0

    def small(self, op: Op) -> bool:
        """Whether a product runs as one with any other of one of its operands."""
        values = (self.graph.values[v] for v in (*op.inputs, *op.outputs) if v >= 0)
        return sum(prod(value.shape) * dtype_bytes(value.dtype) for value in values) <= MERGED

    def place_for(self, loop: Loop | None, mine: tuple[int, int]) -> int | None:
        """When the last product runs of those that were not yet placed; None: after all else."""
        if self.how == BEFORE:
            begins = self.begins[loop]
            return next((at for segment, at in reversed(begins) if segment != mine), None)
        free = [queue for queue in self.free[loop].values() if queue]
        return max(free, key=lambda queue: queue[0]).popleft() if free else None

    def wait(self, o: int, at: int, until: int) -> None:
        if self.deep is None:
            self.place[o] = max(at, until)
        elif until > at:
            self.place[o] = self.deep.late(o)
            self.late[at] = until

    def backwards(self) -> Iterator[tuple[Op, int, int]]:
        """(op, layer, time) in reverse order; of a deep step only what `products` looks at."""
        if self.deep is None:
            yield from ((op, 0, op.id) for op in reversed(self.graph.ops))
            return
        found = [op.id for op in self.graph.ops if op.phase != UPDATE and self.matters[op.kind]]
        ops = np.array(sorted({*found, max(self.deep.cut - 1, 0)}), np.int64)
        index, layer = self.deep.copies(ops)
        ops = ops[index]
        time = self.deep.time(ops, layer, self.deep.layered(ops))
        for k in np.argsort(-time).tolist():
            yield self.graph.ops[ops[k]], int(layer[k]), int(time[k])

    def producers(self) -> None:
        """What only late ops read is computed when they run."""
        graph, place = self.graph, self.place
        end, base = self.base[-1], self.base
        soonest = [end] * len(graph.values)
        early = bytearray(len(graph.values))  # read by an op that is not late
        for op in reversed(graph.ops):
            made = [v for v in op.outputs if v >= 0]
            waits = op.phase == BACKWARD and self.fusable[op.kind] and place[op.id] == base[op.id]
            if waits and made and not any(early[v] or v in self.kept for v in made):
                place[op.id] = min(min(soonest[v] for v in made), base[-2])
            for v in op.inputs:
                if v >= 0:
                    soonest[v] = min(soonest[v], place[op.id])
                    early[v] |= place[op.id] == base[op.id]

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

    def due(self) -> list[int]:
        """Per value: the op before which a barrier wants it, or what is computed from it."""
        graph = self.graph
        found = [sys.maxsize] * len(graph.values)
        for barrier in graph.barriers:
            for v in barrier.values:
                found[v] = min(found[v], barrier.at - 1)
        if graph.barriers:
            for op in reversed(graph.ops):
                soonest = min((found[v] for v in op.outputs if v >= 0), default=sys.maxsize)
                if soonest > op.id:
                    for v in op.inputs:
                        if v >= 0:
                            found[v] = min(found[v], soonest)
        return found

    def of_state(self, v: int) -> bool:
        """Whether a value is an argument, a loop's slice of one, or a cast of those."""
        while self.maker[v] >= 0:
            op = self.graph.ops[self.maker[v]]
            if not self.fusable[op.kind] or len(op.inputs) != 1 or op.inputs[0] < 0:
                return self.primitive[op.kind] == SLICE
            v = op.inputs[0]
        return True

    def awaited(self) -> bytearray:
        """Whether a value is computed, by fused ops alone, from what a collective brings."""
        found = bytearray(len(self.graph.values))
        for op in self.graph.ops:
            brings = self.primitive[op.kind] in (GATHER, REDUCTION)
            if brings or (self.fusable[op.kind] and any(found[v] for v in op.inputs if v >= 0)):
                for v in op.outputs:
                    if v >= 0:
                        found[v] = 1
        return found
