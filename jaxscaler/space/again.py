"""What of a step with all segments recomputed can run again, and what of it be kept instead."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import OpGraph
from jaxscaler.rewrite.changes import Segment
from jaxscaler.space.kept import Pair, equations_of, segment_of
from jaxscaler.space.nodes import Space

RUN, KEPT, OFF, HOSTED = 0, 1, 2, 3  # of a use: made again, kept, not read, kept by the host
STAYS = (KEPT, HOSTED)
HOSTS = ("NVIDIA", "Google")  # whose compilers put values into the memory of the host


@dataclass(frozen=True)
class Recomputation:
    """What of a space can run again or be kept instead."""

    segments: tuple[Segment, ...]
    pairs: tuple[Pair, ...]
    op_nodes: frozenset[int]  # ops of the forward pass that run again
    use_nodes: frozenset[int]  # of values that op_nodes make
    kept: Mapping[int, tuple[Pair, ...]]  # of use_nodes: instances of its value, if it is keepable
    hosted: frozenset[int] = frozenset()  # of those, whose values may go to the host
    parts: Mapping[int, int] = field(default_factory=dict)  # of a kept value, in memory at a time
    # per group of segments that may be whole: node -> the share of it that is theirs
    wholes: tuple[Mapping[int, float], ...] = ()

    def states(self, node: int) -> tuple[int, ...]:
        """The states of a node, in the order of its strategies; OFF has one, the others have all
        strategies of the node."""
        if node in self.op_nodes:
            return (RUN, OFF)
        if node not in self.use_nodes:
            return (RUN,)
        kept = (KEPT,) if node in self.kept else ()
        return (RUN, *kept, *((HOSTED,) if node in self.hosted else ()), OFF)


def recomputation(
    graph: OpGraph,
    folded: Folded,
    space: Space,
    segments: Sequence[Segment],
    pairs: Sequence[Pair],
    hosts: bool = False,
    looped: Collection[int] = (),
) -> Recomputation:
    """Which nodes of a space (built with `shared`) can be off, and which values kept; `hosts`: or
    on the host, but those of loops, which stack them. `looped`: values that are always made again,
    so that what makes them is in no whole segment."""
    at = equations_of(segments)
    op_nodes = set()
    for i, node in enumerate(space.nodes):
        ops = [graph.ops[folded.representatives[c]] for c in node.members]
        if ops and all(op.origin and op.origin.again and segment_of(at, op) is not None
                       for op in ops):  # fmt: skip
            op_nodes.add(i)
    uses = {
        use[0]: k
        for k, use in space.use.items()
        if k in space.made and space.made[k][0] in op_nodes and use[0] != space.made[k][0]
    }
    classes = folded.value_class.tolist()
    instances = Counter(classes)
    by_class: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_class[classes[pair.again]].append(pair)
    kept = {
        node: tuple(by_class[k])
        for node, k in uses.items()
        if len(by_class.get(k, ())) == instances[k]
    }
    outside = [not segment.inside for segment in segments]
    hosted = {n for n, some in kept.items() if hosts and all(outside[p.segment] for p in some)}
    never: set[int | None] = {n for n, segment in enumerate(segments) if segment.inside}
    never |= {segment_of(at, graph.ops[o]) for o in graph.makers[list(looped), 0] if o >= 0}
    return Recomputation(
        tuple(segments), tuple(pairs), frozenset(op_nodes), frozenset(uses), kept,
        frozenset(hosted), wholes=_wholes(graph, folded, space, at, op_nodes, kept, never),
    )  # fmt: skip


def _wholes(
    graph: OpGraph,
    folded: Folded,
    space: Space,
    at: Mapping[tuple, int],
    op_nodes: Collection[int],
    kept: Mapping[int, tuple[Pair, ...]],
    never: Collection[int | None],
) -> tuple[Mapping[int, float], ...]:
    """`Recomputation.wholes`: segments that have the same nodes are one group."""
    total: Counter[int] = Counter()
    mine: dict[int, Counter[int]] = defaultdict(Counter)  # segment -> node -> ops, or values

    def count(node: int, segment: int | None) -> None:
        total[node] += 1
        if segment is not None:
            mine[segment][node] += 1

    classes = folded.op_class.tolist()
    for op in graph.ops:
        if op.origin is not None and op.origin.again:
            node = space.node_of.get(classes[op.id], -1)
            if node in op_nodes:
                count(node, segment_of(at, op))
    for node, pairs in kept.items():
        for pair in pairs:
            count(node, pair.segment)
    groups: dict[frozenset[int], Counter[int]] = defaultdict(Counter)
    for segment, nodes in mine.items():
        if segment not in never:
            groups[frozenset(nodes)].update(nodes)
    return tuple({node: n / total[node] for node, n in group.items()} for group in groups.values())
