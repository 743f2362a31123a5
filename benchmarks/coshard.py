"""What co-sharding and recomputation give a Swin whose attention fills the memory of a V100.

The sizes are those of nnScaler's artifact (OSDI 2024), in float16, on as many V100-32GB as there,
four samples a device. Each is planned four ways, recomputation and gradient accumulation searched
in all of them: freely; without loops over parts of a layer (co-shards); so too, but as tensor
parallelism in the manner of Megatron; and with attention in chunks of queries in every block (what
a fused kernel does with memory). Seconds and memory are predicted.
"""

from __future__ import annotations

import sys
import time

from _harness import at_least, at_most, main

CASES = {  # size -> cluster, samples
    "1.8b": ("v100-32:4", 16),
    "5b": ("v100-32:8", 32),
    "10b": ("v100-32:16", 64),
    "27b": ("v100-32:16x2", 128),
}
QUICK = {  # a Swin of two stages, and a share of the memory that its attention fills
    "size": "tiny", "depths": (2, 2), "hidden": 64, "heads": 4, "window": 24, "image": 96,
    "batch": 2,
}  # fmt: skip
QUICK_CLUSTER, QUICK_MEMORY, QUICK_LIMIT = "v100-32:1", 0.0008, 5.0
MEMORY = 0.92
TIME_LIMIT = 120.0
WAYS = ("searched", "no co-shard", "tensor parallel", "chunked attention")
ROOM = 1.005  # the search is never worse than any other way, but for what it calls equal


def marked(work):
    """The workload's step, its loss marked for the planner."""
    import jaxscaler
    from models.workload import cross_entropy

    def step(state, batch):
        def loss(params):
            outputs = state.apply_fn({"params": params}, batch["inputs"])
            return cross_entropy(outputs, batch["targets"])

        value, grads = jaxscaler.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


def plan(way: str, options: dict, cluster_name: str, memory: float, limit: float) -> dict:
    """One row: a size planned one way."""
    from jaxscaler import planner, recipes
    from jaxscaler.cluster import Cluster
    from jaxscaler.errors import InfeasibleError
    from jaxscaler.program import SAME_DEVICE, forbid, op_assign, region
    from jaxscaler.trace import trace
    from models import swin

    begin = time.perf_counter()
    work, cluster = swin.workload(**{"dtype": "float16"} | options), Cluster.parse(cluster_name)
    traced = trace(marked(work), work.state, work.batch)
    whole = forbid(op_assign(region(phase="forward"), SAME_DEVICE))
    programs: dict = {
        "no co-shard": [whole],
        "tensor parallel": [whole, *recipes.tensor_parallel()],
    }
    loops: bool | tuple = True
    if way == "chunked attention":
        loops = by_queries(traced, options["batch"], cluster.num_devices)
    row = {"size": options["size"], "cluster": cluster_name, "way": way}
    try:
        found = planner.plan_step(
            traced, cluster, constraints=programs.get(way, ()), memory=memory, time_limit=limit,
            loops=loops, explained=False,
        ).plan  # fmt: skip
    except InfeasibleError:
        return row | {"seconds": None, "planning_s": time.perf_counter() - begin}
    kinds = [type(change).__name__ for change in found.changes]
    return row | {
        "seconds": found.predicted.seconds,
        "samples_per_s": options["batch"] / found.predicted.seconds,
        "compute_s": found.predicted.compute,
        "peak_GB": found.predicted.peak_bytes / 1e9,
        "mesh": "x".join(str(n) for _, n in found.axes),
        "recomputed": kinds.count("Recompute"),
        "co-shards": _parts(found.changes, "CoShard"),
        "accumulated": _parts(found.changes, "Accumulate"),
        "planning_s": time.perf_counter() - begin,
    }


def _parts(changes, kind: str) -> str:
    """As "2 x 8 parts"."""
    parts = [change.parts for change in changes if type(change).__name__ == kind]
    return ", ".join(f"{parts.count(n)} x {n} parts" for n in sorted(set(parts)))


def by_queries(traced, batch: int, devices: int) -> tuple:
    """Every attention in chunks of its queries: a loop from the scores to their use. The batch is
    accumulated a sample a device at a time, where there are more."""
    from jaxscaler.graph.build import build
    from jaxscaler.loops.options import batch_of
    from jaxscaler.rewrite.changes import Accumulate, CoShard, Segment

    changes: list = []
    (loss,) = traced.losses
    if batch > devices:
        samples = batch_of(build(traced), 0, loss)
        changes.append(Accumulate(0, batch // devices, samples, devices))
    maker = {v: e for e in loss.eqns for v in e.outvars}
    scores = None
    for i, eqn in enumerate(loss.eqns):
        if eqn.primitive.name != "dot_general":
            continue
        out = eqn.outvars[0].aval.shape
        if scores is None and len(out) >= 4 and out[-1] == out[-2] and _both_made(eqn, maker):
            scores = i
        elif scores is not None:
            # the first product after the scores multiplies them with the values
            query = loss.eqns[scores].params["dimension_numbers"]
            (contracted, _), (shared, _) = query
            operand = loss.eqns[scores].invars[0].aval.shape
            dim = next(d for d in range(len(operand)) if d not in (*contracted, *shared))
            parts = next(n for n in (16, 8, 4, 2) if operand[dim] % n == 0)
            changes.append(CoShard(Segment(0, scores, i), (scores, 0, dim), parts))
            scores = None
    return tuple(changes)


def _both_made(eqn, maker) -> bool:
    return all(v in maker for v in eqn.invars)


def measure(quick: bool):
    if quick:
        for way in WAYS:
            yield plan(way, QUICK, QUICK_CLUSTER, QUICK_MEMORY, QUICK_LIMIT)
        return
    for size, (cluster, batch) in CASES.items():
        for way in WAYS:
            yield plan(way, {"size": size, "batch": batch}, cluster, MEMORY, TIME_LIMIT)


def judge(rows):
    bars = []
    for size in dict.fromkeys(row["size"] for row in rows):
        seconds = {row["way"]: row["seconds"] for row in rows if row["size"] == size}
        best = seconds["searched"]
        others = [s for way, s in seconds.items() if way != "searched" and s is not None]
        if best is None or not others:
            bars.append(at_most(f"swin {size}: searched seconds", best, float("inf")))
            continue
        bars.append(at_most(f"swin {size}: searched / best other", best / min(others), ROOM))
        if (megatron := seconds["tensor parallel"]) is not None:
            bars.append(at_least(f"swin {size}: tensor parallel / searched", megatron / best, 1.0))
    return bars


if __name__ == "__main__":
    sys.exit(main("coshard", measure, judge))
