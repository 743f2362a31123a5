"""What pricing a space needs of its graph, once for all meshes (`Model`: the work of each node, the
memory of each port), and what it comes to on one of them (`Priced`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.cost import compute
from jaxscaler.cost.memory import Lives
from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import FROM_HOST, SLICE, STACK, UPDATE, Kind, Op, OpGraph, dtype_bytes
from jaxscaler.solve.problem import StrategyProblem
from jaxscaler.space import strategies as st
from jaxscaler.space.kernels import Fused, kernels
from jaxscaler.space.nodes import Node, Space

VECTOR = "float32"  # elementwise work; its rate hardly matters, memory binds
# Share of a parameter's gather or a gradient's reduction that runs beside compute: the schedulers
# of XLA:GPU (latency hiding) and TPU start them early; simulated devices share one queue.
HIDDEN = {"NVIDIA": 0.6, "AMD": 0.6, "Google": 0.6}

NEAR = 16  # values that are looked at for a convolution behind a reduction
PICKING = ("gather", "slice", "dynamic_slice")  # read only what they return


@dataclass(frozen=True)
class Memory:
    """One usage entry per row group: what a node's port takes, `bytes` of the whole tensor each."""

    node: int
    port: int
    value: int  # value class
    nbytes: float
    lo: int
    hi: int
    count: int


@dataclass(frozen=True)
class Model:
    """What pricing needs of a graph, once for all meshes."""

    graph: OpGraph
    folded: Folded
    space: Space
    lives: Lives
    works: tuple[compute.Work | None, ...]  # per node; None for nodes of values
    memory: tuple[Memory, ...]
    fixed_bytes: int  # what every device holds whatever the plan: scalars, keys, constants
    samples: tuple[int, ...]  # value class -> one of its values
    instances: tuple[int, ...]  # value class -> how many values it has
    streams: Mapping[tuple[int, int], int]  # (cluster, value class) -> which tensor of its work
    extend: Callable[[Priced, Any], Priced] | None = None  # to a larger problem (recompute.py)
    parts: Mapping[int, int] = field(default_factory=dict)  # value class -> parts of it


@dataclass(frozen=True)
class Priced:
    """A problem and what its numbers mean."""

    model: Model
    mesh: Mesh
    problem: StrategyProblem
    strategies: tuple[np.ndarray, ...]  # per node [strategies, axes]; paired nodes [.., 2 axes]
    unit: float  # seconds per cost unit

    def layout(self, spot: tuple[int, int], choice: np.ndarray) -> np.ndarray:
        """Layout row of (node, port) under a choice of strategies."""
        node, port = spot
        row = self.strategies[node][choice[node] : choice[node] + 1]
        return st.layouts(self.model.space.nodes[node], port, row)[0]


def tensor_bytes(shape, dtype: str) -> float:
    """Bytes of a whole tensor."""
    return prod(shape) * dtype_bytes(dtype)


def host_seconds(nbytes, device):
    """Seconds that a value of so many bytes on a device costs if it goes to the host and comes
    back: twice over the link, less the share that runs beside compute (`HIDDEN`, assumed)."""
    return 2 * nbytes / device.host_bandwidth * (1 - HIDDEN.get(device.vendor, 0.0))


def model(graph: OpGraph, folded: Folded, space: Space, lives: Lives) -> Model:
    """Gather what all meshes share: the work of each node and the memory of each port."""
    buffered = np.zeros(len(graph.values), bool)
    buffered[lives.value] = True
    for v in (*graph.inputs, *graph.constants):
        buffered[v] = True
    for _, o in graph.state:
        if graph.outputs[o] >= 0:
            buffered[graph.outputs[o]] = True
    of_class = np.zeros(int(folded.value_class.max(initial=0)) + 1, bool)
    of_class[folded.value_class[buffered]] = True  # those of inner layers are not in `lives`
    buffered = of_class[folded.value_class]
    _, samples, instances = np.unique(folded.value_class, return_index=True, return_counts=True)
    fused = kernels(graph, folded, space, buffered)
    works = tuple(
        None
        if not node.members
        else _op_work(graph, folded, node.members[0], buffered)
        if node.what == "op"
        else _cluster_work(graph, folded, node, fused[i], samples)
        for i, node in enumerate(space.nodes)
    )
    rows = max(len(lives.moment), 1)
    memory, fixed = _memory(graph, folded, space, lives, rows)
    streams = {(i, k): n for i, f in fused.items() for n, (_, k) in enumerate(f.streams)}
    return Model(graph, folded, space, lives, works, tuple(memory), fixed,
                 tuple(samples.tolist()), tuple(instances.tolist()), streams)  # fmt: skip


def _op_work(graph, folded, c: int, buffered: np.ndarray) -> compute.Work:
    """Work of an op that is a node of its own.

    A kernel streams all its operands and results; a fused op only those that lie in memory, and of
    what it slices only as much as comes out; an alias nothing; a marker one iteration's part.
    """
    op = graph.ops[folded.representatives[c]]
    kind = graph.kinds[op.kind]
    size = {v: _value_bytes(graph, v) for v in (*op.inputs, *op.outputs) if v >= 0}
    tensors = [(slot, v) for slot, v in enumerate(op.inputs) if v >= 0]
    tensors += [(len(op.inputs) + r, v) for r, v in enumerate(op.outputs) if v >= 0]
    kernel = not kind.traits & {"fusable", "marker"}
    if kind.primitive in (SLICE, STACK):
        tensors = tensors[-1:] if kind.primitive == SLICE else tensors[:1]
    elif kind.primitive == FROM_HOST:  # see `fetched`
        tensors, kernel = [], False
    elif kind.traits & {"marker", "alias"}:
        tensors = []
    elif not kernel:
        tensors = [(port, v) for port, v in tensors if buffered[v]]
    if kind.primitive in PICKING:
        out = sum(size[v] for v in op.outputs if v >= 0)
        size = {v: min(nbytes, out) for v, nbytes in size.items()}
    if kind.nbytes is not None:  # as said of the kernel, shared out over its tensors
        scale = kind.nbytes / max(sum(size[v] for _, v in tensors), 1.0)
        size = {v: nbytes * scale for v, nbytes in size.items()}
    return compute.Work(
        flops=kind.flops,
        dtype=next((d for d in kind.operand_dtypes if not d.startswith("key<")), VECTOR),
        tensors=tuple((port, size[v]) for port, v in tensors),
        factors=tuple(range(len(kind.rule.factors))),
        runs=op.repeat * int(folded.multiplicity[c]),
        kernel=kernel,
        op=compute.op_of(kind.primitive, _is_batched(kind), _is_of_conv(graph, op)),
    )


def _is_of_conv(graph: OpGraph, op: Op) -> bool:
    """Whether an operand is what a convolution makes, through elementwise ops at most."""
    left, seen = [v for v in op.inputs if v >= 0], set()
    while left and len(seen) < NEAR:
        v = left.pop()
        maker = int(graph.makers[v, 0])
        if v in seen or maker < 0:
            continue
        seen.add(v)
        kind = graph.kinds[graph.ops[maker].kind]
        if kind.primitive == "conv_general_dilated":
            return True
        if kind.traits & {"elementwise", "alias"}:
            left += [u for u in graph.ops[maker].inputs if u >= 0]
    return False


def _is_batched(kind: Kind) -> bool:
    """Whether some factor is in every operand and result."""
    tensors = (*kind.rule.operands, *kind.rule.results)
    held = [{f for factors in tensor for f in factors} for tensor in tensors]
    return bool(held) and bool(set.intersection(*held))


def _cluster_work(graph, folded, node: Node, fused: Fused, samples) -> compute.Work:
    """Work of a cluster: its kernels share out what all of them do. One that stores nothing is
    computed by its readers."""
    flops = sum(
        graph.kinds[graph.ops[folded.representatives[c]].kind].flops * int(folded.multiplicity[c])
        for c in node.members
    )
    runs = max(fused.number, 1)
    sizes = {(port, k): _value_bytes(graph, samples[k]) for port, k in fused.streams}
    return compute.Work(
        flops=flops / runs,
        dtype=VECTOR,
        tensors=tuple((at[0], sizes[at] * n / runs) for at, n in fused.streams.items()),
        factors=tuple(range(len(node.factors))),
        runs=graph.ops[folded.representatives[node.members[0]]].repeat * runs,
        kernel=fused.number > 0,
    )


def _value_bytes(graph: OpGraph, v: int) -> float:
    return tensor_bytes(graph.values[v].shape, graph.values[v].dtype)


def _memory(graph, folded, space, lives, rows) -> tuple[list[Memory], int]:
    classes = folded.value_class.tolist()
    entries: Counter[tuple[int, int, int, float, int, int]] = Counter()
    fixed = 0.0

    def note(v: int, spot, lo: int, hi: int, share: float) -> None:
        entries[(*spot, classes[v], share * _value_bytes(graph, v), lo, hi)] += 1

    arguments = [(classes[v], v) for v in (*graph.inputs, *graph.constants)]
    held = Counter(k for k, _ in arguments)
    times: dict[int, float] = {}
    if graph.under_way > 1:
        times = {v: graph.under_way for o, _, v in graph.reads.tolist() if graph.waits(v, o)}
    for k, v in dict(arguments).items():
        spot, nbytes = space.rest.get(k), _value_bytes(graph, v)
        if spot is None:
            fixed += held[k] * nbytes
        else:
            entries[(*spot, k, nbytes * times.get(v, 1.0), 0, rows)] += held[k]
    live = zip(*(column.tolist() for column in (lives.value, lives.share, lives.lo, lives.hi)))
    for v, share, lo, hi in live:
        k = classes[v]
        spot = space.use.get(k) or space.made.get(k)
        if spot is not None:
            note(v, spot, lo, hi, share)
    found = _entries(entries)
    found += _paired_reads(graph, folded, space, lives)
    return found, int(fixed)


def _paired_reads(graph, folded, space, lives) -> list[Memory]:
    """Copies of state in the layout it is read in, from its first reader to its last."""
    paired = {k: spot for k, spot in space.use.items() if space.nodes[spot[0]].paired}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    classes = folded.value_class.tolist()
    inputs = {v for v in graph.inputs if classes[v] in paired}
    reads = graph.reads[np.isin(graph.reads[:, 2], list(inputs))]
    for o, _, v in reads.tolist():
        if graph.ops[o].phase != UPDATE:
            first.setdefault(v, o)
            last[v] = o
    entries: Counter[tuple[int, int, int, float, int, int]] = Counter()
    for v in inputs:
        lo = int(np.searchsorted(lives.moment, first.get(v, 0), side="left"))
        hi = int(np.searchsorted(lives.moment, last.get(v, 0), side="right"))
        value = graph.values[v]
        if hi > lo:
            key = (*paired[classes[v]], classes[v], tensor_bytes(value.shape, value.dtype), lo, hi)
            entries[key] += 1
    return _entries(entries)


def _entries(counted: Counter[tuple[int, int, int, float, int, int]]) -> list[Memory]:
    return [
        Memory(node, port, value, nbytes, lo, hi, count)
        for (node, port, value, nbytes, lo, hi), count in counted.items()
    ]
