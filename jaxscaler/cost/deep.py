"""Buffers and late ops of a deep step from those of a short one: layers are put back as times.

In a graph with gaps (`graph/shorten.py`) an op runs at a time of the whole program, and what a
layer beside a gap does, the layers that are left out do as many periods later, or earlier.
"""

from __future__ import annotations

import numpy as np

from jaxscaler.graph.ir import UPDATE, OpGraph
from jaxscaler.graph.shorten import Short


class Deep:
    """Times of the whole program for the ops of a short one.

    Rules of buffers look at *moments*: 2 i is that of op i, 2 i - 1 the one before; a late op has
    one behind the backward pass, since when it runs only the whole program tells.
    Layers are counted from the gap: 0 is the last one before it, as the forward pass runs, and
    `left_out` the last that is left out.
    """

    def __init__(self, short: Short):
        n = len(short.graph.ops)
        self.gaps, self.left_out, self.more = short.gaps, short.left_out, short.more
        self.ops = n
        self.gap = np.full(n, -1)
        for k, g in enumerate(short.gaps):
            self.gap[g.first : g.last] = k
        # Behind it nothing leads to another product: no late op waits any longer.
        self.cut = 1 + max((m for m, _ in _into_products(short.graph)), default=-1)
        update = np.array([op.phase == UPDATE for op in short.graph.ops])
        self.outside = (self.gap < 0) & ~update
        at = np.arange(n + 1)
        self.base = 2 * np.where(at < self.cut, at, at + n)

    def late(self, op: int) -> int:
        """The moment of a late op: those of all lie behind `cut`, in program order."""
        return 2 * (self.cut + op)

    def copies(self, op: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index into `op`, layer) of all that `op` stands for in the whole program."""
        c = self.left_out
        layer, many = np.zeros(len(op), np.int64), np.zeros(len(op), bool)
        for k, g in enumerate(self.gaps):
            mine, after = self.gap[op] == k, op >= g.at
            layer[mine & (after == g.forward)] = c
            begin = g.at - g.period if g.forward else g.at
            many |= mine & (op >= begin) & (op < begin + g.period)
        index = np.repeat(np.arange(len(op)), np.where(many, c + 1, 1))
        start = np.concatenate(([0], np.cumsum(np.where(many, c + 1, 1))))[:-1]
        return index, np.where(many[index], np.arange(len(index)) - start[index], layer[index])

    def time(self, op: np.ndarray, layer: np.ndarray, layered: np.ndarray) -> np.ndarray:
        """When an op runs in a layer; `layered`: else after all that comes before it."""
        time = op.astype(np.int64)
        for k, g in enumerate(self.gaps):
            mine = layered & (self.gap[np.minimum(op, len(self.gap) - 1)] == k)
            whole = np.where(op >= g.at, self.left_out, 0)
            here = layer if g.forward else self.left_out - layer
            time = time + g.period * np.where(mine, here, whole)
        return time

    def layered(self, op: np.ndarray) -> np.ndarray:
        """Whether an op belongs to a layer beside a gap."""
        return self.gap[op] >= 0

    def buffers(
        self, value: np.ndarray, share: np.ndarray, lo: np.ndarray, hi: np.ndarray, late: dict
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Buffers of the whole program; `late`: time of a late op by its time in program order."""
        owner, _, _ = self.op_at(lo)
        index, layer = self.copies(owner)
        layered = self.layered(owner)[index]
        # what is made outside of the layers for each of them, as a cast of all parameters
        several = np.zeros(len(value), np.int64)
        plain = (value < len(self.more)) & self.outside[owner]
        several[plain] = self.more[value[plain]]
        times = np.where(layered, 1, 1 + several[index])
        index, layer, layered = (np.repeat(x, times) for x in (index, layer, layered))
        begin, end = (self.times(x[index], layer, layered, late) for x in (lo, hi))
        kept = end >= begin
        return value[index][kept], share[index][kept], begin[kept], end[kept]

    def op_at(self, moment: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(op, is it late?, is the moment before it?)"""
        at = (moment + 1) // 2
        late = (at >= self.cut) & (at < self.cut + self.ops)
        op = np.where(at < self.cut, at, np.where(late, at - self.cut, at - self.ops))
        return np.minimum(op, self.ops - 1), late, moment % 2 == 1

    def times(self, moment, layer, layered, late: dict[int, int]) -> np.ndarray:
        """The times of moments, those of late ops looked up."""
        op, waits, before = self.op_at(moment)
        time = self.time(op, layer, layered)
        time[waits] = [late.get(t, t) for t in time[waits].tolist()]
        return time - before


def _into_products(graph: OpGraph) -> list[tuple[int, int]]:
    """(op, product that reads it) of the forward and backward pass."""
    heavy = ["heavy" in kind.traits for kind in graph.kinds]
    maker = graph.makers[:, 0].tolist()
    products = (op for op in graph.ops if heavy[op.kind] and op.phase != UPDATE)
    return [(maker[v], op.id) for op in products for v in op.inputs if v >= 0]
