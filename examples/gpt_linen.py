"""A byte-level GPT in flax.linen with sharded state (ZeRO-3), on 8 simulated devices."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import optax

import jaxscaler as js
from jaxscaler import recipes
from models import gpt

BATCH, SEQ, STEPS = 16, 32, 5
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 50, np.uint8)


def windows():
    """Random runs of the text, and what follows each byte of them."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(len(TEXT) - SEQ, size=(BATCH, 1))
        run = TEXT[starts + np.arange(SEQ + 1)].astype(np.int32)
        yield {"inputs": run[:, :-1], "targets": run[:, 1:]}


if __name__ == "__main__":
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    work = gpt.workload("tiny", batch=BATCH, seq=SEQ, context=SEQ, dtype="float32", tx=tx)
    step = js.parallelize(work.step, constraints=recipes.zero())
    state = step.init(work.init, jax.random.key(0), batch=work.batch)
    for batch in step.feed(windows()):
        state, metrics = step(state, batch)
        print(f"loss {float(metrics['loss']):.4f}")
    print("plan", step.plan.digest())
