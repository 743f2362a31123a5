"""Plan and train a small byte-level GPT on this repository's own documents, on 8 simulated devices.

The same 20 steps are then run in plain `jit` on one device: the losses must be the same.
The exit status is 1 when they are not, or when the loss did not fall.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)  # in float32 twenty steps of Adam make any rounding large

import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jaxscaler as js
from models import gpt

STEPS, BATCH, SEQ = 20, 32, 128
TOLERANCE = 1e-9  # sums in another order, and twenty steps for the difference to grow

console = Console()


def read_documents() -> np.ndarray:
    """README, changelog and docs as one run of bytes."""
    root = Path(__file__).resolve().parent.parent
    files = [root / "README.md", root / "CHANGELOG.md", *sorted(root.glob("docs/*.md"))]
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def batches(text: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """The same STEPS batches of random windows every time."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(len(text) - SEQ, size=(BATCH, 1))
        windows = text[starts + np.arange(SEQ + 1)].astype(np.int32)
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def train(title: str, step: Callable[..., Any], state: Any, text: np.ndarray) -> np.ndarray:
    """The loss of each step, with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    losses = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(title, total=STEPS)
        for batch in batches(text):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            progress.update(task, advance=1, description=f"{title}  loss {losses[-1]:.4f}")
    return np.array(losses)


def main() -> int:
    text = read_documents()
    work = gpt.workload(
        "tiny",
        batch=BATCH,
        seq=SEQ,
        context=SEQ,
        layers=4,
        dtype="float64",
        tx=optax.adamw(3e-3),  # with 1e-2 one device differs from itself, rounded, by 6e-4
    )
    rng = jax.random.key(0)
    console.print(f"{work.parameters:,} parameters, {len(text):,} bytes of text")

    train_step = js.parallelize(work.step)
    state = train_step.init(work.init, rng, batch=work.batch)
    train_step.plan.show()
    planned = train("8 devices, planned", train_step, state, text)

    plain = train("1 device, plain jit", jax.jit(work.step), jax.jit(work.init)(rng), text)

    difference = float(np.abs(planned - plain).max())
    same = difference <= TOLERANCE
    fell = planned[-1] < planned[0]
    console.print(f"loss {planned[0]:.4f} -> {planned[-1]:.4f}")
    if not fell:
        console.print("[red]the loss did not fall")
    verdict = "same numbers as" if same else "[red]not the same numbers as"
    console.print(f"{verdict} one device: max difference {difference:.1e}")
    return 0 if same and fell else 1


if __name__ == "__main__":
    sys.exit(main())
