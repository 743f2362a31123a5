"""The collectives of a compiled step, from its HLO text (CPU, GPU and TPU compilers).

The text is read into the same `Node`s as Shardy's audit, fusions and asynchronous calls written
out, and brought into the same normal form: a slice by the device's own number after an all-reduce
makes a reduce-scatter here too (which is how CPU and TPU write one).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from jaxscaler.errors import PlanError
from jaxscaler.verify import hlo_text
from jaxscaler.verify import normal_form as nf
from jaxscaler.verify.hlo_text import Array, Instruction, arrays


def hlo_collectives(
    text: str, mesh: Any, trip_counts: Mapping[str, int] | None = None, merge: bool = False
) -> tuple[nf.Collective, ...]:
    """The collectives of compiled HLO `text` (`compiled.as_text()`) in normal form.

    `mesh`: the mesh that the step was compiled for, a JAX mesh or (name -> size), major axis first;
    names are found by device numbers. `trip_counts`: runs of a loop per entry by its op_name
    (`.../while`), where the compiler does not say (TPU); a loop with collectives whose count is
    not known counts once, with a warning. `merge`: also merge what the GPU and TPU compilers would
    have merged, for text of the CPU compiler, which merges nothing (and upcasts bf16: its bytes
    double there).

    Raises PlanError for text that is no HLO module and groups that do not fit the mesh.
    """
    return nf.normal_form(read_hlo(text, mesh, trip_counts), merge)


def read_hlo(text: str, mesh: Any, trip_counts: Mapping[str, int] | None = None) -> list[nf.Node]:
    """The values of compiled HLO as a graph, each tensor of a combined collective by itself."""
    sizes = dict(getattr(mesh, "shape", mesh))
    reader = _Reader(text, sizes, trip_counts or {})
    reader.computation(None, _Place(reader.entry))
    return _without_rings(reader.nodes, reader.rings, sizes)


def _without_rings(
    nodes: list[nf.Node], rings: Mapping[str, tuple[str, int]], mesh: Mapping[str, int]
) -> list[nf.Node]:
    """Of each ring of permutes its first as the collective that the ring is, the others no more."""
    seen: set[tuple] = set()
    made = []
    for node in nodes:
        if node.op == nf.COLLECTIVE_PERMUTE and node.scope in rings:
            kind, times = rings[node.scope]
            parts = prod(mesh[axis.split(":")[0]] for axis in node.axes)
            first = (node.scope, node.bytes, node.axes) not in seen
            seen.add((node.scope, node.bytes, node.axes))
            node = (
                node._replace(op=kind, bytes=node.bytes * parts, parts=parts, times=times, loop=0)
                if first
                else node._replace(op="ring")
            )
        made.append(node)
    return made


# --- groups -----------------------------------------------------------------------------------

_GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\s*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[.*?\][^{]*\{.*?\}|\S*)"
)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_BY_AXES = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,\s]+))\))?\s*\{(.*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_METADATA = re.compile(r"metadata=\{[^}]*\}")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')


@lru_cache(maxsize=1024)
def _first_group(groups: str, devices: int) -> tuple[int, ...]:
    """The first device group of a `replica_groups=...`: listed, counted, or by axes."""
    if re.fullmatch(r"\{\s*\}", groups):
        return tuple(range(devices))
    if groups.startswith("{{"):
        return tuple(_ints(groups[2 : groups.index("}")]))
    if iota := _IOTA.fullmatch(groups):
        shape, dims, order = iota.groups()
        numbers = np.arange(prod(_ints(dims))).reshape(_ints(dims))
        numbers = numbers.transpose(_ints(order)) if order else numbers
        return tuple(numbers.reshape(_ints(shape))[0].tolist())
    by_axes = _BY_AXES.fullmatch(groups)
    if not by_axes:
        raise PlanError(f"device groups in a notation that is not known: {groups[:120]!r}")
    axes, dims, order, listed, over = by_axes.groups()
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(axes)}
    numbers = np.arange(prod(sizes.values()))
    if dims:
        numbers = numbers.reshape(_ints(dims)).transpose(_ints(order)).reshape(-1)
    elif listed:
        numbers = np.array(_ints(listed))
    strides, stride = {}, numbers.size
    for name, size in sizes.items():
        stride //= size
        strides[name] = stride
    places = np.zeros(1, int)
    for name, _, before, size in _AXIS.findall(over):
        part = int(size or sizes[name])
        minor = sizes[name] // (int(before or 1) * part)
        places = (places[:, None] + np.arange(part) * minor * strides[name]).reshape(-1)
    return tuple(numbers[places].tolist())


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


# --- graph ------------------------------------------------------------------------------------

_COLLECTIVES = {kind.replace("_", "-"): kind for kind in nf.COLLECTIVES}
_COLLECTIVES["ragged-all-to-all"] = nf.ALL_TO_ALL
_KNOWN = {name: name for name in (*nf.LINEAR, nf.ADD, nf.CONSTANT)}
_KNOWN |= {"broadcast": nf.BROADCAST, "bitcast": "reshape"}
# A dot with an all-gather before it or a reduce-scatter after it, as a ring of permutes beside it.
_RING = re.compile(r"windowed_dot_general_body_(ag|rs)")
_RINGS = {"ag": nf.ALL_GATHER, "rs": nf.REDUCE_SCATTER}
_COMBINERS = ("add", "maximum", "minimum", "multiply", "and", "or")

Value = Any  # the index of a node, or a list of values: a tuple


class _Place(NamedTuple):
    """Where the walk stands: computation, runs per step, loop body, whether it is a fusion."""

    home: str
    times: int = 1
    loop: int = 0
    fused: bool = False


class _Reader:
    """A walk over the computations that appends one `Node` per array."""

    def __init__(self, text: str, mesh: Mapping[str, int], trip_counts: Mapping[str, int]):
        self.computations, self.entry = hlo_text.computations(text)
        self.sources = hlo_text.sources(text)
        self.mesh, self.trip_counts = mesh, trip_counts
        self.nodes: list[nf.Node] = []
        self.arrays: list[Array] = []  # what each node is
        self.by_device: set[int] = set()  # integers computed from the device's own number
        self.printed: dict[tuple, tuple[_Place, Value]] = {}
        self.loops = 0
        self.rings: dict[str, tuple[str, int]] = {}  # path of the dot -> (kind, runs a step)

    def computation(self, arguments: list[Value] | None, place: _Place) -> Value:
        """Read a computation (`arguments` None: they are not known); returns its root's value."""
        values: dict[str, Value] = {}
        root: Value = []
        for op in self.computations[place.home]:
            if op.opcode == "parameter" and arguments is not None:
                value = arguments[int(op.operands[0])]
            else:
                value = self._value(op, [values[o] for o in op.operands if o in values], place)
            values[op.name] = value
            if op.root:
                root = value
        if arguments is None:  # what an entry or a body returns is used
            self._append(nf.Node("return", tuple(_flat(root)), loop=place.loop), ("", 0, 0))
        return root

    def _append(self, node: nf.Node, array: Array) -> int:
        self.nodes.append(node)
        self.arrays.append(array)
        return len(self.nodes) - 1

    def _value(self, op: Instruction, inputs: list[Value], place: _Place) -> Value:
        opcode = op.opcode.removesuffix("-start")
        if opcode.endswith(("-done", "-update")) and type(inputs[0]) is type(arrays(op.type)):
            return inputs[0]
        if opcode in _COLLECTIVES:
            return self._collective(op, _COLLECTIVES[opcode], inputs, place)
        if opcode in ("fusion", "call", "async") and (called := hlo_text.called(op)):
            fused = place.fused or opcode == "fusion"
            return self.computation(inputs, place._replace(home=called, fused=fused))
        if opcode == "tuple":
            return inputs
        if opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", op.attributes)
            return inputs[0][int(index[1])] if index else inputs[0]
        if op.opcode == "copy-start":
            return inputs[0]
        if opcode == "while":
            self._while(op, place)
        if opcode == "conditional":
            for branch in hlo_text.branches(op):
                self.computation(None, place._replace(home=branch))
        used = tuple(j for value in inputs for j in _flat(value))
        if (
            opcode == "dynamic-slice"
            and (
                place.home.startswith("all-reduce-scatter")  # how the TPU compiler names one
                or not self.by_device.isdisjoint(used[1:])
            )
        ):
            return self._slice(op, used[0], place)
        return self._other(op, arrays(op.type), used, place)

    def _other(self, op: Instruction, array: Any, used: tuple[int, ...], place: _Place) -> Value:
        """Nodes for an op that is nothing special, one for each array that it makes."""
        if isinstance(array, list):
            return [self._other(op, inner, used, place) for inner in array]
        node = nf.Node(_KNOWN.get(op.opcode, op.opcode), used, loop=place.loop)
        made = self._append(node, array)
        if op.opcode in ("partition-id", "replica-id") or (
            array[0].startswith(("int", "uint")) and not self.by_device.isdisjoint(used)
        ):
            self.by_device.add(made)
        return made

    def _slice(self, op: Instruction, operand: int, place: _Place) -> int:
        """A slice at an offset that depends on the device; along which axes is not seen."""
        array = arrays(op.type)
        parts = self.arrays[operand][1] // max(array[1], 1)
        node = nf.Node(nf.ALL_SLICE, (operand,), (), array[2], array[0], parts, loop=place.loop)
        made = self._append(node, array)
        if array[0].startswith(("int", "uint")):  # a table of offsets, by device
            self.by_device.add(made)
        return made

    def _while(self, op: Instruction, place: _Place) -> None:
        scope = hlo_text.scope(op)
        trips = hlo_text.trip_count(op, place.home, self.computations, self.trip_counts)
        self.loops += 1
        start, inner = len(self.nodes), place._replace(loop=self.loops)
        if trips is not None:
            inner = inner._replace(times=place.times * trips)
        condition, body = hlo_text.loop(op)
        for called in (condition, body):
            self.computation(None, inner._replace(home=called))
        if ring := _RING.search(body):
            self.rings[scope] = (_RINGS[ring[1]], place.times)
        if trips is None and any(n.op in nf.COLLECTIVES for n in self.nodes[start:]):
            warnings.warn(
                f"how often the loop `{scope or op.name}` runs is not in the HLO: its collectives "
                "count once; say it with `trip_counts`",
                stacklevel=2,
            )

    def _collective(self, op: Instruction, kind: str, inputs: list[Value], place: _Place) -> Value:
        operands = [j for value in inputs for j in _flat(value)]
        arrays = [self.arrays[j] for j in operands]
        channel, metadata = _CHANNEL.search(op.attributes), _METADATA.search(op.attributes)
        key = (kind, *arrays, channel and channel[1], metadata and metadata[0])
        there, same = self.printed.get(key, (place, None))
        if there.home != place.home and (there.fused or place.fused) and channel:
            return same  # one collective, spread over several fusions to overlap with them
        if kind == nf.COLLECTIVE_PERMUTE:
            found = _PAIRS.search(op.attributes)
            pairs = [_ints(p) for p in re.findall(r"\{(.*?)\}", found[1] if found else "")]
            axes = nf.pair_axes(pairs, self.mesh)
            parts, params = 1, str(pairs)
        else:
            groups = _GROUPS.search(op.attributes)
            group = _first_group(groups[1] if groups else "{}", prod(self.mesh.values()))
            axes, parts = nf.group_axes(group, self.mesh), len(group)
            params = " ".join((str(group), *re.findall(r"dimensions=\{[\d,]*\}", op.attributes)))
        node = nf.Node(
            kind,
            axes=axes,
            parts=parts,
            times=place.times,
            loop=place.loop,
            combiner=self._combiner(op),
            params=params,
            scope=hlo_text.scope(op),
            source=self._source(op),
        )
        if kind == nf.ALL_TO_ALL and len(operands) > 1:  # one buffer, given in parts
            size = sum(a[2] for a in arrays)
            made = self._append(
                node._replace(inputs=tuple(operands), bytes=size, dtype=arrays[0][0]), arrays[0]
            )
            value: Value = [made] * len(operands)
        else:
            value = [
                self._append(*_sized(node, operand, array))
                for operand, array in zip(operands, arrays)
            ]
            if len(value) == 1 and (op.opcode.endswith("-start") or not op.type.startswith("(")):
                value = value[0]
        self.printed[key] = (place, value)
        return value

    def _combiner(self, op: Instruction) -> str:
        inside = self.computations.get(hlo_text.called(op), ())
        names = [i.opcode for i in inside if i.opcode in _COMBINERS]
        return "sum" if names == ["add"] else "+".join(names)

    def _source(self, op: Instruction) -> str:
        frame, line = _FRAME.search(op.attributes), _LINE.search(op.attributes)
        if frame:
            return self.sources.get(frame[1], "")
        return f"{line[1]}:{line[2]}" if line else ""


def _sized(node: nf.Node, operand: int, array: Array) -> tuple[nf.Node, Array]:
    """`node` for one operand, and the array that it makes."""
    dtype, elements, size = array
    if node.op == nf.ALL_GATHER:
        elements, size = elements * node.parts, size * node.parts
    made = elements // node.parts if node.op == nf.REDUCE_SCATTER else elements
    return node._replace(inputs=(operand,), bytes=size, dtype=dtype), (dtype, made, size)


def _flat(value: Value) -> Iterator[int]:
    if isinstance(value, list):
        for inner in value:
            yield from _flat(inner)
    else:
        yield value
