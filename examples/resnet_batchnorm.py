"""A small ResNet: BatchNorm keeps the statistics of the whole batch, on 8 simulated devices."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import optax

import jaxscaler as js
from models import resnet

BATCH, STEPS = 16, 5


def images(work):
    """Each class is a colour, under noise."""
    rng = np.random.default_rng(0)
    colours = rng.standard_normal((16, 1, 1, 3))
    for _ in range(STEPS):
        targets = rng.integers(16, size=BATCH, dtype=np.int32)
        noise = 0.5 * rng.standard_normal(work.batch["inputs"].shape)
        yield {"inputs": (colours[targets] + noise).astype(np.float32), "targets": targets}


if __name__ == "__main__":
    work = resnet.workload("tiny", batch=BATCH, dtype="float32", tx=optax.adam(1e-2))
    step = js.parallelize(work.step)
    state = step.init(work.init, jax.random.key(0), batch=work.batch)
    for batch in step.feed(images(work)):
        state, metrics = step(state, batch)
        print(f"loss {float(metrics['loss']):.4f}")
    mean = state.variables["batch_stats"]["norm"]["mean"]
    print("running mean of the first norm:", np.round(np.asarray(mean)[:4], 3))
    print("plan", step.plan.digest())
