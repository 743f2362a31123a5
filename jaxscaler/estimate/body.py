"""A micro-batch through a layer and the ends of a model, as the planner prices it.

The plan on the axes that work on one micro-batch together (ep, cp, tp) is pinned by a program,
whose splits follow from how the parameters are split, and searched for what that leaves open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from jaxscaler.cluster.cluster import Level
from jaxscaler.cluster.devices import Device
from jaxscaler.cluster.mesh import Axis, Mesh
from jaxscaler.cluster.mesh import Part as MeshPart
from jaxscaler.cost import compute
from jaxscaler.cost.collective import collective_time
from jaxscaler.cost.reshard import local_bytes, reshard_collectives
from jaxscaler.errors import JaxscalerError
from jaxscaler.estimate.config import ModelConfig, padded_vocab
from jaxscaler.estimate.template import (
    EXPERT,
    HIDDEN,
    TP_DIM,
    Sized,
    Task,
    Template,
    dims_of,
    template_of,
)
from jaxscaler.estimate.waves import idle
from jaxscaler.graph import ir
from jaxscaler.graph.registry import PRIMITIVE as KERNEL
from jaxscaler.program import (
    ALL,
    Replicate,
    Split,
    Statement,
    forbid,
    if_possible,
    op_assign,
    op_trans,
    ops,
    values,
)
from jaxscaler.solve.elimination import cheapest
from jaxscaler.space import strategies as st
from jaxscaler.space.constraints import Constraints
from jaxscaler.space.nodes import PARTIAL, Node
from jaxscaler.space.price import Tabled, tabulate
from jaxscaler.space.problem import Model, tensor_bytes

COMPUTE = (ir.FORWARD, ir.BACKWARD)
RECOMPUTE = ("none", "selective", "full")
ATTENTION = ("unfused", "flash")
LAYER, EMBED, HEAD = "layer", "embed", "head"
TIME_LIMIT = 10.0  # seconds of search for what the program leaves open
AGAIN = "recompute"  # phase of what runs once more in the backward pass
MATMUL, SCORES, VECTOR = "matmul", "attention", "vector"


class Leaf(NamedTuple):
    """A parameter of one layer, or of an end."""

    path: str
    where: str
    size: int  # elements of the whole
    local: int  # elements on one device of the axes ep, cp, tp
    expert: bool


class Part(NamedTuple):
    """What of a kind happens in a phase at a place, per micro-batch (and per layer).

    seconds: of roofline time without starts, or of collectives. flops, nbytes: on one device; of
    collectives what is moved. runs: of kernels or collectives. tail: flops of products for which
    their last waves stand idle, see `waves.py`.
    """

    where: str
    phase: str
    kind: str
    seconds: float
    flops: float
    nbytes: float
    runs: float
    tail: float = 0.0


@dataclass(frozen=True)
class Body:
    """The parts of a micro-batch and the parameters that they read."""

    parts: tuple[Part, ...]
    leaves: tuple[Leaf, ...]
    saved: float  # bytes that one layer keeps for its backward pass, on one device
    seconds: float  # as the planner's problem sums it, updates left out


# -- the pinned plan -------------------------------------------------------------------------------


def program(
    config: ModelConfig, paths: tuple[str, ...], axes: Mapping[str, int], sp: bool
) -> list[Statement]:
    """Lines that pin the plan on the axes among "ep", "cp", "tp" that there are, by their sizes.

    tp: whatever stems from a split dim of a parameter is split, nothing else but (with `sp`)
    tokens. cp: tokens everywhere. ep: experts in their own products, samples elsewhere.
    """
    everything = ops(phase=COMPUTE)

    def only(axis: str, *names: str) -> list[Statement]:
        known = ("batch", "sequence", TP_DIM, HIDDEN, EXPERT)
        rest = tuple(name for name in known if name not in names)
        return [forbid(op_assign(op_trans(everything, Split(name)), axis)) for name in rest]

    def at_rest(axis: str, name: str) -> list[Statement]:
        lines: list[Statement] = []
        for path in paths:
            dims = dims_of(config, path)
            split = Split(dims.index(name)) if name in dims else Replicate()
            many = (ALL,) if name in dims else ()
            lines.append(op_assign(op_trans(values(path, role="parameter"), split, *many), axis))
        return lines

    lines: list[Statement] = []
    cp, tp = axes.get("cp", 1), axes.get("tp", 1)
    if tp > 1:
        lines.append(op_assign(op_trans(everything, Split(TP_DIM), ALL), "tp"))
        lines += only("tp", TP_DIM, *(("sequence",) if sp else ()))
        lines += at_rest("tp", TP_DIM)
    if cp > 1:
        lines += [*only("cp", "sequence"), *at_rest("cp", "")]
    tokens = {"cp": cp} | ({"tp": tp} if sp else {})
    where = tuple(axis for axis, size in tokens.items() if size > 1)
    if where:
        least = (cp, prod(tokens.values()))
        between = [ops(primitive=ir.CARRY, phase=COMPUTE)]
        between += [ops(norms, phase=COMPUTE) for norms in ("*norm*", "*/ln_*")]
        if cp > 1:
            lines.append(op_assign(op_trans(everything, Split("sequence"), least), where))
        for some in between:  # what lies between products, but for what tp splits by heads
            lines.append(if_possible(op_assign(op_trans(some, Split("sequence"), ALL), where)))
    if "ep" in axes:
        lines += [*only("ep", "batch", EXPERT), *at_rest("ep", EXPERT)]
        for path in ("*/attn*", "*/*norm*", "*embed*", "*head*"):
            dense = ops(path, phase=COMPUTE)
            lines.append(op_assign(op_trans(dense, Split("batch"), ALL), "ep"))
    return lines


def plan_of(
    task: Task, axes: tuple[Axis, ...], sp: bool, device: Device, sized: Model
) -> tuple[np.ndarray, ...]:
    """Strategy of each node, [1, axes] of its factors: it serves any micro-batch and vocabulary.

    Found with one sample per group. With tp alone it is found on few devices, and serves all sizes
    of an axis whose link is alike, as far as it divides: hardly anything is left open there. What
    is best for sequences and experts depends on their sizes.
    """
    if [axis.name for axis in axes] == ["tp"]:
        few = (_few(axes[0]),)
        common = replace(task, vocab=padded_vocab(task.model.vocab, few[0].size))
        plan = _plan(common, few, sp, device)
        sizes = (axes[0].size,)
        if all(_divides(node, row, sizes) for node, row in zip(sized.space.nodes, plan)):
            return plan
    return _plan(task, axes, sp, device)


def _divides(node: Node, row: np.ndarray, sizes: tuple[int, ...]) -> bool:
    parts = st.parts(node, row, sizes)[0].tolist()
    return all(f.kind == PARTIAL or f.size % n == 0 for f, n in zip(node.factors, parts))


def _few(axis: Axis) -> Axis:
    """The fewest devices that divide an axis, on its outermost link."""
    size = next(n for n in range(2, axis.size + 1) if axis.size % n == 0)
    return Axis(axis.name, (MeshPart(Level(axis.level, size, axis.link), size),))


@lru_cache(maxsize=1024)
def _plan(task: Task, axes: tuple[Axis, ...], sp: bool, device: Device) -> tuple[np.ndarray, ...]:
    sized = _sized(task, axes, 1, device.vendor)
    paths = tuple(
        value.path
        for value in (sized.graph.values[v] for v in sized.graph.inputs)
        if value.role == ir.PARAMETER
    )
    sizes = {axis.name: axis.size for axis in axes}
    lines = program(task.model, paths, sizes, sp)
    bound = Constraints(lines, sized.graph, sized.folded, sized.space)
    tabled = tabulate(sized, Mesh(axes), device, None, bound.mask)
    choice = cheapest(tabled.shared)
    if choice is None:
        choice = _searched(task, tabled)
    return tuple(rows[c].reshape(1, -1) for rows, c in zip(tabled.strategies, choice))


def _searched(task: Task, tabled: Tabled) -> np.ndarray:
    from jaxscaler.solve import solve  # which compiles: seconds, the first time

    found = solve(tabled.priced().problem, time_limit=TIME_LIMIT)
    if found.choice is None:
        raise JaxscalerError(
            f"{task.model.name} on mesh {tabled.mesh}: no plan in {TIME_LIMIT:g} s ({found.status})"
        )
    return found.choice


@lru_cache(maxsize=4096)
def body_of(task: Task, micro_batch: int, axes: tuple[Axis, ...], sp: bool, device: Device) -> Body:
    """The price of one micro-batch on the mesh of `axes`, named among "ep", "cp", "tp".

    `micro_batch`: samples of each group of cp * tp devices.
    """
    return _body(task, micro_batch, tuple(map(_bare, (a for a in axes if a.size > 1))), sp, device)


def _bare(axis: Axis) -> Axis:
    """The same of switched levels that have no more devices than the axis: clusters whose nodes
    differ in size share what is found for it."""
    parts = (
        MeshPart(replace(part.level, size=part.size), part.size)
        if part.level.link.kind in ("switch", "network")
        else part
        for part in axis.parts
    )
    return Axis(axis.name, tuple(parts))


@lru_cache(maxsize=4096)
def _body(task: Task, micro_batch: int, axes: tuple[Axis, ...], sp: bool, device: Device) -> Body:
    sized = _sized(task, axes, micro_batch, device.vendor)
    plan = (np.zeros((1, 0), np.int64),) * len(sized.space.nodes)
    if axes:
        plan = plan_of(task, axes, sp, device, sized)
    template = template_of(task, _has_cp(axes), device.vendor)
    return _Reader(task, template, sized, Mesh(axes), plan, device).body()


def _has_cp(axes: tuple[Axis, ...]) -> bool:
    return any(axis.name == "cp" for axis in axes)


def _sized(task: Task, axes: tuple[Axis, ...], micro_batch: int, vendor: str) -> Model:
    samples = micro_batch * prod(axis.size for axis in axes if axis.name == "ep")
    return _with_batch(task, _has_cp(axes), samples, vendor)


@lru_cache(maxsize=16)
def _with_batch(task: Task, cp: bool, samples: int, vendor: str) -> Model:
    return Sized(template_of(task, cp, vendor), samples, task.vocab).model()


@dataclass
class _Reader:
    """A plan -> parts."""

    task: Task
    template: Template
    model: Model
    mesh: Mesh
    rows: tuple[np.ndarray, ...]  # the strategy of each node, [1, axes]
    device: Device

    def __post_init__(self) -> None:
        self.graph, self.space = self.model.graph, self.model.space
        fused = ["fusable" in kind.traits for kind in self.graph.kinds]
        self.read_whole = {  # by kernels, which count it
            v for o, _, v in self.graph.reads.tolist() if not fused[self.graph.ops[o].kind]
        }
        self.found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0] * 5)

    def add(self, op: ir.Op, in_layer: bool, kind: str, numbers: tuple[float, ...]) -> None:
        if op.phase == ir.UPDATE:
            return
        phase = AGAIN if "rematted_computation" in op.scope else op.phase
        entry = self.found[self.where(op, in_layer), phase, kind]
        for i, x in enumerate(numbers):
            entry[i] += x

    def reads_in_place(self, op: ir.Op, primitive: str) -> bool:
        """Whether an op slices weights that elementwise ops alone read, from the stack. (What the
        backward pass takes from stacks, layers in a row would in part compute again.)"""
        given = self.graph.makers[op.inputs[0], 0] < 0
        return primitive == ir.SLICE and given and op.outputs[0] not in self.read_whole

    def layout(self, spot: tuple[int, int]) -> np.ndarray:
        """Of (node, port)."""
        node, port = spot
        return st.layouts(self.space.nodes[node], port, self.rows[node])[0]

    def where(self, op: ir.Op, in_layer: bool) -> str:
        if in_layer:
            return LAYER
        table = any(word in op.scope for word in ("embed", "wte", "wpe"))
        product = self.graph.kinds[op.kind].primitive == "dot_general"
        return EMBED if table and not product else HEAD

    def body(self) -> Body:
        for i, work in enumerate(self.model.works):
            if work is not None:
                self.compute(i, work)
        for edge, in_layer in zip(self.space.edges, self.template.edge_in_layer):
            self.edge(edge, in_layer)
        for i, node in enumerate(self.space.nodes):
            if node.what == "op":
                self.eager(i)
        parts = tuple(Part(*key, *numbers) for key, numbers in sorted(self.found.items()))
        seconds = sum(p.seconds + (compute.RAMP * p.runs if ":" not in p.kind else 0.0)
                      for p in parts)  # fmt: skip
        return Body(parts, tuple(self.leaves()), self.saved(), seconds)

    def compute(self, i: int, work: compute.Work) -> None:
        node = self.space.nodes[i]
        o = self.model.folded.representatives[node.members[0]]
        op, kind = self.graph.ops[o], self.graph.kinds[self.graph.ops[o].kind]
        if kind.primitive in ir.MARKERS and not self.reads_in_place(op, kind.primitive):
            return  # the loop stands for layers in a row, which hand on without copies
        row = self.rows[i]
        parts = st.parts(node, row, tuple(self.mesh.shape))
        local = {}
        for port, _ in work.tensors:
            rank = len(node.ports[port].dims)
            layout = st.layouts(node, port, row)
            local[port] = local_bytes(self.mesh, (1,) * rank, 1.0, layout)
        started = compute.curves(self.device, work.op, work.dtype) == (None, None)
        start = work.runs if work.kernel and started else 0  # curves have it in them
        seconds = float(compute.seconds(work, parts, local, self.device)[0])
        share = 1.0 / float(np.prod(parts[0, list(work.factors)], dtype=np.float64))
        moved = sum(nbytes * float(local[port][0]) for port, nbytes in work.tensors)
        if kind.primitive == KERNEL:
            name = SCORES
        elif kind.primitive == "dot_general" and work.flops:
            name = MATMUL if HIDDEN in dict(node.labels).values() else SCORES
        else:
            name = VECTOR
        numbers = (
            seconds - compute.RAMP * start,
            work.flops * share * work.runs,
            moved * work.runs,
            start,
            self.tail(op, node, row, work.flops * share) * work.runs if name == MATMUL else 0.0,
        )
        self.add(op, self.template.in_layer[op.id], name, numbers)

    def tail(self, op: ir.Op, node, row: np.ndarray, flops: float) -> float:
        """Flops for which the last wave of a product stands idle, on one device."""
        shape = self.graph.values[op.outputs[0]].shape
        layout = st.layouts(node, len(op.inputs), row)
        share = float(local_bytes(self.mesh, (1,) * len(shape), 1.0, layout)[0])
        return flops * idle(self.device.name, prod(shape) * share)

    def edge(self, edge, in_layer: bool) -> None:
        value = self.graph.values[self.model.samples[edge.value]]
        if edge.state and value.role != ir.PARAMETER:
            return  # a gradient on its way to its update: priced with data parallelism
        maker = int(self.graph.makers[self.model.samples[edge.value], 0])
        reader = self.space.nodes[edge.dst].members if edge.dst >= 0 else ()
        if maker >= 0 and self.graph.ops[maker].phase != ir.UPDATE:
            op = self.graph.ops[maker]
        elif reader:
            op = self.graph.ops[self.model.folded.representatives[reader[0]]]
        else:
            return
        nbytes = tensor_bytes(value.shape, value.dtype)
        src = self.layout((edge.src, edge.src_port))
        if edge.dst < 0:
            dst = np.full(len(self.mesh.axes), st.UNUSED)
        else:
            dst = self.layout((edge.dst, edge.dst_port))
        for kind, axis, moved in reshard_collectives(
            self.mesh, value.shape, nbytes, src.tolist(), dst.tolist()
        ):
            self.collective(op, in_layer, kind, axis, moved, edge.times)

    def collective(self, op, in_layer, kind: str, axis: str, nbytes: float, times: int) -> None:
        seconds = float(collective_time(kind, self.mesh.axis(axis), nbytes))
        numbers = (seconds * times, 0.0, nbytes * times, times)
        self.add(op, in_layer, f"{axis}:{kind}", numbers)

    def eager(self, i: int) -> None:
        node = self.space.nodes[i]
        row = self.rows[i]
        op = self.graph.ops[self.model.folded.representatives[node.members[0]]]
        for a, _ in st.eager_reductions(node, row):
            for r, v in enumerate(op.outputs):
                if v < 0:
                    continue
                value, port = self.graph.values[v], len(op.inputs) + r
                layout = st.layouts(node, port, row)
                share = local_bytes(self.mesh, (1,) * len(value.shape), 1.0, layout)[0]
                nbytes = tensor_bytes(value.shape, value.dtype) * float(share)
                in_layer = self.template.in_layer[op.id]
                self.collective(op, in_layer, "all_reduce", self.mesh.names[a], nbytes, op.repeat)

    def leaves(self) -> Iterator[Leaf]:
        config, mesh = self.task.model, self.mesh
        for v in self.graph.inputs:
            value = self.graph.values[v]
            if value.role != ir.PARAMETER:
                continue
            dims = dims_of(config, value.path)
            parts = 1
            spot = self.space.rest.get(int(self.model.folded.value_class[v]))
            if spot is not None:
                layout = self.layout(spot)
                cuts = (n for n, d in zip(mesh.shape, layout) if 0 <= d < len(dims))
                parts = prod(cuts)
            first = dims[0] is None and value.path.split("/")[-1] != "wpe"
            table = any(word in value.path for word in ("embed", "wte", "wpe"))
            where = LAYER if first else EMBED if table else HEAD
            size = prod(value.shape)
            yield Leaf(value.path, where, size, size // parts, EXPERT in dims)

    def saved(self) -> float:
        """Bytes of what the forward pass of a layer stacks for its backward pass."""
        total = 0.0
        for op in self.graph.ops:
            kind = self.graph.kinds[op.kind]
            if kind.primitive != ir.STACK or op.phase != ir.FORWARD:
                continue
            v = op.inputs[0]  # of one layer
            value = self.graph.values[v]
            spot = self.space.made.get(int(self.model.folded.value_class[v]))
            share = 1.0
            if spot is not None:
                layout = self.layout(spot).reshape(1, -1)
                share = float(local_bytes(self.mesh, (1,) * len(value.shape), 1.0, layout)[0])
            total += tensor_bytes(value.shape, value.dtype) * share
        return total
