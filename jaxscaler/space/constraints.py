"""Constraints as filters: which strategies of a node a program leaves.

A line touches a node when the node has a subject that the line selects and, for a split, a factor
of that name. Where a factor can not be cut as often as the line says (a bias of 10 on 8 devices), a
`Split(ANY)` asks for as many parts as the node allows and says so; a named factor does not give
way. What no plan can split, since the compiler does not (graph/hazards.py), a line leaves open, and
says so.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.errors import ConstraintError
from jaxscaler.graph import ir
from jaxscaler.graph.fold import Folded
from jaxscaler.program import ALL, ANY, Line, Ops, Replicate, Split, Values, matches
from jaxscaler.space import strategies as st
from jaxscaler.space.nodes import Node, Space

CARRIES_PARAMETER = ("convert_element_type", "reshape", "transpose", "loop_slice",
                     "broadcast_in_dim", "squeeze", "copy")  # fmt: skip
WHOLE_OP = -1  # in place of a port: the factors themselves


class Constraints:
    """A program bound to a graph. Call `mask` per node and mesh, then `report` once."""

    def __init__(self, lines: tuple[Line, ...], graph: ir.OpGraph, folded: Folded, space: Space):
        self.lines, self.space = lines, space
        self.matched = [0] * len(lines)
        self.removed = [0] * len(lines)
        self.relaxed: dict[int, list[str]] = defaultdict(list)
        self.open: dict[int, list[str]] = defaultdict(list)
        self.index = {id(node): i for i, node in enumerate(space.nodes)}
        subjects = _subjects(graph, folded, space) if lines else []
        self.ports = [[_ports(line.subject, *subject) for subject in subjects] for line in lines]
        self.shared = [
            sorted({name for subject in subjects for name in _beside(line.subject, *subject)})
            for line in lines
        ]

    def mask(self, node: Node, rows: np.ndarray, mesh: Mesh) -> np.ndarray:
        """Which of `rows` the program allows: bool [strategies]. ConstraintError if none."""
        keep = np.ones(len(rows), bool)
        why: list[Line] = []
        for n, line in enumerate(self.lines):
            allowed = self.allowed(n, line, node, rows, mesh)
            if allowed is None:
                continue
            self.matched[n] += 1
            self.removed[n] += int((keep & ~allowed).sum())
            if not allowed.all():
                why.append(line)
            keep &= allowed
            if not keep.any():
                said = "\n".join(f"  {line}   ({line.source})" for line in why)
                raise ConstraintError(
                    f"no strategy of {node.name!r} (factors {_sizes(node)}) on mesh {mesh} does "
                    f"what these lines say:\n{said}\n"
                    "leave one out, widen its number, or select fewer subjects"
                )
        return keep

    def against(self, node: Node, rows: np.ndarray, mesh: Mesh) -> list[str]:
        """The lines that allow none of `rows`, with their sources."""
        found = []
        for n, line in enumerate(self.lines):
            allowed = self.allowed(n, line, node, rows, mesh) if len(rows) else None
            if allowed is not None and not allowed.any():
                found.append(f"{line} ({line.source})")
        return found

    def allowed(
        self, n: int, line: Line, node: Node, rows: np.ndarray, mesh: Mesh
    ) -> np.ndarray | None:
        """What one line allows of a node, or None if it does not speak of it."""
        ports = self.ports[n][self.index[id(node)]]
        if ports is None:
            return None
        views = [rows if port == WHOLE_OP else st.layouts(node, port, rows) for port in ports]
        found = [self.allowed_at(n, line, node, rows, cuts, mesh) for cuts in views]
        said = [allowed for allowed in found if allowed is not None]
        return np.logical_and.reduce(said) if said else None

    def allowed_at(self, n: int, line: Line, node: Node, rows, cuts, mesh: Mesh):
        """The same for one view of the node: `cuts` are its factors, or the dims of one leaf."""
        if line.place is not None:
            return self.placed(line, cuts, mesh)
        if isinstance(line.algo, Replicate):
            whole = (cuts == st.UNUSED).all(axis=1)
            return ~whole if line.forbidden else whole
        return self.split(n, line, node, rows, cuts, mesh)

    def split(self, n: int, line: Line, node: Node, rows, cuts, mesh: Mesh):
        assert isinstance(line.algo, Split)
        names = dict(node.labels)
        if line.algo.factor == ANY:
            counted = cuts != st.UNUSED
        elif isinstance(line.algo.factor, int):
            counted = cuts == line.algo.factor
        else:
            factors = [f for f in range(len(node.factors)) if names.get(f) == line.algo.factor]
            factors = [f for f in factors if node.factors[f].size > 1]
            if not factors:
                return None
            if all(node.factors[f].kind == ir.FROZEN for f in factors):
                self.open[n] += [] if line.forbidden else [node.name]
                return None
            base = rows[:, : rows.shape[1] // 2] if node.paired else rows
            counted = np.isin(base, factors)
        sizes = np.array(mesh.shape if counted.shape[1] == len(mesh.shape) else mesh.shape * 2)
        parts = np.where(counted, sizes, 1).prod(axis=1)
        low, high = _range(line.num, mesh.size)
        inside = (parts >= low) & (parts <= high)
        if line.forbidden:
            return ~inside
        if not inside.any() and any(node.factors[f].together for f in range(len(node.factors))):
            self.open[n].append(node.name)
            return np.ones(len(rows), bool)
        if not inside.any() and line.algo.factor == ANY and parts.max(initial=1) < low:
            self.relaxed[n].append(node.name)
            inside = parts == parts.max()
        return inside

    def placed(self, line: Line, cuts, mesh: Mesh):
        assert line.place is not None
        levels = [{part.level.name for part in axis.parts} for axis in mesh.axes]
        known = set(mesh.names).union(*levels)
        if line.place not in known:
            raise ConstraintError(
                f"{line} ({line.source}): mesh {mesh} has no level or axis {line.place!r}; "
                f"it has {', '.join(sorted(known))}"
            )
        # an axis that joins several levels is at none of them alone
        here = [line.place == name or {line.place} == at for name, at in zip(mesh.names, levels)]
        away = ((cuts != st.UNUSED) & ~np.array(here, bool)).any(axis=1)
        return away if line.forbidden else ~away

    def report(self) -> tuple[str, ...]:
        """Lines that match or change nothing, reach further than they say, or ask for too much."""
        notes = []
        for n, line in enumerate(self.lines):
            if not self.matched[n]:
                notes.append(f"constraint {line} ({line.source}) matches nothing")
            elif not self.removed[n]:
                notes.append(f"constraint {line} ({line.source}) changes nothing")
            if self.relaxed[n]:
                names = _some(sorted(set(self.relaxed[n])))
                notes.append(
                    f"constraint {line}: {names} can not be split that often; "
                    "split as often as its factors divide"
                )
            if self.open[n]:
                names = _some(sorted(set(self.open[n])))
                notes.append(
                    f"constraint {line}: the compiler can not split {names} so; left to the search"
                )
            if self.shared[n]:
                notes.append(
                    f"constraint {line} also holds for {_some(self.shared[n])}: "
                    "they share a decision"
                )
        return tuple(notes)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _range(num, devices: int) -> tuple[int, int]:
    if num == ALL:
        return devices, devices
    return (num, num) if isinstance(num, int) else num


def _sizes(node: Node) -> str:
    names = dict(node.labels)
    return ", ".join(
        f"{names.get(f, f)}={x.size}" for f, x in enumerate(node.factors) if x.kind != "partial"
    )


def _ports(subject: Ops | Values, ops: list, leaves: list) -> tuple[int, ...] | None:
    """Ports of a node that hold what a line selects, WHOLE_OP for its ops; None for nothing."""
    if isinstance(subject, Ops):
        selected = any(matches(subject.path, op[0]) for op in ops if _is_kind(subject, *op))
        return (WHOLE_OP,) if selected else None
    found = {
        port for path, role, port in leaves if role in subject.role and matches(subject.path, path)
    }
    return tuple(sorted(found)) or None


def _beside(subject: Ops | Values, ops: list, leaves: list) -> list[str]:
    """Paths that a line leaves out of a node, where others of their kind there are selected."""
    if isinstance(subject, Ops):
        paths = [op[0] for op in ops if _is_kind(subject, *op)]
    else:
        paths = [path for path, role, _ in leaves if role in subject.role]
    left_out = [path for path in paths if not matches(subject.path, path)]
    return left_out if len(left_out) < len(paths) else []


def _is_kind(subject: Ops, scope: str, primitive: str, phase: str, reads: bool) -> bool:
    return (
        phase in subject.phase
        and matches(subject.primitive, primitive)
        and subject.reads_parameter in (None, reads)
    )


def _subjects(graph, folded, space):
    """Per node (ops, leaves): (scope, primitive, phase, reads a parameter), (path, role, port)."""
    parameters = {v for v in graph.inputs if graph.values[v].role == ir.PARAMETER}
    for op in graph.ops:  # what a cast or a view makes of a parameter still is one
        if graph.kinds[op.kind].primitive in CARRIES_PARAMETER and op.inputs[0] in parameters:
            parameters.update(v for v in op.outputs if v >= 0)
    found: list[tuple[list, list]] = [([], []) for _ in space.nodes]
    classes = folded.op_class.tolist()
    seen: set[tuple] = set()
    for op in graph.ops:
        node = space.node_of.get(classes[op.id])
        if node is not None:
            reads = any(v in parameters for v in op.inputs)
            entry = (op.scope, graph.kinds[op.kind].primitive, op.phase, reads)
            if (node, entry) not in seen:
                seen.add((node, entry))
                found[node][0].append(entry)
    for v in graph.inputs:
        spot = space.rest.get(int(folded.value_class[v]))
        if spot is not None:
            found[spot[0]][1].append((graph.values[v].path, graph.values[v].role, spot[1]))
    return found
