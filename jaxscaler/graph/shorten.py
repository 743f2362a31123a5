"""The graph of the same step with fewer of its equal inner layers.

Leaving `c` layers out of a stack takes `c` periods out of each of its repeats (forward, backward),
and what only serves them: their parameters, and the updates of those. A reader that is left finds
what it read `c` periods off, where the reader of *that* was left out; so no layer's beginning has
to be known, and the result is the graph of a model with that many layers less.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import OpGraph, Region

LEFT = 2  # layers left of those that are equal, besides one more at either end
LEAST = 6  # layers left out: with fewer it is not clear which layer a reader's was


class Repeat(NamedTuple):
    """Ops `first` .. `last`-1 are equal layers of `period` ops; one more stands on either side."""

    first: int
    last: int
    period: int

    @property
    def layers(self) -> int:
        return (self.last - self.first) // self.period


class Gap(NamedTuple):
    """Layers are left out before op `at`; an op `first` .. `last`-1 belongs to a layer beside it.

    One layer is `period` ops. Against the program's order the last layers run first: a backward
    pass.
    """

    at: int
    period: int
    forward: bool
    first: int
    last: int


class Short(NamedTuple):
    """A graph in which `left_out` layers are missing at each of `gaps`.

    `more[value]`: how many values of its class are missing, at the last of a class.
    """

    graph: OpGraph
    folded: Folded
    gaps: tuple[Gap, ...]
    left_out: int
    more: np.ndarray


def stacks(graph: OpGraph, folded: Folded) -> list[list[Repeat]]:
    """The repeats of equal layers, those that hand on values to one another together."""
    repeats = _repeats(folded)
    of = np.full(len(graph.ops) + 1, -1)  # the last for what no op makes
    for n, r in enumerate(repeats):
        of[r.first : r.last] = n
    maker = of[graph.makers[graph.reads[:, 2], 0]]
    reader = of[graph.reads[:, 0]]
    linked = np.unique(
        np.stack((maker, reader), 1)[(maker >= 0) & (reader >= 0) & (maker != reader)], axis=0
    )
    root = list(range(len(repeats)))
    for a, b in linked.tolist():
        old, new = max(root[a], root[b]), min(root[a], root[b])
        root = [new if r == old else r for r in root]
    return [[repeats[i] for i, r in enumerate(root) if r == k] for k in sorted(set(root))]


def _repeats(folded: Folded) -> list[Repeat]:
    """Runs of inner layers, and the two beside them, which are of their class."""
    inner = np.concatenate(([False], folded.inner, [False]))
    edges = np.flatnonzero(np.diff(inner.astype(np.int8))).tolist()
    found = []
    for first, last in zip(edges[::2], edges[1::2]):
        period = int(np.count_nonzero(folded.block[first:last] == folded.block[first]))
        found.append(Repeat(first - period, last + period, period))
    return found


def shortest(graph: OpGraph, folded: Folded) -> Short | None:
    """`graph` with all but a few layers of its deepest stack left out; None without a deep one.

    Loops end it: their bodies are short, and what is in them runs at no one time; barriers too:
    they say of single layers what runs before them.
    """
    deep = [] if graph.loops or graph.barriers else stacks(graph, folded)
    saved = [(min(r.layers for r in s) - LEFT, sum(r.period for r in s)) for s in deep]
    saved = [(c, period) if c >= LEAST else (0, 0) for c, period in saved]
    if not any(c for c, _ in saved):
        return None
    n = max(range(len(deep)), key=lambda n: saved[n][0] * saved[n][1])
    return shortened(graph, folded, deep[n], saved[n][0])


def shortened(graph: OpGraph, folded: Folded, stack: list[Repeat], left_out: int) -> Short | None:
    """`graph` with `left_out` layers less in a stack, None where layers hang together otherwise."""
    return _Shortening(graph, folded, stack, left_out).run()


class _Shortening:
    def __init__(self, graph: OpGraph, folded: Folded, stack: list[Repeat], left_out: int):
        self.graph, self.folded, self.stack, self.left_out = graph, folded, stack, left_out
        self.maker = graph.makers[:, 0]
        self.kept = np.ones(len(graph.ops), bool)
        self.repeat_of = np.full(len(graph.ops), -1)
        for n, r in enumerate(stack):
            self.repeat_of[r.first - r.period : r.last + r.period] = n
        self.windows: list[tuple[int, int]] = []
        self.forward: list[bool] = []

    def run(self) -> Short | None:
        graph = self.graph
        if not self.place():
            return None
        gone = self.gone()
        outputs = [v if v < 0 or v not in gone else None for v in graph.outputs]
        inputs = self.renamed(gone)
        if inputs is None:
            return None
        short = self.assembled(inputs, outputs, gone)
        classes = self.folded.value_class
        leaves = classes[[*graph.inputs, *graph.constants]]
        return short if np.isin(leaves, short.folded.value_class).all() else None

    def place(self) -> bool:
        """Which periods are left out: those in the middle of the first repeat, and all that goes
        with them in the others."""
        reads, windows = self.graph.reads, dict[int, tuple[int, int]]()
        forward = {0: True}
        ends = np.stack((self.maker[reads[:, 2]], reads[:, 0]), 1)
        ends = ends[(ends[:, 0] >= 0)]
        at = self.repeat_of[ends]
        first = self.stack[0]
        start = first.first + (first.layers - self.left_out + 1) // 2 * first.period
        windows[0] = (start, start + self.left_out * first.period)
        todo = [0]
        while todo:
            s = todo.pop()
            a, b = windows[s]
            for t, repeat in enumerate(self.stack):
                if t in windows:
                    continue
                theirs, mine = np.concatenate([
                    ends[(at[:, i] == s) & (at[:, j] == t) & (ends[:, i] >= a) & (ends[:, i] < b)]
                    [:, (i, j)]
                    for i, j in ((0, 1), (1, 0))
                ]).T  # fmt: skip
                if len(mine) == 0:
                    continue
                along = bool(((theirs - theirs.mean()) * (mine - mine.mean())).sum() > 0)
                forward[t] = forward[s] == along
                span = self.left_out * repeat.period
                count = np.bincount(mine - repeat.first + repeat.period)
                total = np.concatenate(([0], np.cumsum(count)))
                room = repeat.layers * repeat.period - span
                starts = repeat.period + np.arange(room + 1)
                inside = total[np.minimum(starts + span, len(total) - 1)]
                inside = inside - total[np.minimum(starts, len(total) - 1)]
                start = repeat.first - repeat.period + int(starts[np.argmax(inside)])
                windows[t] = (start, start + span)
                todo.append(t)
        if len(windows) < len(self.stack):
            return False
        self.windows = [windows[n] for n in range(len(self.stack))]
        self.forward = [forward[n] for n in range(len(self.stack))]
        for a, b in self.windows:
            self.kept[a:b] = False
        return True

    def gone(self) -> set[int]:
        """Values that are left out; sets `kept` of ops that only serve them.

        An op outside of the stack that reads one is left out, but for sums of scalars (a norm).
        """
        graph, ops = self.graph, self.graph.ops
        outside = np.flatnonzero(self.repeat_of < 0).tolist()
        small = [prod(value.shape) <= 1 for value in graph.values]
        within = np.flatnonzero(~self.kept).tolist()
        gone = {v for i in within for v in ops[i].outputs if v >= 0}
        state = [(graph.inputs[i], graph.outputs[o]) for i, o in graph.state]
        known = {v for v, _ in state}
        size = -1
        while size != len(gone):
            size = len(gone)
            for i in outside:
                op = ops[i]
                missing = [v in gone for v in op.inputs]
                if any(missing):
                    scalars = all(v < 0 or small[v] for v in (*op.inputs, *op.outputs))
                    if not scalars or all(m or v < 0 for m, v in zip(missing, op.inputs)):
                        gone.update(v for v in op.outputs if v >= 0)
            gone.update(v for v, new in state if new in gone)
        for i in outside:
            made = [v for v in ops[i].outputs if v >= 0]
            if made and all(v in gone for v in made):
                self.kept[i] = False
        # what only layers read that are left out
        reads, n = graph.reads, len(graph.values)
        readers = np.bincount(reads[self.kept[reads[:, 0]], 2], minlength=n).tolist()
        unread = set(range(n)).difference(reads[:, 2].tolist(), graph.outputs)
        unread |= {v for v in graph.outputs if v >= 0}
        for i in reversed(outside):
            made = [v for v in ops[i].outputs if v >= 0]
            if self.kept[i] and made and not any(readers[v] or v in unread for v in made):
                self.kept[i] = False
                gone.update(made)
                for v in ops[i].inputs:
                    if v >= 0:
                        readers[v] -= 1
        gone.update(
            v for v in (*graph.inputs, *graph.constants)
            if not readers[v] and v not in unread and v not in known
        )  # fmt: skip
        return gone

    def renamed(self, gone: set[int]) -> dict[int, tuple[int, ...]] | None:
        """Operands of the ops that are left; None where one is nowhere to be found."""
        ops, found = self.graph.ops, dict[int, tuple[int, ...]]()
        for i in np.flatnonzero(self.kept).tolist():
            inputs = ops[i].inputs
            if any(v in gone for v in inputs):
                n = self.repeat_of[i]
                if n < 0:  # a sum of scalars
                    found[i] = tuple(-1 if v in gone else v for v in inputs)
                    continue
                new = [self.image(i, slot) if v in gone else v for slot, v in enumerate(inputs)]
                if not gone.isdisjoint(new):
                    return None
                found[i] = tuple(new)
            else:
                found[i] = inputs
        return found

    def image(self, i: int, slot: int) -> int:
        """What op i reads instead of a value that is left out: that itself where nothing is."""
        ops = self.graph.ops
        v = ops[i].inputs[slot]
        w = int(self.maker[v])
        if w < 0 or self.repeat_of[w] < 0:  # not of a layer: that of the op left out for this one
            n = self.repeat_of[i]
            span = self.left_out * self.stack[n].period
            return ops[i + span if i < self.windows[n][0] else i - span].inputs[slot]
        n = self.repeat_of[w]
        repeat, result = self.stack[n], int(self.graph.makers[v, 1])
        for span in (-self.left_out * repeat.period, self.left_out * repeat.period):
            at = w + span
            inside = repeat.first - repeat.period <= at < repeat.last + repeat.period
            if inside and self.kept[at]:
                return ops[at].outputs[result]
        return v

    def assembled(self, inputs, outputs, gone: set[int]) -> Short:
        graph = self.graph
        ops = list(inputs)
        leaves = [v for v in graph.inputs if v not in gone]
        constants = [v for v in graph.constants if v not in gone]
        made = (v for i in ops for v in graph.ops[i].outputs if v >= 0)
        values = sorted({*leaves, *constants, *made})
        new = {v: n for n, v in enumerate(values)} | {-1: -1}
        into = {v: n for n, v in enumerate(leaves)}
        kept_outputs = [n for n, v in enumerate(outputs) if v is not None]
        out_of = {n: k for k, n in enumerate(kept_outputs)}
        state = [
            (into[graph.inputs[i]], out_of[o])
            for i, o in graph.state
            if o in out_of and graph.inputs[i] in into
        ]
        spans = [
            (bisect_left(ops, r.first), bisect_left(ops, r.last + 1) - 1) for r in graph.regions
        ]
        short = replace(
            graph,
            ops=tuple(
                graph.ops[i]._replace(
                    id=n, inputs=tuple(new[v] for v in inputs[i]),
                    outputs=tuple(new[v] for v in graph.ops[i].outputs),
                )
                for n, i in enumerate(ops)
            ),
            values=tuple(graph.values[v]._replace(id=new[v]) for v in values),
            inputs=tuple(new[v] for v in leaves),
            constants=tuple(new[v] for v in constants),
            outputs=tuple(new[outputs[n]] for n in kept_outputs),
            output_paths=tuple(graph.output_paths[n] for n in kept_outputs),
            state=tuple(state),
            regions=tuple(Region(r.what, *s) for r, s in zip(graph.regions, spans) if s[0] <= s[1]),
            annotations=(),
        )  # fmt: skip
        at = np.array(ops)
        folded = replace(
            self.folded, op_class=self.folded.op_class[at],
            value_class=self.folded.value_class[values],
            block=self.folded.block[at], inner=self.folded.inner[at],
        )  # fmt: skip
        gaps = tuple(
            Gap(
                bisect_left(ops, a), bisect_left(ops, a) - bisect_left(ops, a - r.period), forward,
                bisect_left(ops, r.first - r.period), bisect_left(ops, r.last + r.period),
            )
            for r, (a, _), forward in zip(self.stack, self.windows, self.forward)
        )  # fmt: skip
        here, n = folded.value_class, len(self.graph.values)
        lack = np.bincount(self.folded.value_class, minlength=n) - np.bincount(here, minlength=n)
        last = np.full(n, -1)
        last[here] = np.arange(len(here))
        more = np.where(last[here] == np.arange(len(here)), lack[here], 0)
        return Short(short, folded, gaps, self.left_out, more)
