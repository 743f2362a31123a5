"""What a pipelined step makes again in its backward passes: changes of the loss, by layers.

Between its forward and its backward pass a micro-batch keeps memory, once for each one under way.
"""

from __future__ import annotations

from jaxscaler.graph.fold import fold
from jaxscaler.graph.ir import FORWARD, OpGraph
from jaxscaler.rewrite.changes import Change, Recompute, Segment
from jaxscaler.space.segments import segmentations


def layers_again(graph: OpGraph, loss: int) -> tuple[Change, ...]:
    """Every layer made again in the backward pass, nothing of it kept; () if there are none."""
    return tuple(Recompute(segment) for segment in _layers(graph, loss))


def cheap_again(graph: OpGraph, loss: int) -> tuple[Change, ...]:
    """All but products and convolutions made again in every layer; () if there are none.

    What an elementwise op makes takes as much memory as what a product makes, and next to no time.
    """
    return tuple(Recompute(s, _heavy(graph, s)) for s in _layers(graph, loss))


def _layers(graph: OpGraph, loss: int) -> tuple[Segment, ...]:
    found = next(iter(segmentations(graph, fold(graph))), ())
    return tuple(segment for segment in found if segment.loss == loss)


def _heavy(graph: OpGraph, segment: Segment) -> tuple[tuple[int, int], ...]:
    """(equation, result) of the products and convolutions of a segment, of its body alone."""
    depth, found = len(segment.inside), set()
    for op in graph.ops:
        if op.origin is None or op.origin.loss != segment.loss or op.origin.again:
            continue
        key = op.origin.key
        own = len(key) == depth + 1 and key[:depth] == segment.inside
        forward = op.phase == FORWARD and "heavy" in graph.kinds[op.kind].traits
        if own and forward and segment.first <= key[depth] <= segment.last:
            found.add((key[depth], 0))
    return tuple(sorted(found))
