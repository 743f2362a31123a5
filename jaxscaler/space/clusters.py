"""Clusters: elementwise ops split alike, because they hand each other values of one shape."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from jaxscaler.graph.fold import runs_again
from jaxscaler.graph.ir import PASS, Op
from jaxscaler.space.classes import Classes

VIEWS = (
    "transpose",
    "broadcast_in_dim",
    "reshape",
)  # join where they neither add nor lose a factor


@dataclass
class Cluster:
    """Factor sizes, and each member's factors in the cluster's numbering."""

    sizes: list[int]
    members: dict[int, dict[int, int]]  # op class -> its factor -> the cluster's factor


def clusters(classes: Classes) -> dict[int, Cluster]:
    """Op class -> the cluster it is in. Ops join the makers of operands of their own shape."""
    owner: dict[int, Cluster] = {}
    for c in range(len(classes.op)):
        own = _joinable(classes, c)
        if own is not None and not classes.trivial(c):
            sizes = [classes.kind[c].rule.factors[f].size for f in own]
            owner[c] = Cluster(sizes, {c: {f: i for i, f in enumerate(own)}})
    beside: dict[tuple, tuple[int, int]] = {}
    reads = _reads_of(classes)
    for c in list(owner):
        rule = classes.kind[c].rule
        for op, slot, v in reads.get(c, ()):
            maker = classes.maker.get(classes.of[v])
            if maker is None or maker[0] not in owner:
                continue
            if not _together(classes, op, v):
                if runs_again(op) and not runs_again(classes.op[maker[0]]):
                    # what is made again of a value that was kept, side by side: one kernel
                    place = (classes.of[v], op.phase, op.repeat, int(classes.folded.block[op.id]))
                    other, at = beside.setdefault(place, (c, slot))
                    if other != c:
                        theirs = classes.kind[other].rule.operands[at]
                        _merge(owner, c, other, _by_dim(rule.operands[slot], theirs))
                continue
            theirs = classes.kind[maker[0]].rule.results[maker[1]]
            _merge(owner, c, maker[0], _by_dim(rule.operands[slot], theirs))
    return owner


def _reads_of(classes: Classes) -> dict[int, list[tuple[Op, int, int]]]:
    """Op class -> (op, operand position, value), one of each class of values that is read there."""
    graph, folded = classes.graph, classes.folded
    reader, slot, value = graph.reads.T
    kind = np.stack((folded.op_class[reader], slot, folded.value_class[value]))
    _, first = np.unique(kind, axis=1, return_index=True)
    found: dict[int, list[tuple[Op, int, int]]] = defaultdict(list)
    for o, n, v in graph.reads[np.sort(first)].tolist():
        found[int(folded.op_class[o])].append((graph.ops[o], n, v))
    return found


def _by_dim(dims, others) -> list[tuple[int, int]]:
    """The factors of two views of one tensor, dim by dim."""
    return [(a[0], b[0]) for a, b in zip(dims, others) if a and b]


def _merge(owner: dict[int, Cluster], c: int, maker: int, pairs: list[tuple[int, int]]) -> None:
    """Move the cluster of `c` into that of `maker`; `pairs` are factors of theirs that are one."""
    mine, theirs = owner[c], owner[maker]
    inside = mine.members[c]
    pairs = [(a, b) for a, b in pairs if a in inside and b in theirs.members[maker]]
    if mine is theirs or len({a for a, _ in pairs}) != len(inside) or len(pairs) != len(inside):
        return
    move = {inside[a]: theirs.members[maker][b] for a, b in pairs}
    for member, factors in mine.members.items():
        theirs.members[member] = {f: move[i] for f, i in factors.items()}
        owner[member] = theirs


def _joinable(classes: Classes, c: int) -> list[int] | None:
    """Factors (longer than 1) of an op that may stand in a cluster, else None."""
    kind = classes.kind[c]
    rule = kind.rule
    elementwise = "elementwise" in kind.traits
    if len(rule.results) != 1 or c in classes.deferring or "marker" in kind.traits:
        return None
    if not elementwise and kind.primitive not in VIEWS:
        return None
    own = [f for f, factor in enumerate(rule.factors) if factor.size > 1]
    if not own or any(rule.factors[f].kind != PASS for f in own):
        return None

    def real(dims) -> list[list[int]]:
        return [[f for f in dim if rule.factors[f].size > 1] for dim in dims]

    compound = any(len(dim) > 1 for dims in (*rule.operands, *rule.results) for dim in real(dims))
    covering = rule.results if elementwise else (*rule.operands, *rule.results)
    if compound or any(sorted(f for dim in real(dims) for f in dim) != own for dims in covering):
        return None
    return own


def _together(classes: Classes, op: Op, v: int) -> bool:
    """Whether an op and the maker of its operand are in one phase, loop level and layer.

    What of the forward pass runs again in the backward pass is apart from it.
    """
    other = classes.graph.ops[classes.graph.makers[v, 0]]
    if other.phase != op.phase or other.repeat != op.repeat or runs_again(op) != runs_again(other):
        return False
    block = classes.folded.block
    return bool(block[other.id] == block[op.id])
