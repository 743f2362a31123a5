"""Loop fission: a scan as several, one after another, so that parts of a stack may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.assign import copied, marked, run_text
from jaxscaler.rewrite.changes import Fission


def fission(
    eqn: Any, change: Fission, other: Any = None, runs: Sequence[int] = ()
) -> Callable[..., list]:
    """The function of the scan `eqn` as pieces of `change.trips` iterations; the same numbers.

    Carries go from piece to piece, stacked results are concatenated. `other`: the body (closed
    jaxpr, same types) of the pieces `change.only`, or of all. `runs`: which run of a pipeline each
    piece belongs to (assign.py). Raises RewriteError where the trips do not add up to the scan's.
    """
    if eqn.primitive.name != "scan":
        raise RewriteError(f"{change}: equation {change.scan} is a {eqn.primitive.name}, no scan")
    consts, carry, length = _compat.scan_sizes(eqn)
    if sum(change.trips) != length or min(change.trips) < 1:
        raise RewriteError(f"{change}: the pieces must add up to the scan's {length} iterations")
    if wrong := [k for k in change.only if not 0 <= k < len(change.trips)]:
        raise RewriteError(f"{change}: there is no piece {wrong[0]}")
    if runs and eqn.params["reverse"]:
        raise RewriteError(f"{change}: a scan that runs in reverse can not be cut into stages")
    order = range(len(change.trips))

    def run(*args: Any) -> list:
        fixed, state, stacked = _split(args, consts, carry)
        made: dict[int, list] = {}
        parts = [jax.lax.split(x, change.trips) for x in stacked]  # its transpose concatenates
        for k in reversed(order) if eqn.params["reverse"] else order:
            mine = [part[k] for part in parts]
            params = {**eqn.params, "length": change.trips[k]}
            (name,) = _compat.SUBJAXPR_PARAMS["scan"]
            if other is not None and (not change.only or k in change.only):
                params[name] = other
            if runs:
                params[name] = marked(params[name], runs[k])
            piece = eqn.replace(params=params)
            with jax.named_scope(run_text(runs[k])) if runs else nullcontext():
                read = copied(fixed, runs[k]) if runs and runs[k] != runs[0] else fixed
                results = _compat.bind_where_it_stands(piece, [*read, *state, *mine])
            state, made[k] = results[:carry], results[carry:]
        return [*state, *(jnp.concatenate(pieces) for pieces in zip(*(made[k] for k in order)))]

    return run


def _split(args: Sequence, consts: int, carry: int) -> tuple[list, list, list]:
    first, second = consts, consts + carry
    return list(args[:first]), list(args[first:second]), list(args[second:])
