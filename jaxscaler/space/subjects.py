"""Subjects of the language on a graph: which nodes, and which ports of them, a line speaks of."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from jaxscaler.graph import ir
from jaxscaler.graph.fold import Folded
from jaxscaler.program import AT_REST, Ops, Subject, Values, matches
from jaxscaler.space.nodes import Space, Spot

CARRIES_PARAMETER = ("convert_element_type", "reshape", "transpose", ir.SLICE, "broadcast_in_dim",
                     "squeeze", "copy")  # fmt: skip
HANDS_ON = ("convert_element_type", "copy", ir.SLICE)  # what they make still is the same tensor
WHOLE_OP = -1  # in place of a port: the factors themselves
_NUMBER = re.compile(r"(\d+)$")
_LINES = re.compile(r"(?P<file>[^:]+?)(:(?P<first>\d+)(-(?P<last>\d+))?)?$")

Ports = dict[int, set[int]]  # node -> ports of it, WHOLE_OP for its factors


def layer_of(path: str) -> int | None:
    """The first number that ends a component: 3 of "model/h_3/ln_1"; None if there is none."""
    found = (_NUMBER.search(part) for part in path.split("/"))
    return next((int(hit[1]) for hit in found if hit), None)


class Subjects:
    """Lookups from the language's subjects to the nodes of a space."""

    def __init__(self, graph: ir.OpGraph, folded: Folded, space: Space):
        self.graph, self.folded, self.space = graph, folded, space
        self.classes = folded.value_class.tolist()
        self.named = {node.name: i for i, node in enumerate(space.nodes)}

    def ports(self, subject: Subject) -> Ports:
        """What a subject selects."""
        found: Ports = defaultdict(set)
        if subject.name is not None:
            return self._decision(subject, subject.name)
        if isinstance(subject, Ops):
            for node, _ in self.op_nodes(subject):
                found[node].add(WHOLE_OP)
        else:
            for node, port, _ in self.value_spots(subject):
                found[node].add(port)
        return dict(found)

    def _decision(self, subject: Subject, name: str) -> Ports:
        node = self.named.get(name)
        if node is None or isinstance(subject, Ops) != bool(self.space.nodes[node].members):
            return {}
        if isinstance(subject, Ops):
            return {node: {WHOLE_OP}}
        return {node: {1 if subject.to is not None and self.space.nodes[node].paired else 0}}

    def beside(self, subject: Subject) -> list[str]:
        """Paths that a subject leaves out, of things of its kind that share a selected node."""
        hits = self.ports(subject)
        if isinstance(subject, Ops):
            wide = Ops(primitive=subject.primitive, phase=subject.phase)
            near = [(node, self.graph.ops[o].scope, o) for node, o in self.op_nodes(wide)]
            chosen = {o for _, o in self.op_nodes(subject)}
        else:
            if subject.to is not None or not set(subject.role) <= set(AT_REST):
                return []
            wide_values = Values(role=subject.role)
            near = [
                (node, self.graph.values[v].path, v) for node, _, v in self.value_spots(wide_values)
            ]
            chosen = {v for _, _, v in self.value_spots(subject)}
        inside = {path for node, path, x in near if node in hits and x in chosen}
        return sorted({path for node, path, x in near if node in hits and x not in chosen} - inside)

    # -- ops ---------------------------------------------------------------------------------------

    def op_nodes(self, subject: Ops) -> Iterator[tuple[int, int]]:
        """(node, op) of every op that is selected and has a node."""
        classes = self.folded.op_class.tolist()
        for o in self.ops(subject):
            node = self.space.node_of.get(classes[o])
            if node is not None:
                yield node, o

    def ops(self, subject: Ops) -> list[int]:
        """Ids of the ops that are selected, in program order."""
        if subject.name is not None:
            return self.members.get(self.named.get(subject.name, -1), [])
        paths: dict[str, bool] = {}
        out = []
        for o, op in enumerate(self.graph.ops):
            if op.phase not in subject.phase:
                continue
            hit = paths.get(op.scope)
            if hit is None:
                hit = paths[op.scope] = matches(subject.path, op.scope)
            if not hit or not matches(subject.primitive, self.graph.kinds[op.kind].primitive):
                continue
            if subject.parameter is not None and not any(
                matches(subject.parameter, self.parameter[v])
                for v in op.inputs
                if v in self.parameter
            ):
                continue
            if subject.layers is not None and not self._in_layers(subject.layers, op):
                continue
            if subject.source is None or at_source(subject.source, op.source):
                out.append(o)
        return out

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """Node -> its ops."""
        found: dict[int, list[int]] = defaultdict(list)
        for o, c in enumerate(self.folded.op_class.tolist()):
            node = self.space.node_of.get(c)
            if node is not None:
                found[node].append(o)
        return dict(found)

    @cached_property
    def parameter(self) -> dict[int, str]:
        """Value -> path of the parameter that it is, or is a cast or a view of."""
        graph = self.graph
        found = {
            v: graph.values[v].path for v in graph.inputs if graph.values[v].role == ir.PARAMETER
        }
        for op in graph.ops:
            if graph.kinds[op.kind].primitive in CARRIES_PARAMETER and op.inputs[0] in found:
                found.update((v, found[op.inputs[0]]) for v in op.outputs if v >= 0)
        return found

    def _in_layers(self, layers: tuple[int, int], op: ir.Op) -> bool:
        layer = layer_of(op.scope)
        if layer is None:  # an op of the update: the layer of what it updates
            near = [self._value_layer(v) for v in op.inputs if v >= 0]
            layer = next((n for n in near if n is not None), None)
        return layer is not None and layers[0] <= layer <= layers[1]

    # -- values ------------------------------------------------------------------------------------

    def value_spots(self, subject: Values) -> Iterator[tuple[int, int, int]]:
        """(node, port, value) of every value that is selected: where it lies, or is handed over."""
        chosen = list(self._values(subject))
        if subject.to is None:
            for node, port, v in chosen:
                yield node, port, v
            return
        origin = {v: v for _, _, v in chosen}
        readers = set(self.ops(subject.to))
        for op in self.graph.ops:
            primitive = self.graph.kinds[op.kind].primitive
            for slot, v in enumerate(op.inputs):
                if v in origin and op.id in readers:
                    spot = self._handed(v, op, slot)
                    if spot is not None:
                        yield *spot, origin[v]
            if primitive in HANDS_ON and op.inputs[0] in origin:
                origin.update((v, origin[op.inputs[0]]) for v in op.outputs if v >= 0)

    def _values(self, subject: Values) -> Iterator[tuple[int, int, int]]:
        for v, spot, path in self._known(subject):
            node, port = spot
            if not matches(subject.path, path):
                continue
            if subject.layers is not None:
                layer = self._value_layer(v)
                if layer is None or not subject.layers[0] <= layer <= subject.layers[1]:
                    continue
            yield node, port, v

    def _known(self, subject: Values) -> Iterator[tuple[int, Spot, str]]:
        """(value, where its layout is decided, path) of all that have a role that is asked for."""
        graph, space = self.graph, self.space
        if subject.primitive == "*":
            for v in graph.inputs:
                spot = space.rest.get(self.classes[v])
                if spot is not None and graph.values[v].role in subject.role:
                    yield v, spot, graph.values[v].path
        if not set(subject.role) - set(AT_REST):
            return
        if ir.OUTPUT in subject.role and subject.primitive == "*":
            for path, v in zip(graph.output_paths, graph.outputs):
                spot = space.outputs.get(self.classes[v]) if v >= 0 else None
                if spot is not None:
                    yield v, spot, path
        for op in graph.ops:
            if not matches(subject.primitive, graph.kinds[op.kind].primitive):
                continue
            for v in op.outputs:
                spot = space.made.get(self.classes[v]) if v >= 0 else None
                role = graph.values[v].role
                if spot is not None and role != ir.OUTPUT and role in subject.role:
                    yield v, spot, op.scope

    def _handed(self, v: int, op: ir.Op, slot: int) -> Spot | None:
        """The layout in which a value is handed to a reader: the shared one, or its own."""
        k = self.classes[v]
        state = self.graph.values[v].role in ir.STATE_ROLES and op.phase == ir.UPDATE
        read = self.space.read.get((int(self.folded.op_class[op.id]), slot))
        return read if state else self.space.use.get(k, read)

    def _value_layer(self, v: int) -> int | None:
        value = self.graph.values[v]
        if not value.path:
            made = int(self.graph.makers[v, 0])
            return layer_of(self.graph.ops[made].scope) if made >= 0 else None
        if value.role != ir.OPTIMIZER:
            return layer_of(value.path)
        parts = tuple(value.path.split("/"))  # state of an optimizer: the layer of its parameter
        tails = (parts[i:] for i in range(len(parts)))
        return next((self._tails[tail] for tail in tails if tail in self._tails), None)

    @cached_property
    def _tails(self) -> dict[tuple[str, ...], int | None]:
        found: dict[tuple[str, ...], int | None] = {}
        for v in self.graph.inputs:
            value = self.graph.values[v]
            if value.role == ir.PARAMETER:
                parts = tuple(value.path.split("/"))
                for i in range(len(parts)):
                    found.setdefault(parts[i:], layer_of(value.path))
        return found

    @cached_property
    def trips(self) -> dict[int, set[int]]:
        """Node -> the factors that a loop runs over: of what it slices and stacks, and of state."""
        found: dict[int, set[int]] = defaultdict(set)
        for op in self.graph.ops:
            primitive = self.graph.kinds[op.kind].primitive
            if primitive not in (ir.SLICE, ir.STACK):
                continue
            node = self.space.node_of.get(int(self.folded.op_class[op.id]))
            if node is not None:
                found[node].add(0)
            stacked = op.inputs[0] if primitive == ir.SLICE else op.outputs[0]
            spot = self.space.rest.get(self.classes[stacked]) if stacked >= 0 else None
            if spot is not None:
                found[spot[0]].update(self.space.nodes[spot[0]].ports[spot[1]].dims[0])
        return dict(found)


def at_source(wanted: str, source: str) -> bool:
    """Whether "path/file.py:12 (function)" is in "file.py", "file.py:12" or "file.py:10-20"."""
    place = _LINES.match(wanted)
    file, _, line = source.split(" (")[0].rpartition(":")
    if place is None or not (file == place["file"] or file.endswith("/" + place["file"])):
        return False
    if place["first"] is None:
        return True
    first = int(place["first"])
    return line.isdigit() and first <= int(line) <= int(place["last"] or first)
