"""What the partitioner does with a planned step: its collectives, without compiling.

Shardy's own passes run on a copy of the lowered step: shardings propagate, every disagreement of an
op with its operands becomes an explicit reshard, reshards become collectives. What is left is read
into `Node`s and brought into normal form. It needs no device and works for any size of mesh.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
from jax.extend.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from jaxscaler.errors import PlanError
from jaxscaler.verify import normal_form as nf

# A pass on the wrong level of nesting ends the process, not the call: keep these under test.
POPULATE_RULES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
PROPAGATE = "builtin.module(sdy-propagation-pipeline)"
RESHARD = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
COLLECTIVES = "builtin.module(func.func(sdy-reshard-to-collectives))"
CLEAN_UP = "builtin.module(canonicalize)"


def audit(lowered: Any, trip_counts: Mapping[str, int] | None = None) -> tuple[nf.Collective, ...]:
    """The collectives of a step in normal form, in program order.

    `lowered`: what `jax.jit(step, in_shardings=...).lower(...)` returns (on devices or on an
    abstract mesh), or its StableHLO module; it is not changed. `trip_counts`: runs of a loop per
    entry, by the loop's path (`.../while`), for loops that do not count up to a constant; a loop
    with collectives that is in neither way known counts once, with a warning.

    Faithful for steps whose layouts are constrained; where they are not, the compiler's own
    partitioner may choose otherwise. Raises PlanError when a pass refuses the step.
    """
    return nf.normal_form(read(partition(lowered), trip_counts))


def partition(lowered: Any) -> Any:
    """A copy of the step's StableHLO module with its collectives written out (`sdy.all_gather`,
    ...), as an MLIR operation."""
    module = lowered.compiler_ir("stablehlo") if hasattr(lowered, "compiler_ir") else lowered
    copy = module.operation.clone()
    with copy.context, ir.Location.unknown():
        _attach_rules(copy)
        _run(PROPAGATE, copy)  # drops the rules, but for those marked custom
        _attach_rules(copy, unmark=True)
        for pipeline in (RESHARD, COLLECTIVES, CLEAN_UP):
            _run(pipeline, copy)
    return copy


def _run(pipeline: str, module: Any) -> None:
    try:
        passmanager.PassManager.parse(pipeline).run(module)
    except ir.MLIRError as error:
        raise PlanError(
            f"Shardy's pipeline {pipeline} failed on the step; compile it instead of auditing it, "
            f"and report this: {error}"
        ) from error


# --- rules for ops that Shardy has none for ---------------------------------------------------

# Ops that need no rule: nothing goes in, or their regions and edges say it.
_RULELESS = re.compile(
    r"(sdy|func|builtin)\..*"
    r"|stablehlo\.(constant|iota|while|case|if|return|partition_id|replica_id|create_token"
    r"|after_all|tuple|get_tuple_element|infeed|outfeed|send|recv|all_reduce|all_gather"
    r"|reduce_scatter|all_to_all|collective_permute|collective_broadcast)"
)


def _attach_rules(module: Any, unmark: bool = False) -> None:
    """Give every op a sharding rule, so that none is a hole in which a split disappears.

    `unmark`: rules that are marked custom (custom_partitioning, LAPACK calls) lose the mark, which
    would exempt the op from explicit reshards.
    """
    _run(POPULATE_RULES, module)

    def visit(op: Any) -> Any:
        attributes = op.attributes
        if "sdy.sharding_rule" not in attributes:
            values = [*op.operands, *op.results]
            tensors = all(isinstance(v.type, ir.RankedTensorType) for v in values)  # no tokens
            if op.operands and op.results and tensors and not _RULELESS.fullmatch(op.name):
                attributes["sdy.sharding_rule"] = _rule(op)
        elif unmark and op.name == "stablehlo.custom_call":
            rule = sdy.OpShardingRuleAttr(attributes["sdy.sharding_rule"])
            if rule.is_custom:
                attributes["sdy.sharding_rule"] = _plain(rule)
        return ir.WalkResult.ADVANCE

    module.walk(visit)


def _rule(op: Any) -> Any:
    """The rule of an op that Shardy does not know: elementwise where all shapes agree, batched in
    all but the last dim for top_k, otherwise every operand whole on every device."""
    shapes = [_shape(v) for v in op.operands], [_shape(v) for v in op.results]
    elementwise = op.name.startswith("chlo.") and len({*shapes[0], *shapes[1]}) == 1
    shared = shapes[0][0] if elementwise else ()
    if op.name == "chlo.top_k":
        shared = shapes[0][0][:-1]
    sizes = list(shared)

    def mapping(shape: tuple[int, ...]) -> Any:
        own = range(len(sizes), len(sizes) + len(shape) - len(shared))
        sizes.extend(shape[len(shared) :])
        return _mapping([[f] for f in (*range(len(shared)), *own)])

    operands, results = ([mapping(s) for s in side] for side in shapes)
    whole = list(range(len(shared), len(sizes)))
    return sdy.OpShardingRuleAttr.get(sizes, operands, results, [], whole)


def _plain(rule: Any) -> Any:
    """A custom rule without its mark; a factor that only one side has can not be split."""
    sides = [
        {f for t in maps for d in _dims(t) for f in d}
        for maps in (rule.operand_mappings, rule.result_mappings)
    ]
    reduced = set(rule.reduction_factors)
    whole = sorted({*rule.need_replication_factors, *(sides[0] ^ sides[1])} - reduced)
    return sdy.OpShardingRuleAttr.get(
        rule.factor_sizes,
        rule.operand_mappings,
        rule.result_mappings,
        rule.reduction_factors,
        whole,
        [f for f in rule.permutation_factors if f not in whole],
        [f for f in rule.blocked_propagation_factors if f not in whole],
    )


def _dims(tensor: Any) -> list[list[int]]:
    dims = sdy.TensorMappingAttr(tensor).dim_mappings
    return [list(sdy.DimMappingAttr(d).factor_indices) for d in dims]


def _mapping(dims: list[list[int]]) -> Any:
    return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get(d) for d in dims])


# --- reading a partitioned module -------------------------------------------------------------

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


class _Reader:
    """A walk over a module that appends one `Node` per value."""

    def __init__(self, module: Any, trip_counts: Mapping[str, int]):
        self.nodes: list[nf.Node] = []
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
        scope = _scope(op, place.path)
        trips = self.trip_counts.get(scope) or _trip_count(op)
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
        self.nodes.append(
            node._replace(
                times=place.times,
                loop=place.loop,
                scope=_scope(op, place.path),
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


def _shape(value: Any) -> tuple[int, ...]:
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


def _moved_dims(value: Any, sharding: Any) -> list[Any]:
    """The dims of `sharding` that differ from the sharding `value` has (all, where unknown)."""
    after = sdy.TensorShardingAttr(sharding).dimension_shardings
    owner = value.owner
    before: Any = None
    if isinstance(owner, ir.Operation) or hasattr(owner, "attributes"):
        if "out_sharding" in owner.attributes:
            before = owner.attributes["out_sharding"]
        elif "sdy.sharding" in owner.attributes:
            result = list(owner.results).index(value)
            per_value = sdy.TensorShardingPerValueAttr(owner.attributes["sdy.sharding"])
            before = per_value.shardings[result]
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


def _source(op: Any) -> str:
    frame = _FRAME.search(str(op.location))
    return f"{frame[2]}:{frame[3]} ({frame[1]})" if frame else ""
