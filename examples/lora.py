"""LoRA: a frozen base, low-rank corrections that train, on 8 simulated devices.

The base comes with every call and never back, so `roles` says that it is no batch; it has no
optimizer state, and its gradient is never made.
"""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import optax

import jaxscaler as js

WIDTH, RANK, BATCH = 128, 4, 32
tx = optax.adam(1e-2)


def predict(base, lora, x):
    for layer, (down, up) in zip(base, lora):
        x = jnp.tanh(x @ layer + x @ down @ up)
    return x


@js.parallelize(roles={"base/*": "parameter"})
def train_step(state, base, batch):
    def loss_fn(lora):
        return jnp.mean((predict(base, lora, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["lora"])
    updates, opt_state = tx.update(grads, state["opt"])
    return {"lora": optax.apply_updates(state["lora"], updates), "opt": opt_state}, loss


def make(key):
    """(what trains, what does not)"""
    keys = jax.random.split(key, 4)
    base = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[:2]]
    lora = [(jax.random.normal(k, (WIDTH, RANK)), jnp.zeros((RANK, WIDTH))) for k in keys[2:]]
    return {"lora": lora, "opt": tx.init(lora)}, base


if __name__ == "__main__":
    x, y = (np.random.default_rng(i).standard_normal((BATCH, WIDTH), np.float32) for i in (0, 1))
    batch = {"x": x, "y": np.tanh(y)}
    state, base = train_step.init(make, jax.random.key(0), batch=batch)
    for _ in range(5):
        state, loss = train_step(state, base, batch)
        print(f"loss {float(loss):.4f}")
    print("plan", train_step.plan.digest())
