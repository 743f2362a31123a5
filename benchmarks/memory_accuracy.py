"""How true the memory that a plan predicts is: against the real compilers, with no such hardware.

Per cell: a step is planned for a cluster, the planned step is compiled by that cluster's own
compiler (`jaxscaler.verify.worker`; needs the extras jaxscaler[gpu] and jaxscaler[tpu]), and
`plan.predicted.peak_bytes` is set against its temporaries + arguments + results - aliases. Compiles
are kept in jaxscaler's cache: a second run compiles nothing. `--all`: the full grid of models,
plans and targets instead of the fixed set. A TPU cell takes the compiler minutes, a GPU cell less.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from importlib import import_module

import numpy as np
from _harness import at_least, at_most, main

from jaxscaler import recipes
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.given import traced_step
from jaxscaler.planner import Planned, plan_step
from jaxscaler.verify import worker
from jaxscaler.verify.targets import target_of

TEXT = dict(size="tiny", batch=32, hidden=1024, heads=16, context=1024, vocab=32000)
LLAMA = dict(TEXT, layers=3, kv_heads=4, ffn=4096, scan=False)
MODELS = {
    "gpt": ("gpt", dict(TEXT, layers=3)),
    "llama": ("llama", LLAMA),
    "llama scan": ("llama", dict(LLAMA, scan=True)),
    "gpt 12": ("gpt", dict(TEXT, layers=12)),
    "llama 12": ("llama", dict(LLAMA, layers=12)),
    "llama 24": ("llama", dict(LLAMA, layers=24)),
    "moe": ("moe", dict(LLAMA, layers=2, ffn=2048)),
    # with windows of 7 XLA finds no tiles for a product and gives up (jax 0.10.2)
    "swin": ("swin", dict(size="tiny", batch=64, image=256, patch=4, hidden=128, depths=(2, 2, 2),
                          heads=4, window=8, classes=1000)),
    "resnet": ("resnet", dict(size="tiny", batch=128, stages=(2, 2, 2), width=64, stem=64,
                              image=112, classes=1000, patch_stem=True)),
    "unet": ("unet", dict(size="tiny", batch=128, width=128, multipliers=(1, 2, 2), blocks=1,
                          attention=(16,), image=32, groups=32, dropout=0.0)),
}  # fmt: skip
RECOMPUTE = ("gpt", "llama", "llama scan", "moe")
DEEP = ("gpt 12", "llama 12", "llama 24")  # not in the full grid: a TPU's compiler takes too long
PLANS = {
    "data": recipes.data_parallel,
    "zero3": lambda: recipes.zero(3),
    "tensor": recipes.tensor_parallel,
    "searched": list,
}
TARGETS = {"h100": "h100:8", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2"}
FIXED = [  # (models, plans, with recomputation, target)
    (("gpt", "llama", "llama scan"), ("data", "zero3", "tensor", "searched"), False, "h100"),
    (("gpt", "llama", "llama scan"), ("data", "zero3", "tensor"), True, "h100"),
    (DEEP, ("zero3", "tensor"), True, "h100"),
    (("llama 12",), ("tensor",), False, "h100"),
    (("moe", "resnet"), ("data", "zero3"), False, "h100"),
    (("unet", "swin"), ("data",), False, "h100"),
    (("gpt",), ("data",), False, "v5e"),
    (("llama", "moe"), ("zero3",), False, "v5e"),
    (("llama",), ("tensor",), False, "v5e"),
    (("gpt", "llama scan"), ("zero3",), True, "v5e"),
    (("gpt",), ("searched",), False, "v5p"),
    (("moe",), ("data",), False, "v5p"),
    (("llama",), ("zero3",), False, "v5p"),
    (("gpt", "llama scan"), ("data",), True, "v5p"),
]
QUICK = [(("llama scan",), ("data", "zero3"), True, "h100")]
TEMP_HEAVY = 0.4  # share of temporaries in the peak from which their own error counts
ALL = "--all" in sys.argv
TIME_LIMIT = 20.0  # seconds of search
ENTRIES = 512  # cells kept in the cache


def cells(quick: bool) -> Iterator[tuple[str, str, bool, str]]:
    rows = QUICK if quick else FIXED
    some = [(m, p, again, target) for models, plans, again, target in rows
            for m in models for p in plans]  # fmt: skip
    yield from some
    if ALL:
        grid = itertools.product(MODELS.keys() - {*DEEP}, PLANS, (False, True), TARGETS)
        yield from (c for c in sorted(grid) if c not in some and (not c[2] or c[0] in RECOMPUTE))


def measure(quick: bool):
    worker.ENTRIES = max(worker.ENTRIES, ENTRIES)
    for model, plan, again, target in cells(quick):
        yield cell(model, plan, again, target)


def planned_step(model: str, plan: str, again: bool, target: str) -> Planned:
    """The step of a cell, planned for its target."""
    module, arguments = MODELS[model]
    work = import_module(f"models.{module}").workload(
        **arguments, **({"remat": True} if again else {})
    )
    cluster = Cluster.parse(TARGETS[target])
    traced = traced_step(work.step, (work.state, work.batch), {}, {}, None, cluster.device)
    return plan_step(traced, cluster, constraints=PLANS[plan](), time_limit=TIME_LIMIT)


def cell(model: str, plan: str, again: bool, target: str) -> dict:
    planned = planned_step(model, plan, again, target)
    found = worker.compile_for(
        TARGETS[target], planned.lower(target_of(TARGETS[target]).platform),
        compiler_options=planned.plan.compiler_options,
    )  # fmt: skip
    row = {
        "model": model, "plan": plan, "recomputed": again, "target": target,
        "predicted_mb": planned.plan.predicted.peak_bytes / 2**20,
    }  # fmt: skip
    if found.memory is None:
        return {**row, "status": found.status}
    memory = found.memory
    lasting = memory.total - memory.temp
    predicted = planned.plan.predicted.peak_bytes
    return {
        **row,
        "compiled_mb": memory.total / 2**20,
        "error": predicted / memory.total - 1,
        "temp_error": (predicted - lasting) / max(memory.temp, 1) - 1,
        "temp_share": memory.temp / memory.total,
        "status": found.status,
    }


def judge(rows):
    done = [row for row in rows if "error" in row]
    error = np.array([row["error"] for row in done])
    temp = np.abs([row["temp_error"] for row in done if row["temp_share"] >= TEMP_HEAVY])
    bars = [at_most("cells not compiled", len(rows) - len(done), 0)]
    if len(done):
        bars += [
            at_most("median error of the peak", float(np.median(np.abs(error))), 0.05),
            at_most("95th percentile of it", float(np.percentile(np.abs(error), 95)), 0.15),
            at_least("least predicted over compiled", float(1 + error.min()), 0.9),
        ]
    if len(temp):
        bars += [
            at_most("median error of temporaries", float(np.median(temp)), 0.15),
            at_most("95th percentile of it", float(np.percentile(temp, 95)), 0.3),
        ]
    return bars


if __name__ == "__main__":
    sys.exit(main("memory_accuracy", measure, judge, [a for a in sys.argv[1:] if a != "--all"]))
