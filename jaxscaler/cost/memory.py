"""When each buffer of a step is live: the memory model's view of the compiled program.

A value has a buffer if a kernel makes it that fuses with nothing (dot, conv, reduce, sort, loop …)
or reads it (dot, conv, scatter, loop, result); all else is fused into its readers, which then keep
*its* operands alive. Reshapes and transposes are views; arguments live throughout, and donated
state is updated in place; what a loop reads lives until the loop ends, what it stacks from its
start; an elementwise kernel takes over an operand of as many bytes that dies there. What one
compiler does and another does not is in `RULES`; docs/memory.md says how far it is true.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from jaxscaler.cost.deep import Deep
from jaxscaler.cost.schedule import BEFORE, BESIDE, REDUCTION, Schedule, schedule
from jaxscaler.cost.softmax import Softmaxes, softmaxes
from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import (
    CARRY,
    FROM_HOST,
    JOIN,
    SLICE,
    STACK,
    UPDATE,
    Loop,
    OpGraph,
)

# Kernels that take fused producers: they read a value without its having a buffer.
FUSING_READERS = ("reduce_", "arg", "cum", SLICE, STACK, JOIN)
WRITES_INTO = ("scatter", "dynamic_update_slice", CARRY)  # into the first operand, where it dies
NO_SOFTMAX = Softmaxes(frozenset(), frozenset(), frozenset())
LOOKS = 64  # fused values that are looked through for the buffers behind them
WIDE = {"bfloat16": 2.0, "float16": 2.0}  # bytes of f32 over those of the dtype


class Rules(NamedTuple):
    """What a compiler does with buffers."""

    stored: frozenset[str]  # results of fused ops that are stored when several ops read them
    late: str | None  # where what only the update reads runs (cost/schedule.py); None: in order
    overwrites: bool  # elementwise kernels write over an operand of as many bytes that dies there
    rows: bool  # a softmax over rows is one kernel: it writes over nothing, nor is it transposed
    shifted: bool  # what a softmax between two products keeps is that of cost/softmax.py
    twice: bool  # … and the softmax too
    turned: bool  # state is copied into the layout of its gradients, in steps with recomputation
    products_fuse: bool  # dots and convolutions compute elementwise operands themselves
    unfused: frozenset[str]  # … unless they are one of these
    tile: tuple[int, int]  # arguments are padded to it
    recomputed: float  # heap over what `heap_size` packs, of a step with recomputation


# Seen in buffer assignments of XLA as of jax 0.10.2 and libtpu 0.0.52, of H100, v5e and v5p:
# stored: on GPUs gelu's tanh is an output of the kernel that applies it, and read in the backward
#   pass; on TPUs rows that are looked up in a table.
# late: weight gradients run after the backward pass, or where collectives want to be hidden, or,
#   on v5e, before the next segment that is computed again; on v5p nearly in order.
# overwrites: of four S x S tensors in the backward pass of attention on TPUs none takes another's
#   place.
# rows: the same on GPUs, and copies in f32 of gradients that are transposed.
# shifted, twice: cost/softmax.py; what v5e computes for the second product, v5p stores.
# turned: on v5p matrices whose gradients come out transposed and whole lie in that layout too, with
#   their optimizer's state, from the start of a step with recomputation to its end.
# products_fuse: casts, masks and activations are computed as the matrix unit reads them; chains
#   with an exponential or a division are not, nor, on v5p, gelu's tanh.
# tile: arguments are laid out in (8, 128) tiles of the two dims that lose least; temporaries too,
#   with little loss.
# recomputed: buffers of many sizes come and go there. Chosen looking at H100 cells, not measured
#   for itself: GPT under ZeRO-3, lowest of them, stood at -10.6 % without it, at -9.0 % with it.
COSTLY = frozenset({"exp", "exp2", "div", "logistic"})
RULES = {
    "NVIDIA": Rules(
        stored=frozenset({"tanh", "erf"}), late=BESIDE, overwrites=True, rows=True,
        shifted=False, twice=False, turned=False, products_fuse=False, unfused=frozenset(),
        tile=(1, 1), recomputed=1.02,
    ),
    "Google": Rules(
        stored=frozenset({"gather"}), late=BEFORE, overwrites=False, rows=False,
        shifted=True, twice=False, turned=False, products_fuse=True, unfused=COSTLY,
        tile=(8, 128), recomputed=1.0,
    ),
}  # fmt: skip
RULES["v5p"] = RULES["Google"]._replace(
    late=None, twice=True, turned=True, unfused=COSTLY | {"tanh"}
)
RULES["AMD"] = RULES["NVIDIA"]  # the same compiler; not measured


def rules_for(vendor: str, name: str = "") -> Rules:
    """The rules of a device's compiler: by its name, else its vendor; NVIDIA's for others."""
    return RULES.get(name) or RULES.get(vendor, RULES["NVIDIA"])


class Buffers(NamedTuple):
    """Buffer i holds `share[i]` times value `value[i]`'s bytes from op `lo[i]` to op `hi[i]`."""

    value: np.ndarray
    share: np.ndarray
    lo: np.ndarray
    hi: np.ndarray


class Lives(NamedTuple):
    """Buffers with their live rows: buffer i holds value `value[i]` in rows `lo[i]` .. `hi[i]`-1.

    Rows are the moments at which the live set can be largest, in program order: `moment[row]` is an
    op id. Arguments are not listed: they live in every row. `share`: times the value's bytes.
    """

    value: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    moment: np.ndarray
    share: np.ndarray


def live_buffers(graph: OpGraph, folded: Folded, rules: Rules = RULES["NVIDIA"]) -> Lives:
    """Live rows of every buffer of a step, moments inside inner equal layers left out.

    Inner layers need no row of their own: from one layer to the next the live set of any plan grows
    or shrinks by the same amount, so the largest is at the first or the last of them. Ops run in
    program order: what a compiler runs later depends on the plan (`buffers` of its device graph).
    """
    values, share, lo, hi = buffers(graph, rules._replace(late=None))
    if graph.under_way > 1:
        waits = [graph.waits(v, last) for v, last in zip(values.tolist(), hi.tolist())]
        share = share * np.where(waits, graph.under_way, 1.0)
    if len(values) == 0:
        return Lives(values, lo, hi, np.zeros(1, np.int64), share)
    moments = _maximal(lo, hi)
    kept = moments[~folded.inner[np.clip(moments, 0, len(graph.ops) - 1)]]
    if len(kept) == 0:
        kept = moments
    first = np.searchsorted(kept, lo, side="left")
    last = np.searchsorted(kept, hi, side="right")
    seen = last > first
    return Lives(values[seen], first[seen], last[seen], kept, share[seen])


def buffers(graph: OpGraph, rules: Rules, deep: Deep | None = None) -> Buffers:
    """All buffers of a graph but its arguments, and when they live; with `deep` of the whole."""
    return _Ranges(graph, rules, deep).run()


def _maximal(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Moments at which some buffer ends after another began: only there the live set is maximal."""
    ends = np.unique(hi)
    starts = np.sort(lo)
    begun = np.searchsorted(starts, ends, side="right")
    return ends[np.diff(begun, prepend=0) > 0]


class _Ranges:
    """Per value: first op, last op, whether it has a buffer; then what departs from that."""

    def __init__(self, graph: OpGraph, rules: Rules, deep: Deep | None = None):
        self.graph, self.rules, self.deep = graph, rules, deep
        kinds = graph.kinds
        self.primitive = [kind.primitive for kind in kinds]
        self.fusable = ["fusable" in k.traits or k.primitive == SLICE for k in kinds]
        self.view = ["alias" in k.traits or k.primitive == "transpose" for k in kinds]
        self.elementwise = ["elementwise" in k.traits for k in kinds]
        self.heavy = ["heavy" in k.traits for k in kinds]
        self.hungry = [  # kernels whose operands must lie in memory
            not self.fusable[k] and not kind.primitive.startswith(FUSING_READERS)
            for k, kind in enumerate(kinds)
        ]
        self.maker = graph.makers[:, 0].tolist()
        self.enclosing = enclosing(graph)
        *in_order, self.after = range(len(graph.ops) + 1) if deep is None else deep.base.tolist()
        if rules.late:
            found = schedule(graph, self.fusable, self.heavy, self.enclosing, rules.late, deep)
        else:
            found = Schedule(in_order, frozenset(), {})
        self.place, self.kept, self.waits = found
        self.start = np.maximum(graph.makers[:, 0], 0).tolist()
        self.end = [0] * len(graph.values)
        self.has = bytearray(len(graph.values))
        self.softmaxes = softmaxes(graph, self.fusable, self.heavy) if rules.shifted else NO_SOFTMAX
        self.costly = self.costly_values()
        self.extra: list[tuple[int, float, int, int]] = []  # (value, share, lo, hi)

    def run(self) -> Buffers:
        self.begin()
        self.live()
        self.take_over()
        if self.rules.rows:
            self.transposed_rows()
        if self.rules.turned and any(region.what == "remat" for region in self.graph.regions):
            self.extra.extend((v, 1.0, 0, self.after) for v in turned_state(self.graph))
        found = [(v, 1.0, self.start[v], self.end[v]) for v in np.flatnonzero(self.has).tolist()]
        found = [b for b in (*self.extra, *found) if b[3] >= b[2]]
        value, share, lo, hi = zip(*found) if found else ((), (), (), ())
        arrays = (np.array(value, np.int64), np.array(share, float), np.array(lo, np.int64),
                  np.array(hi, np.int64))  # fmt: skip
        return Buffers(*(self.deep.buffers(*arrays, self.waits) if self.deep else arrays))

    def costly_values(self) -> bytearray:
        """Whether a fused value's chain back to buffers has an op that products do not compute."""
        costly = bytearray(len(self.graph.values))
        if self.rules.products_fuse:
            shifted, _, made = self.softmaxes
            cheap = shifted if self.rules.twice else shifted | made
            for op in self.graph.ops:
                if self.fusable[op.kind]:
                    found = self.primitive[op.kind] in self.rules.unfused
                    found = found or any(costly[v] for v in op.inputs if v >= 0)
                    for v in op.outputs:
                        if v >= 0:
                            costly[v] = found and v not in cheap
        return costly

    def begin(self) -> None:
        for op in self.graph.ops:
            for v in op.outputs:
                if v >= 0:
                    self.start[v] = self.place[op.id]
            if self.primitive[op.kind] == STACK:  # allocated before its loop
                self.start[op.outputs[0]] = self.enclosing[op.id][-1].first - 1

    def live(self) -> None:
        graph, has, end, start = self.graph, self.has, self.end, self.start
        needed = bytearray(len(graph.values))
        donated = {graph.outputs[o] for _, o in graph.state}
        readers = np.bincount(np.unique(graph.reads[:, [0, 2]], axis=0)[:, 1],
                              minlength=len(graph.values))  # fmt: skip
        for v in graph.outputs:
            if v >= 0 and v not in donated:
                needed[v] = 1
                end[v] = self.after
        for op in reversed(graph.ops):
            k, name = op.kind, self.primitive[op.kind]
            results = [v for v in op.outputs if v >= 0]
            stored = name in self.rules.stored
            for v in results:
                if name in (CARRY, STACK):
                    has[v] = 1
                    end[v] = max(end[v], self.enclosing[op.id][-1].last)
                elif not self.view[k] and (
                    needed[v]
                    or not self.fusable[k]
                    or v in self.kept
                    or (stored and readers[v] > 1)
                    or v in self.softmaxes.shifted
                ):
                    has[v] = v not in self.softmaxes.products
            at = self.place[op.id]
            if name == FROM_HOST:  # what went there has been in memory once
                needed[op.inputs[0]] = 1
                end[op.inputs[0]] = max(end[op.inputs[0]], start[op.inputs[0]])
                continue
            if self.fusable[k] and not any(has[v] for v in results):  # read when its readers run
                at = max((end[v] for v in results), default=at)
            into = self.scattered(op)
            hands_on = self.view[k] and any(needed[v] for v in results)
            # the second operand of a carry is written into the carry's own buffer
            for v in op.inputs[:1] if name == CARRY else op.inputs:
                if v < 0:
                    continue
                stacked = name == SLICE  # what a loop takes apart is an operand of the whole loop
                if hands_on or stacked or (self.hungry[k] and not self.computes(k, v)):
                    needed[v] = 1
                last = at if into in (-1, v) else self.place[self.maker[into]]
                # what a carry begins with is read once in its own loop
                for loop in self.enclosing[op.id][: -1 if name == CARRY else None]:
                    if start[v] < loop.first:  # made outside: alive until the loop ends
                        last = max(last, loop.last)
                        break
                if last > end[v]:
                    end[v] = last
        for v in (*donated, *graph.inputs, *graph.constants):  # arguments, and in their place
            if v >= 0:
                has[v] = 0

    def scattered(self, op) -> int:
        """The operand of a sum that is scattered into zeros: it is scattered into the other one."""
        if self.primitive[op.kind] in ("add", "add_any") and not self.has[op.outputs[0]]:
            for v in op.inputs:
                o = self.maker[v] if v >= 0 else -1
                if o >= 0 and self.primitive[self.graph.ops[o].kind] == "scatter-add":
                    zeros = self.maker[self.graph.ops[o].inputs[0]]
                    if zeros >= 0 and self.fusable[self.graph.ops[zeros].kind]:
                        return v
        return -1

    def computes(self, k: int, v: int) -> bool:
        """Whether a product of kind `k` computes its operand `v` itself."""
        if not (self.rules.products_fuse and self.heavy[k]) or self.maker[v] < 0:
            return False
        return self.fusable[self.graph.ops[self.maker[v]].kind] and not self.costly[v]

    def take_over(self) -> None:
        """End a buffer where an op of as many bytes takes it over, before that one begins."""
        graph, has, start, end = self.graph, self.has, self.start, self.end
        taken = bytearray(len(graph.values))
        for op in graph.ops:
            made = [v for v in op.outputs if v >= 0 and has[v]]
            into = self.primitive[op.kind].startswith(WRITES_INTO)
            over = self.rules.overwrites and self.elementwise[op.kind]
            if not made or not (into or over):
                continue
            behind, rows = self.behind(op.inputs[:1] if into else op.inputs)
            whole = set()  # operands that a row reduction of the same kernel reads too
            if rows and self.rules.rows:
                whole = {u for r in rows for u in self.behind(graph.ops[r].inputs)[0]}
            for v in made:
                for u in behind:
                    if (
                        not taken[u] and u not in whole and end[u] == self.place[op.id]
                        and start[u] <= start[v] and self.size(u) == self.size(v)
                    ):  # fmt: skip
                        taken[u] = 1
                        end[u] = start[v] - 1
                        break

    def transposed_rows(self) -> None:
        """A row softmax of a transposed product is computed again by each product that reads it.

        In its gradient the other product is brought into the same layout, as a copy in f32. What
        a loop stacks in such a layout is copied, the largest last, before another loop reads it.
        """
        graph = self.graph
        readers: dict[int, list[int]] = {}
        for o, _, v in graph.reads.tolist():
            readers.setdefault(v, []).append(o)
        stacks: dict[Loop, int] = {}
        for op in graph.ops:
            stacked = self.primitive[op.kind] == STACK
            (v,) = op.outputs if len(op.outputs) == 1 else (-1,)
            if not stacked and not (v >= 0 and self.elementwise[op.kind] and self.has[v]):
                continue
            behind, rows = self.behind(op.inputs)
            products = sorted(u for u in behind if self.heavy[graph.ops[self.maker[u]].kind])
            if stacked:
                if any(behind[u] for u in products):
                    loop = self.enclosing[op.id][-1]
                    stacks[loop] = max(stacks.get(loop, v), v, key=self.nbytes)
                continue
            products = [u for u in products if self.count(u) == self.count(v)]
            if not (rows and products and behind[products[0]]):
                continue
            at, newest = self.place[op.id], products[-1]
            if len(products) > 1:
                self.extra.append((newest, WIDE.get(graph.values[newest].dtype, 1.0), at, at))
                self.end[newest] = min(self.end[newest], at - 1)
                continue
            hungry = (o for o in readers.get(v, ()) if self.hungry[graph.ops[o].kind])
            first, *later = sorted({self.place[o] for o in hungry}) or [at]
            if later:
                self.extra.append((v, 1.0, later[0], self.end[v]))
                self.end[v] = first
                self.end[newest] = max(self.end[newest], later[0])
        for v in stacks.values():
            at = min((self.place[o] for o in readers.get(v, ())), default=self.end[v]) - 1
            self.extra.append((v, 1.0, at, at))

    def behind(self, inputs) -> tuple[dict[int, bool], list[int]]:
        """The buffers that a fused op reads element by element: {value: is it transposed?}.

        And the ops of row reductions whose results it reads on the way.
        """
        left, seen = [(v, False) for v in inputs if v >= 0], set[int]()
        found: dict[int, bool] = {}
        rows = []
        while left and len(seen) < LOOKS:
            v, turned = left.pop()
            o = self.maker[v]
            if o < 0 or v in seen:
                continue
            seen.add(v)
            op = self.graph.ops[o]
            name = self.primitive[op.kind]
            if self.has[v]:
                found[v] = turned
                if name.startswith("reduce_"):
                    rows.append(o)
            elif self.elementwise[op.kind] or self.view[op.kind] or name == "broadcast_in_dim":
                turned |= name == "transpose"
                left.extend((u, turned) for u in op.inputs if u >= 0)
        return found, rows

    def count(self, v: int) -> int:
        return prod(self.graph.values[v].shape)

    def size(self, v: int) -> tuple[int, str]:
        """Values of one size have as many bytes: elements, and the width that a dtype's name has.

        "bfloat16" and "float16" differ in name only: both end in "16".
        """
        return self.count(v), self.graph.values[v].dtype.lstrip("abcdefghijklmnopqrstuvwxyz")

    def nbytes(self, v: int) -> float:
        return self.count(v) / WIDE.get(self.graph.values[v].dtype, 1.0)


def turned_state(graph: OpGraph) -> set[int]:
    """Matrices among the arguments that are updated with a product's transposed result."""
    count = [prod(value.shape) for value in graph.values]
    straight, turned = set[int](), set[int]()  # results of products, and those transposed
    state = {v: v for v in graph.inputs}  # arguments, and what is computed from one alone
    found = set[int]()
    for op in graph.ops:
        kind = graph.kinds[op.kind]
        heavy = "heavy" in kind.traits
        moved = heavy or kind.primitive == REDUCTION or "fusable" in kind.traits
        for v in op.outputs if moved else ():
            same = [u for u in op.inputs if u >= 0 and v >= 0 and count[u] == count[v]]
            if heavy:
                straight.add(v)
            elif turned.intersection(same) or straight.intersection(same):
                now = bool(turned.intersection(same))
                if kind.primitive == "transpose" and len(graph.values[v].shape) == 2:
                    now = not now
                (turned if now else straight).add(v)
                if now and op.phase == UPDATE:
                    found.update(state[u] for u in same if u in state)
            elif len(same) == 1 and same[0] in state and op.phase == UPDATE:
                state[v] = state[same[0]]
    return found


def enclosing(graph: OpGraph) -> list[tuple[Loop, ...]]:
    """Per op: the loops it is in, outermost first."""
    inside: list[tuple[Loop, ...]] = [()] * len(graph.ops)
    for loop in sorted(graph.loops):  # an outer loop begins before what is in it
        for i in range(loop.first, loop.last + 1):
            inside[i] = (*inside[i], loop)
    return inside
