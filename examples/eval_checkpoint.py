"""Train and evaluate on 2 x 4 simulated devices, save with orbax, and go on with 4 of them.

Evaluation takes the state where training keeps it. What is restored lies as another plan wants it.
"""

import tempfile
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxscaler as js
from jaxscaler import recipes

WIDTH, BATCH = 64, 32
tx = optax.adamw(1e-2)


def evaluate(state, x):
    hidden = jnp.tanh(x @ state["params"]["up"])
    return jnp.mean((hidden @ state["params"]["down"] - x) ** 2)


def train(state, x):
    loss, grads = jax.value_and_grad(lambda p: evaluate({"params": p}, x))(state["params"])
    updates, opt_state = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}, loss


def make(key):
    params = {"up": (up := jax.random.normal(key, (WIDTH, 4 * WIDTH)) / 8), "down": up.T / 4}
    return {"params": params, "opt": tx.init(params)}


if __name__ == "__main__":
    x, test = (np.random.default_rng(i).standard_normal((BATCH, WIDTH), np.float32) for i in (0, 1))
    train_step = js.parallelize(train, cluster="cpu:4x2", constraints=recipes.zero())
    state = train_step.init(make, jax.random.key(0), batch=x)
    for _ in range(5):
        state, loss = train_step(state, x)
        print(f"loss {float(loss):.4f}")
    before = js.parallelize(evaluate, follow=train_step)(state, test)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state)
        (Path(folder) / "digest").write_text(train_step.plan.digest())  # to know it again by

        fewer = js.parallelize(train, cluster="cpu:4", constraints=recipes.data_parallel())
        fewer.plan_for(make, jax.random.key(0), batch=x)
        restored = checkpointer.restore(Path(folder) / "state", fewer.abstract_state())
        print("plan", (Path(folder) / "digest").read_text(), "then", fewer.plan.digest())
    after = js.parallelize(evaluate, follow=fewer)(restored, test)
    print(f"evaluation {float(before):.6f}, restored on 4 devices {float(after):.6f}")
