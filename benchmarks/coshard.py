"""What co-sharding and recomputation give a Swin whose attention fills the memory of a V100.

The sizes are those of nnScaler's artifact (OSDI 2024), in float16, on as many V100-32GB as there,
four samples a device. Each is planned four ways, recomputation and gradient accumulation searched
in all of them: freely; without loops over parts of a layer (co-shards); so too, but as tensor
parallelism in the manner of Megatron; and with attention in chunks of queries in every block (what
a fused kernel does with memory). Seconds and memory are predicted. The blocks of a stage are a
scan, two at a time, which makes the traced step a third as large. Each row is planned in a process
of its own; the error stream says where the search is, and has each row when it is done.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from _harness import at_least, at_most, main

CASES = {  # size -> cluster, samples
    "1.8b": ("v100-32:4", 16),
    "5b": ("v100-32:8", 32),
    "10b": ("v100-32:8x2", 64),
    "27b": ("v100-32:8x4", 128),
}
QUICK = {  # a Swin of two stages, and a share of the memory that its attention fills
    "size": "tiny", "depths": (2, 2), "hidden": 64, "heads": 4, "window": 24, "image": 96,
    "batch": 2,
}  # fmt: skip
QUICK_CLUSTER, QUICK_MEMORY, QUICK_LIMIT = "v100-32:1", 0.0008, 5.0
MEMORY = 0.92
TIME_LIMIT = 60.0
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
        shape = {name: value for name, value in options.items() if name != "batch"}
        config = swin.configure(swin.SIZES, **{"dtype": "float16"} | shape)
        loops = by_queries(traced, config, options["batch"], cluster.num_devices)
    row = {"size": options["size"], "cluster": cluster_name, "way": way}

    def said(*what):
        at = time.perf_counter() - begin
        print(f"{row['size']}, {way}: {at:.0f} s:", *what, file=sys.stderr, flush=True)

    try:
        found = planner.plan_step(
            traced, cluster, constraints=programs.get(way, ()), memory=memory, time_limit=limit,
            loops=loops, explained=False, progress=said,
        ).plan  # fmt: skip
    except InfeasibleError as error:
        least = error.need and error.need / 1e9
        spent = time.perf_counter() - begin
        return row | {"seconds": None, "least_GB": least, "planning_s": spent}
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


def by_queries(traced, config, batch: int, devices: int) -> tuple:
    """Every attention in chunks of its queries: a loop from the scores to their use. The batch is
    accumulated a sample a device at a time, where there are more."""
    from jaxscaler.graph.build import build
    from jaxscaler.graph.fold import fold
    from jaxscaler.loops.options import batch_of
    from jaxscaler.rewrite.candidates import candidates
    from jaxscaler.rewrite.changes import Accumulate
    from jaxscaler.space.segments import segmentations

    graph = build(traced)
    changes: list = []
    if batch > devices:
        samples = batch_of(graph, 0, traced.losses[0])
        changes.append(Accumulate(0, batch // devices, samples, devices))
    segments = [s for found in segmentations(graph, fold(graph)) for s in found]
    loops = {}  # of a layer's cores the one by queries: keys are summed over
    tokens = {config.window_of(stage)[1] ** 2 for stage in range(len(config.depths))}
    for found in candidates(traced.losses, segments):
        if found.size in tokens:
            parts = next(n for n in (16, 8, 4, 2) if found.size % n == 0)
            loops |= {change.segment: change for change in found.changes(parts)}
    expected = 2 * len(config.depths) if config.scan else sum(config.depths)
    if len(loops) != expected:
        raise RuntimeError(f"{len(loops)} attentions were found, not {expected}")
    return (*changes, *loops.values())


def measure(quick: bool):
    if quick:
        for way in WAYS:
            yield plan(way, QUICK, QUICK_CLUSTER, QUICK_MEMORY, QUICK_LIMIT)
        return
    for size, (cluster, batch) in CASES.items():
        for way in WAYS:
            options = {"size": size, "batch": batch, "scan": True}
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, spawn) as alone:
                row = alone.submit(plan, way, options, cluster, MEMORY, TIME_LIMIT).result()
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


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
