"""Softmaxes between two products, as TPU compilers keep them.

The first product's kernel takes the largest of each row off as it writes: what is stored is
`x - max(x)`, in the width in which the softmax is computed, and the product itself nowhere. What
reads the softmax computes it from that, or (`Rules.twice`) finds it stored as well. Seen in buffer
assignments for v5e and v5p of attention whose softmax is in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from jaxscaler.graph.ir import OpGraph


class Softmaxes(NamedTuple):
    """Values: products less their rows' largest, these products, what is made of the former."""

    shifted: frozenset[int]
    products: frozenset[int]
    made: frozenset[int]


def softmaxes(graph: OpGraph, fusable: Sequence[bool], heavy: Sequence[bool]) -> Softmaxes:
    """All `product - max over rows` that lead to another product of the same pass.

    `fusable`, `heavy`: by kind. A gather among the readers says that it is a loss, of which the
    product is kept as it is.
    """
    count = [prod(value.shape) for value in graph.values]
    spread: set[int] = set()  # values that broadcast smaller ones
    tops: set[int] = set()  # largest of rows, and their broadcasts
    product: dict[int, int] = {}  # of which product a value is computed, element by element
    source: dict[int, int] = {}  # of which shifted value
    found, lost = dict[int, int](), set[int]()
    for op in graph.ops:
        name = graph.kinds[op.kind].primitive
        inputs = [v for v in op.inputs if v >= 0]
        sources = {source[v] for v in inputs if v in source}
        lost |= sources if name == "gather" else set()
        v = op.outputs[0] if op.outputs else -1
        if v < 0:
            continue
        if heavy[op.kind]:
            product[v] = v
            for y in sources:
                if graph.ops[graph.makers[y, 0]].phase == op.phase:
                    found[y] = product[graph.ops[graph.makers[y, 0]].inputs[0]]
        elif name == "reduce_max":
            tops.add(v)
        elif fusable[op.kind]:
            full = [u for u in inputs if count[u] == count[v] and u not in spread]
            if not full:
                spread.add(v)
            if any(u in tops for u in inputs) and not any(u in product for u in full):
                tops.add(v)
            elif name == "sub" and op.inputs[1] in tops and op.inputs[0] in product:
                source[v] = v
            elif len(sources) == 1 and all(u in source for u in full):
                source[v] = sources.pop()
            else:
                of = [product[u] for u in full if u in product]
                product.update({v: of[0]} if of else {})
    kept = {y: p for y, p in found.items() if y not in lost}
    for o, _, v in graph.reads.tolist():  # a product that the other pass reads is stored itself
        for y in [y for y, p in kept.items() if p == v]:
            if graph.ops[o].phase != graph.ops[graph.makers[y, 0]].phase:
                del kept[y]
    made = frozenset(v for v, y in source.items() if y in kept and v != y)
    return Softmaxes(frozenset(kept), frozenset(kept.values()), made)
