"""Loop fission: a scan as several, one after another, so that parts of a stack may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.changes import Fission


def fission(eqn: Any, change: Fission, other: Any = None) -> Callable[..., list]:
    """The function of the scan `eqn` as pieces of `change.trips` iterations; the same numbers.

    Carries go from piece to piece, stacked results are concatenated. `other`: the body (closed
    jaxpr, same types) of the pieces `change.only`, or of all. Raises RewriteError where the trips
    do not add up to the scan's.
    """
    if eqn.primitive.name != "scan":
        raise RewriteError(f"{change}: equation {change.scan} is a {eqn.primitive.name}, no scan")
    consts, carry, length = _compat.scan_sizes(eqn)
    if sum(change.trips) != length or min(change.trips) < 1:
        raise RewriteError(f"{change}: the pieces must add up to the scan's {length} iterations")
    if wrong := [k for k in change.only if not 0 <= k < len(change.trips)]:
        raise RewriteError(f"{change}: there is no piece {wrong[0]}")
    starts = [sum(change.trips[:k]) for k in range(len(change.trips))]
    order = range(len(starts))

    def run(*args: Any) -> list:
        fixed, state, stacked = _split(args, consts, carry)
        made: dict[int, list] = {}
        for k in reversed(order) if eqn.params["reverse"] else order:
            begin, trips = starts[k], change.trips[k]
            mine = [jax.lax.slice_in_dim(x, begin, begin + trips) for x in stacked]
            params = {**eqn.params, "length": trips}
            if other is not None and (not change.only or k in change.only):
                (name,) = _compat.SUBJAXPR_PARAMS["scan"]
                params[name] = other
            piece = eqn.replace(params=params)
            results = _compat.bind_where_it_stands(piece, [*fixed, *state, *mine])
            state, made[k] = results[:carry], results[carry:]
        return [*state, *(jnp.concatenate(pieces) for pieces in zip(*(made[k] for k in order)))]

    return run


def _split(args: Sequence, consts: int, carry: int) -> tuple[list, list, list]:
    first, second = consts, consts + carry
    return list(args[:first]), list(args[first:second]), list(args[second:])
