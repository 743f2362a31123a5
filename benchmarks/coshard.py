"""What co-sharding and recomputation give a Swin whose attention fills the memory of a V100.

The sizes are those of nnScaler's artifact (OSDI 2024), on as many V100-32GB as there, one sample a
device. Each is planned four ways: freely; freely, but without loops over parts; as tensor
parallelism in the manner of Megatron, with recomputation; and with attention in chunks of queries
in every block (what a fused kernel does with memory), without other loops. Seconds and memory are
predicted.
"""

from __future__ import annotations

import sys
import time

from _harness import at_least, at_most, main

CASES = {  # size -> cluster
    "1.8b": "v100-32:4",
    "5b": "v100-32:8",
    "10b": "v100-32:16",
    "27b": "v100-32:16x2",
}
QUICK = {  # a Swin of two stages, and a share of the memory that its attention fills
    "size": "tiny", "depths": (2, 4), "hidden": 128, "heads": 4, "window": 24, "image": 192,
    "batch": 4,
}  # fmt: skip
QUICK_MEMORY, QUICK_LIMIT = 0.0035, 30.0
MEMORY = 0.92
TIME_LIMIT = 600.0
WAYS = ("searched", "no loops", "tensor parallel", "chunked attention")
ROOM = 1.0  # the search is never worse than any other way


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
    from jaxscaler.trace import trace
    from models import swin

    begin = time.perf_counter()
    work, cluster = swin.workload(**options), Cluster.parse(cluster_name)
    traced = trace(marked(work), work.state, work.batch)
    loops: bool | tuple = way == "searched"
    if way == "chunked attention":
        loops = by_queries(traced)
    program = recipes.tensor_parallel() if way == "tensor parallel" else ()
    row = {"size": options["size"], "cluster": cluster_name, "way": way}
    try:
        found = planner.plan_step(
            traced, cluster, constraints=program, memory=memory, time_limit=limit, loops=loops
        ).plan
    except InfeasibleError:
        return row | {"seconds": None, "planning_s": time.perf_counter() - begin}
    kinds = [type(change).__name__ for change in found.changes]
    return row | {
        "seconds": found.predicted.seconds,
        "samples_per_s": options["batch"] / found.predicted.seconds,
        "peak_GB": found.predicted.peak_bytes / 1e9,
        "mesh": "x".join(str(n) for _, n in found.axes),
        "recomputed": kinds.count("Recompute"),
        "looped": kinds.count("CoShard"),
        "accumulated": kinds.count("Accumulate"),
        "planning_s": time.perf_counter() - begin,
    }


def by_queries(traced) -> tuple:
    """Every attention in chunks of its queries: a loop from the scores to their use."""
    from jaxscaler.rewrite.changes import CoShard, Segment

    changes = []
    (loss,) = traced.losses
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
            (contracted, _), (batch, _) = query
            operand = loss.eqns[scores].invars[0].aval.shape
            dim = next(d for d in range(len(operand)) if d not in (*contracted, *batch))
            parts = next(n for n in (16, 8, 4, 2) if operand[dim] % n == 0)
            changes.append(CoShard(Segment(0, scores, i), (scores, 0, dim), parts))
            scores = None
    return tuple(changes)


def _both_made(eqn, maker) -> bool:
    return all(v in maker for v in eqn.invars)


def measure(quick: bool):
    if quick:
        for way in WAYS:
            yield plan(way, QUICK, "v100-32:4", QUICK_MEMORY, QUICK_LIMIT)
        return
    for size, cluster in CASES.items():
        batch = {"v100-32:4": 4, "v100-32:8": 8, "v100-32:16": 16}.get(cluster, 32)
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
