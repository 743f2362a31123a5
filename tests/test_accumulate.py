"""Gradient accumulation: the same loss and gradients, part by part, or the op that forbids it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rewriting import is_float, loss_of, plain, same
from test_chunk import reductions

from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.accumulate import accumulate
from jaxscaler.rewrite.apply import flat
from jaxscaler.rewrite.changes import Accumulate


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def gradients(function, args, batch):
    moving = [i for i, x in enumerate(args) if i not in batch and is_float(x)]

    def loss(weights, args):
        filled = list(args)
        for i, x in zip(moving, weights):
            filled[i] = x
        value, *rest = function(*filled)
        return value, rest

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return grad([args[i] for i in moving], args)


def of_function(function, *args):
    return flat(jax.make_jaxpr(lambda *args: list(function(*args)))(*args))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt", dict(layers=1, dropout=0.1, seq=16)),
        pytest.param("llama", dict(scan=True, remat=True, seq=16), marks=pytest.mark.slow),
    ],
)
def test_models(model, options):
    closed, leaves, batch = loss_of(model, **options)
    assert not closed.consts
    change = Accumulate(0, 2, tuple((i, 0) for i in batch), lanes=2 if model == "gpt" else 1)
    args = [jnp.asarray(x) for x in leaves]
    same(gradients(plain(closed), args, batch), gradients(accumulate(closed, change), args, batch))


def forward(w, x):
    return jnp.tanh(x @ w)


def mean(w, x):
    return (forward(w, x).mean(),)


def masked_mean(w, x):
    mask = x[:, 0] > 0  # of the batch alone: its sum may be taken first
    return (jnp.where(mask, forward(w, x).sum(1), 0).sum() / jnp.maximum(mask.sum(), 1),)


def weights_first(w, x):
    share = (x[:, :1] > 0) / (x[:, 0] > 0).sum()
    return ((forward(w, x) * share).sum(),)


def with_decay(w, x):
    return (jnp.square(w).sum() + jnp.exp(w[0, 0]) * forward(w, x).mean(),)


def with_others(w, x):
    y = forward(w, x)
    return y.mean(), jnp.exp(y.mean()), y, (x > 0).sum()


def case():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s) for s in ((4, 3), (16, 4))]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("loss", [mean, masked_mean, weights_first, with_decay, with_others])
def test_affine_losses(loss, lanes):
    args = case()
    closed = of_function(loss, *args)
    parts = accumulate(closed, Accumulate(0, 4, ((1, 0),), lanes))
    same(gradients(plain(closed), args, (1,)), gradients(parts, args, (1,)))
    same(plain(closed)(*args), parts(*args))


def batch_norm(w, x):
    y = x @ w
    return (jnp.square((y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5)).mean(),)


def contrastive(w, x):
    y = x @ w
    return (jax.nn.logsumexp(y @ y.T, axis=-1).mean(),)


def norm(w, x):
    return (jnp.sqrt(jnp.square(x @ w).sum()),)


def learned_weights(w, x):
    gate = jax.nn.sigmoid(x @ w[:, 0])
    return ((gate * (x @ w[:, 1])).sum() / gate.sum(),)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (batch_norm, "`sub` at .*: a part needs what all parts make"),
        (contrastive, "`dot_general` at .*: two of its factors"),
        (norm, "`sqrt` at .*not affine"),
        (learned_weights, "`div` at .*not affine"),
        (lambda w, x: (w.sum(),), "does not depend on the batch|nothing can run"),
        (lambda w, x: ((x[:5] @ w).sum(),), "`slice` at"),
    ],
)
def test_refusals(loss, why):
    closed = of_function(loss, *case())
    with pytest.raises(RewriteError, match=f"(?s){why}"):
        accumulate(closed, Accumulate(0, 4, ((1, 0),)))


def test_what_can_not_be_differentiated():
    args = case()
    closed = of_function(with_others, *args)
    parts = accumulate(closed, Accumulate(0, 4, ((1, 0),)))
    with pytest.raises(RewriteError, match="by its batch"):
        jax.grad(lambda x: parts(args[0], x)[0])(args[1])
    with pytest.raises(RewriteError, match="another result"):
        jax.grad(lambda w: parts(w, args[1])[1])(args[0])


def test_forward_and_backward_run_once_per_part():
    """No pass is made again, and no activation of the whole batch exists."""
    args = case()
    closed = of_function(mean, *args)
    parts = accumulate(closed, Accumulate(0, 4, ((1, 0),)))
    text = str(jax.make_jaxpr(jax.grad(lambda w, x: parts(w, x)[0]))(*args))
    assert text.count("tanh") == 1 and "f64[16,3]" not in text and "f64[4,3]" in text


def test_reduced_once_a_step(devices):
    args = case()
    closed = of_function(masked_mean, *args)
    mesh = Mesh(np.array(devices), "d")
    ways = [NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))]

    def step(w, x, lanes):
        parts = accumulate(closed, Accumulate(0, 2, ((1, 0),), lanes))
        return jax.value_and_grad(lambda w: parts(w, x)[0])(w)

    def compiled(lanes):
        way = (ways[0], ways[0])
        jitted = jax.jit(lambda w, x: step(w, x, lanes), in_shardings=ways, out_shardings=way)
        return jitted.lower(*args).compile()

    once = compiled(8)
    inside, outside = reductions(once.as_text())
    assert inside == 0 and outside > 0
    assert reductions(compiled(1).as_text())[0] > 0  # what lanes are for
    placed = [jax.device_put(x, way) for x, way in zip(args, ways)]
    same(once(*placed), jax.value_and_grad(lambda w: masked_mean(w, args[1])[0])(args[0]))
