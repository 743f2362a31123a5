"""Repeated layers: which ops and values may share one decision.

Two ops of one class get the same strategy. Classes come in two steps. (1) Tandem repeats in the
sequence of kinds, forward and backward: a block that repeats at a fixed period is a layer; ops at
one offset of the inner layers are one class, the first and the last layer stay apart. (2)
Everything else (inputs, update ops) is refined by its neighbours (Weisfeiler-Leman colours) with
the layers' ops as anchors, so that the optimizer state of a weight falls in with the weight.
Merging restricts the search and never changes what a plan means, whatever classes are found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxscaler.errors import TraceError
from jaxscaler.graph.ir import BACKWARD, FORWARD, UPDATE, Op, OpGraph

WINDOW = 12  # equal kinds in a row that suggest a repeat
ROUNDS = 8  # longest chain from an input through an update to the gradient it belongs to
CANDIDATES = 24  # periods tried
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Folded:
    """Classes of a graph's ops and inputs. Representatives are the first members."""

    op_class: np.ndarray  # [ops] -> class
    value_class: np.ndarray  # [values] -> class; values made by one op class at one result position
    representatives: np.ndarray  # [op classes] -> op id
    multiplicity: np.ndarray  # [op classes] -> members
    block: np.ndarray  # [ops]: which layer (one period of one repeat) the op is in, 0 for none
    inner: np.ndarray  # [ops] bool: in a layer with two layers of its class on either side

    @property
    def num_classes(self) -> int:
        return len(self.representatives)


def fold(graph: OpGraph, merge: bool = True) -> Folded:
    """Find the classes; with `merge=False` every op and input is alone."""
    n = len(graph.ops)
    leaves = (*graph.inputs, *graph.constants)
    if n == 0:
        raise TraceError("the step has no operation: nothing depends on its arguments")
    anchors, block, inner = _layers(_sequence(graph))
    if not merge:
        ops, values = np.arange(n), np.arange(len(graph.values))
        return Folded(ops, values, ops, np.ones(n, np.int64), block, np.zeros(n, bool))
    colors, leaf_colors = _refine(graph, leaves, anchors)
    _, first, op_class, counts = np.unique(
        colors, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)  # number classes in program order
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    op_class = rank[op_class]
    return Folded(
        op_class, _value_classes(graph, leaves, leaf_colors, op_class), first[order], counts[order],
        block, inner,
    )  # fmt: skip


def _value_classes(graph: OpGraph, leaves, leaf_colors, op_class: np.ndarray) -> np.ndarray:
    maker, result = graph.makers.T
    width = int(result.max(initial=0)) + 1
    key = op_class[maker] * width + result
    _, color = np.unique(leaf_colors, return_inverse=True)
    key[list(leaves)] = -1 - color
    return np.unique(key, return_inverse=True)[1]


def _sequence(graph: OpGraph) -> np.ndarray:
    """One number per op: kind, phase, module path with its digits dropped, whether it runs again.

    Update ops get numbers of their own: their order follows the pytree's, not the layers'.
    """
    scopes: dict[str, str] = {}
    codes: dict[tuple, int] = {}
    out = np.empty(len(graph.ops), np.int64)
    for i, op in enumerate(graph.ops):
        if op.phase == UPDATE:
            out[i] = -1 - i
            continue
        scope = scopes.get(op.scope)
        if scope is None:
            scope = scopes[op.scope] = _DIGITS.sub("#", op.scope)
        key = op.kind, op.phase, scope, op.repeat, runs_again(op)
        out[i] = codes.setdefault(key, len(codes))
    return np.unique(out, return_inverse=True)[1]


def runs_again(op: Op) -> bool:
    """Whether an op makes in the backward pass what the forward pass made before."""
    return op.origin is not None and op.origin.again


def _layers(sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(anchor, block, inner) per op: anchor > 0 names the class of an op inside a repeat, 0
    elsewhere.

    Greedy: the period and stretch that cover most come first; covered ops are not covered again.
    """
    n = len(sequence)
    anchors = np.zeros(n, np.int64)
    block_of = np.zeros(n, np.int64)
    inner = np.zeros(n, bool)
    free = np.ones(n, bool)
    next_anchor = 1
    for period in _periods(sequence):
        while True:
            start, length = _longest_stretch(sequence, free, period)
            count = length // period
            if count < 3:
                break
            for k in range(count):
                block = slice(start + k * period, start + (k + 1) * period)
                free[block] = False
                last = k == count - 1
                if k in (0, 1) or last:
                    base = np.arange(next_anchor, next_anchor + period)
                    next_anchor += period
                anchors[block] = base
                block_of[block] = block_of.max() + 1
                inner[block] = 1 < k < count - 2
            # what hangs over the last whole period belongs to the end of the stack
    return anchors, block_of, inner


def _periods(sequence: np.ndarray) -> list[int]:
    """Distances between equal windows, the most frequent (weighted by the ops they span) first."""
    n = len(sequence)
    if n < 2 * WINDOW:
        return []
    rng = np.random.default_rng(0)
    codes = rng.integers(1, 2**62, int(sequence.max()) + 1, dtype=np.uint64)[sequence]
    hashes = np.zeros(n - WINDOW + 1, np.uint64)
    for w in range(WINDOW):
        hashes = hashes * np.uint64(6364136223846793005) + codes[w : n - WINDOW + 1 + w]
    order = np.argsort(hashes, kind="stable")
    same = hashes[order][1:] == hashes[order][:-1]
    distance = (order[1:] - order[:-1])[same]
    periods, counts = np.unique(distance, return_counts=True)
    best = np.argsort(-counts, kind="stable")[:CANDIDATES]
    return [int(p) for p in periods[best] if p >= WINDOW // 2]


def _longest_stretch(sequence: np.ndarray, free: np.ndarray, period: int) -> tuple[int, int]:
    """Longest run of free ops (start, length) that equals itself one period on."""
    equal = (sequence[:-period] == sequence[period:]) & free[:-period] & free[period:]
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
    if len(edges) == 0:
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    i = int(np.argmax(ends - starts))
    return int(starts[i]), int(ends[i] - starts[i]) + period


def _refine(graph: OpGraph, leaves: Sequence[int], anchors: np.ndarray):
    """Colours of ops and leaves: neighbours' colours mixed in, anchored ops fixed.

    Scalars are mute: step counters and norms reach every parameter and would tell all apart.
    """
    n = len(graph.ops)
    rng = np.random.default_rng(1)
    kind_codes = rng.integers(1, 2**62, len(graph.kinds), dtype=np.uint64)
    phases = {FORWARD: 3, BACKWARD: 5, UPDATE: 7}
    base = kind_codes[[op.kind for op in graph.ops]]
    base = base * np.array([phases[op.phase] for op in graph.ops], np.uint64)
    base = base + np.array([op.repeat for op in graph.ops], np.uint64)
    base[[runs_again(op) for op in graph.ops]] += np.uint64(1 << 60)
    made_by, result = graph.makers.T.copy()
    position = made_by  # value -> node: ops, then leaves
    position[list(leaves)] = np.arange(n, n + len(leaves))
    result[list(leaves)] = 0
    describe: dict[tuple, int] = {}
    leaf_base = np.array(
        [
            describe.setdefault((value.shape, value.dtype, value.role), len(describe) + 1)
            for value in (graph.values[v] for v in leaves)
        ],
        np.uint64,
    )  # fmt: skip
    ranks = np.array([len(value.shape) for value in graph.values])
    dst, slot, value = graph.reads[ranks[graph.reads[:, 2]] > 0].T
    src, port = position[value], slot * 64 + result[value]
    outputs = [v for v in set(graph.outputs) if v >= 0]
    salt_in = _mix(port.astype(np.uint64) * np.uint64(2) + np.uint64(1))
    salt_out = _mix(port.astype(np.uint64) * np.uint64(2) + np.uint64(10**6))
    own = _mix(np.concatenate((base, leaf_base + np.uint64(1 << 40))))
    own[np.unique(position[outputs])] += np.uint64(77)
    fixed = np.concatenate((anchors > 0, np.zeros(len(leaves), bool)))
    own[:n][anchors > 0] = _mix(anchors[anchors > 0].astype(np.uint64) + np.uint64(1 << 50))
    colors = own.copy()
    for _ in range(ROUNDS):
        heard = np.zeros(n + len(leaves), np.uint64)
        np.add.at(heard, dst, _mix(colors[src] ^ salt_in))
        np.add.at(heard, src, _mix(colors[dst] ^ salt_out))
        mixed = _mix(own + heard)
        colors = np.where(fixed, own, mixed)
    return colors[:n], colors[n:]


def _mix(x: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
