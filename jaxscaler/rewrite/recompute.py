"""A segment whose values are made again in the backward pass, but for those that are named."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.rewrite.changes import Recompute

KEPT, MOVED = "jaxscaler kept", "jaxscaler host"  # names of what stays, and of what goes to host


def recompute(closed, change: Recompute) -> Callable[..., list]:
    """The function of a segment, its backward pass keeping only `change.kept` and `change.host`.

    Random keys are arguments or made again from the same ones: masks are the same. Raises PlanError
    for a value that the segment does not make.
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    names = dict.fromkeys(change.kept, KEPT) | dict.fromkeys(change.host, MOVED)
    first, count = change.segment.first, len(jaxpr.eqns)
    for i, r in names:
        if not (0 <= i - first < count and 0 <= r < len(jaxpr.eqns[i - first].outvars)):
            raise PlanError(f"{change.segment}: equation {i} makes no result {r} there")

    def run(*args) -> list:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for i, eqn in enumerate(jaxpr.eqns, start=first):
            operands = [v.val if _compat.is_literal(v) else env[v] for v in eqn.invars]
            results = _compat.bind_where_it_stands(eqn, operands)
            for r, name in ((r, names[i, r]) for r in range(len(results)) if (i, r) in names):
                with _compat.where_it_stands(eqn):
                    results[r] = checkpoint_name(results[r], name)
            env.update(zip(eqn.outvars, results, strict=True))
        return [env[v] for v in jaxpr.outvars]

    # inside a loop the compiler can not merge the two runs, outside only barriers prevent it
    return jax.checkpoint(run, policy=_policy(change), prevent_cse=not change.segment.inside)


def _policy(change: Recompute):
    policies = jax.checkpoint_policies
    if change.host:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[KEPT], names_which_can_be_offloaded=[MOVED],
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
    return policies.save_only_these_names(KEPT)
