"""A segment whose values are made again in the backward pass, but for those that are named."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.rewrite.changes import Recompute

KEPT, MOVED = "jaxscaler kept", "jaxscaler host"  # names of what stays, and of what goes to host
# Their derivatives read the result itself: it must have its name there, or it is made again.
READ_THEIR_RESULT = frozenset(
    ("cbrt", "erf_inv", "exp", "exp2", "expm1", "logistic", "rsqrt", "sqrt", "tan", "tanh")
)


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
            if eqn.primitive.name in READ_THEIR_RESULT and (i, 0) in names:
                env[eqn.outvars[0]] = _named_at_once(eqn, names[i, 0])(*operands)
                continue
            results = _compat.bind_where_it_stands(eqn, operands)
            for r, name in ((r, names[i, r]) for r in range(len(results)) if (i, r) in names):
                results[r] = _named(eqn, results[r], name)
            env.update(zip(eqn.outvars, results, strict=True))
        return [env[v] for v in jaxpr.outvars]

    # inside a loop the compiler can not merge the two runs, outside only barriers prevent it
    return jax.checkpoint(run, policy=_policy(change), prevent_cse=not change.segment.inside)


def _named(eqn, value, name: str):
    """A result of an equation, by a name."""
    with _compat.where_it_stands(eqn):
        return checkpoint_name(value, name)


def _named_at_once(eqn, name: str) -> Callable:
    """An equation of one operand whose derivative reads the result by its name."""

    def plain(x):
        return _compat.bind_where_it_stands(eqn, [x])[0]

    @jax.custom_jvp
    def run(x):
        return _named(eqn, plain(x), name)

    @run.defjvp
    def _(primals, tangents):
        rule = jax.make_jaxpr(lambda x, dx: jax.jvp(plain, (x,), (dx,)))(*primals, *tangents)
        jaxpr, consts = _compat.open_jaxpr(rule)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *primals, *tangents)))
        for step in jaxpr.eqns:
            operands = [v.val if _compat.is_literal(v) else env[v] for v in step.invars]
            env.update(zip(step.outvars, _compat.bind_where_it_stands(step, operands)))
            if jaxpr.outvars[0] in step.outvars:
                env[jaxpr.outvars[0]] = _named(eqn, env[jaxpr.outvars[0]], name)
        return tuple(env[v] for v in jaxpr.outvars)

    return run


def _policy(change: Recompute):
    policies = jax.checkpoint_policies
    if change.host:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[KEPT], names_which_can_be_offloaded=[MOVED],
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
    return policies.save_only_these_names(KEPT)
