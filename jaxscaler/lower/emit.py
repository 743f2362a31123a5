"""From decisions to specs by position: what each strategy means at each equation of the jaxpr.

A value is constrained where it is made, to the layout of the node that makes it (unless that leaves
it a partial sum: then the reduction happens where a reader's layout says, or at a barrier before
it), and again where a reader wants another layout. A value with a "use" layout passes through it on
the way to all its readers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod

import numpy as np

from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import FROM_HOST, JOIN, MARKERS, UPDATE, OpGraph
from jaxscaler.lower.layouts import Layouts, Spec
from jaxscaler.plan import Decision
from jaxscaler.space import strategies as st
from jaxscaler.space.nodes import Node, Space, factor_name


def emit(
    graph: OpGraph,
    folded: Folded,
    space: Space,
    axes: tuple[tuple[str, int], ...],
    rows: tuple[np.ndarray, ...],
) -> Layouts:
    """Specs of a whole step. `rows[i]` is node i's strategy (one row of `strategies`)."""
    return Emitter(graph, folded, space, axes, rows).run()


def rows_of(
    nodes: Sequence[Node], decided: dict[str, Decision], axes: tuple[str, ...]
) -> list[np.ndarray | None]:
    """Strategy row per node from a plan's decisions by subject; None where the plan has none."""
    out: list[np.ndarray | None] = []
    for node in nodes:
        d = decided.get(node.name)
        if d is None:
            out.append(None)
            continue
        index = {factor_name(node, f): f for f in range(len(node.factors))}
        try:
            if any(axis not in axes for axis, _ in (*d.cuts, *(d.in_use or ()))):
                raise KeyError
            halves = [d.cuts] + ([d.in_use or ()] if node.paired else [])
            row = [
                index[dict(half)[a]] if a in dict(half) else st.UNUSED
                for half in halves
                for a in axes
            ]
        except KeyError:
            out.append(None)
            continue
        out.append(np.array(row, np.int64))
    return out


def _moves(spec: Spec, wanted: Spec) -> bool:
    """Whether the wanted layout is more than the pieces of `spec`, cut further where they lie."""
    return any(then[: len(cut)] != cut for cut, then in zip(spec, wanted))


class Emitter:
    """Layouts of a plan's values and operands, as specs over the axes of its mesh."""

    def __init__(self, graph, folded, space, axes, rows):
        self.graph, self.folded, self.space, self.rows = graph, folded, space, rows
        self.names = tuple(name for name, _ in axes)
        self.axes = axes
        self.cache: dict[tuple[int, int], tuple[Spec, bool]] = {}
        self.classes = folded.value_class.tolist()
        self.op_class = folded.op_class.tolist()
        self.state_inputs = {graph.inputs[i] for i, _ in graph.state}
        # partial sums that a barrier holds up: (the first op behind it, constraints before it)
        self.summed: dict[int, tuple[int, tuple[Spec, ...]]] = {}
        self.sum_at_barriers()

    def sum_at_barriers(self) -> None:
        """A barrier lets no partial sum through: it is reduced as its next reader wants it."""
        readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        held = {v for barrier in self.graph.barriers for v in barrier.values}
        reads = self.graph.reads
        for o, slot, v in reads[np.isin(reads[:, 2], list(held))].tolist():
            readers[v].append((o, slot))
        found: dict[int, tuple[int, tuple[Spec, ...]]] = {}
        for barrier in self.graph.barriers:
            for v in barrier.values:
                later = [spot for spot in readers[v] if spot[0] >= barrier.at]
                if v not in found and later and self.made(v)[1]:
                    o, slot = later[0]
                    if path := self.on_the_way(self.graph.ops[o], slot):
                        found[v] = barrier.at, path
        self.summed = found

    def found(self, v: int, o: int) -> tuple[Spec, bool]:
        """(spec, is a partial sum) in which op `o` finds a value."""
        behind, path = self.summed.get(v, (len(self.graph.ops) + 1, ()))
        return (path[-1], False) if o >= behind else self.made(v)

    def spec(self, spot: tuple[int, int]) -> tuple[Spec, bool]:
        """(spec, is a partial sum) of a node's port."""
        found = self.cache.get(spot)
        if found is None:
            node, port = spot
            row = self.rows[node].reshape(1, -1)
            layout = st.layouts(self.space.nodes[node], port, row)[0]
            rank = len(self.space.nodes[node].ports[port].dims)
            dims = tuple(
                tuple(name for name, d in zip(self.names, layout) if d == dim)
                for dim in range(rank)
            )
            found = self.cache[spot] = (dims, bool((layout == rank).any()))
        return found

    def whole(self, v: int) -> Spec:
        return ((),) * len(self.graph.values[v].shape)

    # -- one value ---------------------------------------------------------------------------------

    def made(self, v: int) -> tuple[Spec, bool]:
        spot = self.space.made.get(self.classes[v])
        return (self.whole(v), False) if spot is None else self.spec(spot)

    def on_the_way(self, op, slot: int) -> tuple[Spec, ...]:
        """Constraints that bring an operand from where it was made to how the op reads it."""
        v = op.inputs[slot]
        if v < 0 or prod(self.graph.values[v].shape) <= 1:
            return ()
        spec, partial = self.found(v, op.id)
        path: list[Spec] = []
        k = self.classes[v]
        use = self.space.use.get(k)
        if use is not None and not self.skips_use(op, v, use):
            wanted, _ = self.spec(use)
            if wanted != spec or partial:
                # twice: the layout at rest first keeps the gather behind a cast that precedes it
                path += self.first(spec, partial, wanted) if partial else [spec]
                path.append(wanted)
            spec, partial = wanted, False
        read = self.space.read.get((self.op_class[op.id], slot))
        if read is not None:
            wanted, stays = self.spec(read)
            if not stays and (wanted != spec or partial):
                path += self.first(spec, partial, wanted)
                path.append(wanted)
        elif partial:
            path.append(self.whole(v))
        return tuple(path)

    @staticmethod
    def first(spec: Spec, partial: bool, wanted: Spec) -> list[Spec]:
        """What a partial sum is constrained to before a layout that moves its pieces: its own.

        Else XLA gathers a small operand of the product instead, or computes another product: wrong
        is one with a batch dim on axis b and sums over axis a, if its result is wanted with that
        dim on a and another dim on b (jaxlib 0.10.2).
        """
        return [spec] if partial and _moves(spec, wanted) else []

    def skips_use(self, op, v: int, use) -> bool:
        """The update reads state as it lies; so do readers in the node that makes a value."""
        if self.space.nodes[use[0]].what == "state" or v in self.state_inputs:
            return op.phase == UPDATE
        return self.space.node_of.get(self.op_class[op.id]) == self.space.made[self.classes[v]][0]

    # -- the whole step ----------------------------------------------------------------------------

    def run(self) -> Layouts:
        graph = self.graph
        self.leaving = self.values_leaving_their_node()
        self.given_back = set(graph.outputs)
        tables = [defaultdict(dict) for _ in range(4)]
        self.results, self.operands, self.body_inputs, self.body_outputs = tables
        kernels = {}
        for op in graph.ops:
            if "manual" in graph.kinds[op.kind].traits:
                kernels[op.key] = self.kernel(op)
            if self.op_class[op.id] not in self.space.node_of:
                for slot in range(len(op.inputs)):
                    self.put(self.operands, op.key, slot, self.on_the_way(op, slot))
            elif graph.kinds[op.kind].primitive in MARKERS:
                self.marker(op)
            elif graph.kinds[op.kind].primitive == FROM_HOST:  # there it is not laid out anew
                made, _ = self.made(op.outputs[0])
                self.put(self.results, op.key, 0, (*self.on_the_way(op, 0), made))
            else:
                self.equation(op)
        for barrier in graph.barriers:
            for n, v in enumerate(barrier.values):
                at, path = self.summed.get(v, (-1, ()))
                if at == barrier.at:
                    self.put(self.operands, barrier.key, n, path)
        inputs = tuple(self.at_rest(v) for v in graph.inputs)
        outputs = [None if v < 0 else self.result(v) for v in graph.outputs]
        for i, o in graph.state:
            outputs[o] = inputs[i]
        results, operands, into, out_of = map(dict, tables)
        return Layouts(self.axes, inputs, tuple(outputs), results, operands, into, out_of, kernels)

    @staticmethod
    def put(table, key, position: int, path: tuple[Spec, ...]) -> None:
        if path:
            table[key][position] = path

    def kernel(self, op) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
        """Specs of all operands and results of an op, as its node cuts them."""
        node, kind = self.space.node_of.get(self.op_class[op.id]), self.graph.kinds[op.kind]

        def spec(port: int, shape) -> Spec:
            return ((),) * len(shape) if node is None else self.spec((node, port))[0]

        shapes = (*kind.operand_shapes, *kind.result_shapes)
        specs = tuple(spec(port, shape) for port, shape in enumerate(shapes))
        return specs[: len(op.inputs)], specs[len(op.inputs) :]

    def equation(self, op) -> None:
        for slot in range(len(op.inputs)):
            self.put(self.operands, op.key, slot, self.on_the_way(op, slot))
        for r, v in enumerate(op.outputs):
            if v < 0 or prod(self.graph.values[v].shape) <= 1 or v not in self.leaving:
                continue
            spec, partial = self.made(v)
            leaves = self.result(v) if v in self.given_back else spec
            if not partial or self.first(spec, partial, leaves):
                self.put(self.results, op.key, r, (spec,))

    def marker(self, op) -> None:
        """A marker's constraints go where its value crosses into and out of the loop or branch."""
        sub, operand, invar, outvar, result = op.spot
        body = (*op.key, sub)
        made, _ = self.made(op.outputs[0])
        if prod(self.graph.values[op.outputs[0]].shape) <= 1:
            return
        primitive = self.graph.kinds[op.kind].primitive
        if operand >= 0:
            path = self.on_the_way(op, 0)
            self.put(self.operands, op.key, operand, path)
            self.put(self.body_inputs, body, invar, (made,))
        if outvar >= 0:
            slots = range(len(op.inputs)) if primitive == JOIN else (len(op.inputs) - 1,)
            for slot in slots:
                at = (*op.key, slot) if primitive == JOIN else body
                spec, _ = self.spec(self.space.read[self.op_class[op.id], slot])
                self.put(self.body_outputs, at, outvar, self.on_the_way(op, slot) or (spec,))
        if result >= 0:
            self.put(self.results, op.key, result, (made,))

    def values_leaving_their_node(self) -> set[int]:
        """Values that are read outside the node that makes them, or are results of the step."""
        leaving = {v for v in self.graph.outputs if v >= 0}
        made, classes = self.space.made, self.classes
        node_of = self.space.node_of
        for op in self.graph.ops:
            node = node_of.get(self.op_class[op.id], -1)
            for v in op.inputs:
                if v >= 0:
                    spot = made.get(classes[v])
                    if spot is not None and (
                        spot[0] != node or self.space.nodes[node].what != "cluster"
                    ):
                        leaving.add(v)
        return leaving

    def at_rest(self, v: int) -> Spec:
        spot = self.space.rest.get(self.classes[v])
        return self.whole(v) if spot is None else self.spec(spot)[0]

    def result(self, v: int) -> Spec:
        k = self.classes[v]
        spot = self.space.outputs.get(k) or self.space.rest.get(k)
        return self.whole(v) if spot is None else self.spec(spot)[0]
