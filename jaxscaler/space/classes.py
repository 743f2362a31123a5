"""A folded graph by its classes: what makes, reads and repeats each class of values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import BATCH, REDUCE, STATE_ROLES, UPDATE, Kind, Op, OpGraph, Value

DEFERRING = ("add", "add_any")  # partial sums may meet in these before they are reduced

# value class -> (op class, operand) -> runs per step, over all instances
Readers = dict[int, dict[tuple[int, int], int]]


@dataclass(frozen=True)
class Classes:
    """Lookups on a graph and its fold; every answer is the same for all members of a class."""

    graph: OpGraph
    folded: Folded

    @cached_property
    def op(self) -> list[Op]:
        """Op class -> its representative."""
        return [self.graph.ops[o] for o in self.folded.representatives]

    @cached_property
    def kind(self) -> list[Kind]:
        return [self.graph.kinds[op.kind] for op in self.op]

    @cached_property
    def of(self) -> list[int]:
        """Value -> its class."""
        return self.folded.value_class.tolist()

    @cached_property
    def maker(self) -> dict[int, tuple[int, int]]:
        """Value class -> (op class, result) that makes it; arguments have none."""
        return {
            self.of[v]: (c, r)
            for c, op in enumerate(self.op)
            for r, v in enumerate(op.outputs)
            if v >= 0
        }

    @cached_property
    def sample(self) -> dict[int, int]:
        """Value class -> its first value."""
        classes, first = np.unique(self.folded.value_class, return_index=True)
        return dict(zip(classes.tolist(), first.tolist()))

    @cached_property
    def instances(self) -> Counter[int]:
        """Value class -> how many values it has."""
        return Counter(self.of)

    def value(self, k: int) -> Value:
        return self.graph.values[self.sample[k]]

    def trivial(self, c: int) -> bool:
        """Whether an op class touches nothing but scalars and random keys."""
        kind = self.kind[c]
        small = all(prod(s) <= 1 for s in (*kind.operand_shapes, *kind.result_shapes))
        keys = all(d.startswith("key<") for d in kind.result_dtypes)
        return small or (keys and all(self.whole(v) for v in self.op[c].inputs))

    def whole(self, v: int) -> bool:
        """Whether a value is always replicated: literal, scalar, random key, closed-over array."""
        if v < 0:
            return True
        value, maker = self.graph.values[v], self.maker.get(self.of[v])
        if maker is None:
            return value.role not in (*STATE_ROLES, BATCH) or prod(value.shape) <= 1
        return self.trivial(maker[0])

    @cached_property
    def deferring(self) -> set[int]:
        """Op classes whose result may be a partial sum: contractions, and sums of such results."""
        out: set[int] = set()
        for c, op in enumerate(self.op):
            kind = self.kind[c]
            if any(f.kind == REDUCE and f.combiner == "sum" for f in kind.rule.factors):
                out.add(c)
            elif kind.primitive in DEFERRING and len(set(kind.operand_shapes)) == 1:
                makers = [self.maker.get(self.of[v]) if v >= 0 else None for v in op.inputs]
                if all(m is not None and m[0] in out for m in makers):
                    out.add(c)
        return out

    @cached_property
    def readers(self) -> Readers:
        op, slot, value = self.graph.reads.T
        runs = np.array([o.repeat for o in self.graph.ops], np.int64)[op]
        width, ops = int(slot.max(initial=0)) + 1, self.folded.num_classes
        key = (self.folded.value_class[value] * ops + self.folded.op_class[op]) * width + slot
        groups, where = np.unique(key, return_inverse=True)
        total = np.bincount(where, weights=runs).astype(np.int64)
        found: Readers = {}
        for group, times in zip(groups.tolist(), total.tolist()):
            pair, s = divmod(group, width)
            k, c = divmod(pair, ops)
            found.setdefault(k, {})[c, s] = times
        return found

    @cached_property
    def _trips(self) -> list[int]:
        """Per op, of the innermost loop around it."""
        found = [1] * len(self.graph.ops)
        for loop in sorted(self.graph.loops, key=lambda loop: loop.first - loop.last):
            found[loop.first : loop.last + 1] = [loop.trips] * (loop.last + 1 - loop.first)
        return found

    def trips(self, op: Op) -> int:
        """How often a marker's loop goes round for one run of it; 1 for other ops."""
        is_marker = "marker" in self.graph.kinds[op.kind].traits
        return self._trips[op.id] if is_marker else 1

    def light(self, c: int) -> bool:
        """Whether an op only casts, rescales or views its operands, or is a marker."""
        return bool(self.kind[c].traits & {"marker", "elementwise", "alias", "fusable"})

    @cached_property
    def state_traffic(self) -> set[int]:
        """Value classes that carry parameters to compute or gradients to the update.

        What light ops make of state, and what only the update reads, through light ops: their
        collectives need wait for nothing, or nothing waits for them.
        """
        found = {k for k in self.sample if self.value(k).role in STATE_ROLES}
        for c, op in enumerate(self.op):
            reads = [self.of[v] for v in op.inputs if v >= 0]
            if reads and self.light(c) and found.issuperset(reads):
                found.update(self.of[v] for v in op.outputs if v >= 0)
        results = {self.of[v] for v in self.graph.outputs if v >= 0}
        gradients: set[int] = set()

        def late(c: int) -> bool:
            made = [self.of[v] for v in self.op[c].outputs if v >= 0]
            return self.op[c].phase == UPDATE or (self.light(c) and gradients.issuperset(made))

        for op in reversed(self.op):
            for k in (self.of[v] for v in op.outputs if v >= 0):
                if (
                    op.phase != UPDATE
                    and k not in results
                    and all(late(c) for c, _ in self.readers.get(k, ()))
                ):
                    gradients.add(k)
        return found | gradients
