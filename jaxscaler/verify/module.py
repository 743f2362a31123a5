"""A StableHLO module, partitioned or not, read into the `Node`s of the normal form."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy

from jaxscaler.verify import normal_form as nf

_KNOWN = {f"stablehlo.{name}": name for name in (*nf.LINEAR, nf.ADD, nf.BROADCAST, nf.CONSTANT)}
_KNOWN["sdy.constant"] = nf.CONSTANT
_SDY = {f"sdy.{kind}": kind for kind in (*nf.COLLECTIVES, nf.ALL_SLICE)}
_STABLEHLO = {f"stablehlo.{kind}": kind for kind in nf.COLLECTIVES}
_BRANCHES = ("stablehlo.case", "stablehlo.if", "sdy.manual_computation", "sdy.named_computation")
_AXES = {  # the attribute of a sdy collective that holds its axes
    nf.ALL_GATHER: "gathering_axes",
    nf.REDUCE_SCATTER: "reduce_scatter_axes",
    nf.ALL_REDUCE: "reduction_axes",
    nf.ALL_SLICE: "slicing_axes",
    nf.ALL_TO_ALL: "params",
}
_DIMS = ("all_gather_dim", "scatter_dimension", "split_dimension", "concat_dimension")
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_REPEATED = re.compile(r"(?:/|(?<=\())repeated(\d+)(?=[/)]|$)")
_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+):')


class _Place(NamedTuple):
    """Where the walk stands: runs per step, loop body, path and line of the calls around it."""

    times: int = 1
    loop: int = 0
    path: str = ""
    source: str = ""

    def inside(self, op: Any) -> _Place:
        return self._replace(path=_scope(op, self.path), source=_source(op) or self.source)


def read(module: Any, trip_counts: Mapping[str, int] | None = None) -> list[nf.Node]:
    """The values of a partitioned module (`partition`) as a graph, calls written out."""
    with module.context:
        reader = _Reader(module, trip_counts or {})
        reader.function("main", None, _Place())
    return reader.nodes


def mesh_axes(module: Any) -> dict[str, int]:
    """The axes (name -> size, major first) of the mesh that a StableHLO module is for."""
    with module.context:
        return dict(_Reader(module.operation, {}).mesh)


def trip_counts(module: Any) -> dict[str, int]:
    """Runs per entry of the loops of a StableHLO module, by path, where they are constants."""
    with module.context:
        reader = _Reader(module.operation, {})
        reader.function("main", None, _Place())
    return reader.runs


class _Reader:
    """A walk over a module that appends one `Node` per value."""

    def __init__(self, module: Any, trip_counts: Mapping[str, int]):
        self.nodes: list[nf.Node] = []
        self.runs: dict[str, int] = {}  # of the loops met so far, by path
        self.node_of: dict[Any, int] = {}  # by MLIR value; in a function: of the call being read
        self.trip_counts = trip_counts
        self.loops = 0
        tops = [view.operation for view in module.opview.body.operations]
        self.functions = {
            op.attributes["sym_name"].value: op for op in tops if op.name == "func.func"
        }
        meshes = [_mesh(op) for op in tops if op.name == "sdy.mesh"]
        self.mesh: dict[str, int] = max(meshes, key=lambda m: prod(m.values()), default={})

    def function(self, name: str, arguments: list[int] | None, place: _Place) -> list[int]:
        """Read a function's body; returns the nodes of its results."""
        block = self.functions[name].regions[0].blocks[0]
        return self._block(block, arguments or self._new("argument", len(block.arguments)), place)

    def _new(self, op: str, count: int, inputs: tuple[int, ...] = ()) -> list[int]:
        first = len(self.nodes)
        self.nodes.extend([nf.Node(op, inputs)] * count)
        return list(range(first, first + count))

    def _block(self, block: Any, arguments: list[int], place: _Place) -> list[int]:
        """Read a block; returns the nodes that its terminator hands on."""
        node_of = self.node_of
        node_of.update(zip(block.arguments, arguments))
        inputs: tuple[int, ...] = ()
        for view in block.operations:
            op = view.operation
            name = op.name
            inputs = tuple([node_of[v] for v in op.operands])
            results = op.results
            if name in _SDY:
                made = [self._sdy(op, _SDY[name], inputs, place)]
            elif name in _STABLEHLO:
                made = [
                    self._stablehlo(op, _STABLEHLO[name], inputs[i], i, place)
                    for i in range(len(results))
                ]
            elif name == "func.call":
                callee = op.attributes["callee"].value
                made = self.function(callee, list(inputs), place.inside(op))
            elif name == "stablehlo.while":
                made = self._while(op, inputs, place)
            elif name in _BRANCHES:
                made = self._branches(op, inputs, place)
            elif len(results) == 1:
                made = [len(self.nodes)]
                self.nodes.append(nf.Node(_KNOWN.get(name, name), inputs, loop=place.loop))
            else:  # without results, a return: what it hands on is used
                made = self._new(name, max(len(results), 1), inputs)
            node_of.update(zip(results, made))
        return list(inputs)

    def _branches(self, op: Any, inputs: tuple[int, ...], place: _Place) -> list[int]:
        inner = place.inside(op) if op.name == "sdy.manual_computation" else place
        handed: list[int] = []
        for region in op.regions:
            block = region.blocks[0]
            handed += self._block(block, self._new("argument", len(block.arguments), inputs), inner)
        return self._new(op.name, len(op.results), (*inputs, *handed))

    def _while(self, op: Any, inputs: tuple[int, ...], place: _Place) -> list[int]:
        scope = _plain(_scope(op, place.path))[0]
        trips = self.trip_counts.get(scope) or _trip_count(op)
        if trips is not None:
            self.runs[scope] = trips
        self.loops += 1
        inner = place._replace(times=place.times * (trips or 1), loop=self.loops)
        start = len(self.nodes)
        handed: list[int] = []
        for region in op.regions:
            carried = self._new("argument", len(inputs), inputs)
            handed += self._block(region.blocks[0], carried, inner)
        if trips is None and any(n.op in nf.COLLECTIVES for n in self.nodes[start:]):
            warnings.warn(
                f"how often the loop `{scope}` runs is not known: its collectives count once; "
                "say it with `trip_counts`",
                stacklevel=2,
            )
        return self._new(op.name, len(op.results), (*inputs, *handed))

    def _sdy(self, op: Any, kind: str, inputs: tuple[int, ...], place: _Place) -> int:
        sharding = op.attributes["out_sharding"]
        if kind == nf.COLLECTIVE_PERMUTE:
            moved = str(_moved_dims(op.operands[0], sharding))
        else:
            moved = str(op.attributes[_AXES[kind]])
        axes, parts = self._axes(moved)
        size, dtype = _local_bytes(op.results[0].type, sharding, self.mesh)
        return self._collective(
            op,
            place,
            nf.Node(
                kind,
                inputs,
                axes,
                size * parts if kind == nf.REDUCE_SCATTER else size,
                dtype,
                parts,
                combiner=_combiner_before(op),
                params=f"{moved} {sharding}",
            ),
        )

    def _stablehlo(self, op: Any, kind: str, operand: int, i: int, place: _Place) -> int:
        """A collective that the user wrote, in a `shard_map`."""
        if kind == nf.COLLECTIVE_PERMUTE:
            pairs = np.array(op.attributes["source_target_pairs"]).tolist()
            moved, axes, parts = str(pairs), nf.pair_axes(pairs, self.mesh), 1
        else:
            group = np.array(op.attributes["replica_groups"])[0].tolist()
            moved, axes, parts = str(group), nf.group_axes(group, self.mesh), len(group)
        dims = [str(op.attributes[d]) for d in _DIMS if d in op.attributes]
        sharding = None
        if "sdy.sharding" in op.attributes:
            sharding = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings[i]
        size, dtype = _local_bytes(op.results[i].type, sharding, self.mesh)
        return self._collective(
            op,
            place,
            nf.Node(
                kind,
                (operand,),
                axes,
                size * parts if kind == nf.REDUCE_SCATTER else size,
                dtype,
                parts,
                combiner=_combiner(op),
                params=" ".join([moved, *dims]),
            ),
        )

    def _collective(self, op: Any, place: _Place, node: nf.Node) -> int:
        scope, stands_for = _plain(_scope(op, place.path))
        self.nodes.append(
            node._replace(
                times=place.times * stands_for,
                loop=place.loop,
                scope=scope,
                source=_source(op) or place.source,
            )
        )
        return len(self.nodes) - 1

    def _axes(self, text: str) -> tuple[tuple[str, ...], int]:
        """(axes that `text` names, in the mesh's order; devices along them)."""
        found = {}
        for name, before, size in _AXIS.findall(text):
            order = list(self.mesh).index(name), int(before or 0)
            found[order] = (
                f"{name}:({before}){size}" if size else name,
                int(size or self.mesh[name]),
            )
        ordered = [found[order] for order in sorted(found)]
        return tuple(name for name, _ in ordered), prod(size for _, size in ordered)


def _mesh(op: Any) -> dict[str, int]:
    axes = (sdy.MeshAxisAttr(a) for a in sdy.MeshAttr(op.attributes["mesh"]).axes)
    return {axis.name: axis.size for axis in axes}


def shape(value: Any) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


def _dim_axes(sharding: Any) -> list[list[tuple[str, int]]]:
    """For each dim the (axis, size of the part of it or 0 for all) that cut it."""
    dims = sdy.TensorShardingAttr(sharding).dimension_shardings
    refs = [[sdy.AxisRefAttr(a) for a in sdy.DimensionShardingAttr(d).axes] for d in dims]
    return [
        [(r.name, sdy.SubAxisInfoAttr(r.sub_axis_info).size if r.sub_axis_info else 0) for r in dim]
        for dim in refs
    ]


def _local_bytes(type_: Any, sharding: Any, mesh: Mapping[str, int]) -> tuple[int, str]:
    """(bytes on one device, dtype) of a tensor under a sharding; uneven dims round up."""
    tensor = ir.RankedTensorType(type_)
    dtype, bits = nf.element(str(tensor.element_type))
    dims = list(tensor.shape)
    if sharding is not None:
        cuts = [prod(size or mesh[a] for a, size in dim) for dim in _dim_axes(sharding)]
        dims = [ceil(n / cut) for n, cut in zip(dims, cuts)]
    return ceil(prod(dims) * bits / 8), dtype


def sharding_of(value: Any) -> Any:
    """The sharding of an MLIR value; None where it is not said."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        function = owner.owner.operation
        if function.name != "func.func" or "arg_attrs" not in function.attributes:
            return None
        own = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[value.arg_number])
        return own["sdy.sharding"] if "sdy.sharding" in own else None  # noqa: SIM401
    if "out_sharding" in owner.attributes:
        return owner.attributes["out_sharding"]
    if "sharding" in owner.attributes:
        return owner.attributes["sharding"]
    if "sdy.sharding" in owner.attributes:
        result = list(owner.results).index(value)
        return sdy.TensorShardingPerValueAttr(owner.attributes["sdy.sharding"]).shardings[result]
    return None


def _moved_dims(value: Any, sharding: Any) -> list[Any]:
    """The dims of `sharding` that differ from the sharding `value` has (all, where unknown)."""
    after = sdy.TensorShardingAttr(sharding).dimension_shardings
    before = sharding_of(value)
    if before is None:
        return after
    then = sdy.TensorShardingAttr(before).dimension_shardings
    return [x for a, b in zip(after, then) if str(a) != str(b) for x in (a, b)]


def _combiner(op: Any) -> str:
    """How an op with a reducer combines two values: `sum`, or the name of another op."""
    if not len(op.regions):
        return ""
    name = next(iter(op.regions[0].blocks[0].operations)).operation.name
    return "sum" if name == "stablehlo.add" else name


def _combiner_before(op: Any) -> str:
    """The combiner of a sdy reduction, which does not carry it: that of the op that it ends."""
    owner = op.operands[0].owner
    if getattr(owner, "name", "") == "stablehlo.reduce":
        return _combiner(owner)
    return "sum"


def _trip_count(op: Any) -> int | None:
    """Runs of a loop that counts up from a constant to a constant by a constant, else None."""
    cond, body = (region.blocks[0] for region in op.regions)
    test = list(cond.operations)[-1].operands[0].owner
    if getattr(test, "name", "") != "stablehlo.compare" or "LT" not in str(
        test.attributes["comparison_direction"]
    ):
        return None
    counter, limit = test.operands[0], _integer(test.operands[1])
    position = [i for i, a in enumerate(cond.arguments) if a == counter]
    if limit is None or not position:
        return None
    start = _integer(op.operands[position[0]])
    step = list(body.operations)[-1].operands[position[0]].owner
    if start is None or getattr(step, "name", "") != "stablehlo.add":
        return None
    by = [_integer(v) for v in step.operands if v != body.arguments[position[0]]]
    if len(by) != 1 or not by[0] or by[0] < 0:
        return None
    return max(ceil((limit - start) / by[0]), 0)


def _integer(value: Any) -> int | None:
    owner = value.owner
    if getattr(owner, "name", "") not in ("stablehlo.constant", "sdy.constant"):
        return None
    dense = np.array(owner.attributes["value"])
    return int(dense.flat[0]) if dense.size == 1 and dense.dtype.kind in "iu" else None


def _scope(op: Any, path: str) -> str:
    location = op.location
    name = location.name_str if isinstance(location, ir.NameLoc) else ""
    return "/".join(part for part in (path, name) if part)


def _plain(scope: str) -> tuple[str, int]:
    """A path, and for how many equations it stands (`folded.py`)."""
    repeated = _REPEATED.findall(scope)
    return (_REPEATED.sub("", scope), prod(map(int, repeated))) if repeated else (scope, 1)


def _source(op: Any) -> str:
    frame = _FRAME.search(str(op.location))
    return f"{frame[2]}:{frame[3]} ({frame[1]})" if frame else ""
