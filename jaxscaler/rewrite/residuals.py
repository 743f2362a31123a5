"""What a stage keeps of a micro-batch from forward to backward pass, and what it makes again.

One compiled step makes casts, masks and the like again where they are read, as they fuse. A stage's
forward and backward pass are two programs, so that is decided here: what backward reads is followed
to its operands through cheap equations wherever those take less memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxscaler.graph import kinds
from jaxscaler.rewrite.parts import Loop, Where, nbytes, variables

CHEAP = kinds.ELEMENTWISE | kinds.names("broadcast_in_dim reshape squeeze expand_dims")


def made_again(loop: Loop, body: Sequence[Where | None], run: int) -> frozenset[int]:
    """Equations of a run's F that its B and W run once more, in place of keeping their results."""
    eqns = loop.body.eqns
    mine = {i for i, where in enumerate(body) if where == (run, "F")}
    maker = {v: i for i in mine for v in eqns[i].outvars}
    needed = {
        v
        for i, where in enumerate(body)
        if where in ((run, "B"), (run, "W"))
        for v in variables(eqns[i].invars)
    }
    pulled = {v for i, where in enumerate(body) if where is None for v in eqns[i].outvars}
    free = {*loop.consts, *loop.slices, *pulled}
    least: dict[Any, float] = {}  # bytes to keep, at least, so that backward has a value

    def cheap(v: Any) -> bool:
        i = maker.get(v)
        return i is not None and eqns[i].primitive.name in CHEAP and not eqns[i].effects

    for i, eqn in enumerate(eqns):  # operands come first
        for v in eqn.outvars:
            least[v] = float(nbytes(v))
            if i in mine and cheap(v):
                through = sum(_cost(u, least, free) for u in set(variables(eqn.invars)))
                least[v] = min(least[v], through)
    again: set[int] = set()
    for i in sorted(mine, reverse=True):
        for v in eqns[i].outvars:
            if v not in needed or not cheap(v):
                continue
            read = set(variables(eqns[i].invars))
            if sum(_cost(u, least, free) for u in read - needed) < nbytes(v):
                again.add(i)
                needed.discard(v)
                needed |= read
    return frozenset(again)


def _cost(v: Any, least: dict[Any, float], free: set) -> float:
    return 0.0 if v in free else least.get(v, float(nbytes(v)))
