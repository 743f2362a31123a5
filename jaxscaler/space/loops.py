"""Loops over parts as they would be in a plan space, before a step is traced with them.

Of a value that a loop makes, one part is in memory at a time; its kernels start once a part, and
read anew what they read whole; what the backward pass needs is made again there. All that is a
change of numbers in a `Model`: nodes, edges and strategies stay. Gradients that add up over parts
are in memory all the while, and so are the copies in which what goes in and comes out has its parts
in order. Weights are gathered, and their gradients reduced, once a part of an accumulation. What a
loop adds beside (the seconds of those copies, sums over lanes, a co-shard's reductions once a part)
is left out; the step that is traced with the loop has the true price.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.cost.compute import Work
from jaxscaler.cost.memory import Lives
from jaxscaler.graph.ir import BACKWARD, FORWARD, UPDATE, Op, OpGraph, dtype_bytes
from jaxscaler.rewrite.changes import Key
from jaxscaler.space.nodes import Edge, Node
from jaxscaler.space.price import Filter
from jaxscaler.space.problem import Model, tensor_bytes
from jaxscaler.space.problem import model as model_of

ROUNDS = 4  # of following a factor back and forth through the ops of a loop


class Looped(NamedTuple):
    """A loop over `parts` parts of a factor of `size` in what equations of one loss make.

    cuts: (loss, key of an equation) -> per result the dim that is cut, None for a whole one.
    again: whether a part is made again in the backward pass (a co-shard), or the backward pass of a
    part follows its forward pass (accumulation). segment: of the equations, where each has a loop
    of its own.
    """

    parts: int
    size: int
    cuts: Mapping[tuple[int, Key], tuple[int | None, ...]]
    again: bool
    segment: Mapping[tuple[int, Key], int] = {}


class Reach(NamedTuple):
    """What a loop covers of a graph: ops, values that it holds in parts, ops that run once more.

    whole: op -> its ports (operands, then results) that each part reads or makes whole. cut: value
    that is made in parts -> its dim that is cut. sums: gradients that add up over the parts of
    an accumulation. copies: (value, first and last op) of what a co-shard reads and hands on in
    parts.
    """

    ops: frozenset[int]
    values: frozenset[int]
    more: frozenset[int]
    whole: Mapping[int, frozenset[int]]
    cut: Mapping[int, int]
    sums: frozenset[int]
    copies: tuple[tuple[int, int, int], ...] = ()


def reach(graph: OpGraph, loop: Looped) -> Reach:
    """Which ops and values of a graph a loop would cover.

    `graph`: of the step without the loop, with or without recomputation.
    """
    inside = [op for op in graph.ops if equation_of(loop, op) is not None]
    ids = {op.id for op in inside}
    cut = _followed(graph, loop, inside)
    readers: dict[int, list[int]] = {}
    for o, _, v in graph.reads.tolist():
        readers.setdefault(v, []).append(o)
    results = set(graph.outputs)
    held = {v for v in cut if v not in results and all(o in ids for o in readers.get(v, ()))}
    more: set[int] = set()
    if loop.again:
        copied = {op.origin for op in inside if op.origin and op.origin.again}
        for op in reversed(inside):
            assert op.origin is not None
            if op.phase != FORWARD or op.origin.again or op.origin._replace(again=True) in copied:
                continue
            for v in op.outputs:
                if any(o in more or graph.ops[o].phase != FORWARD for o in readers.get(v, ())):
                    more.add(op.id)
    whole = {op.id: _whole_ports(graph, op, cut) for op in inside}
    sums = frozenset() if loop.again else _gradients(graph, {loss for loss, _ in loop.cuts})
    copies = _copies(graph, loop, inside, cut, cut.keys() - held) if loop.again else ()
    return Reach(frozenset(ids), frozenset(held), frozenset(more), whole, cut, sums, copies)


def _copies(
    graph: OpGraph, loop: Looped, inside: Sequence[Op], cut: Mapping[int, int], late: Set[int]
) -> tuple[tuple[int, int, int], ...]:
    """What is sliced into parts, or joined of them (`late`), per segment and pass."""
    state, spans = set(graph.inputs), {}
    ends: set[tuple[int, tuple[int, bool]]] = set()
    for op in inside:
        equation = equation_of(loop, op)
        assert equation is not None
        where = loop.segment.get(equation, 0), op.phase == FORWARD
        first, last = spans.get(where, (op.id, op.id))
        spans[where] = min(first, op.id), max(last, op.id)
        rule = graph.kinds[op.kind].rule
        sides = (*zip(op.inputs, rule.operands), *zip(op.outputs, rule.results))
        f = next((_major(dims, cut[v]) for v, dims in sides if v in cut), None)
        if f is not None:
            ends.update(
                (v, where) for v, dims in sides if v >= 0 and v not in state
                and (v in late or v not in cut) and _dim_of(dims, f) is not None
            )  # fmt: skip
    return tuple((v, *spans[where]) for v, where in sorted(ends))


def _gradients(graph: OpGraph, losses: Set[int]) -> frozenset[int]:
    """What the backward passes of losses hand to the update, or out of the step."""
    read = {v for o, _, v in graph.reads.tolist() if graph.ops[o].phase == UPDATE}
    read.update(graph.outputs)
    return frozenset(
        v
        for op in graph.ops
        if op.phase == BACKWARD and op.origin is not None and op.origin.loss in losses
        for v in op.outputs
        if v in read
    )


def _whole_ports(graph: OpGraph, op: Op, cut: Mapping[int, int]) -> frozenset[int]:
    """Ports of an op that lack the factor of a loop; none where the op is not known to have it."""
    rule = graph.kinds[op.kind].rule
    sides = (*zip(op.inputs, rule.operands), *zip(op.outputs, rule.results))
    f = next((_major(dims, cut[v]) for v, dims in sides if v in cut), None)
    if f is None:
        return frozenset()
    return frozenset(p for p, (_, dims) in enumerate(sides) if _dim_of(dims, f) is None)


def equation_of(loop: Looped, op: Op) -> tuple[int, Key] | None:
    """The equation of the loop that an op came from, whole or from inside of it."""
    if op.origin is None:
        return None
    loss, key, _ = op.origin
    around = ((loss, key[:n]) for n in range(1, len(key) + 1, 2))
    return next((equation for equation in around if equation in loop.cuts), None)


def _followed(graph: OpGraph, loop: Looped, inside: Sequence[Op]) -> dict[int, int]:
    """Value that ops of the loop make -> its dim that is cut: by the factors of their rules."""
    made = {v for op in inside for v in op.outputs if v >= 0}
    cut: dict[int, int] = {}
    for op in inside:
        assert op.origin is not None
        known = loop.cuts.get((op.origin.loss, op.origin.key))
        same = op.phase == FORWARD or op.origin.again  # as in the equation
        if known is not None and same and len(known) == len(op.outputs):
            shapes = zip(op.outputs, known)
            cut.update({v: d for v, d in shapes if v >= 0 and d is not None
                        and d < len(graph.values[v].shape)})  # fmt: skip
    for turn in range(ROUNDS):
        before = len(cut)
        for op in inside if turn % 2 == 0 else reversed(inside):
            rule = graph.kinds[op.kind].rule
            sides = (*zip(op.inputs, rule.operands), *zip(op.outputs, rule.results))
            f = next((_major(dims, cut[v]) for v, dims in sides if v in cut), None)
            if f is None:
                continue
            for v, dims in sides:
                if v in made and v not in cut and (d := _dim_of(dims, f)) is not None:
                    cut[v] = d
        if turn and len(cut) == before:
            break
    return cut


def _major(dims: Sequence[tuple[int, ...]], dim: int) -> int | None:
    return dims[dim][0] if dim < len(dims) and dims[dim] else None


def _dim_of(dims: Sequence[tuple[int, ...]], factor: int) -> int | None:
    return next((d for d, dim in enumerate(dims) if dim and dim[0] == factor), None)


# -- in a model --------------------------------------------------------------------------------


def with_loops(model: Model, loops: Sequence[tuple[Looped, Reach]]) -> Model:
    """The model of the step with these loops: what they hold, and what their kernels cost."""
    graph, folded = model.graph, model.folded
    share = np.ones(len(graph.values))
    parts = np.ones(len(graph.ops), np.int64)
    runs = np.ones(len(graph.ops), np.int64)
    whole: dict[int, frozenset[int]] = {}
    for loop, covered in loops:
        share[list(covered.values)] /= loop.parts
        whole.update(covered.whole)
        parts[list(covered.ops)] *= loop.parts
        runs[list(covered.more)] += 1
    lives = model.lives._replace(share=model.lives.share * share[model.lives.value])
    for loop, covered in loops:
        if loop.again:
            lives = _more(lives, [(v, a, b, 1.0) for v, a, b in covered.copies])
        else:
            lives = _added_up(model, lives, covered)
    found = model_of(graph, folded, model.space, lives)
    classes = folded.op_class
    total = Counter(classes.tolist())
    least = np.full(len(folded.representatives), np.iinfo(np.int64).max)
    np.minimum.at(least, classes, parts)
    times = np.zeros(len(folded.representatives))
    np.add.at(times, classes, runs)
    works = []
    for node, work in zip(model.space.nodes, found.works):
        if work is not None:
            split = min(int(least[c]) for c in node.members)
            again = max(times[c] / total[c] for c in node.members)
            first = int(folded.representatives[node.members[0]])
            ports = whole.get(first, frozenset()) if node.what == "op" else frozenset()
            work = _in_parts(work, split, again, ports)
        works.append(work)
    pieces = np.ones(len(graph.values), np.int64)  # in which a value goes from layout to layout
    for loop, covered in loops:
        pieces[list(covered.cut)] *= loop.parts
    fewest = np.full(int(folded.value_class.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(fewest, folded.value_class, pieces)
    by_class = {k: n for k, n in enumerate(fewest.tolist()) if 1 < n < np.iinfo(np.int64).max}
    space = replace(model.space, edges=_once_a_part(model, loops))
    return replace(found, space=space, works=tuple(works), extend=model.extend, parts=by_class)


def _once_a_part(model: Model, loops: Sequence[tuple[Looped, Reach]]) -> tuple[Edge, ...]:
    """The edges of a space, those of weights and of their gradients once for every part of an
    accumulation: gathered where a part reads them, reduced before they are added up. What is added
    up as the partial sum that it is, and has all the memory of one, is reduced after the loop."""
    graph, folded, space = model.graph, model.folded, model.space
    edges = space.edges
    for loop, covered in loops:
        if loop.again:
            continue
        outside = {c for o, c in enumerate(folded.op_class.tolist()) if o not in covered.ops}
        inside = {n for n, node in enumerate(space.nodes)
                  if node.members and outside.isdisjoint(node.members)}  # fmt: skip
        reads = {v for o, _, v in graph.reads.tolist() if o in covered.ops}
        classes = {int(folded.value_class[v]) for v in reads | covered.sums}
        inside |= {space.use[k][0] for k in classes if k in space.use}
        cut = {int(folded.value_class[v]) for v in covered.cut}
        edges = tuple(
            edge._replace(times=edge.times * loop.parts)
            if edge.dst in inside and edge.value not in cut else edge for edge in edges
        )  # fmt: skip
    return edges


def _added_up(model: Model, lives: Lives, covered: Reach) -> Lives:
    """What adds up over the parts of an accumulation lives from its start to its end, in f32 at
    least. It is where the value lies that it is a cast or a view of, which itself, of one part,
    lives until it is made: then it is added."""
    graph, space, classes = model.graph, model.space, model.folded.value_class
    found: dict[int, float] = {}
    for v in covered.sums:
        size = dtype_bytes(graph.values[v].dtype)
        nbytes = prod(graph.values[v].shape) * max(size, 4.0)
        while int(classes[v]) not in space.use and int(classes[v]) not in space.made:
            maker = int(graph.makers[v, 0])
            if maker < 0 or len(graph.ops[maker].inputs) != 1:
                break
            v = graph.ops[maker].inputs[0]
        value = graph.values[v]
        found[v] = found.get(v, 0.0) + nbytes / max(tensor_bytes(value.shape, value.dtype), 1.0)
    made = np.searchsorted(lives.moment, graph.makers[lives.value, 0], side="right")
    mine = np.isin(lives.value, list(found))
    ends = np.where(mine, np.minimum(lives.hi, np.maximum(made, lives.lo)), lives.hi)
    span = min(covered.ops, default=0), max(covered.ops, default=-1)
    return _more(lives._replace(hi=ends), [(v, *span, times) for v, times in found.items()])


def _more(lives: Lives, buffers: Sequence[tuple[int, int, int, float]]) -> Lives:
    """With buffers more: (value, first op, last op, times its bytes)."""
    if not buffers:
        return lives
    value, first, last, share = map(np.array, zip(*buffers))
    return Lives(
        np.append(lives.value, value),
        np.append(lives.lo, np.searchsorted(lives.moment, first, side="left")),
        np.append(lives.hi, np.searchsorted(lives.moment, last, side="right")),
        lives.moment,
        np.append(lives.share, share),
    )


def _in_parts(work: Work, parts: int, again: float, whole: frozenset[int]) -> Work:
    """A kernel that runs once a part on part of its work, but on all of what is whole to it."""
    if parts == 1 and again == 1:
        return work
    tensors = tuple((p, n if p in whole else n / parts) for p, n in work.tensors)
    runs = max(round(work.runs * again), work.runs) * parts
    return work._replace(flops=work.flops / parts, tensors=tensors, runs=runs)


def divisible(model: Model, loops: Sequence[tuple[Looped, Reach]]) -> Filter:
    """Which strategies cut a loop's factor only as often as one part of it can be cut."""
    space, classes = model.space, model.folded.value_class.tolist()
    limits: dict[int, set[tuple[int, int]]] = defaultdict(set)  # node -> (factor, of one part)
    for loop, covered in loops:
        for v, dim in covered.cut.items():
            for spot in (space.made.get(classes[v]), space.use.get(classes[v])):
                if spot is not None and not space.nodes[spot[0]].paired:
                    factors = space.nodes[spot[0]].ports[spot[1]].dims[dim]
                    limits[spot[0]].update((f, loop.size // loop.parts) for f in factors[:1])
    of = {id(node): limits[i] for i, node in enumerate(space.nodes) if i in limits}

    def keep(node: Node, rows: np.ndarray, mesh: Mesh) -> np.ndarray:
        mask = np.ones(len(rows), bool)
        for factor, size in of.get(id(node), ()):
            ways = np.where(rows == factor, np.array(mesh.shape, np.int64), 1).prod(axis=1)
            mask &= size % ways == 0
        return mask

    return keep


def held_bytes(model: Model, covered: Reach, price: np.ndarray) -> float:
    """Bytes of what a loop would hold in parts, times the `price` of the rows [rows] it is in."""
    lives = model.lives
    total = np.concatenate(([0.0], np.cumsum(price)))
    mine = np.isin(lives.value, list(covered.values))
    values = [model.graph.values[v] for v in lives.value[mine].tolist()]
    size = np.array([tensor_bytes(value.shape, value.dtype) for value in values])
    cost = total[lives.hi[mine]] - total[lives.lo[mine]]
    return float((size * lives.share[mine] * cost).sum())
