"""Put a plan's constraints into a jaxpr: equations in, the same equations and constraints out.

The jaxpr is the whole step, already differentiated. Nothing is evaluated or traced: equations are
copied, their operands renamed to the constrained values, and bodies of loops, branches, remat and
custom calls rebuilt only where a constraint stands inside. Calls of `jit` are written out in place.
What an equation means, its custom derivative rules, its names and its source line stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
from jax.extend import core as jex

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.lower.layouts import Constraint, Key, Layouts, Spec


def named_sharding(mesh, spec: Spec) -> jax.sharding.NamedSharding:
    """The sharding on `mesh` that cuts each dim by its axes, major first.

    Raises PlanError for an axis that the mesh does not have, or that is used twice.
    """
    used = [axis for axes in spec for axis in axes]
    if unknown := [axis for axis in used if axis not in mesh.shape]:
        raise PlanError(f"layout {spec}: no mesh axis {unknown[0]!r} among {tuple(mesh.shape)}")
    if len(set(used)) < len(used):
        raise PlanError(f"layout {spec} uses a mesh axis twice; one axis can cut one dim only")
    dims = [axes[0] if len(axes) == 1 else axes or None for axes in spec]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims))


def apply_layouts(closed_jaxpr, layouts: Layouts, mesh) -> Callable[..., list]:
    """A function of the flat arguments that runs `closed_jaxpr` under `layouts`, inside a `jit`."""
    constrained = constrain(closed_jaxpr, layouts, mesh)
    return lambda *args: _compat.emit(constrained, args)


def constrain(closed_jaxpr, layouts: Layouts, mesh):
    """`closed_jaxpr` with sharding constraints where `layouts` has them; the same function.

    `mesh` may be a `jax.sharding.Mesh` or `AbstractMesh` with Auto axes. Raises PlanError for a
    constraint on an equation that does not exist, or whose specs do not fit the value.
    """
    writer = _Writer(layouts, mesh)
    result = writer.body(closed_jaxpr, (), layouts.inputs)
    if missing := sorted(writer.asked - writer.seen):
        raise PlanError(
            f"the plan has constraints on equations {missing[:5]} that this step does not have: "
            "it was made for another step or jax version; plan again"
        )
    return result


def with_branch_ends(closed_jaxpr, layouts: Layouts, mesh) -> Layouts:
    """`layouts` with what `constrain` adds to them: where branches of a `cond` end."""
    writer = _Writer(layouts, mesh)
    writer.body(closed_jaxpr, (), layouts.inputs)
    ends = {key: dict(constraints) for key, constraints in layouts.body_outputs.items()}
    for key, added in writer.ends.items():
        here = ends.setdefault(key, {})
        here.update({i: (*here.get(i, ()), *constraint) for i, constraint in added.items()})
    return replace(layouts, body_outputs=ends)


class _Writer:
    """Walks a jaxpr once; `seen` collects the keys of `layouts` that were met."""

    def __init__(self, layouts: Layouts, mesh):
        self.layouts = layouts
        self.mesh = mesh
        self.shardings: dict[Spec, jax.sharding.NamedSharding] = {}
        tables = (layouts.results, layouts.operands, layouts.body_inputs, layouts.body_outputs)
        self.asked: set[Key] = set().union(*tables, layouts.kernels)
        self.seen: set[Key] = set()
        self.ends: dict[Key, dict[int, Constraint]] = {}  # of branches, see `branches`
        self.touched = {key[:n] for key in self.asked for n in range(len(key) + 1)}

    def body(self, jaxpr, key: Key, inputs: Iterable[Spec | None] = ()):
        """`jaxpr` (open or closed) standing at `key`, rebuilt if a constraint is inside."""
        return self.ended(jaxpr, key, {}, inputs)[0]

    def ended(self, jaxpr, key: Key, ends: dict[int, Constraint], inputs=()):
        """`body`, its results constrained by `ends` last; and the layouts known of them."""
        if key not in self.touched and not ends:
            return jaxpr, {}
        inner, _ = _compat.open_jaxpr(jaxpr)
        scope = _Scope(self, {v: s for v, s in zip(inner.invars, inputs) if s is not None})
        outvars = scope.write(inner, key, inner.invars)
        outvars = scope.place_all(outvars, ends, key, (inner.eqns or [None])[-1])
        known = {r: scope.at[v] for r, v in enumerate(outvars) if not _fixed(v) and v in scope.at}
        return _compat.with_eqns(jaxpr, scope.eqns, outvars), known

    def branches(self, jaxprs, key: Key) -> list:
        """The branches of a `cond`, their results in one layout: XLA refuses others.

        Where branches end in different layouts all take the first one's.
        """
        written = [self.ended(jaxpr, (*key, s), {}) for s, jaxpr in enumerate(jaxprs)]
        ends: dict[int, Constraint] = {}
        for _, known in written:
            for r, spec in known.items():
                ends.setdefault(r, (spec,))
        clash = {r: c for r, c in ends.items() if any(k.get(r, c[0]) != c[0] for _, k in written)}
        if clash:
            self.ends.update({(*key, s): clash for s in range(len(jaxprs))})
            written = [self.ended(jaxpr, (*key, s), clash) for s, jaxpr in enumerate(jaxprs)]
        return [body for body, _ in written]

    def annotated(self, eqn) -> dict:
        """Parameters of a user's sharding constraint, on this mesh if it speaks of its axes."""
        said = _compat.annotation(eqn)
        if said is None:
            return eqn.params
        sizes = dict(said[1])
        used = [n for cut in said[0] for n in cut or () if sizes[n] > 1]
        if lacking := [n for n in used if self.mesh.shape.get(n) != sizes[n]]:
            raise PlanError(
                f"with_sharding_constraint at {_compat.source_line(eqn)} cuts by axis "
                f"{lacking[0]!r} of {sizes}, which the plan's mesh {dict(self.mesh.shape)} lacks: "
                "plan with mesh="
            )
        return _compat.on_mesh(eqn, self.mesh).params

    def sharding(self, spec: Spec) -> jax.sharding.NamedSharding:
        if spec not in self.shardings:
            self.shardings[spec] = named_sharding(self.mesh, spec)
        return self.shardings[spec]


def _fixed(atom) -> bool:
    """A scalar in the program text is everywhere, what is dropped is nowhere: no constraint."""
    return isinstance(atom, (jex.Literal, jex.DropVar))


class _Scope:
    """The equations of one body as they are written.

    `at[v]`: the layout v is known to be in. `made[v, spec]`: v constrained to spec, so that equal
    constraints on one value are one equation.
    """

    def __init__(self, writer: _Writer, at: dict):
        self.writer = writer
        self.eqns: list = []
        self.at = at
        self.made: dict = {}

    def place(self, atom, constraint: Constraint, key: Key, like):
        """`atom` after its constraints, one after another."""
        if _fixed(atom):
            return atom
        for spec in constraint:
            if self.at.get(atom) == spec:
                continue
            if (atom, spec) not in self.made:
                if len(spec) != atom.aval.ndim:
                    raise PlanError(
                        f"spec {spec} of {len(spec)} dims on a value of shape {atom.aval.shape} "
                        f"at equation {key}"
                    )
                result = _compat.fresh_var(atom)
                sharding = self.writer.sharding(spec)
                self.eqns.append(_compat.constraint_eqn(atom, result, sharding, like))
                self.made[atom, spec] = result
                self.at[result] = spec
            atom = self.made[atom, spec]
        return atom

    def place_all(self, atoms, constraints: dict[int, Constraint], key: Key, like) -> list:
        placed = list(atoms)
        for i, constraint in sorted(constraints.items()):
            if not 0 <= i < len(placed):
                raise PlanError(f"no position {i} at equation {key}: it has {len(placed)}")
            placed[i] = self.place(placed[i], constraint, key, like)
        return placed

    def on_shards(self, eqn, key: Key, operands) -> list:
        """Append `eqn` as a kernel that every device runs on its part alone; its results."""
        writer = self.writer
        ins, outs = writer.layouts.kernels[key]
        where = [[writer.sharding(s).spec for s in specs] for specs in (ins, outs)]
        try:
            alone = _compat.on_shards(eqn, writer.mesh, *where)
        except Exception as error:  # the kernel is a user's, or a library's: it may raise anything
            raise PlanError(
                f"`{eqn.primitive.name}` ({_compat.source_line(eqn)}) can not run on the parts "
                f"{where[0]} of its operands: {error}. Keep such a factor whole in its rule"
            ) from error
        inner, consts = _compat.open_jaxpr(alone)
        if consts:
            raise PlanError(
                f"`{eqn.primitive.name}` ({_compat.source_line(eqn)}) closes over arrays: a kernel "
                "that is split must get them as arguments"
            )
        return self.write(inner, (*key, 0), operands, eqn)

    def write(self, jaxpr, key: Key, args, call=None) -> list:
        """Append the equations of `jaxpr`, applied to `args`; its results."""
        writer, layouts = self.writer, self.writer.layouts
        writer.seen.add(key)
        ends = jaxpr.eqns or [None]  # whose names and lines the constraints at the borders take
        args = self.place_all(args, layouts.body_inputs.get(key, {}), key, call or ends[0])
        env = dict(zip(jaxpr.constvars, jaxpr.constvars))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom):
            return atom if isinstance(atom, jex.Literal) else env[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            here = (*key, i)
            writer.seen.add(here)
            if call is not None:
                eqn = _compat.scoped(eqn, call)
            asked = layouts.operands.get(here, {})
            operands = self.place_all(map(read, eqn.invars), asked, here, eqn)
            bodies = _compat.subjaxprs(eqn)
            if here in layouts.kernels:
                made = self.on_shards(eqn, here, operands)
            elif _compat.is_inlinable(eqn):
                inner, _ = _compat.open_jaxpr(bodies[0])
                made = self.write(inner, (*here, 0), operands, eqn)
            else:
                made = [_compat.fresh_var(v) for v in eqn.outvars]
                if eqn.primitive.name == "cond":
                    new = writer.branches(bodies, here)
                else:
                    new = [writer.body(body, (*here, s)) for s, body in enumerate(bodies)]
                changed = any(a is not b for a, b in zip(new, bodies))
                params = _compat.with_subjaxprs(eqn, new) if changed else eqn.params
                if eqn.primitive.name == "sharding_constraint":
                    params = writer.annotated(eqn)
                self.eqns.append(eqn.replace(invars=operands, outvars=made, params=params))
            made = self.place_all(made, layouts.results.get(here, {}), here, eqn)
            env.update(zip(eqn.outvars, made, strict=True))

        outs = [read(v) for v in jaxpr.outvars]
        return self.place_all(outs, layouts.body_outputs.get(key, {}), key, call or ends[-1])
