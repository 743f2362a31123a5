"""Bytes of a plan's collectives against those in the HLO that the target's compiler makes.

Each cell is a model under a plan for 8 H100s, or one of those for 8 v5e of `memory_accuracy.py`,
compiled with the target's real compiler (no such device is needed; `pip install
'jaxscaler[gpu,tpu]'`; `--quick`: small float32 steps under the plans that the CPU compiler, which
reassociates nothing, keeps as they are). The plan's prediction, Shardy's audit and
the compiled HLO are all in normal form, and stand in this order in the columns of kinds. `off` is
the sum over kinds of the difference of predicted and compiled bytes, as a share of the compiled
bytes; `audit_off` the same of Shardy's audit. The bar: `off` is at most 5 % on 90 % of the cells.

Compiles are kept in the folder of the plan cache: a second run compiles nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import memory_accuracy
from _harness import Bar, Row, at_least, main

from jaxscaler import planner, recipes
from jaxscaler.cluster import Cluster
from jaxscaler.errors import InfeasibleError
from jaxscaler.plan import Traffic
from jaxscaler.trace import trace
from jaxscaler.verify import worker
from jaxscaler.verify.audit import audit
from jaxscaler.verify.normal_form import COLLECTIVES, Collective
from jaxscaler.verify.targets import target_of
from jaxscaler.verify.worker import compile_for

_LLAMA = {"layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 4096, "vocab": 8192}
_ATTENTION = {"context": 512, "batch": 32, "seq": 512}
CLUSTER, TPU = "h100:8", "v5e"  # libtpu can not print programs for v5p
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"size": "small", "layers": 2, "padded_vocab": 50304, **_ATTENTION}),
    "llama": ("llama", {**_LLAMA, **_ATTENTION, "scan": False}),
    "llama scan": ("llama", {**_LLAMA, **_ATTENTION, "scan": True}),
    "moe": ("moe", {**_LLAMA, **_ATTENTION, "scan": False, "ffn": 2048}),
    "resnet": ("resnet", {"size": "50", "stages": (1, 1, 1, 1), "batch": 128}),
}
QUICK = {
    "gpt": ("gpt", {"size": "tiny", "batch": 16, "dtype": "float32"}),
    "llama": ("llama", {"size": "tiny", "batch": 16, "dtype": "float32", "scan": False}),
}
PLANS = {
    "dp": recipes.data_parallel,
    "zero3": recipes.zero,
    "tensor": recipes.tensor_parallel,
    "searched": list,
}
QUICK_PLANS = ("dp", "zero3")
LIMIT, SHARE = 0.05, 0.9  # of the bytes, of the cells


def by_kind(found: Iterable[Traffic | Collective]) -> Counter[str]:
    """Bytes a step by kind of collective."""
    total: Counter[str] = Counter()
    for c in found:
        if c.kind in COLLECTIVES:
            total[c.kind] += round(c.count * (c.nbytes if isinstance(c, Traffic) else c.bytes))
    return total


def off(found: Counter[str], compiled: Counter[str]) -> float:
    """Sum over kinds of the difference, as a share of the compiled bytes."""
    wrong = sum(abs(found[kind] - compiled[kind]) for kind in COLLECTIVES)
    return wrong / max(compiled.total(), 1)


def measure(quick: bool) -> Iterator[Row]:
    worker.ENTRIES = max(worker.ENTRIES, memory_accuracy.ENTRIES)
    name = "cpu:8" if quick else CLUSTER
    cluster = Cluster.parse(name)
    models = QUICK if quick else MODELS
    if quick:  # LLVM's optimisations come after what is measured
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    for model, (module, options) in models.items():
        workload = importlib.import_module(f"models.{module}").workload(**options)
        traced = trace(workload.step, workload.state, workload.batch)
        for plan in QUICK_PLANS if quick else PLANS:
            try:
                planned = planner.plan_step(
                    traced, cluster, constraints=PLANS[plan](), time_limit=30
                )
            except InfeasibleError:
                continue  # as the recipe of a model that has nothing of the kind
            yield {"target": name, "model": model, "plan": plan, **_cell(planned, cluster)}
    for model, plan, again, target in () if quick else memory_accuracy.cells(False):
        if target == TPU:
            cluster = Cluster.parse(memory_accuracy.TARGETS[target])
            planned = memory_accuracy.planned_step(model, plan, again, target)
            model += ", recomputed" * again
            yield {"target": target, "model": model, "plan": plan, **_cell(planned, cluster)}


def _cell(planned: Any, cluster: Cluster) -> Row:
    plan = planned.plan
    lowered = planned.lower(target_of(cluster).platform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a loop whose runs are not known
        audited = by_kind(audit(lowered))
        compiled = compile_for(cluster, lowered, compiler_options=plan.compiler_options)
    if compiled.collectives is None:
        raise RuntimeError(f"{compiled.status}: {compiled.detail}")
    predicted, real = by_kind(plan.traffic), by_kind(compiled.collectives)
    row: Row = {"mesh": " ".join(f"{n}={s}" for n, s in plan.axes)}
    for kind in COLLECTIVES:
        row[f"{kind} MB"] = "/".join(f"{c[kind] / 1e6:.4g}" for c in (predicted, audited, real))
    return {
        **row,
        "bytes": real.total(),
        "off": off(predicted, real),
        "audit_off": off(audited, real),
        "compile s": compiled.seconds,
    }


def judge(rows: list[Row]) -> list[Bar]:
    within = [row["off"] <= LIMIT for row in rows]
    return [at_least(f"share of cells within {LIMIT:.0%}", sum(within) / len(rows), SHARE)]


if __name__ == "__main__":
    sys.exit(main("collective_accuracy", measure, judge))
