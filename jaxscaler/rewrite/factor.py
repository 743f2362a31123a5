"""Where a factor goes: which dim of which value carries it, by the rules of the equations.

A *placing* of an equation says which dim of each operand and result is cut. It follows from any one
cut of it: the equation's `Rule` names the factor, and where else that factor stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.graph import kinds, rules
from jaxscaler.graph.ir import FROZEN, PASS, REDUCE

# What a sum over a part of a factor is a part of the sum of; a lookup needs to know which part.
SUMS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "reduce_sum"})
SUM = -1  # in place of a dim: the value is a part of a sum over the factor
# What may be done to parts of a sum: to all operands together, or to one of two.
_SCALES = {"mul": (0, 1), "div": (0,)}
Spot = tuple[int, int]  # (0, operand) or (1, result) of an equation


class Placing(NamedTuple):
    """Per operand and result the dim that is cut; None: it is whole, SUM: part of a sum."""

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]

    @property
    def partial(self) -> bool:
        """Whether a result is a part of a sum."""
        return SUM in self.outs

    def at(self, spot: Spot) -> int | None:
        """The dim cut at a spot."""
        return (self.ins, self.outs)[spot[0]][spot[1]]


class Regrain(Exception):
    """The factor is made of several: only the first, of `size`, can be followed further."""

    def __init__(self, size: int):
        super().__init__(size)
        self.size = size


def refuse(eqn: Any, why: str) -> RewriteError:
    """The error that an equation can not follow a factor."""
    return RewriteError(f"`{eqn.primitive.name}` at {_compat.source_line(eqn) or '?'}: {why}")


def place(eqn: Any, known: Mapping[Spot, int], size: int) -> Placing:
    """The placing of `eqn` that has these cuts, by a factor of `size`.

    Raises RewriteError, naming the equation, where the factor can not be followed, and `Regrain`
    where only a major part of it can.
    """
    name = eqn.primitive.name
    if name == "scan":
        return place_scan(eqn, known, size)[0]
    if name in _compat.SUBJAXPR_PARAMS:
        if name not in BODIES or eqn.params.get("num_consts"):
            raise refuse(eqn, "a factor is not followed into it; end the segment before it")
        return place_call(eqn, known, size)[0]
    return _place_leaf(eqn, known, size)


BODIES = frozenset({*_compat.REMAT, *_compat.INLINED_CALLS, "custom_jvp_call", "custom_vjp_call"})


def _place_leaf(eqn: Any, known: Mapping[Spot, int], size: int) -> Placing:
    if SUM in (known.get((0, n)) for n in range(len(eqn.invars))):
        return _place_linear(eqn, known)
    known = {spot: dim for spot, dim in known.items() if dim != SUM}
    if not known:  # a sum, as is said of its result: what it sums is not known yet
        return Placing((None,) * len(eqn.invars), (SUM,) * len(eqn.outvars))
    (rule,) = rules.rules_for([eqn])
    sides = (rule.operands, rule.results)
    found = {sides[side][n][dim][0] for (side, n), dim in known.items()}
    if len(found) > 1:
        raise refuse(eqn, "two of its factors would be cut at once, part by part")
    (f,) = found
    factor = rule.factors[f]
    if factor.kind == FROZEN:
        raise refuse(eqn, rule.note or "it needs the cut dim whole")
    if factor.size % size:
        if size % factor.size:
            raise refuse(eqn, f"a factor of {size} does not fit one of {factor.size}")
        raise Regrain(factor.size)
    if any(f in dim[1:] for side in sides for dims in side for dim in dims):
        raise refuse(eqn, "the factor is a minor one of a dim of it: its parts lie scattered")

    def cut(dims: tuple[tuple[int, ...], ...]) -> int | None:
        return next((d for d, dim in enumerate(dims) if dim and dim[0] == f), None)

    placing = Placing(tuple(map(cut, rule.operands)), tuple(map(cut, rule.results)))
    if factor.kind == PASS:
        if eqn.primitive.name in kinds.RANDOM - {"threefry2x32"}:
            raise refuse(
                eqn, "random numbers of a part are not those of the whole: draw them outside"
            )
        return placing
    assert factor.kind == REDUCE
    if factor.combiner != "sum" or eqn.primitive.name not in SUMS:
        raise refuse(eqn, f"its parts do not add up (they combine by {factor.combiner!r})")
    return placing._replace(outs=(SUM,))


def _place_linear(eqn: Any, known: Mapping[Spot, int]) -> Placing:
    """An equation that reads a part of a sum: its result is one too, if it is linear."""
    name, count = eqn.primitive.name, len(eqn.invars)
    spots = [n for n in range(count) if known.get((0, n)) == SUM]
    others = [n for n, v in enumerate(eqn.invars) if n not in spots and not _is_zero(v)]
    if any(known.get((0, n), SUM) != SUM for n in others):
        raise refuse(eqn, "it meets a part of a sum and a part of a value")
    if name in _SCALES and len(spots) == 1 and spots[0] in _SCALES[name]:
        return Placing(tuple(SUM if n in spots else None for n in range(count)), (SUM,))
    if "linear" not in kinds.traits(eqn):
        raise refuse(eqn, "a part needs what all parts make together: it reads a sum")
    return Placing((SUM,) * count, (SUM,) * len(eqn.outvars))


def _is_zero(atom: Any) -> bool:
    return _compat.is_literal(atom) and not np.any(atom.val)


def makes_zero(eqn: Any) -> bool:
    """Whether an equation makes zeros: parts of a sum of nothing."""
    return eqn.primitive.name == "broadcast_in_dim" and _is_zero(eqn.invars[0])


# --- bodies ---------------------------------------------------------------------------------------


class Flat(NamedTuple):
    """A jaxpr with its `jit` calls written out; its constants by variable."""

    eqns: tuple
    invars: tuple
    outvars: tuple
    consts: dict


_flat: WeakKeyDictionary = WeakKeyDictionary()


def flatten(jaxpr: Any) -> Flat:
    """`jaxpr` (open or closed) with its `jit` calls written out."""
    found = _flat.get(jaxpr)
    if found is None:
        found = _flat[jaxpr] = _flatten(jaxpr)
    return found


def _flatten(jaxpr: Any) -> Flat:
    eqns: list = []
    consts: dict = {}

    def write(body: Any, args: Iterable, call: Any) -> list:
        inner, values = _compat.open_jaxpr(body)
        env = dict(zip(inner.invars, args))
        for var, value in zip(inner.constvars, values):
            env[var] = _compat.fresh_var(var)
            consts[env[var]] = value

        for eqn in inner.eqns:
            if call is not None:
                eqn = _compat.scoped(eqn, call)
            operands = [_read(env, v) for v in eqn.invars]
            if is_plain_call(eqn):
                (called,) = _compat.subjaxprs(eqn)
                made = write(called, operands, eqn)
            else:
                made = [_compat.fresh_var(v) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=operands, outvars=made))
            env.update(zip(eqn.outvars, made))
        return [_read(env, v) for v in inner.outvars]

    invars = tuple(map(_compat.fresh_var, _compat.open_jaxpr(jaxpr)[0].invars))
    outvars = tuple(write(jaxpr, invars, None))
    return Flat(tuple(eqns), invars, outvars, consts)


def _read(env: Mapping, atom: Any) -> Any:
    return atom if _compat.is_literal(atom) else env[atom]


def is_plain_call(eqn: Any) -> bool:
    """Whether `eqn` is a call that adds nothing to its body."""
    if eqn.primitive.name not in _compat.INLINED_CALLS:
        return False
    said = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(s).__name__ == "UnspecifiedValue" for s in said)


def spread(flat: Flat, known: Mapping[Any, int], size: int, holder: Any) -> dict[Any, int]:
    """Variable -> dim for all that is cut in a body if `known` is. `holder`: whose body it is.

    Inside a body nothing is kept whole beside its parts; a sum may leave it as a part of one.
    """
    touching: dict[Any, list] = {}
    for eqn in flat.eqns:
        for var in {v for v in (*eqn.invars, *eqn.outvars) if not _compat.is_literal(v)}:
            touching.setdefault(var, []).append(eqn)
    cuts = dict(known)
    queue = list(known)
    while queue:
        for eqn in touching.get(queue.pop(), ()):
            placing = place(eqn, known_cuts(eqn, cuts), size)
            for atoms, dims in ((eqn.invars, placing.ins), (eqn.outvars, placing.outs)):
                for var, dim in zip(atoms, dims):
                    if _compat.is_literal(var) or cuts.get(var, dim) == dim:
                        if dim is not None and var not in cuts:
                            cuts[var] = dim
                            queue.append(var)
                    else:
                        raise refuse(eqn, "it needs whole, or cut otherwise, what is cut")
    for eqn in flat.eqns:  # what is said to be a part of a sum is one
        made = known_cuts(eqn, cuts)
        ins = {spot: dim for spot, dim in made.items() if spot[0] == 0}
        if SUM in made.values() and not makes_zero(eqn):
            sums = [n for (side, n), dim in made.items() if side == 1 and dim == SUM]
            if sums and (not ins or any(place(eqn, ins, size).outs[n] != SUM for n in sums)):
                raise refuse(eqn, f"in the body of `{holder.primitive.name}`, a sum over parts "
                                  "meets what every part has whole")  # fmt: skip
    return cuts


def known_cuts(eqn: Any, cuts: Mapping[Any, int]) -> dict[Spot, int]:
    """The cuts of an equation's operands and results among those of a body's variables."""
    return {
        (side, n): cuts[v]
        for side, atoms in enumerate((eqn.invars, eqn.outvars))
        for n, v in enumerate(atoms)
        if not _compat.is_literal(v) and v in cuts
    }


def placing_of(eqn: Any, cuts: Mapping[Any, int]) -> Placing:
    """The placing of an equation of a body that `spread` went through."""
    known = known_cuts(eqn, cuts)
    ins = tuple(known.get((0, n)) for n in range(len(eqn.invars)))
    return Placing(ins, tuple(known.get((1, n)) for n in range(len(eqn.outvars))))


def place_call(eqn: Any, known: Mapping[Spot, int], size: int) -> tuple[Placing, Flat, dict]:
    """A call of a body: operands and results are its own."""
    if eqn.primitive.name in _compat.INLINED_CALLS and not is_plain_call(eqn):
        raise refuse(eqn, "it fixes its own shardings")
    flat = flatten(_compat.subjaxprs(eqn)[0])
    ends = (flat.invars, flat.outvars)
    inner = {ends[side][n]: dim for (side, n), dim in known.items()}
    cuts = spread(flat, inner, size, eqn)
    return Placing(_dims(cuts, flat.invars), _dims(cuts, flat.outvars)), flat, cuts


_scans: WeakKeyDictionary = WeakKeyDictionary()  # body -> what was placed of loops over it


def place_scan(eqn: Any, known: Mapping[Spot, int], size: int) -> tuple[Placing, Flat, dict]:
    """A loop: stacked operands and results have one dim more outside, and it is not cut."""
    body = _compat.subjaxprs(eqn)[0]
    placed = _scans.setdefault(body, {})
    key = (frozenset(known.items()), size, _compat.scan_sizes(eqn))
    if key not in placed:
        placed[key] = _place_scan(eqn, flatten(body), known, size)
    return placed[key]


def _place_scan(
    eqn: Any, flat: Flat, known: Mapping[Spot, int], size: int
) -> tuple[Placing, Flat, dict]:
    consts, carry, _ = _compat.scan_sizes(eqn)
    stacked = (consts + carry, carry)  # the first stacked operand, and result
    ends = (flat.invars, flat.outvars)
    inner = {}
    for (side, n), dim in known.items():
        if n >= stacked[side] and dim != SUM:
            if dim == 0:
                raise refuse(eqn, "the dim that it loops over stays whole")
            dim -= 1
        inner[ends[side][n]] = dim
    carried = list(zip(flat.invars[consts : consts + carry], flat.outvars[:carry]))
    while True:
        cuts = spread(flat, inner, size, eqn)
        more = {
            b: cuts[a]
            for pair in carried
            for a, b in (pair, pair[::-1])
            if a in cuts and not _compat.is_literal(b) and cuts.get(b) != cuts[a]
        }
        if not more:
            break
        if clash := [v for v in more if v in cuts]:
            raise refuse(eqn, f"a carry of it would be cut along dims {more[clash[0]]} and "
                              f"{cuts[clash[0]]} in turns")  # fmt: skip
        inner |= more

    def outside(side: int) -> tuple[int | None, ...]:
        row = enumerate(_dims(cuts, ends[side]))
        return tuple(d if d in (None, SUM) or n < stacked[side] else d + 1 for n, d in row)

    return Placing(outside(0), outside(1)), flat, cuts


def _dims(cuts: Mapping[Any, int], atoms: Iterable) -> tuple[int | None, ...]:
    return tuple(None if _compat.is_literal(v) else cuts.get(v) for v in atoms)
