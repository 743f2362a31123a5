"""A traced step as an `OpGraph`.

Calls (jit, custom rules, remat) are inlined; loops and branches too, with markers where values
enter and leave (`ir.MARKERS`). One pass over the equations; equal equations share one `Kind`, and
rules are asked for once per kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from jaxscaler import _compat
from jaxscaler.errors import ConstraintError
from jaxscaler.graph import kinds, registry, rules
from jaxscaler.graph.ir import (
    ACTIVATION,
    BACKWARD,
    BATCH,
    CARRY,
    CONSTANT,
    DONATED,
    FORWARD,
    FROM_HOST,
    FROZEN,
    GRADIENT,
    JOIN,
    MARKERS,
    OPTIMIZER,
    OUTPUT,
    PARAMETER,
    PASS,
    RNG,
    SLICE,
    STACK,
    UPDATE,
    Annotation,
    Barrier,
    Factor,
    Kind,
    Loop,
    Op,
    OpGraph,
    Origin,
    Region,
    Rule,
    Value,
)
from jaxscaler.graph.origin import AGAIN, EARLY, read_origin
from jaxscaler.trace import Traced

LITERAL = -1
PHASE = Op._fields.index("phase")
ROLES = (PARAMETER, OPTIMIZER, BATCH, RNG)  # of an argument
_WRAPPER = re.compile(r"(?:transpose|jvp|vmap|rematted_computation|checkpoint)\(([^()]*)\)")


Where = tuple[str, str | None, Origin | None]  # module path, phase, origin
OUTERMOST: Where = ("", None, None)


def build(traced: Traced) -> OpGraph:
    """The graph of a traced step (`trace.Traced`)."""
    builder = _Builder(traced)
    builder.run()
    return builder.finish()


def marker_rule(primitive: str, shape: tuple[int, ...], operands: int) -> Rule:
    """Rule of a marker whose unstacked value has `shape` ([L, ...] for the stacked side)."""
    dims = tuple((d,) for d in range(len(shape)))
    factors = tuple(Factor(n, PASS) for n in shape)
    if primitive in (CARRY, JOIN, FROM_HOST):
        return Rule(factors, (dims,) * operands, (dims,))
    trips = Factor(shape[0], FROZEN)  # the loop runs over it: every device needs every iteration
    factors = (trips, *factors[1:])
    stacked, one = dims, dims[1:]
    note = "the stacked dim of a loop is whole on every device"
    if primitive == SLICE:
        return Rule(factors, (stacked,), (one,), note)
    return Rule(factors, (one,), (stacked,), note)


@dataclass
class _Builder:
    """Mutable state of one pass."""

    traced: Traced
    values: list[tuple] = field(default_factory=list)  # (shape, dtype, role, path)
    ops: list[Op] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    annotations: list[Annotation] = field(default_factory=list)
    barriers: list[Barrier] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind_of: dict = field(default_factory=dict)  # signature -> index
    kind_list: list = field(default_factory=list)  # (eqn | None, Kind with rule pending)
    scopes: dict = field(default_factory=dict)  # (outer scope, name stack) -> (scope, phase | None)
    located: dict = field(default_factory=dict)  # the same by the name stack's id
    sources: dict = field(default_factory=dict)  # traceback -> text

    def run(self) -> None:
        closed = self.traced.jaxpr
        self.inputs = [
            self.new_value(v.aval, "", p) for v, p in zip(closed.jaxpr.invars, self.traced.in_paths)
        ]
        self.constants = [self.new_value(v.aval, CONSTANT, "") for v in closed.jaxpr.constvars]
        self.outputs = self.inline(closed.jaxpr, self.inputs, self.constants, (), 1, OUTERMOST)

    def new_value(self, aval, role: str, path: str = "") -> int:
        self.values.append((aval.shape, _compat.dtype_name(aval), role, path))
        return len(self.values) - 1

    # -- one jaxpr ---------------------------------------------------------------------------------

    def inline(self, jaxpr, inputs, constants, key, repeat, where) -> list[int]:
        """Append the equations of `jaxpr`, its invars standing for value ids `inputs`."""
        env = dict(zip(jaxpr.invars, inputs))
        env.update(zip(jaxpr.constvars, constants))
        literal = _compat.Literal
        structured: dict[str, Callable[..., list[int]]] = dict.fromkeys(_compat.CALLS, self.call)
        structured.update({"scan": self.scan, "while": self.while_loop, "cond": self.cond})
        structured.update({"name": self.handed_on, "reduce_precision": self.handed_on})
        structured.update({"optimization_barrier": self.barrier, "device_put": self.transfer})
        for i, eqn in enumerate(jaxpr.eqns):
            operands = [LITERAL if isinstance(a, literal) else env[a] for a in eqn.invars]
            append = structured.get(eqn.primitive.name, self.equation)
            results = append(eqn, operands, key + (i,), repeat, self.locate(where, eqn))
            env.update(zip(eqn.outvars, results))
        return [LITERAL if isinstance(a, literal) else env[a] for a in jaxpr.outvars]

    def body(self, closed, inputs, key, repeat, where) -> list[int]:
        inner, consts = _compat.open_jaxpr(closed)
        ids = [self.new_value(v.aval, CONSTANT) for v in inner.constvars] if consts else []
        self.constants.extend(ids)
        return self.inline(inner, inputs, ids, key, repeat, where)

    def call(self, eqn, operands, key, repeat, spot) -> list[int]:
        (inner,) = _compat.subjaxprs(eqn)
        first = len(self.ops)
        results = self.body(inner, operands, key + (0,), repeat, spot)
        if eqn.primitive.name in _compat.REMAT:
            self.regions.append(Region("remat", first, len(self.ops) - 1))
        return results

    def handed_on(self, eqn, operands, key, repeat, spot) -> list[int]:
        """What marks a value of a loss as kept (rewrite/recompute.py) is no op of its own."""
        if spot[2] is not None and _compat.changes_nothing(eqn):
            return operands
        return self.equation(eqn, operands, key, repeat, spot)

    def barrier(self, eqn, operands, key, repeat, spot) -> list[int]:
        """One of this package's is no op: of its many operands it only says when they are there."""
        if EARLY not in spot[0].split("/"):
            return self.equation(eqn, operands, key, repeat, spot)
        self.barriers.append(Barrier(len(self.ops), key, tuple(operands)))
        return operands

    def transfer(self, eqn, operands, key, repeat, spot) -> list[int]:
        """What lies on the host is the value that went there, until it comes back."""
        (var,), (made,) = eqn.invars, eqn.outvars
        if _compat.on_host(made):
            return operands
        if not _compat.on_host(var):
            return self.equation(eqn, operands, key, repeat, spot)
        shape = tuple(made.aval.shape)
        return [self.marker(FROM_HOST, operands, made.aval, shape, key, repeat, spot, ())]

    def equation(self, eqn, operands, key, repeat, spot) -> list[int]:
        kind = self.kind(eqn)
        scope, phase, origin = spot
        drop = _compat.DropVar
        results = [
            LITERAL if isinstance(v, drop) else self.new_value(v.aval, "") for v in eqn.outvars
        ]
        self.ops.append(
            Op(len(self.ops), key, kind, tuple(operands), tuple(results), phase or "", scope,
               self.source(eqn), repeat, (), origin)
        )  # fmt: skip
        annotated = eqn.primitive.name == "sharding_constraint" and results[0] != LITERAL
        if annotated and (said := _compat.annotation(eqn)) is not None:
            self.annotations.append(Annotation(results[0], *said, self.source(eqn)))
        return results

    # -- control flow ------------------------------------------------------------------------------

    def marker(self, primitive, operands, aval, stacked, key, repeat, where, spot) -> int:
        """Append a marker; `stacked` is the shape of its stacked side (or of the value itself)."""
        dtype = _compat.dtype_name(aval)
        signature = (primitive, stacked, dtype, len(operands))
        if signature not in self.kind_of:
            one = stacked[1:] if primitive in (SLICE, STACK) else stacked
            inside = stacked if primitive == SLICE else one
            outside = stacked if primitive == STACK else one
            self.kind_of[signature] = len(self.kind_list)
            kind = Kind(primitive, (inside,) * len(operands), (dtype,) * len(operands), (outside,),
                        (dtype,), marker_rule(primitive, stacked, len(operands)), 0.0,
                        frozenset({"marker"} if primitive in MARKERS else ()))  # fmt: skip
            self.kind_list.append((None, kind))
        scope, phase, origin = where
        result = self.new_value(aval, "")
        self.ops.append(
            Op(len(self.ops), key, self.kind_of[signature], tuple(operands), (result,), phase or "",
               scope, "", repeat, spot, origin)
        )  # fmt: skip
        return result

    def carry(self, init, var, key, repeat, where, spot) -> tuple[int, int]:
        """A loop carry whose body result is not known yet: (value id, op id to complete)."""
        shape = tuple(var.aval.shape)
        v = self.marker(CARRY, (init, init), var.aval, shape, key, repeat, where, spot)
        return v, len(self.ops) - 1

    def complete(self, op: int, result: int) -> None:
        self.ops[op] = self.ops[op]._replace(inputs=(self.ops[op].inputs[0], result))

    def scan(self, eqn, operands, key, repeat, where) -> list[int]:
        num_consts, num_carry, length = _compat.scan_sizes(eqn)
        (closed,) = _compat.subjaxprs(eqn)
        inner, _ = _compat.open_jaxpr(closed)
        first, inside = len(self.ops), repeat * length
        inputs, carries = list(operands[:num_consts]), []
        for i in range(num_consts, len(operands)):
            var, j = inner.invars[i], i - num_consts
            if j < num_carry:
                v, op = self.carry(operands[i], var, key, inside, where, (0, i, i, j, j))
                carries.append((v, op))
            else:
                stacked, spot = (length, *var.aval.shape), (0, i, i, -1, -1)
                v = self.marker(SLICE, (operands[i],), var.aval, stacked, key, inside, where, spot)
            inputs.append(v)
        results = self.body(closed, inputs, key + (0,), inside, where)
        for (_, op), result in zip(carries, results):
            self.complete(op, result)
        outs = [v for v, _ in carries]
        for j, result in enumerate(results[num_carry:], start=num_carry):
            aval, spot = eqn.outvars[j].aval, (0, -1, -1, j, j)
            stacked = tuple(aval.shape)
            outs.append(self.marker(STACK, (result,), aval, stacked, key, inside, where, spot))
        self.loops.append(Loop(first, len(self.ops) - 1, length))
        return outs

    def while_loop(self, eqn, operands, key, repeat, where) -> list[int]:
        cond, closed = _compat.subjaxprs(eqn)
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        inner, _ = _compat.open_jaxpr(closed)
        first = len(self.ops)
        carries = []
        for i in range(n_cond + n_body, len(operands)):
            j, var = i - n_cond - n_body, inner.invars[i - n_cond]
            spot = (1, i, i - n_cond, j, j)
            carries.append(self.carry(operands[i], var, key, repeat, where, spot))
        values = [v for v, _ in carries]
        self.body(cond, operands[:n_cond] + values, key + (0,), repeat, where)
        inputs = operands[n_cond : n_cond + n_body] + values
        results = self.body(closed, inputs, key + (1,), repeat, where)
        for (_, op), result in zip(carries, results):
            self.complete(op, result)
        self.loops.append(Loop(first, len(self.ops) - 1, 1))
        self.notes.append(
            f"{self.source(eqn)}: how often this `while` loop runs is not known before it runs; "
            "it is priced as one iteration"
        )
        return values

    def cond(self, eqn, operands, key, repeat, where) -> list[int]:
        branches = [
            self.body(b, operands[1:], key + (s,), repeat, where)
            for s, b in enumerate(_compat.subjaxprs(eqn))
        ]
        return [
            self.marker(JOIN, results, var.aval, tuple(var.aval.shape), key, repeat, where,
                        (-1, -1, -1, j, j))
            for j, (var, *results) in enumerate(zip(eqn.outvars, *branches))
        ]  # fmt: skip

    # -- descriptions ------------------------------------------------------------------------------

    def locate(self, where: Where, eqn) -> Where:
        """Module path, phase (None when only data flow can tell), origin of an equation."""
        name_stack = eqn.source_info.name_stack
        found = self.located.get((where, id(name_stack)))
        if found is None:
            found = self.located[where, id(name_stack)] = self.read_scope(where, str(name_stack))
        return found

    def read_scope(self, where: Where, stack: str) -> Where:
        found = self.scopes.get((where, stack))
        if found is None:
            outer, phase, origin = where
            if "transpose(" in stack:
                phase = BACKWARD
            elif "jvp(" in stack and phase is None:
                phase = FORWARD
            scope = stack
            while scope != (scope := _WRAPPER.sub(r"\1", scope)):
                pass
            parts, at = read_origin([p for p in scope.split("/") if p])
            again = AGAIN in parts or (origin is not None and origin.again)
            if at:
                origin = Origin(at[0], at[1:], again)
            path = "/".join(p for p in (outer, *parts) if p)
            found = self.scopes[where, stack] = (path, phase, origin)
        return found

    def source(self, eqn) -> str:
        traceback = eqn.source_info.traceback
        text = self.sources.get(traceback)
        if text is None:
            text = self.sources[traceback] = _compat.source_line(eqn)
        return text

    def kind(self, eqn) -> int:
        signature = rules.unchecked_signature(eqn)
        try:
            index = self.kind_of.get(signature)
        except TypeError:
            signature = rules.structural_signature(eqn)
            index = self.kind_of.get(signature)
        if index is None:
            index = self.kind_of[signature] = len(self.kind_list)
            self.kind_list.append((eqn, None))
        return index

    def finish(self) -> OpGraph:
        eqns = [eqn for eqn, _ in self.kind_list if eqn is not None]
        found = iter(rules.rules_for(eqns))
        table = tuple(
            kind if eqn is None else _kind_of_equation(eqn, next(found))
            for eqn, kind in self.kind_list
        )
        seen: set[int] = set()
        for op in self.ops:  # the first op of a kind speaks for it
            if (
                table[op.kind].rule.note
                and "opaque" in table[op.kind].traits
                and op.kind not in seen
            ):
                seen.add(op.kind)
                self.notes.append(
                    f"{op.source}: `{table[op.kind].primitive}`: {table[op.kind].rule.note}"
                )
        state = tuple(self.traced.state_pairs)
        ops = _with_phases(self.ops)
        said = _roles_said(self.traced.roles, self.traced.in_paths)
        values = _with_roles(self.values, ops, table, self.inputs, self.outputs, state, said)
        return OpGraph(
            ops=tuple(ops), values=tuple(values), kinds=table, inputs=tuple(self.inputs),
            outputs=tuple(self.outputs), output_paths=tuple(self.traced.out_paths), state=state,
            constants=tuple(self.constants), loops=tuple(self.loops),
            regions=tuple(self.regions), annotations=tuple(self.annotations),
            barriers=tuple(self.barriers), notes=tuple(self.notes),
            under_way=self.traced.under_way,
        )  # fmt: skip


def _kind_of_equation(eqn, rule: Rule) -> Kind:
    kernel = registry.find(eqn)
    traits, flops, nbytes = kinds.traits(eqn), kinds.flops(eqn), None
    if kernel is not None:
        said = kernel.count(kernel.flops, eqn)
        flops = flops if said is None else said
        nbytes = kernel.count(kernel.nbytes, eqn)
    if kernel is not None or eqn.primitive.name in ("pallas_call", _compat.SHIFT):
        traits |= {"manual"}
    return Kind(
        eqn.primitive.name,
        tuple(tuple(v.aval.shape) for v in eqn.invars),
        tuple(_compat.dtype_name(v.aval) for v in eqn.invars),
        tuple(tuple(v.aval.shape) for v in eqn.outvars),
        tuple(_compat.dtype_name(v.aval) for v in eqn.outvars),
        rule,
        flops,
        traits,
        nbytes,
    )


def _with_phases(ops: list[Op]) -> list[Op]:
    """Phases that no name tells: what leads to the loss is forward, the rest of a step update."""
    if not any(op.phase == BACKWARD for op in ops):
        return [op if op.phase else op._replace(phase=FORWARD) for op in ops]
    # values that an op of the forward or backward pass depends on
    leads = set().union(*(op.inputs for op in ops if op.phase)) - {LITERAL}
    out = list(ops)
    for op in reversed([op for op in ops if not op.phase]):
        phase = UPDATE
        if not leads.isdisjoint(op.outputs):
            phase = FORWARD
            leads.update(v for v in op.inputs if v != LITERAL)
        out[op.id] = Op._make((*op[:PHASE], phase, *op[PHASE + 1 :]))  # faster than _replace
    return out


def _roles_said(roles: Sequence[tuple[str, str]], paths: Sequence[str]) -> dict[int, str]:
    """The user's word on the roles of inputs, by position; the last glob that matches counts.

    Raises ConstraintError for a role that does not exist and a glob that matches no path.
    """
    said: dict[int, str] = {}
    at = {path: i for i, path in enumerate(paths)}
    for pattern, role in roles:
        if role not in ROLES:
            raise ConstraintError(
                f"roles: no role {role!r} (for {pattern!r}); there are {', '.join(ROLES)}"
            )
        if pattern in at:  # a path as it is, whatever characters it has
            hits = [at[pattern]]
        else:
            hits = [
                i for i, path in enumerate(paths) if path == pattern or fnmatchcase(path, pattern)
            ]
        if not hits:
            near = ", ".join(paths)[:300]
            raise ConstraintError(f"roles: {pattern!r} matches no argument; there are {near}")
        said.update(dict.fromkeys(hits, role))
    return said


def _with_roles(values, ops, table, inputs, outputs, state, said) -> list[Value]:
    """Roles of inputs: as `said`, else from data flow: what the forward pass reads of the state is
    a parameter.
    """
    read_forward = set().union(*(op.inputs for op in ops if op.phase != UPDATE))
    drawing = {k for k, kind in enumerate(table) if "random" in kind.traits}
    random = set().union(*(op.inputs for op in ops if op.kind in drawing))
    roles = [role for _, _, role, _ in values]
    for op in ops:
        role = ACTIVATION if op.phase == FORWARD else GRADIENT
        for v in op.outputs:
            if v >= 0:
                roles[v] = role
    state_inputs = {inputs[i] for i, _ in state}
    for i, v in enumerate(inputs):
        dtype = values[v][1]
        if i in said:
            roles[v] = said[i]
        elif dtype.startswith("key<") or (v in random and dtype.startswith("uint")):
            roles[v] = RNG
        elif v not in state_inputs:
            roles[v] = BATCH
        elif v in read_forward and dtype.startswith(("float", "bfloat", "complex")):
            roles[v] = PARAMETER
        else:
            roles[v] = OPTIMIZER
    state_outputs = {outputs[o] for _, o in state}
    for v in outputs:
        if v >= 0 and roles[v] in (ACTIVATION, GRADIENT):
            roles[v] = DONATED if v in state_outputs else OUTPUT
    return [
        Value(v, tuple(shape), dtype, role, path)
        for v, ((shape, dtype, _, path), role) in enumerate(zip(values, roles))
    ]
