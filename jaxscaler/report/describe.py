"""A choice of strategies in words and numbers: decisions, tensors, collectives, memory, time."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import lcm, prod

import numpy as np

from jaxscaler.cost import compute
from jaxscaler.cost.collective import collective_time
from jaxscaler.cost.reshard import reshard_collectives
from jaxscaler.graph import ir
from jaxscaler.plan import Decision, Prediction, Specs, Tensor, Traffic
from jaxscaler.report.memory import device_memory
from jaxscaler.space import strategies as st
from jaxscaler.space.nodes import factor_name
from jaxscaler.space.problem import Priced, host_seconds, tensor_bytes

LARGE = 1 << 20  # bytes from which a tensor is worth a line


def decisions(priced: Priced, choice: np.ndarray) -> tuple[Decision, ...]:
    """One decision per node."""
    out = []
    axes = priced.mesh.names
    instances, folded = priced.model.instances, priced.model.folded
    for i, node in enumerate(priced.model.space.nodes):
        row = priced.strategies[i][choice[i]]
        cuts, *in_use = (
            tuple((a, factor_name(node, f)) for a, f in zip(axes, half) if f != st.UNUSED)
            for half in np.split(row, 2 if node.paired else 1)
        )
        if node.members:
            count = int(folded.multiplicity[node.members[0]])
        else:
            count = instances[node.values[0]]
        out.append(Decision(node.name, node.what, count, cuts, in_use[0] if in_use else None))
    return tuple(out)


def spec_of(priced: Priced, spot: tuple[int, int], choice: np.ndarray) -> Specs:
    """Axes per dim of a node's port; a partial sum cuts nothing."""
    layout = priced.layout(spot, choice)
    rank = len(priced.model.space.nodes[spot[0]].ports[spot[1]].dims)
    names = priced.mesh.names
    return tuple(tuple(n for n, d in zip(names, layout) if d == dim) for dim in range(rank))


def tensors(priced: Priced, choice: np.ndarray) -> tuple[Tensor, ...]:
    """Every leaf of the arguments, then the large activations (one per class)."""
    model = priced.model
    graph, space = model.graph, model.space
    classes = model.folded.value_class
    use_of_cast = _casts(graph)

    @cache  # layers share their spots
    def where(spot: tuple[int, int]) -> tuple[Specs, int]:
        lies = spec_of(priced, spot, choice)
        return lies, _parts(priced, lies)

    out = []
    for v in graph.inputs:
        value, k = graph.values[v], int(classes[v])
        spot = space.rest.get(k)
        nbytes = tensor_bytes(value.shape, value.dtype)
        lies, parts = where(spot) if spot else (((),) * len(value.shape), 1)
        used = space.use.get(int(classes[use_of_cast.get(v, v)]))
        used_as = where(used)[0] if used and value.role == ir.PARAMETER else None
        held = nbytes / parts
        out.append(Tensor(value.path, value.role, value.shape, value.dtype, lies, held, used_as))
    seen = set()
    for m in model.memory:
        value = graph.values[model.samples[m.value]]
        if m.nbytes < LARGE or value.path or m.value in seen:
            continue
        seen.add(m.value)
        lies, parts = where((m.node, m.port))
        held = m.nbytes / parts
        name = space.nodes[m.node].name
        out.append(Tensor(name, value.role, value.shape, value.dtype, lies, held))
    return tuple(out)


def _casts(graph) -> dict[int, int]:
    """Input -> the value that a cast makes of it."""
    inputs = set(graph.inputs)
    return {
        op.inputs[0]: op.outputs[0]
        for op in graph.ops
        if graph.kinds[op.kind].primitive == "convert_element_type" and op.inputs[0] in inputs
    }


def _parts(priced: Priced, spec: Specs) -> int:
    sizes = dict(zip(priced.mesh.names, priced.mesh.shape))
    n = 1
    for dim in spec:
        for axis in dim:
            n *= sizes[axis]
    return n


def traffic(priced: Priced, choice: np.ndarray, device) -> tuple[Traffic, ...]:
    """What moves in a step, the dearest first: every collective, and the batch from the host."""
    model, mesh = priced.model, priced.mesh
    graph, space = model.graph, model.space
    found: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])
    makers = {
        int(model.folded.value_class[v]): graph.ops[o]
        for o in model.folded.representatives
        for v in graph.ops[o].outputs
        if v >= 0
    }

    def add(kind, axis, nbytes, count, where, source):
        entry = found[kind, axis, nbytes, where, source]
        entry[0] += count
        entry[1] += count * float(collective_time(kind, mesh.axis(axis), nbytes))

    def move(value_class, src, dst, count):
        value = graph.values[model.samples[value_class]]
        nbytes = tensor_bytes(value.shape, value.dtype)
        maker = makers.get(value_class)
        where = value.path or (
            f"{maker.scope}:{graph.kinds[maker.kind].primitive}" if maker else ""
        )
        source = maker.source if maker else ""
        for kind, axis, moved in reshard_collectives(mesh, value.shape, nbytes, src, dst):
            add(kind, axis, moved, count, where, source)

    for edge in space.edges:
        src = priced.layout((edge.src, edge.src_port), choice)
        dst = (
            np.full(len(mesh.axes), st.UNUSED)
            if edge.dst < 0
            else priced.layout((edge.dst, edge.dst_port), choice)
        )
        move(edge.value, src, dst, edge.times)
    for i, node in enumerate(space.nodes):
        if node.paired:
            (k,) = node.values
            count = model.instances[k]
            move(k, priced.layout((i, 0), choice), priced.layout((i, 1), choice), count)
        if node.what == "batch":
            (k,) = node.values
            value = graph.values[model.samples[k]]
            whole = tensor_bytes(value.shape, value.dtype)
            nbytes = whole / _parts(priced, spec_of(priced, (i, 0), choice))
            entry = found["feed", "host", nbytes, value.path, ""]
            entry[0] += model.instances[k]
            entry[1] += model.instances[k] * nbytes / device.host_bandwidth
        if node.what != "op":
            continue
        row = priced.strategies[i][choice[i]]
        op = graph.ops[model.folded.representatives[node.members[0]]]
        kind = graph.kinds[op.kind]
        runs = op.repeat * int(model.folded.multiplicity[node.members[0]])
        if kind.primitive == ir.FROM_HOST:
            nbytes = tensor_bytes(kind.operand_shapes[0], kind.operand_dtypes[0])
            nbytes /= _parts(priced, spec_of(priced, (i, 0), choice))
            entry = found["offload", "host", nbytes, op.scope, op.source]
            entry[0] += 2 * runs
            entry[1] += runs * host_seconds(nbytes, device)
        for a, _ in st.eager_reductions(node, row.reshape(1, -1)):
            for r, v in enumerate(op.outputs):
                if v >= 0:
                    value = graph.values[v]
                    spec = spec_of(priced, (i, len(op.inputs) + r), choice)
                    nbytes = tensor_bytes(value.shape, value.dtype) / _parts(priced, spec)
                    where = f"{op.scope}:{graph.kinds[op.kind].primitive}"
                    add("all_reduce", mesh.names[a], nbytes, runs, where, op.source)
        for a, f in st.shifts(node, row.reshape(1, -1)):
            value = graph.values[op.inputs[0]]
            spec = spec_of(priced, (i, 0), choice)
            parts = st.parts(node, row.reshape(1, -1), tuple(mesh.shape))[0, f]
            nbytes = tensor_bytes(value.shape, value.dtype) / _parts(priced, spec)
            nbytes *= int(parts) / node.factors[f].size
            where = f"{op.scope}:{graph.kinds[op.kind].primitive}"
            add("collective_permute", mesh.names[a], nbytes, runs, where, op.source)
    rows = [
        Traffic(kind, axis, nbytes, int(n), seconds, value, source)
        for (kind, axis, nbytes, value, source), (n, seconds) in found.items()
    ]
    return tuple(sorted(rows, key=lambda x: (-x.seconds, x.value, x.kind, x.axis)))


def prediction(priced: Priced, choice: np.ndarray, device, limit: float) -> Prediction:
    """Seconds of the step: compute, exposed communication; memory by role at the fullest moment."""
    model = priced.model
    total = cost_of(priced, choice)
    busy = 0.0
    sizes = tuple(priced.mesh.shape)
    for i, work in enumerate(model.works):
        if work is None:
            continue
        row = priced.strategies[i][choice[i]].reshape(1, -1)
        local = {
            port: np.array([1.0 / _parts(priced, spec_of(priced, (i, port), choice))])
            for port, _ in work.tensors
        }
        parts = st.parts(model.space.nodes[i], row, sizes)
        busy += float(compute.seconds(work, parts, local, device)[0])
    peak, by_role = device_memory(priced, choice, device)
    return Prediction(total, busy, total - busy, peak, limit, by_role)


def cost_of(priced: Priced, choice: np.ndarray) -> float:
    """Seconds per step that the problem gives to a choice."""
    p = priced.problem
    total = int(p.node_costs[p.node_ptr[:-1] + choice].sum())
    if len(p.edge_nodes):
        i, j = p.edge_nodes[:, 0], p.edge_nodes[:, 1]
        width = p.node_ptr[j + 1] - p.node_ptr[j]
        total += int(p.edge_costs[p.edge_ptr[:-1] + choice[i] * width + choice[j]].sum())
    return total * priced.unit


def peak_memory(priced: Priced, choice: np.ndarray) -> tuple[float, tuple[tuple[str, float], ...]]:
    """(bytes at the fullest of the rows that the search bounds, the same by role)."""
    model = priced.model
    rows = max(len(model.lives.moment), 1)
    by_role: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(rows + 1))
    for m in model.memory:
        spec = spec_of(priced, (m.node, m.port), choice)
        nbytes = m.nbytes / _parts(priced, spec) * m.count
        second = model.space.nodes[m.node].paired and m.port == 1
        if (
            second
            and (priced.layout((m.node, 0), choice) == priced.layout((m.node, 1), choice)).all()
        ):
            continue  # read as it lies: no second copy
        role = model.graph.values[model.samples[m.value]].role
        by_role[role][m.lo] += nbytes
        by_role[role][m.hi] -= nbytes
    by_role["fixed"][0] += model.fixed_bytes
    profiles = {role: np.cumsum(change)[:rows] for role, change in by_role.items()}
    total = np.sum(list(profiles.values()), axis=0)
    at = int(np.argmax(total))
    parts = sorted(
        ((r, float(p[at])) for r, p in profiles.items() if p[at] > 0), key=lambda x: -x[1]
    )
    return float(total[at]), tuple(parts)


def remarks(priced: Priced, choice: np.ndarray) -> tuple[str, ...]:
    """What a user should know: dims that devices do not divide, large replicated tensors."""
    model, devices = priced.model, priced.mesh.size
    graph = model.graph
    notes = []
    for v in graph.inputs:
        value = graph.values[v]
        if value.role not in (ir.BATCH, ir.PARAMETER) or prod(value.shape) <= 1 or devices == 1:
            continue
        if value.role == ir.BATCH and value.shape[0] % devices:
            notes.append(
                f"{value.path}: its batch of {value.shape[0]} does not divide by {devices} "
                "devices, so it can not be split over all of them; "
                f"{_next(value.shape[0], devices)} would"
            )
        if value.role != ir.PARAMETER or tensor_bytes(value.shape, value.dtype) < LARGE:
            continue
        for d, n in enumerate(value.shape):
            if n > devices and any(n % s for s in priced.mesh.shape) and n == max(value.shape):
                notes.append(
                    f"{value.path}: dim {d} of {n} does not divide by {devices} devices and is "
                    f"never split at rest; padded to {_next(n, lcm(devices, 128))} it could be"
                )
    if devices > 1 and all(
        (rows[c] == st.UNUSED).all() for rows, c in zip(priced.strategies, choice)
    ):
        notes.append(
            f"everything lies whole on each of the {devices} devices: for a step this small, "
            "communication would cost more than the devices save"
        )
    return tuple(dict.fromkeys(notes))


def _next(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
