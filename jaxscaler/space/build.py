"""From a folded graph to its plan space: one pass makes the nodes, one the edges between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import BATCH, PASS, STATE_ROLES, UPDATE, Factor, OpGraph
from jaxscaler.graph.labels import dim_names
from jaxscaler.space.classes import DEFERRING, Classes
from jaxscaler.space.clusters import Cluster, clusters
from jaxscaler.space.nodes import PARTIAL, Dims, Edge, Node, Port, Space, Spot

WHOLE: Spot = (-1, 0)  # a reader that needs its operand whole
HANDS_ON = ("convert_element_type", "loop_slice", "loop_carry")  # read state only to hand it on


def build_space(
    graph: OpGraph,
    folded: Folded,
    labels: list[dict[int, str]],
    shared: frozenset[int] = frozenset(),
) -> Space:
    """The plan space of `graph`. Every op class that touches more than scalars has a node.

    `shared`: value classes that get a use node even if they have one reader only.
    """
    return _Builder(Classes(graph, folded), labels, shared).run()


@dataclass
class _Builder:
    classes: Classes
    labels: list[dict[int, str]]
    shared: frozenset[int] = frozenset()
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    node_of: dict[int, int] = field(default_factory=dict)
    made: dict[int, Spot] = field(default_factory=dict)
    read: dict[tuple[int, int], Spot] = field(default_factory=dict)
    use: dict[int, Spot] = field(default_factory=dict)
    rest: dict[int, Spot] = field(default_factory=dict)
    outputs: dict[int, Spot] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)

    def run(self) -> Space:
        grouped = clusters(self.classes)
        for c in range(len(self.classes.op)):
            if self.classes.trivial(c):
                continue
            cluster = grouped.get(c)
            if cluster is None:
                self.op_node(c)
            elif next(iter(cluster.members)) == c:
                self.cluster_node(cluster)
        self.argument_nodes()
        for k in self.classes.readers:
            if k in self.made:
                self.value_edges(k)
        self.result_edges()
        return Space(
            nodes=tuple(self.nodes), edges=tuple(self.edges), node_of=self.node_of, made=self.made,
            read=self.read, use=self.use, rest=self.rest, outputs=self.outputs,
        )  # fmt: skip

    # -- nodes of ops ------------------------------------------------------------------------------

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def name(self, base: str) -> str:
        n = self.names[base]
        self.names[base] += 1
        return f"{base}#{n}" if n else base

    def describe(self, c: int) -> str:
        op = self.classes.op[c]
        return f"{op.phase}:{op.scope}:{self.classes.kind[c].primitive}"

    def op_node(self, c: int) -> None:
        op, kind = self.classes.op[c], self.classes.kind[c]
        factors = list(kind.rule.factors)
        if c in self.classes.deferring and kind.primitive in DEFERRING:
            factors.append(Factor(1 << 62, PARTIAL))
        ports = tuple(Port(dims) for dims in (*kind.rule.operands, *kind.rule.results))
        values = tuple(self.classes.of[v] for v in op.outputs if v >= 0)
        node = self.add(
            Node(
                name=self.name(self.describe(c)), what="op", factors=tuple(factors), ports=ports,
                members=(c,), values=values, labels=tuple(sorted(self.labels[c].items())),
                num_results=len(kind.rule.results),
            )
        )  # fmt: skip
        self.node_of[c] = node
        for slot in range(len(op.inputs)):
            self.read[c, slot] = (node, slot)
        for r, v in enumerate(op.outputs):
            if v >= 0:
                self.made[self.classes.of[v]] = (node, len(op.inputs) + r)

    def cluster_node(self, cluster: Cluster) -> None:
        ports: dict[Dims, int] = {}
        values: list[int] = []
        named: dict[int, str] = {}
        node = len(self.nodes)
        for c, mine in cluster.members.items():

            def port(dims: Dims, mine: dict[int, int] = mine) -> int:
                translated = tuple(tuple(mine[f] for f in dim if f in mine) for dim in dims)
                return ports.setdefault(translated, len(ports))

            rule = self.classes.kind[c].rule
            self.node_of[c] = node
            for slot, dims in enumerate(rule.operands):
                self.read[c, slot] = (node, port(dims))
            (v,) = self.classes.op[c].outputs
            if v >= 0:
                values.append(self.classes.of[v])
                self.made[values[-1]] = (node, port(rule.results[0]))
            for f, name in self.labels[c].items():
                if f in mine:
                    named.setdefault(mine[f], name)
        self.add(
            Node(
                name=self.name(self.describe(next(iter(cluster.members)))), what="cluster",
                factors=tuple(Factor(n, PASS) for n in cluster.sizes),
                ports=tuple(Port(dims) for dims in ports), members=tuple(cluster.members),
                values=tuple(values), labels=tuple(sorted(named.items())),
            )
        )  # fmt: skip

    # -- nodes of values ---------------------------------------------------------------------------

    def value_node(self, what: str, name: str, k: int, paired: bool = False) -> int:
        shape = self.classes.value(k).shape
        port = Port(tuple((d,) for d in range(len(shape))))
        return self.add(
            Node(
                name=self.name(name), what=what, factors=tuple(Factor(n, PASS) for n in shape),
                ports=(port, port) if paired else (port,), values=(k,),
                labels=self.value_labels(k), paired=paired,
            )
        )  # fmt: skip

    def value_labels(self, k: int) -> tuple[tuple[int, str], ...]:
        value = self.classes.value(k)
        if value.role == BATCH:
            return tuple(enumerate(dim_names(value)[: len(value.shape)]))
        if k not in self.made:
            return ()
        node, port = self.made[k]
        names, dims = dict(self.nodes[node].labels), self.nodes[node].ports[port].dims
        return tuple((d, names[f[0]]) for d, f in enumerate(dims) if f and f[0] in names)

    def argument_nodes(self) -> None:
        """State and batch nodes; state that only its own update touches is tied to that update."""
        graph, of = self.classes.graph, self.classes.of
        result_of = {graph.inputs[i]: graph.outputs[o] for i, o in graph.state}
        stored: Counter[tuple[int, int]] = Counter()  # (class of the new value, of the argument)
        for v in graph.inputs:
            if self.classes.whole(v):
                continue
            k, new = of[v], result_of.get(v, -1)
            if k not in self.rest:
                self.rest[k] = self.made[k] = self.argument_spot(k, of[new] if new >= 0 else -1)
            if new >= 0 and new != v:
                stored[of[new], k] += 1
        for (new, k), times in stored.items():
            made, rest = self.made.get(new), self.rest[k]
            if made is not None and made != rest:
                self.edges.append(Edge(made[0], made[1], rest[0], rest[1], new, times, True))

    def argument_spot(self, k: int, new: int) -> Spot:
        value = self.classes.value(k)
        if value.role == BATCH:
            return self.value_node("batch", value.path, k), 0
        tied = self.tied(k, new)
        if tied is not None:
            return tied
        direct = any(
            self.classes.op[c].phase != UPDATE
            and self.classes.kind[c].primitive not in HANDS_ON
            and not self.classes.trivial(c)
            for c, _ in self.classes.readers.get(k, ())
        )
        node = self.value_node("state", value.path, k, paired=direct)
        if direct:
            self.use[k] = (node, 1)
        return node, 0

    def tied(self, k: int, new: int) -> Spot | None:
        """Where the update that alone reads and rewrites a state leaf lays it out, if one does."""
        made = self.made.get(new)
        spots = {self.read.get(reader) for reader in self.classes.readers.get(k, ())}
        if made is None or len(spots) != 1 or self.nodes[made[0]].what != "cluster":
            return None
        (spot,) = spots
        if spot is None or spot[0] != made[0]:
            return None
        ports = self.nodes[spot[0]].ports
        return spot if ports[spot[1]] == ports[made[1]] else None

    # -- edges -------------------------------------------------------------------------------------

    def value_edges(self, k: int) -> None:
        """From where a value is made to its readers, through a use node if several share it."""
        made, value = self.made[k], self.classes.value(k)
        maker = self.classes.maker.get(k)
        level = self.classes.op[maker[0]].repeat if maker else 1
        direct: dict[Spot, list[int]] = {}  # reader -> runs per step of each operand it reads
        shared: dict[Spot, list[int]] = {}
        crossing, laid_out = False, level
        for reader, times in self.classes.readers[k].items():
            spot = self.read.get(reader, WHOLE)
            op = self.classes.op[reader[0]]
            straight = spot[0] == made[0] or (value.role in STATE_ROLES and op.phase == UPDATE)
            (direct if straight else shared).setdefault(spot, []).append(times)
            crossing |= not straight and op.repeat > level
            if not straight:  # anew wherever it is read, but once for a loop that takes it apart
                laid_out = max(laid_out, op.repeat // self.classes.trips(op))
        traffic = k in self.classes.state_traffic
        source = self.use.get(k, made)
        wanted = len(shared) > 1 or crossing or (k in self.shared and bool(shared))
        if k not in self.use and wanted:
            name = value.path or self.describe(maker[0]) if maker else value.path
            node = self.value_node("use", f"use:{name}", k)
            times = self.classes.instances[k] * laid_out
            self.edges.append(Edge(made[0], made[1], node, 0, k, times, traffic))
            source = self.use[k] = (node, 0)
        for origin, spots in ((made, direct), (source, shared)):
            for spot, runs in spots.items():
                if spot != made:  # operands of one node that read one value read the same copy
                    times = max(runs)
                    self.edges.append(Edge(*origin, *spot, k, times, traffic))

    def result_edges(self) -> None:
        graph = self.classes.graph
        state = {o for _, o in graph.state}
        for o, v in enumerate(graph.outputs):
            k = self.classes.of[v] if v >= 0 else -1
            if o in state or k not in self.made or k in self.outputs:
                continue
            node = self.value_node("output", f"output:{graph.output_paths[o]}", k)
            self.outputs[k] = (node, 0)
            made, times = self.made[k], self.classes.instances[k]
            self.edges.append(Edge(made[0], made[1], node, 0, k, times, False))
