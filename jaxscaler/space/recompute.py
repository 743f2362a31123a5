"""Recomputation as part of a plan space: what a segment keeps, with the layouts, in one problem.

The graph is that of the step with *every* segment recomputed and nothing kept (`graph` below). So
each op that could run again is there, at its place in the backward pass, with its edges and its
buffers. What is then decided, pairwise and exactly:

| node | states |
|---|---|
| an op (or cluster) that runs again | run, under each strategy; off: it does not, one strategy |
| the use of a value that it makes | again; kept; on the host: each in each layout; off: not read |
| segments whose ops share their nodes | again; whole: as the author wrote them |

An op that is off reads nothing and offers nothing. A value that is kept costs no second run, has
the layout of its first copy in the forward pass, and stays in memory from there on; one that goes
to the host costs the way there and back, and takes memory as one that is made again; one that is
off may not be read. Whether a value is kept at all is asked where it has a buffer; what is fused
into its readers runs with them. A segment that is whole keeps all such values, and nothing of it
runs again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from jaxscaler.cost import compute
from jaxscaler.cost.memory import enclosing, rules_for
from jaxscaler.cost.reshard import local_bytes
from jaxscaler.graph.ir import Loop
from jaxscaler.rewrite.changes import Recompute
from jaxscaler.solve.problem import INFINITY, StrategyProblem
from jaxscaler.space import strategies as st
from jaxscaler.space.again import HOSTED, KEPT, OFF, RUN, STAYS, Recomputation
from jaxscaler.space.kept import Lifetimes, Pair, lives_of
from jaxscaler.space.problem import VECTOR, Priced, host_seconds, tensor_bytes


def changes_of(found: Recomputation, priced: Priced, choice: np.ndarray) -> tuple[Recompute, ...]:
    """What a choice of strategies of an extended problem says of each segment.

    A segment outside of loops of which nothing that has a buffer is made again is left as it is.
    """
    stays: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)  # segment, state
    again: set[int] = set()
    for node, pairs in found.kept.items():
        state = _state(priced, found, node, choice)
        for pair in pairs:
            stays[pair.segment, state].add((pair.equation, pair.result))
            if state in (RUN, HOSTED):
                again.add(pair.segment)
    return tuple(
        Recompute(segment, *(tuple(sorted(stays[n, state])) for state in STAYS))
        for n, segment in enumerate(found.segments)
        if n in again or segment.inside
    )


def _state(priced: Priced, found: Recomputation, node: int, choice: np.ndarray) -> int:
    """The state of a use node, from where in the node's strategies the choice is."""
    states, at = found.states(node), int(choice[node])
    each = (len(priced.strategies[node]) - 1) // (len(states) - 1)
    return states[min(at // each, len(states) - 1)]


# -- on a mesh ---------------------------------------------------------------------------------


def extended(
    priced: Priced, found: Recomputation, device, forced: Mapping[int, frozenset[int]] = {}
) -> Priced:
    """`priced` with the states of recomputation: other strategies, costs, edges and usages.

    `forced`: the states that a node of `found.use_nodes` may be in, where constraints say.
    """
    return _Extension(priced, found, device, forced).run()


class _Extension:
    def __init__(self, priced: Priced, found: Recomputation, device, forced):
        self.priced, self.found, self.device, self.forced = priced, found, device, forced
        self.model, self.old = priced.model, priced.problem
        self.space = self.model.space
        self.sizes = np.diff(self.old.node_ptr)
        self.gains: dict[int, np.ndarray] = {}  # of an op: by all that it need not stream
        self.of: list[np.ndarray] = []  # per node: strategy -> the old one
        self.state: list[np.ndarray] = []
        for i, n in enumerate(self.sizes.tolist()):
            all_of = np.arange(n)
            states = found.states(i)
            parts = [all_of[:1] if s == OFF else all_of for s in states]
            self.of.append(np.concatenate(parts))
            self.state.append(np.repeat(states, [len(p) for p in parts]))

    def run(self) -> Priced:
        costs = [self.node_costs(i) for i in range(len(self.of))]
        edges = self.edges()
        costs += [np.zeros(2, np.int64)] * len(self.found.wholes)
        usages = self.usages()
        pairs = list(edges)

        def pointers(lengths) -> np.ndarray:
            return np.concatenate(([0], np.cumsum(np.array(lengths, np.int64)))).astype(np.int64)

        empty = np.zeros(0, np.int64)
        problem = StrategyProblem(
            name=self.old.name,
            node_ptr=pointers([len(c) for c in costs]),
            node_costs=np.concatenate(costs),
            edge_nodes=np.array(pairs, np.int64).reshape(-1, 2),
            edge_ptr=pointers([t.size for t in edges.values()]),
            edge_costs=np.concatenate([t.ravel() for t in edges.values()]) if edges else empty,
            usage_node=np.array([u[0] for u in usages], np.int64),
            usage_lo=np.array([u[1] for u in usages], np.int64),
            usage_hi=np.array([u[2] for u in usages], np.int64),
            usage_ptr=pointers([len(u[3]) for u in usages]),
            usages=np.concatenate([u[3] for u in usages]) if usages else empty,
            usage_limit=self.old.usage_limit,
        )
        rows = [r[of] for r, of in zip(self.priced.strategies, self.of)]
        rows += [np.full((2, len(self.mesh_sizes)), st.UNUSED)] * len(self.found.wholes)
        return replace(self.priced, problem=problem, strategies=tuple(rows))

    # -- costs -------------------------------------------------------------------------------------

    def units(self, seconds: np.ndarray) -> np.ndarray:
        return np.rint(seconds / self.priced.unit).astype(np.int64)

    def node_costs(self, i: int) -> np.ndarray:
        of, state = self.of[i], self.state[i]
        old = self.old.node_costs[self.old.node_ptr[i] : self.old.node_ptr[i + 1]]
        cost = np.where(state == OFF, 0, old[of])
        if i in self.found.kept:
            written = self.units(self.stacked(i))[of]
            cost = cost + np.where(np.isin(state, STAYS), written, 0)
        if i in self.found.hosted:
            pairs = self.found.kept[i]
            value = self.model.graph.values[pairs[0].first]
            nbytes = tensor_bytes(value.shape, value.dtype) * self.local(i, 0)
            moved = self.units(len(pairs) * host_seconds(nbytes, self.device))
            cost = cost + np.where(state == HOSTED, moved[of], 0)
        if i in self.forced:
            cost = np.where(np.isin(state, list(self.forced[i])), cost, INFINITY)
        return cost

    def local(self, node: int, port: int) -> np.ndarray:
        dims = self.space.nodes[node].ports[port].dims
        layouts = st.layouts(self.space.nodes[node], port, self.priced.strategies[node])
        return local_bytes(self.priced.mesh, (1,) * len(dims), 1.0, layouts)

    def stacked(self, i: int) -> np.ndarray:
        """Seconds to write a kept value to a loop's stack and to read it back, or to write one
        that the forward pass fuses into its readers: [strategies]."""
        runs = 0
        for pair in self.found.kept[i]:
            maker = int(self.model.graph.makers[pair.first, 0])
            if self.loops_of(pair):
                runs += 2 * self.model.graph.ops[maker].repeat
            elif not self.lives.has[pair.first]:
                runs += 1
        if not runs:
            return np.zeros(self.sizes[i])
        value = self.model.graph.values[self.found.kept[i][0].first]
        nbytes = tensor_bytes(value.shape, value.dtype)
        work = compute.Work(0.0, VECTOR, ((0, nbytes),), (), runs, False)
        ones = np.ones((self.sizes[i], 1), np.int64)
        return compute.seconds(work, ones, {0: self.local(i, 0)}, self.device)

    @cached_property
    def lives(self) -> Lifetimes:
        """When the values of the graph live, and which have buffers."""
        return lives_of(self.model.graph, rules_for(self.device.vendor, self.device.name))

    def loops_of(self, pair: Pair) -> list[Loop]:
        """The loops of the forward pass whose iterations stack a value."""
        enclosing, maker = self.enclosing, self.model.graph.makers[:, 0]
        around = enclosing[maker[pair.again]]
        return [loop for loop in enclosing[maker[pair.first]] if loop not in around]

    @cached_property
    def enclosing(self) -> list[tuple[Loop, ...]]:
        """Per op: the loops around it, outermost first."""
        return enclosing(self.model.graph)

    @cached_property
    def readers(self) -> Mapping[int, list[tuple[int, int]]]:
        """Value -> (op, operand) that read it."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for op, slot, v in self.model.graph.reads.tolist():
            found[v].append((op, slot))
        return found

    def edges(self) -> dict[tuple[int, int], np.ndarray]:
        moded = self.found.op_nodes | self.found.use_nodes
        directions = {(e.src, e.dst) for e in self.space.edges if e.dst >= 0}
        out: dict[tuple[int, int], np.ndarray] = {}
        for e, (i, j) in enumerate(self.old.edge_nodes.tolist()):
            table = self.old.edge_costs[self.old.edge_ptr[e] : self.old.edge_ptr[e + 1]]
            table = table.reshape(self.sizes[i], self.sizes[j])
            if i in moded or j in moded:
                table = self.conditional(i, j, table[np.ix_(self.of[i], self.of[j])], directions)
            out[i, j] = table if (i, j) not in out else _sum(out[i, j], table)
        for node, pairs in self.found.kept.items():
            for spot in {self.first_spot(pair) for pair in pairs}:
                self.tie(out, spot, node)
            self.untouched(out, node)
        for n, group in enumerate(self.found.wholes, start=len(self.of)):
            for node, share in group.items():
                self.whole(out, n, node, share)
        return out

    def conditional(self, i: int, j: int, table: np.ndarray, directions) -> np.ndarray:
        """Edges between two nodes: paid where they are read, forbidden where nothing is there."""
        paid, broken = np.zeros(table.shape, bool), np.zeros(table.shape, bool)
        for src, dst, turn in ((i, j, False), (j, i, True)):
            if (src, dst) in directions:
                there = (self.state[src] != OFF)[:, None]
                read = (self.state[dst] == RUN)[None, :]
                paid |= (there & read).T if turn else there & read
                broken |= (~there & read).T if turn else ~there & read
        # a value made again needs its maker to run
        return np.where(broken, INFINITY, np.where(paid, table, 0))

    def first_spot(self, pair: Pair):
        k = int(self.model.folded.value_class[pair.first])
        return self.space.use.get(k) or self.space.made.get(k)

    def tie(self, out: dict, spot, node: int) -> None:
        """What is kept lies as its first copy does."""
        if spot is None:  # it is whole
            other, layouts = None, np.full((1, self.priced.strategies[node].shape[1]), st.UNUSED)
        else:
            other, port = spot
            rows = self.priced.strategies[other][self.of[other]]
            layouts = st.layouts(self.space.nodes[other], port, rows)
        mine = st.layouts(self.space.nodes[node], 0, self.priced.strategies[node][self.of[node]])
        same = (layouts[:, None, :] == mine[None, :, :]).all(axis=2)
        table = np.where(np.isin(self.state[node], STAYS)[None, :] & ~same, INFINITY, 0)
        if other is not None:
            _add(out, other, node, table)

    def untouched(self, out: dict, node: int) -> None:
        """What streams less when a value is kept: the cluster that need not write it; of a loop's
        stack, the kernels that read it as they slice it."""
        pair = self.found.kept[node][0]
        folded, graph = self.model.folded, self.model.graph
        k = int(folded.value_class[pair.again])
        spots = {self.space.made[k]} if self.is_cluster(self.space.made[k][0]) else set()
        reads = self.readers[pair.again]
        kinds = [graph.kinds[graph.ops[o].kind] for o, _ in reads]
        if self.loops_of(pair) and all("fusable" in kind.traits for kind in kinds):
            found = (self.space.read.get((int(folded.op_class[o]), slot)) for o, slot in reads)
            spots.update(spot for spot in found if spot is not None)
        for other, port in spots:
            gain = self.saved(other, port, k)
            gain = np.where(self.state[other] == RUN, gain[self.of[other]], 0)
            table = np.where((self.state[node] != RUN)[None, :], -gain[:, None], 0)
            _add(out, other, node, table)
            self.gains[other] = self.gains.get(other, 0) + gain

    def whole(self, out: dict, group: int, node: int, share: float) -> None:
        """A group of segments that is whole keeps all that it may; its share of what an op takes
        when it runs again is not paid."""
        if node in self.found.kept:
            made = np.isin(self.state[node], (RUN, HOSTED))
            _add(out, node, group, np.stack((np.zeros(len(made), np.int64), made * INFINITY), 1))
            return
        cost = self.old.node_costs[self.old.node_ptr[node] : self.old.node_ptr[node + 1]]
        paid = np.where(self.state[node] == RUN, cost[self.of[node]], 0) - self.gains.get(node, 0)
        saved = np.where(cost[self.of[node]] < INFINITY, share * np.maximum(paid, 0), 0)
        saved = saved.astype(np.int64)
        if saved.any():
            _add(out, node, group, np.stack((np.zeros_like(saved), -saved), 1))

    def is_cluster(self, node: int) -> bool:
        return self.space.nodes[node].what == "cluster"

    def saved(self, node: int, port: int, k: int) -> np.ndarray:
        """Cost units that a node's kernels take less if they do not stream the value class `k`
        at a port: [strategies]."""
        work = self.model.works[node]
        at = None
        if work is not None and self.is_cluster(node):
            at = self.model.streams.get((node, k))
        elif work is not None:
            at = next((n for n, (p, _) in enumerate(work.tensors) if p == port), None)
        if work is None or at is None:
            return np.zeros(self.sizes[node], np.int64)
        tensors = tuple(tensor for n, tensor in enumerate(work.tensors) if n != at)
        parts = st.parts(self.space.nodes[node], self.priced.strategies[node], self.mesh_sizes)
        local = {p: self.local(node, p) for p, _ in work.tensors}

        def seconds(work: compute.Work) -> np.ndarray:
            return compute.seconds(work, parts, local, self.device)

        saved = seconds(work) - seconds(work._replace(tensors=tensors))
        if self.is_cluster(node):  # what stores nothing is no kernel: each value has a share of it
            values = self.space.nodes[node].values
            stored = sum((node, value) in self.model.streams for value in values)
            start = seconds(work) - seconds(work._replace(kernel=False))
            saved = saved + start * (k in values) / max(stored, 1)
        return self.units(saved)

    @property
    def mesh_sizes(self) -> tuple[int, ...]:
        return tuple(self.priced.mesh.shape)

    # -- memory ------------------------------------------------------------------------------------

    def usages(self) -> list[tuple[int, int, int, np.ndarray]]:
        old, out = self.old, []
        for u, i in enumerate(old.usage_node.tolist()):
            taken = old.usages[old.usage_ptr[u] : old.usage_ptr[u + 1]][self.of[i]]
            lo, hi = int(old.usage_lo[u]), int(old.usage_hi[u])
            out.append((i, lo, hi, np.where(np.isin(self.state[i], (RUN, HOSTED)), taken, 0)))
        graph, moment = self.model.graph, self.model.lives.moment
        start, end, has = self.lives

        def rows(first: int, last: int) -> tuple[int, int]:
            lo = np.searchsorted(moment, first, side="left")
            return int(lo), int(np.searchsorted(moment, last, side="right"))

        for node, pairs in self.found.kept.items():
            counted: Counter[tuple[int, int, int]] = Counter()
            back: Counter[tuple[int, int]] = Counter()  # from the host, where it were not stored
            for pair in pairs:
                v, w = pair.first, pair.again
                loops = self.loops_of(pair)
                if loops:
                    stays = rows(loops[0].first - 1, self.end_of_backward(pair, int(end[w])))
                    counted[(*stays, prod(loop.trips for loop in loops))] += 1
                    inside = self.enclosing[int(graph.makers[w, 0])][-1].first
                    if has[w]:
                        counted[(*rows(inside, int(end[w])), 1)] += 1
                else:
                    begins = int(end[v]) + 1 if has[v] else int(start[v])
                    counted[(*rows(begins, int(end[w])), 1)] += 1
                if node in self.found.hosted and not has[w]:
                    back[rows(int(start[w]), int(end[w]))] += 1
            value = graph.values[pairs[0].first]
            one = tensor_bytes(value.shape, value.dtype) * self.local(node, 0)[self.of[node]]
            one = one / self.found.parts.get(node, 1)
            entries = [(KEPT, lo, hi, times * n) for (lo, hi, times), n in counted.items()]
            entries += [(HOSTED, lo, hi, n) for (lo, hi), n in back.items()]
            for state, lo, hi, count in entries:
                if hi > lo:
                    taken = np.where(self.state[node] == state, one * count, 0.0)
                    out.append((node, lo, hi, np.ceil(taken).astype(np.int64)))
        return out

    def end_of_backward(self, pair: Pair, end: int) -> int:
        """The end of the loop that reads a stack, or of the last read."""
        maker = self.model.graph.makers[:, 0]
        around = self.enclosing[maker[pair.first]]
        loops = [loop for loop in self.enclosing[maker[pair.again]] if loop not in around]
        return loops[0].last if loops else end


def _sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where((a >= INFINITY) | (b >= INFINITY), INFINITY, a + b)


def _add(out: dict, i: int, j: int, table: np.ndarray) -> None:
    if i > j:
        i, j, table = j, i, table.T
    out[i, j] = table if (i, j) not in out else _sum(out[i, j], table)
