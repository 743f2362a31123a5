"""A forward jaxpr and its changes -> a function with the same values, for JAX to differentiate.

Before it is changed a forward jaxpr is made flat (`flat`: calls of `jit` written out in place, also
in bodies of scans) and its equations are named (`named`), so that after differentiation every
equation, forward or backward, tells from which one it came. Custom derivative rules stay whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import jax

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.graph.origin import origin_text
from jaxscaler.rewrite.accumulate import accumulate
from jaxscaler.rewrite.assign import Assignment, marked, run_text
from jaxscaler.rewrite.changes import (
    Accumulate,
    Cast,
    Change,
    CoShard,
    Fission,
    Kernel,
    Key,
    OfSegment,
    Recompute,
    Ring,
    Stages,
)
from jaxscaler.rewrite.chunk import chunked
from jaxscaler.rewrite.exchange import cast, kernel
from jaxscaler.rewrite.fission import fission
from jaxscaler.rewrite.recompute import recompute
from jaxscaler.rewrite.ring import ring

REWRITERS: dict[type, Callable] = {  # of a segment
    Recompute: recompute, CoShard: chunked, Kernel: kernel, Cast: cast,
}  # fmt: skip


def flat(jaxpr):
    """`jaxpr` (open or closed) with the bodies of `jit` calls in their place, scans' bodies too."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    eqns: list = []
    env: dict = {}
    _write_flat(inner, eqns, env, None)
    outvars = [env.get(v, v) if not _compat.is_literal(v) else v for v in inner.outvars]
    return _compat.with_eqns(jaxpr, eqns, outvars)


def _write_flat(jaxpr, eqns: list, env: dict, call) -> None:
    for eqn in jaxpr.eqns:
        if call is not None:
            eqn = _compat.scoped(eqn, call)
        atoms = [v if _compat.is_literal(v) else env.get(v, v) for v in eqn.invars]
        bodies = _compat.subjaxprs(eqn)
        if _compat.is_inlinable(eqn):
            inner, _ = _compat.open_jaxpr(bodies[0])
            inside = dict(zip(inner.invars, atoms, strict=True))
            _write_flat(inner, eqns, inside, eqn)
            for var, made in zip(eqn.outvars, inner.outvars, strict=True):
                env[var] = made if _compat.is_literal(made) else inside[made]
            continue
        outs = [_compat.fresh_var(v) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outs))
        params = eqn.params
        if eqn.primitive.name == "scan":
            params = _compat.with_subjaxprs(eqn, [flat(body) for body in bodies])
        eqns.append(eqn.replace(invars=atoms, outvars=outs, params=params))


def named(jaxpr, loss: int, key: Key = ()):
    """`jaxpr` with the origin (loss and key) of every equation in its name stack."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    eqns = []
    for i, eqn in enumerate(inner.eqns):
        here = (*key, i)
        eqn = _compat.in_scope(eqn, origin_text(loss, here))
        if bodies := _compat.subjaxprs(eqn):
            new = [named(body, loss, (*here, s)) for s, body in enumerate(bodies)]
            eqn = eqn.replace(params=_compat.with_subjaxprs(eqn, new))
        eqns.append(eqn)
    return _compat.with_eqns(jaxpr, eqns, inner.outvars)


def changed(closed, changes: Sequence[Change]) -> Callable[..., list]:
    """What `closed` computes of its flat arguments, with the `changes` of its loss.

    Raises PlanError for a change that fits no equation, or segments that overlap.
    """
    bodies: dict[Key, list] = defaultdict(list)
    pieces: dict[Key, Fission | Ring] = {}
    whole: list[Accumulate] = []
    stages: list[Stages] = []
    for change in changes:
        if isinstance(change, OfSegment):
            bodies[change.segment.inside].append(change)
        elif isinstance(change, Fission | Ring):
            if (change.scan,) in pieces:
                raise PlanError(f"{change}, {pieces[change.scan,]}: a scan is cut in one way")
            pieces[(change.scan,)] = change
        elif isinstance(change, Accumulate):
            whole.append(change)
        elif isinstance(change, Stages):
            stages.append(change)
        else:
            raise PlanError(f"{change}: this version knows no such change; plan again")
    if len(whole) > 1:
        raise PlanError(f"{whole}: a loss accumulates over parts of the batch once")
    if len(stages) > len(whole):
        raise PlanError(f"{stages}: a loss is cut into stages once, and needs an Accumulate")
    ordered = {key: sorted(found, key=lambda c: c.segment) for key, found in bodies.items()}
    inner, consts = _compat.open_jaxpr(closed)
    assigned = Assignment(inner, stages[0], dict(whole[0].batch)) if stages else None
    writer = _Writer(ordered, pieces, assigned)

    def evaluate(consts, args) -> list:
        results = writer.run(inner, consts, args, ())
        if missing := {*writer.bodies, *writer.pieces} - writer.seen:
            raise PlanError(f"changes inside {sorted(missing)[:3]}: the loss has no such bodies")
        return results

    def run(*args) -> list:
        if not whole:
            return evaluate(consts, args)
        arrays, count = (*consts, *args), len(consts)
        alone = jax.make_jaxpr(lambda *a: evaluate(a[:count], a[count:]))(*arrays)
        return accumulate(alone, whole[0])(*arrays)

    return run


class _Writer:
    """Evaluates a jaxpr; `seen` collects the bodies that were met."""

    def __init__(
        self,
        bodies: dict[Key, list],
        pieces: dict[Key, Fission | Ring],
        assigned: Assignment | None = None,
    ):
        self.bodies = bodies
        self.assigned = assigned  # equations at the top level to stages
        self.pieces = pieces  # of scans at the top level
        self.seen: set[Key] = set()

    def run(self, jaxpr, consts, args, key: Key) -> list:
        self.seen.add(key)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        last_use = _compat.last_uses(jaxpr)

        def read(atom):
            return atom.val if _compat.is_literal(atom) else env[atom]

        changes = {change.segment.first: change for change in self.bodies.get(key, ())}
        _check(changes, len(jaxpr.eqns), key)
        i = 0
        while i < len(jaxpr.eqns):
            change = changes.get(i)
            if change is None:
                eqn = jaxpr.eqns[i]
                with self.at(i, i, key):
                    args = [read(v) for v in eqn.invars]
                    if self.assigned is not None and not key:
                        args = self.assigned.reads(i, eqn, eqn.invars, args)
                        eqn = self.assigned.marked(i, eqn)
                    made, results = eqn.outvars, self.equation(eqn, args, (*key, i))
                i += 1
            else:
                first, last = change.segment.first, change.segment.last
                closed, reads, made = segment_of(jaxpr, first, last, last_use)
                with self.at(first, last, key):
                    args = [read(v) for v in reads]
                    if self.assigned is not None and not key:
                        args = self.assigned.reads(first, jaxpr.eqns[first], reads, args)
                        closed = marked(closed, self.assigned.runs[first][0])
                    results = REWRITERS[type(change)](closed, change)(*args)
                i = last + 1
            env.update(zip(made, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def at(self, first: int, last: int, key: Key):
        """A context in which what is bound runs where equations `first` .. `last` run."""
        if self.assigned is None or key:
            return nullcontext()
        runs = {run for i in range(first, last + 1) for run in self.assigned.runs[i]}
        if first < last and len(runs) > 1:
            raise PlanError(
                f"a change of equations {first} to {last} of the loss, which run on stages "
                f"{sorted(runs)}: cut the stages before or after it"
            )
        return jax.named_scope(run_text(min(runs))) if len(runs) == 1 else nullcontext()

    def equation(self, eqn, args, key: Key) -> list:
        bodies = _compat.subjaxprs(eqn)
        inside = [(*key, s) for s in range(len(bodies))]
        wanted = [k for k in inside if any(b[: len(k)] == k for b in self.bodies)]
        cut = self.pieces.get(key)
        runs: list[int] = []
        if cut is not None:
            self.seen.add(key)
        elif self.assigned is not None and len(key) == 1:
            cut = self.assigned.fission(key[0], eqn)
            runs = self.assigned.runs[key[0]]
        if cut is not None:
            other = self.body(bodies[0], inside[0]) if wanted else None
            if isinstance(cut, Ring):
                return ring(eqn, cut, other)(*args)
            return fission(eqn, cut, other, runs)(*args)
        if wanted:
            new = [self.body(b, k) if k in wanted else b for b, k in zip(bodies, inside)]
            eqn = eqn.replace(params=_compat.with_subjaxprs(eqn, new))
        return _compat.bind_where_it_stands(eqn, list(args))

    def body(self, closed, key: Key):
        inner, consts = _compat.open_jaxpr(closed)
        avals = [v.aval for v in inner.invars]
        made = jax.make_jaxpr(lambda *args: self.run(inner, consts, args, key))(*avals)
        return made if closed is not inner else made.jaxpr


def segment_of(jaxpr, first: int, last: int, last_use: dict | None = None):
    """(closed jaxpr, what it reads, what it makes) of equations `first` .. `last` of a jaxpr.

    It reads variables made before, and makes those that are read later, or are results.
    """
    last_use = _compat.last_uses(jaxpr) if last_use is None else last_use
    eqns = jaxpr.eqns[first : last + 1]
    made_here: set = {v for eqn in eqns for v in eqn.outvars if not _compat.is_dropped(v)}
    reads = dict.fromkeys(
        v for eqn in eqns for v in eqn.invars if not _compat.is_literal(v) and v not in made_here
    )
    made = [
        v
        for eqn in eqns
        for v in eqn.outvars
        if not _compat.is_dropped(v) and last_use.get(v, -1) > last
    ]
    return _compat.closed_over_nothing(jaxpr, list(reads), eqns, made), list(reads), made


def _check(changes: dict[int, OfSegment], length: int, key: Key) -> None:
    end = -1
    for change in changes.values():
        segment = change.segment
        if not end < segment.first <= segment.last < length:
            raise PlanError(
                f"{segment}: overlaps another segment, or goes past the {length} equations of the "
                f"body {key}: the plan was made for another step or jax version; plan again"
            )
        end = segment.last


def body_of(loss, inside: Key):
    """The open jaxpr of a body of a loss (its forward jaxpr)."""
    jaxpr, _ = _compat.open_jaxpr(loss)
    for i, s in zip(inside[::2], inside[1::2]):
        jaxpr, _ = _compat.open_jaxpr(_compat.subjaxprs(jaxpr.eqns[i])[s])
    return jaxpr


def results_of(loss, inside: Key) -> list[tuple[str, list[tuple[tuple[int, ...], str]]]]:
    """Per equation of a body of a loss: its primitive, and shape and dtype of its results."""
    return [
        (e.primitive.name, [(tuple(v.aval.shape), _compat.dtype_name(v.aval)) for v in e.outvars])
        for e in body_of(loss, inside).eqns
    ]
