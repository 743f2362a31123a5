"""The op graph: plain frozen data, no JAX.

A train step is a flat list of `Op`s over `Value`s in program order. Bodies of loops and branches
stand in the same list, each `Op` carrying how often it runs per step (`repeat`); what flows into
and out of them goes through four marker primitives (`MARKERS`), so that a walk over the graph needs
no special case for control flow. `Op.key` says where the equation stands in the jaxpr.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

# Phases of a step.
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

# Roles of a value.
PARAMETER, OPTIMIZER, BATCH, RNG, CONSTANT = "parameter", "optimizer", "batch", "rng", "constant"
ACTIVATION, GRADIENT, OUTPUT = "activation", "gradient", "output"
DONATED = "donated"  # new state, written in the place of the argument it replaces
STATE_ROLES = (PARAMETER, OPTIMIZER)

# Marker primitives: data-flow edges of loops and branches, written as ops.
#   loop_carry   (init, body result) -> value inside the body; also what the loop returns
#   loop_slice   (stacked [L, ...])  -> value [...] of one iteration
#   loop_stack   (value [...] of one iteration) -> stacked [L, ...]
#   branch_join  (result of each branch, ...) -> result
CARRY, SLICE, STACK, JOIN = "loop_carry", "loop_slice", "loop_stack", "branch_join"
MARKERS = (CARRY, SLICE, STACK, JOIN)
# A value comes back from the memory of the host. It is the value that went there, which needs no op
# of its own; reading it so does not keep it in the memory of the device.
FROM_HOST = "from_host"

# Kinds of a factor.
PASS = "pass"  # a split passes through: every tensor that has the factor is cut
REDUCE = "reduce"  # contracted: results are partial values, combined by `Factor.combiner`
FROZEN = "frozen"  # must not be split (sort axis, halo, scan axis, miscompiled …)
SHIFT = "shift"  # as the combiner of a PASS factor: every device hands an element to the next


class Factor(NamedTuple):
    """One named loop of an op: `size` iterations, of one `kind`.

    `combiner` is how partial results of a split REDUCE factor combine: "sum" (may be deferred
    through linear ops), or "max", "min", "and", "or", "other" (must be combined at once). A PASS
    factor may say SHIFT.
    `together`: either every mesh axis cuts it or none, as the compiler does badly with some.
    """

    size: int
    kind: str
    combiner: str = ""
    together: bool = False


@dataclass(frozen=True)
class Rule:
    """Which factors each dim of each operand and result is made of, major factor first.

    A dim of size 1 may have no factor. A tensor that lacks a split factor is whole on every part;
    a result that lacks a split REDUCE factor is a partial value.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    note: str = ""  # why a factor is frozen or the op unknown; empty for the ordinary

    def verify(self, operand_shapes, result_shapes) -> None:
        """Raise AssertionError unless the rule fits these shapes."""
        assert len(self.operands) == len(operand_shapes), (len(self.operands), operand_shapes)
        assert len(self.results) == len(result_shapes), (len(self.results), result_shapes)
        for dims, shape in (*zip(self.operands, operand_shapes), *zip(self.results, result_shapes)):
            assert len(dims) == len(shape), (dims, shape)
            for factors, size in zip(dims, shape):
                product = 1
                for f in factors:
                    product *= self.factors[f].size
                assert product == size or (not factors and size == 1), (factors, size, self)


class Kind(NamedTuple):
    """What all equal equations share: primitive, shapes, rule, floating-point work of one run."""

    primitive: str
    operand_shapes: tuple[tuple[int, ...], ...]
    operand_dtypes: tuple[str, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    result_dtypes: tuple[str, ...]
    rule: Rule
    flops: float  # multiply-adds count 2; 0 for what only moves data
    traits: frozenset[str] = frozenset()  # "linear", "elementwise", "opaque", … see graph/kinds.py
    nbytes: float | None = None  # memory traffic of one run; None: all operands and results


class Value(NamedTuple):
    """A tensor. `path` is the pytree path for inputs, empty for what an op makes."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    role: str
    path: str = ""


class Origin(NamedTuple):
    """Equation `key` (as `Op.key`) of the forward jaxpr of the step's marked loss number `loss`.

    again: an op of the forward pass that runs once more, in the backward pass.
    """

    loss: int
    key: tuple[int, ...]
    again: bool = False


@cache
def dtype_bytes(dtype: str) -> float:
    """Bytes per element by dtype name ("bfloat16", "int4", "bool", "key<fry>" …)."""
    digits = "".join(c for c in dtype.split("_")[0] if c.isdigit())  # float8_e4m3fn -> 8
    if digits:
        return int(digits) / 8
    return 1.0 if dtype == "bool" else 8.0  # a random key is two words


class Op(NamedTuple):
    """One equation. `inputs` and `outputs` are value ids; -1 stands for a literal."""

    id: int
    key: tuple[int, ...]  # equation index, then (sub-jaxpr, equation index) for each level inside
    kind: int  # index into OpGraph.kinds
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: str
    scope: str  # module path, from the name stack
    source: str  # file:line (function)
    repeat: int = 1  # runs per step
    # of a marker, whose key is that of the loop or branch: (sub-jaxpr, operand of the loop, invar
    # of the body, outvar of the body, result of the loop), -1 where there is none
    spot: tuple[int, ...] = ()
    origin: Origin | None = None  # the forward equation that it came from, forward or backward


class Loop(NamedTuple):
    """Ops `first` .. `last` (inclusive, ids) are the body of one loop, its markers included."""

    first: int
    last: int
    trips: int


class Region(NamedTuple):
    """Ops `first` .. `last` (inclusive, ids) that the step's author marked: `what` is "remat"."""

    what: str
    first: int
    last: int


class Barrier(NamedTuple):
    """No op from `at` (id) on runs before `values` are there (rewrite/early.py); `key`: as of ops.

    An equation, but no op: what reads its results reads `values`.
    """

    at: int
    key: tuple[int, ...]
    values: tuple[int, ...]


class Annotation(NamedTuple):
    """The step's author says where a value lies: per dim the axes that cut it, None where open.

    `axes` are those of the author's mesh, (name, size), major first.
    """

    value: int
    spec: tuple[tuple[str, ...] | None, ...]
    axes: tuple[tuple[str, int], ...]
    source: str


@dataclass(frozen=True)
class OpGraph:
    """A whole train step."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    kinds: tuple[Kind, ...]
    inputs: tuple[int, ...]  # value ids, in the order of the flat arguments
    outputs: tuple[int, ...]  # value ids, in the order of the flat results (-1: a literal)
    output_paths: tuple[str, ...]
    state: tuple[tuple[int, int], ...]  # (position in inputs, position in outputs) of state leaves
    constants: tuple[int, ...] = ()  # value ids of closed-over arrays
    loops: tuple[Loop, ...] = ()
    regions: tuple[Region, ...] = ()
    annotations: tuple[Annotation, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    notes: tuple[str, ...] = field(default=())  # what a user should know (unknown ops, …)
    under_way: float = 1.0  # times that what `waits` is in memory at once: see `Traced`

    @cached_property
    def reads(self) -> np.ndarray:
        """Every (op, operand position, value) that is no literal: [n, 3]."""
        found = [(op.id, slot, v) for op in self.ops for slot, v in enumerate(op.inputs) if v >= 0]
        return np.array(found, np.int64).reshape(-1, 3)

    @cached_property
    def makers(self) -> np.ndarray:
        """Per value: (op that makes it, result position), -1 for arguments: [values, 2]."""
        found = np.full((len(self.values), 2), -1, np.int64)
        made = [(v, op.id, r) for op in self.ops for r, v in enumerate(op.outputs) if v >= 0]
        at = np.array(made, np.int64).reshape(-1, 3)
        found[at[:, 0]] = at[:, 1:]
        return found

    def waits(self, value: int, last: int) -> bool:
        """Whether a value, whose last reader is op `last`, is a micro-batch's and waits for its
        backward pass: made forward in a loop, or received from another stage."""
        if last >= len(self.ops) or self.ops[last].phase != BACKWARD or self.ops[last].repeat == 1:
            return False
        maker = int(self.makers[value, 0])
        if maker < 0:
            return self.values[value].role == BATCH
        return self.ops[maker].phase == FORWARD and self.ops[maker].repeat > 1

    def verify(self) -> None:
        """Raise AssertionError unless the graph is well formed."""
        known = set(self.inputs) | set(self.constants)
        made: set[int] = set()
        for i, value in enumerate(self.values):
            assert value.id == i
        late = set()  # what a loop's body hands to its next iteration is made after it is used
        for i, op in enumerate(self.ops):
            assert op.id == i and op.repeat >= 1
            kind = self.kinds[op.kind]
            shapes = [self.values[v].shape if v >= 0 else None for v in op.inputs]
            assert len(shapes) == len(kind.operand_shapes), (op, kind)
            for shape, expected in zip(shapes, kind.operand_shapes):
                assert shape is None or shape == expected, (op, kind)
            for v, expected in zip(op.outputs, kind.result_shapes):
                assert v < 0 or self.values[v].shape == expected, (op, kind)
            for n, v in enumerate(op.inputs):
                if v >= 0 and v not in known and v not in made:
                    assert kind.primitive == CARRY and n == 1, f"{op} uses {v} before it is made"
                    late.add(v)
            for v in op.outputs:
                if v >= 0:
                    assert v not in made and v not in known, f"value {v} is made twice"
                    made.add(v)
            kind.rule.verify(kind.operand_shapes, kind.result_shapes)
        assert late <= made | known, f"never made: {late - made - known}"
        for v in self.outputs:
            assert v < 0 or v in made or v in known, f"output {v} is never made"
        for i, o in self.state:
            a, b = self.values[self.inputs[i]], self.outputs[o]
            assert b < 0 or a.shape == self.values[b].shape, (i, o)
