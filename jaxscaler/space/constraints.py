"""Constraints as filters: which strategies of a node a program leaves.

A line touches a node when the node has a subject that the line selects and, for a split, a factor
of that name. Where a factor can not be cut as often as the line says (a bias of 10 on 8 devices), a
`Split(ANY)` asks for as many parts as the node allows and says so; a named factor does not give
way. What no plan can split, since the compiler does not (graph/hazards.py), a line leaves open, and
says so. What no plan can do at all is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.errors import ConstraintError
from jaxscaler.graph import ir
from jaxscaler.graph.fold import Folded
from jaxscaler.holes import Hole, Relation, fillings
from jaxscaler.program import (
    ALL,
    ANY,
    HBM,
    HOST,
    NOWHERE,
    PLAN,
    SAME_DEVICE,
    Cast,
    Kernel,
    Line,
    Order,
    Replicate,
    Split,
    Stage,
    Statement,
    holes_of,
)
from jaxscaler.space import strategies as st
from jaxscaler.space.nodes import Node, Space, factor_name
from jaxscaler.space.orders import check_order
from jaxscaler.space.subjects import WHOLE_OP, Subjects

TRIPS = "trips"  # the factor of what a loop slices and stacks that the loop runs over
NO_HOLES: Mapping[str, int] = {}

# What the language has words for and a plan of shardings can not carry out.
UNPLANNED_ALGOS = {
    Cast: (
        "ops keep their dtype, unless the step itself is planned with this line, its loss marked "
        "by jaxscaler.value_and_grad"
    ),
    Kernel: (
        "ops keep their implementation, unless the step itself is planned with this line, its loss "
        "marked by jaxscaler.value_and_grad"
    ),
}
UNPLANNED_PLACES = {
    SAME_DEVICE: (
        "ops are not cut into parts that run one after another, unless the step itself is planned "
        "with this line, its loss marked by jaxscaler.value_and_grad"
    ),
    HOST: (
        "values lie in the memory of the device, unless they are activations and the step itself "
        "is planned with this line, its loss marked by jaxscaler.value_and_grad"
    ),
    NOWHERE: (
        "values are kept until they were last read, unless the step itself is planned with this "
        "line, its loss marked by jaxscaler.value_and_grad"
    ),
}
STEP_PLACES = (SAME_DEVICE, HOST, NOWHERE)  # what lies there changes the step itself


class Constraints:
    """A program bound to a graph. Call `mask` per node and mesh, then `report` once.

    Raises ConstraintError for what no plan can do (see `refuse`), for an order that data flow
    contradicts, and for a hole that says nothing.
    """

    def __init__(
        self, program: Sequence[Statement], graph: ir.OpGraph, folded: Folded, space: Space
    ):
        refuse(program)
        self.lines = tuple(x for x in program if isinstance(x, Line))
        self.relations = tuple(x for x in program if isinstance(x, Relation))
        self.space = space
        count = len(self.lines)
        self.matched, self.removed = [0] * count, [0] * count
        self.relaxed: dict[int, set[str]] = defaultdict(set)
        self.open: dict[int, set[str]] = defaultdict(set)
        self.yielded: dict[int, set[str]] = defaultdict(set)
        self.index = {id(node): i for i, node in enumerate(space.nodes)}
        self.touching: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        self.orders: list[str] = []
        self.trips: Mapping[int, set[int]] = {}
        if not program:
            return
        subjects = self.subjects = Subjects(graph, folded, space)
        self.trips = subjects.trips
        for n, line in enumerate(self.lines):
            for node, ports in subjects.ports(line.subject).items():
                self.touching[node].append((n, tuple(sorted(ports))))
        for touching in self.touching.values():  # lines that give way come last
            touching.sort(key=lambda entry: (self.lines[entry[0]].yielding, entry[0]))
        self.orders = [check_order(x, graph, subjects) for x in program if isinstance(x, Order)]

    def fillings(self, mesh: Mesh, relations: Sequence[Relation] | None = None):
        """Every way to fill the named holes on a mesh: numbers of parts by name of hole."""
        sizes = {1}
        for n in mesh.shape:
            sizes |= {n * m for m in sizes}
        used = [hole for line in self.lines for hole in holes_of(line)]
        relations = self.relations if relations is None else relations
        return fillings(used, relations, sorted(sizes))

    def mask(
        self, node: Node, rows: np.ndarray, mesh: Mesh, holes: Mapping[str, int] = NO_HOLES
    ) -> np.ndarray:
        """Which of `rows` the program allows: bool [strategies]. ConstraintError if none."""
        keep = np.ones(len(rows), bool)
        i = self.index[id(node)]
        for n, _ in self.touching.get(i, ()):
            line = self.lines[n]
            allowed = self.allowed(n, node, rows, mesh, holes)
            if allowed is None:
                continue
            self.matched[n] += 1
            if line.yielding and not (keep & allowed).any():
                self.yielded[n].add(node.name)
                continue
            self.removed[n] += int((keep & ~allowed).sum())
            keep &= allowed
            if not keep.any():
                raise self.clash(node, rows, mesh, holes)
        return keep

    def clash(self, node: Node, rows, mesh: Mesh, holes: Mapping[str, int]) -> ConstraintError:
        """The error for a node that a program leaves nothing: a smallest set of lines that do."""
        masks = self.masks(node, rows, mesh, holes)
        least = smallest(
            sorted(masks), lambda some: not np.logical_and.reduce([masks[n] for n in some]).any()
        )
        said = "\n".join(f"  {self.lines[n]}   ({self.lines[n].source})" for n in least)
        filled = "".join(f", {name} = {n}" for name, n in holes.items())
        return ConstraintError(
            f"no strategy of {node.name!r} (factors {_sizes(node)}) on mesh {mesh}{filled} does "
            f"what {'this line says' if len(least) == 1 else 'these lines say'}:\n{said}\n"
            "leave one out, widen its number, or select fewer subjects"
        )

    def masks(self, node: Node, rows, mesh: Mesh, holes: Mapping[str, int]):
        """Line -> what it allows of a node, for the lines that narrow it and do not give way."""
        found = {}
        for n, _ in self.touching.get(self.index[id(node)], ()):
            if not self.lines[n].yielding:
                allowed = self.allowed(n, node, rows, mesh, holes)
                if allowed is not None and not allowed.all():
                    found[n] = allowed
        return found

    def against(self, node: Node, rows: np.ndarray, mesh: Mesh) -> list[str]:
        """The lines that allow none of `rows`, with their sources."""
        found = []
        for n, _ in self.touching.get(self.index[id(node)], ()) if len(rows) else ():
            line = self.lines[n]
            if holes_of(line) or line.yielding:
                continue
            allowed = self.allowed(n, node, rows, mesh)
            if allowed is not None and not allowed.any():
                found.append(f"{line} ({line.source})")
        return found

    def allowed(
        self, n: int, node: Node, rows, mesh: Mesh, holes: Mapping[str, int] = NO_HOLES
    ) -> np.ndarray | None:
        """What one line allows of a node, or None if it does not speak of it."""
        ports = dict(self.touching.get(self.index[id(node)], ())).get(n)
        if ports is None:
            return None
        line = self.lines[n]
        here = self.here(line, mesh)
        if here is None:  # there is no such place, and the line gives way
            return np.zeros(len(rows), bool)
        said = []
        for port in ports:
            cuts = rows if port == WHOLE_OP else st.layouts(node, port, rows)
            does = self.at_port(n, node, rows, cuts, port, mesh, here, holes)
            if does is not None:
                said.append(~does if line.forbidden else does)
        return np.logical_and.reduce(said) if said else None

    def at_port(self, n: int, node: Node, rows, cuts, port: int, mesh: Mesh, here, holes):
        """Which strategies do what a line says, in one view of the node: `cuts` [strategies, axes]
        are its factors, or the dims of one tensor. `here`: the axes at the line's place.
        """
        line = self.lines[n]
        used = cuts != st.UNUSED
        if line.algo is None:
            return ~(used & ~here).any(axis=1)
        if isinstance(line.algo, Replicate):
            return ~(used & here).any(axis=1)
        counted = self.counted(n, node, cuts, port)
        if counted is None:
            return None
        sizes = np.array(mesh.shape, np.int64)
        parts = np.where(counted & here, sizes, 1).prod(axis=1)
        inside = ~(counted & ~here).any(axis=1)
        low, high = _range(line.num, int(sizes[here].prod()), holes)
        enough = inside & (parts >= low) & (parts <= high)
        if line.forbidden or enough.any():
            return enough
        if any(factor.together for factor in node.factors):
            self.open[n].add(node.name)
            return np.ones(len(rows), bool)
        most = parts[inside].max(initial=1)
        if line.algo == Split(ANY) and most < low:
            self.relaxed[n].add(node.name)
            return inside & (parts == most)
        return enough

    def counted(self, n: int, node: Node, cuts, port: int):
        """Where `cuts` cut what a Split names; None if the node has nothing of that name."""
        line = self.lines[n]
        assert isinstance(line.algo, Split)
        wanted = line.algo.factor
        if wanted == ANY:
            return cuts != st.UNUSED
        if isinstance(wanted, int):
            return cuts == wanted
        names = (wanted,) if isinstance(wanted, str) else wanted
        factors = [
            f
            for f, own in self.names(node, line.subject.name is not None).items()
            if own.intersection(names) and (node.factors[f].size > 1)
        ]
        if not factors:
            return None
        if all(node.factors[f].kind == ir.FROZEN for f in factors):
            if not line.forbidden:
                self.open[n].add(node.name)
            return None
        if port != WHOLE_OP:  # the dims that carry them
            dims = node.ports[port].dims
            factors = [d for d, dim in enumerate(dims) if set(dim) & set(factors)]
        return np.logical_or.reduce([cuts == f for f in factors])

    def names(self, node: Node, one: bool) -> dict[int, set[str]]:
        """Factor -> its names. `one`: the line is of this decision, whose factors have numbers."""
        labels = dict(node.labels)
        trips = self.trips.get(self.index[id(node)], ())
        return {
            f: {labels.get(f, ""), TRIPS if f in trips else "", factor_name(node, f) if one else ""}
            - {""}
            for f in range(len(node.factors))
        }

    def here(self, line: Line, mesh: Mesh) -> np.ndarray | None:
        """Which axes of a mesh are at a line's place: bool [axes]. None: it yields, for want of it.

        An axis that joins several levels is at none of them alone.
        """
        if line.place is None or line.place == HBM:
            return np.ones(len(mesh.axes), bool)
        assert not isinstance(line.place, Stage)  # refused
        places = {line.place} if isinstance(line.place, str) else set(line.place)
        levels = [{part.level.name for part in axis.parts} for axis in mesh.axes]
        known = set(mesh.names).union(*levels)
        if missing := sorted(places - known):
            if line.yielding:
                return None
            raise ConstraintError(
                f"{line} ({line.source}): mesh {mesh} has no level or axis {missing[0]!r}; "
                f"it has {', '.join(sorted(known))}"
            )
        return np.array([name in places or at <= places for name, at in zip(mesh.names, levels)])

    def report(self) -> tuple[str, ...]:
        """Lines that match or change nothing, give way, reach further than they say, or ask for
        too much.
        """
        notes = [*self.orders, *self._of_plan()]
        for n, line in enumerate(self.lines):
            if line.source == PLAN:
                continue  # see _of_plan
            said = f"constraint {line} ({line.source})"
            if not self.matched[n] and not self.open[n]:
                notes.append(f"{said} matches nothing")
            elif self.yielded[n]:
                notes.append(f"{said} gives way for {_some(sorted(self.yielded[n]))}")
            elif not self.removed[n] and not self.open[n]:
                notes.append(f"{said} changes nothing")
            if self.relaxed[n]:
                names = _some(sorted(self.relaxed[n]))
                notes.append(
                    f"constraint {line}: {names} can not be split that often; "
                    "split as often as its factors divide"
                )
            if self.open[n]:
                names = _some(sorted(self.open[n]))
                notes.append(
                    f"constraint {line}: the compiler can not split {names} so; left to the search"
                )
            named = line.subject.name is not None  # a decision, whatever it holds
            if shared := [] if named else self.subjects.beside(line.subject):
                notes.append(
                    f"constraint {line} also holds for {_some(shared)}: they share a decision"
                )
        return tuple(notes)

    def _of_plan(self) -> list[str]:
        """What became of the lines of a plan: of those that hold there is nothing to say."""
        lines = [n for n, line in enumerate(self.lines) if line.source == PLAN]
        gone = sorted({self.lines[n].subject.name or "" for n in lines if not self.matched[n]})
        gave = sorted({name for n in lines for name in self.yielded[n]})
        notes = []
        if gone:
            notes.append(f"of the plan to keep, {len(gone)} decisions are gone: {_some(gone)}")
        if gave:
            notes.append(f"of the plan to keep, {len(gave)} decisions give way: {_some(gave)}")
        decided = {self.lines[n].subject.name for n in lines}
        new = [node.name for node in self.space.nodes if node.name not in decided]
        if lines and new:
            notes.append(f"of this plan, {len(new)} decisions are new: {_some(new)}")
        return notes


def refuse(program: Sequence[Statement]) -> None:
    """Raise ConstraintError, naming every one, for lines that no plan of shardings carries out."""
    wrong = []
    for line in program:
        if not isinstance(line, Line):
            continue
        reason = UNPLANNED_ALGOS.get(type(line.algo)) if line.algo is not None else None
        if isinstance(line.place, Stage):
            reason = "stages are for micro_batches= (docs/pipelines.md)"
        elif isinstance(line.place, str) and line.place in UNPLANNED_PLACES:
            reason = UNPLANNED_PLACES[line.place]
        elif line.forbidden and isinstance(line.num, Hole):
            reason = "of a hole, forbidden, there is always another number: name the number"
        if reason:
            wrong.append(f"  {line}   ({line.source}): {reason}")
    if wrong:
        raise ConstraintError(
            "the planner can not carry out:\n" + "\n".join(wrong) + "\nleave these lines out"
        )


def changes_step(line: Statement) -> bool:
    """Whether a line asks for another step: what is made again, on the host, or in a loop."""
    return isinstance(line, Line) and line.place in STEP_PLACES


def smallest(items: Sequence, clashes) -> list:
    """A subset of `items` that still clashes and of which no item can be left out."""
    kept = list(items)
    for item in items:
        rest = [x for x in kept if x != item]
        if rest and clashes(rest):
            kept = rest
    return kept


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _range(num, devices: int, holes: Mapping[str, int]) -> tuple[int, int]:
    if num == ALL:
        return devices, devices
    if isinstance(num, Hole):
        num = holes[num.name]
    return (num, num) if isinstance(num, int) else num


def _sizes(node: Node) -> str:
    names = dict(node.labels)
    return ", ".join(
        f"{names.get(f, f)}={x.size}" for f, x in enumerate(node.factors) if x.kind != "partial"
    )
