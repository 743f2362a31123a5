"""Models with more than one stack as pipelines in one program: the same numbers."""

import jax
import numpy as np
import optax
import pytest

import jaxscaler as js
from jaxscaler.rewrite.changes import Ring
from models import alphafold2, clip, t5, vlm
from models.workload import cross_entropy

SGD = dict(dtype="float64", tx=optax.sgd(0.1), scan=True)
WORKLOADS = {
    "t5": lambda: t5.workload(batch=8, seq=8, **SGD),
    "vlm": lambda: vlm.workload(batch=8, seq=8, layers=2, vision=clip.Tower(2, 16, 2), **SGD),
    "alphafold2": lambda: alphafold2.workload(batch=4, blocks=2, **SGD),
    "clip": lambda: clip.workload(
        batch=8, vision=clip.Tower(2, 16, 2), text=clip.Tower(2, 16, 2), **SGD
    ),
}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def marked(work, score):
    """The step of a workload, its loss marked for the planner."""
    fed = [key for key in work.batch if key != "targets"]

    def step(state, batch):
        def loss(params):
            whole = {**params, **getattr(state, "frozen", {})}
            outputs = state.apply_fn({"params": whole}, *(batch[key] for key in fed))
            return score(outputs, batch["targets"]) if "targets" in batch else score(outputs)

        value, grads = js.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stacks"), [("t5", 2), ("vlm", 2), ("clip", 2), ("alphafold2", 2)]
)
def test_same_numbers(name, stacks, devices):
    """Every stack is a pipeline; the loss of all pairs, which is no sum over samples, too."""
    work = WORKLOADS[name]()
    step = marked(work, clip.contrastive if name == "clip" else cross_entropy)
    run = js.parallelize(
        step, cluster="cpu:8", micro_batches=2, stages=2, one_program=True, time_limit=10,
        cache=False,
    )  # fmt: skip
    batch = work.make_batch(0)
    state = run.init(work.init, jax.random.key(0), batch=work.batch)
    assert sum(isinstance(c, Ring) for c in run.plan.changes) == stacks
    got, metrics = run(state, batch)
    want, expected = jax.jit(work.step)(jax.jit(work.init)(jax.random.key(0)), batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-9)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-9, atol=1e-11)
