"""The plan space of a graph, before any mesh: who decides (nodes) and what ties them (edges).

- An *op* node decides how one op class is split: which factor each mesh axis cuts.
- A *cluster* is elementwise ops of one phase and layer that hand values of one shape to each other:
they are split alike, so they are one node. - A *state* node decides where a state leaf lies at
rest, and, if ops read it as it is, the layout it is read in. State that only its own update touches
lies as the update computes it: no node.
- A *use* node decides the layout in which a value with several readers is handed to them, so that
  what they share is paid for once.
- *batch* and *output* nodes are the layouts of data in and results out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxscaler.graph.ir import Factor

Dims = tuple[tuple[int, ...], ...]  # per dim of a tensor: the node's factors, major first

Spot = tuple[int, int]  # (node, port)

# Kind of the pseudo factor of an op in which partial sums meet: cut, its operands and result are
# partial.
PARTIAL = "partial"


class Port(NamedTuple):
    """A tensor that a node sees, its dims in the node's factors."""

    dims: Dims


@dataclass(frozen=True)
class Node:
    """One decision. `members` are op classes; `values` the value classes it lays out."""

    name: str
    what: str  # "op", "cluster", "state", "use", "batch", "output"
    factors: tuple[Factor, ...]
    ports: tuple[Port, ...]
    members: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    labels: tuple[tuple[int, str], ...] = ()
    paired: bool = False  # a state node whose second port is the layout it is read in
    num_results: int = 0  # of an op node: how many of its last ports are results


class Edge(NamedTuple):
    """A value on its way: from a port to a port, `times` per step."""

    src: int
    src_port: int
    dst: int  # -1: to something that needs it whole
    dst_port: int
    value: int  # value class
    times: int
    state: bool  # a parameter gathered or a gradient reduced: can hide behind compute


@dataclass(frozen=True)
class Space:
    """Nodes and edges of a graph, and where each value class and operand finds its layout."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    node_of: dict[int, int]  # op class -> node
    made: dict[int, Spot]  # value class -> where its layout is decided when it is made
    read: dict[tuple[int, int], Spot]  # (op class, operand) -> how the op reads it
    use: dict[int, Spot]  # value class -> the layout in which all its readers get it
    rest: dict[int, Spot]  # class of an argument -> its layout at rest
    outputs: dict[int, Spot]  # value class of a result -> its layout


def factor_name(node: Node, f: int) -> str:
    """A factor's name within its node: its label if no other factor has it, else "f<i>"."""
    names = dict(node.labels)
    if node.factors[f].kind == PARTIAL:
        return "partial"
    if f in names and list(names.values()).count(names[f]) == 1:
        return names[f]
    return f"f{f}"
