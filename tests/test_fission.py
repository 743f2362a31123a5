"""Loop fission: the same numbers from several shorter scans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting import find, loss_of, plain, pull, same

from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.apply import changed
from jaxscaler.rewrite.changes import Accumulate, CoShard, Fission, Segment
from jaxscaler.rewrite.fission import fission


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def scan_eqn(reverse):
    def stack(w, x, xs):
        def layer(x, at):
            y = jnp.tanh(x @ w + at)
            return y, (y.sum(), y * 2)

        return jax.lax.scan(layer, x, xs, reverse=reverse)

    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s) for s in ((3, 3), (3,), (6, 3))]
    closed = jax.make_jaxpr(stack)(*args)
    (eqn,) = closed.jaxpr.eqns
    return eqn, args, lambda *args: jax.tree.leaves(stack(*args))


@pytest.mark.parametrize(("reverse", "trips"), [(False, (2, 3, 1)), (True, (4, 2))])
def test_same_numbers(reverse, trips):
    eqn, args, stack = scan_eqn(reverse)
    pieces = fission(eqn, Fission(0, 0, trips))
    same(pull(stack, args), pull(pieces, args))
    text = str(jax.make_jaxpr(pieces)(*args))
    assert [f"length={n}" in text for n in (*trips, 6)] == [True] * len(trips) + [False]


def test_another_body_in_some_pieces():
    eqn, args, stack = scan_eqn(False)
    body = eqn.params["jaxpr"]
    other = jax.make_jaxpr(jax.checkpoint(plain(body)))(*body.in_avals)
    pieces = fission(eqn, Fission(0, 0, (2, 4), only=(1,)), other)
    same(pull(stack, args), pull(pieces, args))
    scans = [e for e in jax.make_jaxpr(pieces)(*args).jaxpr.eqns if e.primitive.name == "scan"]
    held = [any(e.primitive.name == "remat2" or "checkpoint" in e.primitive.name
                for e in s.params["jaxpr"].jaxpr.eqns) for s in scans]  # fmt: skip
    assert held == [False, True]


@pytest.mark.parametrize(("trips", "only"), [((2, 3), ()), ((0, 6), ()), ((3, 3), (2,))])
def test_refusals(trips, only):
    eqn, *_ = scan_eqn(False)
    with pytest.raises(RewriteError, match=r"pieces must add up|no piece"):
        fission(eqn, Fission(0, 0, trips, only))


def test_together():
    """In the first two of three layers the MLP in parts; the head in parts; two batches in turn."""
    closed, leaves, batch = loss_of("llama", layers=3, scan=True, batch=4, seq=16)
    scan = next(i for i, e in enumerate(closed.jaxpr.eqns) if e.primitive.name == "scan")
    body = closed.jaxpr.eqns[scan].params["jaxpr"]
    down = max(i for i, e in enumerate(body.jaxpr.eqns) if e.primitive.name == "dot_general")
    head = find(closed, "dot_general", (4, 16, 256))
    changes = [
        Fission(0, scan, (2, 1), only=(0,)),
        CoShard(Segment(0, 0, len(body.jaxpr.eqns) - 1, (scan, 0)), (down, 0, 2), 4),
        CoShard(Segment(0, head, len(closed.jaxpr.eqns) - 1), (head, 0, 1), 2),
        Accumulate(0, 2, tuple((i, 0) for i in batch)),
    ]
    args = [jnp.asarray(x) for x in leaves]
    moving = [i for i in range(len(args)) if i not in batch]

    def grads(function):
        def loss(weights):
            filled = list(args)
            for i, x in zip(moving, weights):
                filled[i] = x
            return function(*filled)[0]

        return jax.jit(jax.value_and_grad(loss))([args[i] for i in moving])

    same(grads(plain(closed)), grads(changed(closed, changes)))
