"""When each buffer of a step is live: the memory model's view of the compiled program.

Rules, each measured against XLA's buffer assignment: arguments live throughout, donated state is
updated in place; a value has a buffer if a kernel makes it (dot, conv, reduce, sort, loop …) or a
kernel that can not fuse its operands reads it (dot, conv, scatter, loop, result); all else is fused
into its readers, which then keep *its* operands alive; reshapes are aliases; what a loop reads
lives until the loop ends, what it stacks lives from its start.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import CARRY, JOIN, SLICE, STACK, Loop, OpGraph

# Kernels that take fused producers: they read a value without its having a buffer.
FUSING_READERS = ("reduce_", "arg", "cum", SLICE, STACK, JOIN)


class Lives(NamedTuple):
    """Buffers with their live rows: buffer i holds value `value[i]` in rows `lo[i]` .. `hi[i]`-1.

    Rows are the moments at which the live set can be largest, in program order: `moment[row]` is an
    op id. Arguments are not listed: they live in every row.
    """

    value: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    moment: np.ndarray


def live_buffers(graph: OpGraph, folded: Folded) -> Lives:
    """Live rows of every buffer of a step, moments inside inner equal layers left out.

    Inner layers need no row of their own: from one layer to the next the live set of any plan grows
    or shrinks by the same amount, so the largest is at the first or the last of them.
    """
    start, end, has = _ranges(graph)
    values = np.flatnonzero(has)
    lo, hi = start[values], end[values]
    if len(values) == 0:
        return Lives(values, lo, hi, np.zeros(1, np.int64))
    moments = _maximal(lo, hi)
    kept = moments[~folded.inner[np.clip(moments, 0, len(graph.ops) - 1)]]
    if len(kept) == 0:
        kept = moments
    first = np.searchsorted(kept, lo, side="left")
    last = np.searchsorted(kept, hi, side="right")
    seen = last > first
    return Lives(values[seen], first[seen], last[seen], kept)


def _maximal(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Moments at which some buffer ends after another began: only there the live set is maximal."""
    ends = np.unique(hi)
    starts = np.sort(lo)
    begun = np.searchsorted(starts, ends, side="right")
    return ends[np.diff(begun, prepend=0) > 0]


def _ranges(graph: OpGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first op, last op, has a buffer) per value."""
    enclosing = _enclosing(graph)
    primitive = [kind.primitive for kind in graph.kinds]
    fusable = ["fusable" in kind.traits or kind.primitive == SLICE for kind in graph.kinds]
    alias = ["alias" in kind.traits for kind in graph.kinds]
    hungry = [  # kernels whose operands must lie in memory
        not fusable[k] and not kind.primitive.startswith(FUSING_READERS)
        for k, kind in enumerate(graph.kinds)
    ]
    start = np.maximum(graph.makers[:, 0], 0).tolist()
    for loop in graph.loops:  # what a loop stacks is allocated before it
        for op in graph.ops[loop.first : loop.last + 1]:
            if primitive[op.kind] == STACK:
                start[op.outputs[0]] = enclosing[op.id][-1].first - 1
    end = [0] * len(graph.values)
    has, needed = bytearray(len(graph.values)), bytearray(len(graph.values))
    donated = {graph.outputs[o] for _, o in graph.state}
    for v in graph.outputs:
        if v >= 0 and v not in donated:
            needed[v] = 1
            end[v] = len(graph.ops)

    for op in reversed(graph.ops):
        k, name = op.kind, primitive[op.kind]
        results = [v for v in op.outputs if v >= 0]
        for v in results:
            if name in (CARRY, STACK):
                has[v] = 1
                end[v] = max(end[v], enclosing[op.id][-1].last)
            elif not alias[k] and (needed[v] or not fusable[k]):
                has[v] = 1
        at = op.id
        if fusable[k] and not any(has[v] for v in results):  # read when its readers run
            at = max((end[v] for v in results), default=at)
        hands_on = alias[k] and any(needed[v] for v in results)
        # the second operand of a carry is written into the carry's own buffer
        for v in op.inputs[:1] if name == CARRY else op.inputs:
            if v < 0:
                continue
            if hands_on or hungry[k]:
                needed[v] = 1
            last = at
            for loop in enclosing[op.id]:
                if start[v] < loop.first:  # made outside: alive until the loop ends
                    last = max(last, loop.last)
                    break
            if last > end[v]:
                end[v] = last
    for v in (*donated, *graph.inputs, *graph.constants):  # arguments, and written in their place
        if v >= 0:
            has[v] = 0
    return np.array(start, np.int64), np.array(end, np.int64), np.frombuffer(has, np.uint8) > 0


def _enclosing(graph: OpGraph) -> list[tuple[Loop, ...]]:
    """Per op: the loops it is in, outermost first."""
    inside: list[tuple[Loop, ...]] = [()] * len(graph.ops)
    for loop in sorted(graph.loops):  # an outer loop begins before what is in it
        for i in range(loop.first, loop.last + 1):
            inside[i] = (*inside[i], loop)
    return inside
