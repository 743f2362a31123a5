"""Layouts at rest that another plan has fixed: filters on the nodes that decide where state lies.

A leaf of the state is known by its shape and the end of its path: "params/h_0/kernel" of one step
is "state/params/h_0/kernel" of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.errors import ConstraintError, PlanError
from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import PARAMETER, STATE_ROLES, OpGraph
from jaxscaler.space import strategies as st
from jaxscaler.space.nodes import Node, Space

Specs = tuple[tuple[str, ...], ...]  # per dim, the mesh axes that cut it, major first


class Pin(NamedTuple):
    """A leaf of the state and where it lies."""

    path: str
    role: str
    shape: tuple[int, ...]
    spec: Specs


@dataclass(frozen=True)
class Pins:
    """The state of a plan on a mesh with `axes` ((name, size), major first)."""

    axes: tuple[tuple[str, int], ...]
    pins: tuple[Pin, ...]

    @staticmethod
    def of(plan: Any) -> Pins:
        """The pins that a `Plan` gives: all its parameters and optimizer state."""
        return Pins(
            plan.axes,
            tuple(
                Pin(t.path, t.role, t.shape, t.spec) for t in plan.tensors if t.role in STATE_ROLES
            ),
        )

    @cached_property
    def _by_end(self) -> dict[tuple[str, tuple[int, ...]], list[Pin]]:
        found = defaultdict(list)
        for pin in self.pins:
            found[pin.path.rpartition("/")[2], pin.shape].append(pin)
        return dict(found)

    def candidates(self, path: str, shape: tuple[int, ...]) -> list[Pin]:
        """The leaves of this shape whose path has the longest end in common with `path`.

        Parameters before other state; more than one only if that leaves several.
        """
        near = self._by_end.get((path.rpartition("/")[2], tuple(shape)), [])
        if not near:
            return []

        def rank(pin: Pin) -> tuple[int, bool]:
            return -_common_end(pin.path, path), pin.role != PARAMETER

        best = min(map(rank, near))
        return [pin for pin in near if rank(pin) == best]

    def find(self, path: str, shape: tuple[int, ...]) -> Pin | None:
        """The state leaf that stands behind `path`; None if none does, or several differ."""
        found = self.candidates(path, shape)
        return found[0] if len({pin.spec for pin in found}) == 1 else None

    def of_arguments(
        self, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], arguments: Sequence[int]
    ) -> dict[int, Pin]:
        """Flat input -> its pin, for every argument (`arguments[i]` is that of input i) which is
        state throughout, and every other leaf with the very path of a pin.

        Raises PlanError if there are none, and if a leaf may be one of several that lie apart.
        """
        found = {i: self.candidates(p, s) for i, (p, s) in enumerate(zip(paths, shapes))}
        partly = {arguments[i] for i, pins in found.items() if not pins}
        taken = {
            i: pins
            for i, pins in found.items()
            if pins and (arguments[i] not in partly or pins[0].path == paths[i])
        }
        if not taken:
            raise PlanError(
                "none of the arguments is state of the plan to follow: their leaves are "
                f"{_some(paths)}; the plan's state is {_some(pin.path for pin in self.pins)}"
            )
        for i, pins in taken.items():
            if len({pin.spec for pin in pins}) > 1:
                raise PlanError(
                    f"{paths[i]} may be any of {_some(pin.path for pin in pins)}, which lie apart: "
                    "give the step the part of the state that holds it, under the same names"
                )
        return {i: pins[0] for i, pins in taken.items()}

    def fits(self, mesh: Mesh) -> bool:
        """Whether a mesh has the axes that the pins speak of."""
        return self.axes == tuple(zip(mesh.names, mesh.shape))


class PinFilter:
    """Pins of the inputs of a graph (`pinned[i]`: of input i) as a filter of strategies."""

    def __init__(self, pinned: dict[int, Pin], graph: OpGraph, folded: Folded, space: Space):
        index = {i: id(node) for i, node in enumerate(space.nodes)}
        self.of_node: defaultdict[int, set[tuple[int, Pin]]] = defaultdict(set)
        specs: defaultdict[int, set[Specs]] = defaultdict(set)
        for i, pin in pinned.items():
            k = int(folded.value_class[graph.inputs[i]])
            specs[k].add(pin.spec)
            if k in space.rest:  # what has no node lies whole, in this plan and the other
                node, port = space.rest[k]
                self.of_node[index[node]].add((port, pin))
        # leaves that share a decision here, but not in the plan that they come from
        self.clash = any(len(apart) > 1 for apart in specs.values())

    def mask(self, node: Node, rows: np.ndarray, mesh: Mesh, keep: np.ndarray) -> np.ndarray:
        """Which of `rows` leave the node's leaves where they are: bool [strategies].

        `keep`: what is allowed otherwise. Raises ConstraintError if nothing is left.
        """
        for port, pin in sorted(self.of_node.get(id(node), ())):
            wanted = [
                next((d for d, cut in enumerate(pin.spec) if axis in cut), st.UNUSED)
                for axis in mesh.names
            ]
            keep = keep & (st.layouts(node, port, rows) == wanted).all(axis=1)
            if not keep.any():
                raise ConstraintError(
                    f"{pin.path} lies as {pin.spec} in the plan that is followed; the constraints, "
                    f"or what shares a decision with it ({node.name!r}), allow no such layout"
                )
        return keep


def _common_end(a: str, b: str) -> int:
    """How many components two paths have in common at their ends."""
    same = 0
    for x, y in zip(reversed(a.split("/")), reversed(b.split("/"))):
        if x != y:
            break
        same += 1
    return same


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
