"""A space on a mesh as a `StrategyProblem`: strategies, their costs, the costs between them,
memory.

Costs are integers in units of `unit` seconds, usages are bytes per device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.cost import compute
from jaxscaler.cost.collective import collective_time
from jaxscaler.cost.reshard import local_bytes, reshard_time
from jaxscaler.graph.ir import FROM_HOST
from jaxscaler.solve.problem import INFINITY, StrategyProblem
from jaxscaler.solve.shared import Shared
from jaxscaler.space import strategies as st
from jaxscaler.space.nodes import Node
from jaxscaler.space.problem import HIDDEN, Model, Priced, host_seconds, tensor_bytes

RESOLUTION = 2.0**-32  # of the least conceivable step time: one cost unit

Filter = Callable[[Node, np.ndarray, Mesh], np.ndarray]


def price(
    model: Model, mesh: Mesh, device, limit: int | None, keep: Filter | None = None
) -> Priced:
    """The problem of a graph on a mesh. `keep` masks strategies out (constraints)."""
    return tabulate(model, mesh, device, limit, keep).priced()


@dataclass(frozen=True)
class Tabled:
    """A `Priced` before its problem is written out: edges of the same price share a table."""

    model: Model
    mesh: Mesh
    shared: Shared
    strategies: tuple[np.ndarray, ...]
    unit: float

    def priced(self) -> Priced:
        return Priced(self.model, self.mesh, self.shared.whole(), self.strategies, self.unit)


def tabulate(
    model: Model, mesh: Mesh, device, limit: int | None, keep: Filter | None = None
) -> Tabled:
    """As `price`, but not yet written out."""
    tabled = _Pricer(model, mesh, device, keep).run(limit)
    if model.extend is None:
        return tabled
    priced = model.extend(tabled.priced(), device)
    return Tabled(model, mesh, Shared.of(priced.problem), priced.strategies, priced.unit)


class Part(NamedTuple):
    """One of the edges between two nodes: `weight` times a table, turned or not."""

    table: np.ndarray
    weight: float
    turned: bool

    def costs(self) -> np.ndarray:
        return self.weight * (self.table.T if self.turned else self.table)


class _Pricer:
    def __init__(self, model: Model, mesh: Mesh, device, keep: Filter | None):
        self.model, self.mesh, self.device, self.keep = model, mesh, device, keep
        self.sizes = tuple(mesh.shape)
        self.hidden = HIDDEN.get(device.vendor, 0.0)
        self.rows: list[np.ndarray] = []
        self.port_layouts: dict[tuple[int, int], np.ndarray] = {}
        # Rows and layouts are made once each, so that identity tells them apart.
        self.enumerated: dict[tuple, np.ndarray] = {}
        self.distinct: dict[bytes, np.ndarray] = {}
        self.by_rows: dict[tuple, np.ndarray] = {}
        self.once: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.shares: dict[tuple[int, int], np.ndarray] = {}
        self.computed: dict[tuple, np.ndarray] = {}
        self.tables: dict[tuple, np.ndarray] = {}

    def run(self, limit: int | None) -> Tabled:
        nodes = self.model.space.nodes
        for node in nodes:
            key = (node.factors, node.ports, node.paired)
            if key not in self.enumerated:
                self.enumerated[key] = st.strategies(node, self.sizes)
            rows = self.enumerated[key]
            if self.keep is not None:
                mask = self.keep(node, rows, self.mesh)
                if not mask.all():
                    rows = self.enumerated.setdefault((*key, mask.tobytes()), rows[mask])
            self.rows.append(rows)
        costs = [self.node_cost(i) for i in range(len(nodes))]
        edges = self.edges(costs)
        ideal = sum(float(c[np.isfinite(c)].min()) for c in costs if np.isfinite(c).any())
        unit = max(ideal, 1e-9) * RESOLUTION
        shared = self.assemble(costs, edges, unit, limit)
        return Tabled(self.model, self.mesh, shared, tuple(self.rows), unit)

    def layouts(self, node: int, port: int) -> np.ndarray:
        found = self.port_layouts.get((node, port))
        if found is None:
            found = self.layouts_of(self.model.space.nodes[node], port, self.rows[node])
            self.port_layouts[node, port] = found
        return found

    def layouts_of(self, node: Node, port: int, rows: np.ndarray) -> np.ndarray:
        key = (id(rows), port, node.what == "op", node.num_results)  # rows tell factors and ports
        found = self.by_rows.get(key)
        if found is None:
            found = st.layouts(node, port, rows)
            found = self.by_rows[key] = self.distinct.setdefault(found.tobytes(), found)
        return found

    def local(self, node: int, port: int) -> np.ndarray:
        """Share of a port's tensor on one device, [strategies]."""
        layouts, rank = self.layouts(node, port), len(self.model.space.nodes[node].ports[port].dims)
        found = self.shares.get((id(layouts), rank))
        if found is None:
            found = local_bytes(self.mesh, (1,) * rank, 1.0, layouts)
            self.shares[id(layouts), rank] = found
        return found

    def node_cost(self, i: int) -> np.ndarray:
        node, rows = self.model.space.nodes[i], self.rows[i]
        cost = np.zeros(len(rows))
        work = self.model.works[i]
        if work is not None:
            key = (id(rows), node.what == "op", node.num_results, work)
            if key not in self.computed:
                parts = st.parts(node, rows, self.sizes)
                local = {port: self.local(i, port) for port, _ in work.tensors}
                self.computed[key] = compute.seconds(work, parts, local, self.device)
            cost += self.computed[key]
        if node.what == "op":
            cost += self.eager(i) + self.shifted(i) + self.fetched(i)
        if node.what == "batch":
            (k,) = node.values
            value = self.model.graph.values[self.model.samples[k]]
            fed = tensor_bytes(value.shape, value.dtype) * self.local(i, 0)
            cost += self.model.instances[k] * fed / self.device.host_bandwidth
        if node.paired:
            (k,) = node.values
            value = self.model.graph.values[self.model.samples[k]]
            nbytes = tensor_bytes(value.shape, value.dtype)
            table = self.reshard(value.shape, nbytes, self.layouts(i, 0), self.layouts(i, 1))
            count = self.model.instances[k]
            cost += np.diagonal(table) * count * (1 - self.hidden)
        return cost

    def eager(self, i: int) -> np.ndarray:
        """What is contracted by other than a sum combines at once: all-reduce each result."""
        node, rows = self.model.space.nodes[i], self.rows[i]
        out = np.zeros(len(rows))
        columns = st.eager_reductions(node, rows)
        if not columns:
            return out
        (c,) = node.members
        op = self.model.graph.ops[self.model.folded.representatives[c]]
        runs = op.repeat * int(self.model.folded.multiplicity[c])
        for r, v in enumerate(op.outputs):
            if v < 0:
                continue
            value = self.model.graph.values[v]
            port = len(op.inputs) + r
            nbytes = tensor_bytes(value.shape, value.dtype) * self.local(i, port)
            for a, f in columns:
                time = collective_time("all_reduce", self.mesh.axes[a], nbytes)
                out += np.where(rows[:, a] == f, time, 0.0) * runs
        return out

    def shifted(self, i: int) -> np.ndarray:
        """Of a dim that is shifted, one element goes from each device to the next."""
        node, rows = self.model.space.nodes[i], self.rows[i]
        out = np.zeros(len(rows))
        columns = st.shifts(node, rows)
        if not columns:
            return out
        (c,) = node.members
        op = self.model.graph.ops[self.model.folded.representatives[c]]
        runs = op.repeat * int(self.model.folded.multiplicity[c])
        value = self.model.graph.values[op.inputs[0]]
        parts = st.parts(node, rows, self.sizes)
        for a, f in columns:
            share = self.local(i, 0) * parts[:, f] / node.factors[f].size
            time = collective_time(
                "collective_permute",
                self.mesh.axes[a],
                tensor_bytes(value.shape, value.dtype) * share,
            )
            out += np.where(rows[:, a] == f, time, 0.0) * runs
        return out

    def fetched(self, i: int) -> np.ndarray:
        """What comes from the host went there before: see `host_seconds`."""
        (c,) = self.model.space.nodes[i].members
        op = self.model.graph.ops[self.model.folded.representatives[c]]
        kind = self.model.graph.kinds[op.kind]
        if kind.primitive != FROM_HOST:
            return np.zeros(len(self.rows[i]))
        nbytes = tensor_bytes(kind.operand_shapes[0], kind.operand_dtypes[0]) * self.local(i, 0)
        runs = op.repeat * int(self.model.folded.multiplicity[c])
        return runs * host_seconds(nbytes, self.device)

    def reshard(self, shape, nbytes, src, dst) -> np.ndarray:
        key = (tuple(shape), nbytes, id(src), id(dst))
        found = self.tables.get(key)
        if found is None:
            (a, ia), (b, ib) = self.unique(src), self.unique(dst)
            table = reshard_time(self.mesh, tuple(shape), nbytes, a, b)
            found = self.tables[key] = table[np.ix_(ia, ib)]
        return found

    def unique(self, layouts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(different rows, which of them each row is) of layouts that `distinct` holds."""
        found = self.once.get(id(layouts))
        if found is None:
            rows, at = np.unique(layouts, axis=0, return_inverse=True)
            found = self.once[id(layouts)] = rows, at.ravel()
        return found

    def edges(self, costs: list[np.ndarray]) -> dict[tuple[int, int], list[Part]]:
        """The parts of the table between each pair of nodes; what has one end goes into `costs`."""
        found: dict[tuple[int, int], list[Part]] = {}
        whole = np.full((1, len(self.sizes)), st.UNUSED)
        whole = self.distinct.setdefault(whole.tobytes(), whole)
        for edge in self.model.space.edges:
            value = self.model.graph.values[self.model.samples[edge.value]]
            parts = self.model.parts.get(edge.value, 1)
            nbytes = tensor_bytes(value.shape, value.dtype) / parts
            weight = edge.times * parts * ((1 - self.hidden) if edge.state else 1.0)
            src = self.layouts(edge.src, edge.src_port)
            if edge.dst < 0:
                table = self.reshard(value.shape, nbytes, src, whole)
                costs[edge.src] = costs[edge.src] + weight * table[:, 0]
                continue
            table = self.reshard(value.shape, nbytes, src, self.layouts(edge.dst, edge.dst_port))
            if edge.src == edge.dst:
                costs[edge.src] = costs[edge.src] + weight * np.diagonal(table)
                continue
            ends = min(edge.src, edge.dst), max(edge.src, edge.dst)
            found.setdefault(ends, []).append(Part(table, weight, edge.src > edge.dst))
        return found

    def assemble(self, costs, edges, unit, limit) -> Shared:
        def integers(x: np.ndarray) -> np.ndarray:
            with np.errstate(invalid="ignore"):
                scaled = np.rint(np.where(np.isfinite(x), x / unit, 0)).astype(np.int64)
            return np.where(np.isfinite(x), scaled, INFINITY)

        def pointers(lengths) -> np.ndarray:
            return np.concatenate(([0], np.cumsum(np.array(lengths, np.int64)))).astype(np.int64)

        at: dict[tuple, int] = {}
        tables: list[np.ndarray] = []
        edge_at, end = [], 0
        for parts in edges.values():
            key = tuple((id(part.table), part.weight, part.turned) for part in parts)
            if key not in at:
                total = sum(part.costs() for part in parts[1:]) + parts[0].costs()
                tables.append(integers(total.ravel()))
                at[key], end = end, end + total.size
            edge_at.append(at[key])
        usages, node, lo, hi = self.usages()
        none = np.zeros(0, np.int64)
        rest = StrategyProblem(
            name=str(self.mesh),
            node_ptr=pointers([len(c) for c in costs]),
            node_costs=integers(np.concatenate(costs)),
            edge_nodes=np.array(list(edges), np.int64).reshape(-1, 2),
            edge_ptr=none, edge_costs=none,
            usage_node=node, usage_lo=lo, usage_hi=hi,
            usage_ptr=pointers([len(u) for u in usages]),
            usages=np.concatenate(usages) if usages else none,
            usage_limit=None if limit is None else int(limit) - self.model.fixed_bytes,
        )  # fmt: skip
        return Shared(rest, np.array(edge_at, np.int64), np.concatenate(tables) if tables else none)

    def usages(self):
        """Usage entries, those of one node and one interval summed."""
        total: dict[tuple[int, int, int], np.ndarray] = {}
        for m in self.model.memory:
            node = self.model.space.nodes[m.node]
            nbytes = m.nbytes * self.local(m.node, m.port) * m.count
            if node.paired and m.port == 1:  # no second copy when it is read as it lies
                same = (self.layouts(m.node, 0) == self.layouts(m.node, 1)).all(axis=1)
                nbytes = np.where(same, 0.0, nbytes)
            key = (m.node, m.lo, m.hi)
            old = total.get(key)
            total[key] = nbytes if old is None else old + nbytes
        keys = np.array(list(total), np.int64).reshape(-1, 3)
        usages = [np.ceil(u).astype(np.int64) for u in total.values()]
        return usages, keys[:, 0], keys[:, 1], keys[:, 2]
