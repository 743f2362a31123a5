"""Clusters: elementwise ops split alike, because they hand each other values of one shape."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Op class -> the cluster it is in. Ops join the maker of an operand of their own shape."""
    owner: dict[int, Cluster] = {}
    beside: dict[tuple, int] = {}
    for c, op in enumerate(classes.op):
        own = _joinable(classes, c)
        if own is None or classes.trivial(c):
            continue
        rule = classes.kind[c].rule
        numbered = {f: i for i, f in enumerate(own)}
        owner[c] = Cluster([rule.factors[f].size for f in own], {c: numbered})
        for slot, v in enumerate(op.inputs):
            maker = classes.maker.get(classes.of[v]) if v >= 0 else None
            if maker is None or maker[0] not in owner:
                continue
            if not _together(classes, c, maker[0], v):
                if _again(op) and not _again(classes.op[maker[0]]):
                    # what is made again of a value that was kept, side by side: one kernel
                    place = (classes.of[v], op.phase, op.repeat, int(classes.folded.block[op.id]))
                    other = beside.setdefault(place, c)
                    if other != c:
                        pairs = _by_dim(rule.operands[slot], _reads(classes, other, v))
                        _merge(owner, c, other, pairs)
                continue
            theirs = classes.kind[maker[0]].rule.results[maker[1]]
            _merge(owner, c, maker[0], _by_dim(rule.operands[slot], theirs))
    return owner


def _by_dim(dims, others) -> list[tuple[int, int]]:
    """The factors of two views of one tensor, dim by dim."""
    return [(a[0], b[0]) for a, b in zip(dims, others) if a and b]


def _reads(classes: Classes, c: int, v: int):
    """The dims of an operand of op class `c` that is of the class of value `v`."""
    slots = [
        n for n, u in enumerate(classes.op[c].inputs) if u >= 0 and classes.of[u] == classes.of[v]
    ]
    return classes.kind[c].rule.operands[slots[0]]


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


def _together(classes: Classes, c: int, maker: int, v: int) -> bool:
    """Whether an op and the maker of its operand are in one phase, loop level and layer.

    What of the forward pass runs again in the backward pass is apart from it.
    """
    op, other = classes.op[c], classes.op[maker]
    if other.phase != op.phase or other.repeat != op.repeat or _again(op) != _again(other):
        return False
    block = classes.folded.block
    return bool(block[classes.graph.makers[v, 0]] == block[op.id])


def _again(op: Op) -> bool:
    return op.origin is not None and op.origin.again
