"""What a step's author says of shardings, as pins: filters on the nodes that decide them.

Sources: sharding constraints inside the step (`graph.annotations`; Flax's logical axes come out as
these), specs of arguments, by globs of their paths, and what flax.nnx Variables say of themselves.
All speak of the axes of a mesh that the author names; then that mesh alone is searched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.errors import ConstraintError
from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import Annotation, OpGraph
from jaxscaler.space import strategies as st
from jaxscaler.space.constraints import Constraints
from jaxscaler.space.nodes import Node, Space

Axes = tuple[tuple[str, int], ...]  # (name, size), major first
OpenSpec = tuple[tuple[str, ...] | None, ...]  # per dim the axes that cut it; None: left open


@dataclass(frozen=True)
class Author:
    """The mesh that a user names (None: none) and specs of arguments: (glob, spec), and what the
    arguments say themselves: (path, spec, in words).
    """

    axes: Axes | None = None
    specs: tuple[tuple[str, OpenSpec], ...] = ()
    own: tuple[tuple[str, OpenSpec, str], ...] = ()


NOBODY = Author()


class Said(NamedTuple):
    """A value, how it is to lie, and where that is said; `at_rest`: it is an argument."""

    value: int
    spec: OpenSpec
    where: str
    at_rest: bool


def pins_of(graph: OpGraph, author: Author) -> list[Said]:
    """All pins of a step, checked against the shapes and the mesh.

    Raises ConstraintError: for names of axes without a mesh that has them, a spec that does not fit
    or divide its value, a glob that matches nothing, and two specs of one argument.
    """
    found = [_of_annotation(a, author) for a in graph.annotations]
    found += _of_specs(graph, author)
    sizes = dict(author.axes or ())
    for pin in found:
        _check(pin, graph.values[pin.value].shape, sizes)
    return [pin._replace(spec=_real(pin.spec, sizes)) for pin in found]


def _of_annotation(a: Annotation, author: Author) -> Said:
    said = f"with_sharding_constraint({_text(a.spec)}) at {a.source}"
    if _names(a.spec) and author.axes is None:
        mesh = dict(a.axes)
        raise ConstraintError(
            f"{said} names axes of a mesh that the search does not know: give it with mesh= "
            f"(mesh={mesh}, or the jax.sharding.Mesh itself), or take the constraint out"
        )
    if _names(a.spec) and dict(a.axes) != dict(author.axes or ()):
        raise ConstraintError(
            f"{said} is for a mesh {dict(a.axes)}, but mesh= is {dict(author.axes or ())}: use one"
        )
    return Said(a.value, a.spec, said, False)


def _of_specs(graph: OpGraph, author: Author) -> list[Said]:
    if author.specs and author.axes is None:
        raise ConstraintError(
            f"specs[{author.specs[0][0]!r}] names axes: give the mesh they belong to with mesh= "
            '(such as mesh={"data": 4, "model": 2})'
        )
    found: dict[int, Said] = {}
    listed = [
        (pattern, spec, f"specs[{pattern!r}] = {_text(spec)}") for pattern, spec in author.specs
    ]
    for pattern, spec, words in (*listed, *author.own):
        hits = [v for v in graph.inputs if _matches(graph.values[v].path, pattern)]
        if not hits:
            near = ", ".join(graph.values[v].path for v in graph.inputs)[:300]
            raise ConstraintError(f"specs: {pattern!r} matches no argument; there are {near}")
        for v in hits:
            path, rank = graph.values[v].path, len(graph.values[v].shape)
            said = f"{words} ({path})"
            pin = Said(v, (*spec, *((),) * (rank - len(spec))), said, True)
            other = found.setdefault(v, pin)
            if other.spec != pin.spec:
                raise ConstraintError(f"{path} can not lie both ways: {other.where}, and {said}")
    return list(found.values())


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


def _check(pin: Said, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    names = _names(pin.spec)
    if unknown := [name for name in names if name not in sizes]:
        raise ConstraintError(f"{pin.where}: the mesh {sizes} has no axis {unknown[0]!r}")
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ConstraintError(f"{pin.where}: axis {twice[0]!r} can cut one dim only")
    if len(pin.spec) > len(shape):
        raise ConstraintError(f"{pin.where}: {len(pin.spec)} dims, but the value has shape {shape}")
    order = list(sizes)
    for dim, (cut, size) in enumerate(zip(pin.spec, shape)):
        if cut and size % (parts := prod(sizes[name] for name in cut)):
            raise ConstraintError(
                f"{pin.where}: dim {dim} of shape {shape} does not divide into {parts} parts "
                f"(mesh {sizes}): pad it, or leave that dim whole"
            )
        if cut and list(cut) != sorted(cut, key=order.index):
            raise ConstraintError(
                f"{pin.where}: the axes of dim {dim} are not in the order of the mesh, "
                f"{tuple(order)}: the search knows no other"
            )


def _names(spec: OpenSpec) -> list[str]:
    return [name for cut in spec for name in cut or ()]


def _real(spec: OpenSpec, sizes: dict[str, int]) -> OpenSpec:
    """The spec without axes of one device, which a search leaves out."""
    return tuple(None if c is None else tuple(n for n in c if sizes[n] > 1) for c in spec)


def _text(spec: OpenSpec) -> str:
    def dim(cut: tuple[str, ...] | None) -> str:
        return "UNCONSTRAINED" if cut is None else repr(cut[0] if len(cut) == 1 else cut or None)

    return f"P({', '.join(map(dim, spec))})"


class Annotations:
    """Pins bound to a graph's nodes.

    `clash`: pins tell apart what shares a decision, so that layers must not be merged.
    """

    def __init__(self, pins: Sequence[Said], graph: OpGraph, folded: Folded, space: Space):
        self.of_node: defaultdict[int, list[tuple[int, Said]]] = defaultdict(list)
        apart: defaultdict[int, set[OpenSpec]] = defaultdict(set)
        pinned: Counter[int] = Counter()
        for pin in pins:
            k = int(folded.value_class[pin.value])
            apart[k].add(pin.spec)
            pinned[k] += pin.at_rest
            spot = (space.rest if pin.at_rest else space.made).get(k)
            if spot is not None:
                self.of_node[id(space.nodes[spot[0]])].append((spot[1], pin))
            elif _names(pin.spec):
                raise ConstraintError(f"{pin.where}: every plan keeps this value whole")
        inputs = Counter(int(folded.value_class[v]) for v in graph.inputs)
        self.clash = any(len(specs) > 1 for specs in apart.values()) or any(
            0 < n < inputs[k] for k, n in pinned.items()
        )

    def mask(
        self, node: Node, rows: np.ndarray, mesh: Mesh, keep: np.ndarray, lines: Constraints
    ) -> np.ndarray:
        """Which of `rows` do as the pins say: bool [strategies]; `keep`: what is allowed otherwise.

        Raises ConstraintError, naming both sides, if nothing is left.
        """
        before: list[tuple[Said, np.ndarray]] = []
        for port, pin in self.of_node.get(id(node), ()):
            fits = _fits(st.layouts(node, port, rows), pin.spec, mesh)
            if not fits.any():
                raise ConstraintError(
                    f"{pin.where}: {node.name!r} can not lie so in any plan on mesh {mesh}: what "
                    "computes it keeps such a dim whole"
                )
            against = [p.where for p, other in before if not (fits & other).any()]
            against = against or lines.against(node, rows[fits & _all(before, rows)], mesh)
            keep = keep & fits
            if not keep.any():
                others = "; ".join(against) or "what shares a decision with it"
                raise ConstraintError(f"{pin.where} contradicts {others}: leave one out")
            before.append((pin, fits))
        return keep


def _all(before: Sequence[tuple[Said, np.ndarray]], rows: np.ndarray) -> np.ndarray:
    return np.logical_and.reduce([np.ones(len(rows), bool), *(fits for _, fits in before)])


def _fits(layouts: np.ndarray, spec: OpenSpec, mesh: Mesh) -> np.ndarray:
    """Which layouts [strategies, axes] are as a spec says; dims that it leaves open may be cut."""
    free = [d for d, cut in enumerate(spec) if cut is None]
    keep = np.ones(len(layouts), bool)
    for a, name in enumerate(mesh.names):
        dims = [d for d, cut in enumerate(spec) if cut and name in cut]
        keep &= np.isin(layouts[:, a], dims or [st.UNUSED, *free])
    return keep
