"""A small classifier in flax.nnx on synthetic digits, on 8 simulated devices."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import optax
from flax import nnx

import jaxscaler as js

BATCH, PIXELS, CLASSES = 64, 64, 10


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(PIXELS, 128, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(nnx.relu(self.up(x))))


def loss_fn(model: Classifier, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@js.parallelize
def train_step(
    model: Classifier, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]
) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def digits(seed: int) -> dict[str, np.ndarray]:
    """Noisy copies of one random picture per class."""
    pictures = np.random.default_rng(0).standard_normal((CLASSES, PIXELS))
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=BATCH, dtype=np.int32)
    image = pictures[label] + 0.3 * rng.standard_normal((BATCH, PIXELS))
    return {"image": image.astype(np.float32), "label": label}


if __name__ == "__main__":
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for i in range(5):
        loss = train_step(model, optimizer, digits(i))
        print(f"loss {float(loss):.4f}")
    print("plan", train_step.plan.digest())
