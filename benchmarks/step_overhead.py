"""What a planned step costs over a hand-written `jit` with the same shardings, per call.

A train step that does almost nothing on a state of many leaves, so that what is measured is the
dispatch: from the call to its return. Both steps run in turns, which goes first changes every turn,
and each waits for its results outside the time taken. What is built first in a process is quicker
by a tenth (its memory lies better), so each row is measured in rounds that build the two in either
order, after a round that does not count. On one device the mesh is a device that is not JAX's
default one, since for that one a plan is `jit` itself.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from _harness import at_most, main

from jaxscaler.lower import Layouts, compile_step, named_sharding
from jaxscaler.trace import trace

AUTO = jax.sharding.AxisType.Auto
LIMIT = 1.05


def make_step():
    """A new function each time, so that no two compiled steps share anything."""

    def step(state, batch):
        scale = 1 + batch.sum()
        return jax.tree.map(lambda leaf: leaf * scale, state), {"loss": scale}

    return step


def measure(quick: bool):
    for leaves in (150, 450):
        for devices in (1, 8):
            yield compare(leaves, jax.devices()[-devices:], rounds=4 if quick else 16)


def compare(leaves: int, devices, rounds: int, turns: int = 40) -> dict:
    """One row: milliseconds of a call of each step, medians, and the median ratio of the turns."""
    seconds: dict[str, list[float]] = {"jit": [], "planned": []}
    for number in range(rounds + 1):
        order = sorted(seconds, reverse=bool(number % 2))
        taken = run(*build(leaves, devices, order), turns)
        for name in order if number else ():
            seconds[name] += taken[name]
    pairs = zip(seconds["jit"], seconds["planned"], strict=True)
    return {
        "leaves": leaves,
        "devices": len(devices),
        "jit_ms": 1e3 * statistics.median(seconds["jit"]),
        "planned_ms": 1e3 * statistics.median(seconds["planned"]),
        "ratio": statistics.median(planned / by_hand for by_hand, planned in pairs),
    }


def build(leaves: int, devices, order) -> tuple[dict, dict, np.ndarray]:
    """Steps by name and their states, built in this order; and the batch."""
    mesh = jax.sharding.Mesh(np.array(devices), ("d",), axis_types=(AUTO,))
    state = {f"leaf{i}": np.ones((8, 8), np.float32) for i in range(leaves)}
    batch = np.zeros((8,), np.float32)
    cut, rows, whole = (("d",), ()), (("d",),), ()
    shardings = dict.fromkeys(state, named_sharding(mesh, cut))

    def planned():
        layouts = Layouts(
            (("d", len(devices)),), (cut,) * leaves + (rows,), (cut,) * leaves + (whole,)
        )
        return compile_step(trace(make_step(), state, batch), layouts, mesh)

    def by_hand():
        return jax.jit(
            make_step(),
            in_shardings=(shardings, named_sharding(mesh, rows)),
            out_shardings=(shardings, {"loss": named_sharding(mesh, whole)}),
            donate_argnums=0,
        )

    makers = {"jit": by_hand, "planned": planned}
    steps, states = {}, {}
    for name in order:
        steps[name] = makers[name]()
        states[name], _ = steps[name](jax.device_put(state, shardings), batch)  # compiles
    return steps, states, batch


def run(steps, states, batch, turns: int) -> dict[str, list[float]]:
    """Seconds of each call, without the first turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-5, turns):
        for name in sorted(steps, reverse=bool(turn % 2)):
            start = time.perf_counter()
            states[name], _ = steps[name](states[name], batch)
            elapsed = time.perf_counter() - start
            jax.block_until_ready(states[name])
            if turn >= 0:
                seconds[name].append(elapsed)
    return seconds


def judge(rows):
    return [
        at_most(f"{row['leaves']} leaves on {row['devices']} devices", row["ratio"], LIMIT)
        for row in rows
    ]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main("step_overhead", measure, judge))
