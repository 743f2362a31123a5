"""Searched plans beside those of other systems, at the model and cluster sizes of nnScaler's paper.

Swin and T5 with the sizes of its artifact, GPT-3 with those of its authors' own comparisons, and
AlphaFold2 as published, on 4 and 16 V100-32GB, at one global batch for all ways. Nothing is run:
seconds and memory of a step are predicted, by the same prices for all.

- `searched`: the joint search over plans with stages and without; for AlphaFold2 also 3F1B.
- `megatron`: tensor parallelism inside nodes, 1F1B over equal layers, data parallelism. Of the
  least model parallelism that fits the fastest; one sample a replica at a time; as little
  recomputation as fits, of none, all but products, whole layers. State at rest is left open.
- `zero-3`: data parallelism with split state; recomputation and accumulation are searched.
- `tensor`: tensor parallelism alone; recomputation and accumulation are searched.
- `alpa`: the joint search without co-shards, interlacing, recycled stages, orders but 1F1B.

Parameters are cast to half precision once a step, as mixed precision with master weights has it.

- `published`: the plan that trained Llama 3 405B, given as constraints, at what its stack makes of
  the device (`jaxscaler.estimate.stack`), beside its published step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from _harness import at_most, main

ROOM = 1.005  # what the search calls equal
MEMORY = 0.92
TIME_LIMIT = 60.0  # seconds of one search
SWIN = {"scan": True}
GPT = {"size": "6.7b", "scan": True}
CASES = {  # model -> (name, cluster, global batch, options of the model)
    "gpt": (
        ("1.3b", "v100-32:4", 64, GPT | {"layers": 24, "hidden": 2048, "heads": 16}),
        ("6.7b", "v100-32:16", 64, GPT),
    ),
    "t5": (
        ("vocab-512k", "v100-32:4", 64, {"size": "vocab-512k", "scan": True}),
        ("vocab-1.5m", "v100-32:16", 64, {"size": "vocab-1.5m", "scan": True}),
    ),
    "alphafold2": (
        ("initial", "v100-32:4", 64, {"size": "initial", "scan": True}),
        ("finetune", "v100-32:16", 64, {"size": "finetune", "scan": True}),
    ),
    "swin": (
        ("1.8b", "v100-32:4", 64, {"size": "1.8b", "scan": True}),
        ("10b", "v100-32:16", 64, {"size": "10b", "scan": True}),
    ),
}  # fmt: skip
# Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 4: nodes of 8 H100 -> TFLOP/s a GPU
# of model work, at 2048 sequences of 8192 tokens, tensor parallelism 8, 16 stages.
LLAMA = {1024: 430.0, 2048: 400.0}
OFF = 0.15  # of the published step
QUICK = ("tiny", "v100-32:4", 16, {"size": "tiny", "layers": 4, "scan": True})
QUICK_LIMIT = 5.0
# Published: "up to", over which way.
PUBLISHED = {("swin", "megatron"): 3.5, ("t5", "megatron"): 2.2, ("alphafold2", "zero-3"): 1.8}


def traced(model: str, batch: int, options: dict) -> Any:
    """The step of a model, its loss marked, its parameters in half precision inside of the loss."""
    return traced_of(made(model, batch, options))


def made(model: str, batch: int, options: dict) -> Any:
    """A workload."""
    import importlib

    module = importlib.import_module(f"models.{model}")
    return module.workload(**{"dtype": "float16", "batch": batch} | options)


def traced_of(work: Any, half: str = "float16") -> Any:
    """The step of a workload, its loss marked, its parameters cast once before it."""
    import jax

    import jaxscaler
    from jaxscaler.trace import trace
    from models.workload import cross_entropy

    def step(state, batch):
        def loss(params):
            arrays = [array for name, array in batch.items() if name != "targets"]
            return cross_entropy(state.apply_fn({"params": params}, *arrays), batch["targets"])

        value, grads = jaxscaler.value_and_grad(loss)(
            jax.tree.map(lambda p: p.astype(half), state.params)
        )
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return trace(step, work.state, work.batch)


class Result(dict):
    """What a row says of a plan."""


def of_pipeline(plan: Any) -> Result:
    return Result(
        seconds=plan.seconds,
        peak_GB=max(p.bytes for p in plan.timeline.peak) / 1e9,
        plan=f"{len(plan.plans)} stages of {'+'.join(map(str, dict.fromkeys(plan.devices)))}, "
        f"{plan.micro} micro-batches",
    )


def of_plan(plan: Any) -> Result:
    kinds = [type(change).__name__ for change in plan.changes]
    counts = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
    mesh = "x".join(str(n) for _, n in plan.axes)
    return Result(
        seconds=plan.predicted.seconds,
        peak_GB=plan.predicted.peak_bytes / 1e9,
        plan=f"mesh {mesh}" + (f"; {counts}" if counts else ""),
    )


# --- ways -----------------------------------------------------------------------------------------


def searched(step: Any, cluster: Any, batch: int, limit: float, visits: int = 1) -> Result:
    from jaxscaler.pipeline.search import search_pipelines

    found = search_pipelines(step, cluster, memory=MEMORY, time_limit=limit, dispatch_limit=None)
    best = _told(found)
    if visits > 1:
        ways = ((p, visits) for p in _powers(2, cluster.num_devices))
        best = min([best, *_recycled(step, cluster, batch, ways)], key=lambda r: r["seconds"])
    return best


def _told(found: Any) -> Result:
    pipelined = hasattr(found.best, "timeline")
    return of_pipeline(found.best) if pipelined else of_plan(found.best.plan)


def _recycled(step: Any, cluster: Any, batch: int, ways: Any) -> Iterator[Result]:
    """nF1B: every visit of the stack cut alike, its pieces on the same devices, in 1F1B's order.

    Embeddings and what is between visits have gradients, so no visit is quite without any, as the
    family `nf1b` has it.
    """
    from jaxscaler.rewrite.changes import Stages

    scans = _scans(step)
    for count, visits in ways:
        runs = scans[-visits:]
        if any(length % count for _, length in runs):
            continue
        points = [(at, n * length // count, n) for at, length in runs for n in range(count)]
        points[0] = (0, 0, 0)
        micro = batch // max(1, cluster.num_devices // count)
        for plan in _plans(step, cluster, Stages(0, tuple(points)), micro, "1f1b", (),
                           max(1, cluster.num_devices // count)):  # fmt: skip
            yield of_pipeline(plan)


def megatron(step: Any, cluster: Any, batch: int, limit: float) -> Result | None:
    from jaxscaler.program import ANY, Split, op_trans, ops, values
    from jaxscaler.recipes import COMPUTE

    total, node = cluster.num_devices, cluster.levels[-1].size
    compute = ops(phase=COMPUTE)
    for parallel in _powers(1, total):
        found = []
        for tensor in _powers(1, min(parallel, node)):
            stages, data = parallel // tensor, total // parallel
            if batch % data:
                continue
            lines = [op_trans(compute, Split("batch"), data)] if data > 1 else []
            if tensor > 1:
                weights = values("*kernel", role="parameter", to=compute)
                lines.append(op_trans(weights, Split(ANY), tensor))
            for plan in _plans(step, cluster, stages, batch // data, "1f1b", lines, data):
                found.append(of_pipeline(plan))
        if found:
            return min(found, key=lambda result: result["seconds"])
    return None


def _plans(
    step: Any, cluster: Any, stages: Any, micro: int, order: str, lines: Any, lanes: int
) -> Iterator[Any]:
    """The pipeline with the least recomputation that fits; none where nothing does."""
    from jaxscaler.errors import InfeasibleError
    from jaxscaler.graph.build import build
    from jaxscaler.pipeline.again import cheap_again, layers_again
    from jaxscaler.pipeline.planner import plan_pipeline

    graph = build(step)
    for again in (lambda g, loss: (), cheap_again, layers_again):
        try:
            yield plan_pipeline(
                step, cluster, stages=stages, micro=micro, order=order, constraints=lines,
                changes=again(graph, 0), lanes=lanes, memory=MEMORY, dispatch_limit=None,
            )  # fmt: skip
            return
        except InfeasibleError:
            continue


def alone(program: Callable[[], list]) -> Callable:
    """A plan without stages, of a recipe; loops over parts of a layer are not for it."""

    def way(step: Any, cluster: Any, batch: int, limit: float) -> Result | None:
        from jaxscaler import planner
        from jaxscaler.errors import InfeasibleError

        try:
            found = planner.plan_step(
                step, cluster, constraints=[*_whole_layers(), *program()], memory=MEMORY,
                time_limit=limit, loops=True, explained=False,
            )  # fmt: skip
        except InfeasibleError:
            return None
        return of_plan(found.plan)

    return way


def alpa(step: Any, cluster: Any, batch: int, limit: float) -> Result | None:
    from jaxscaler.errors import InfeasibleError
    from jaxscaler.pipeline.search import search_pipelines

    try:
        return _told(search_pipelines(
            step, cluster, constraints=_whole_layers(), schedules=("1f1b",), memory=MEMORY,
            time_limit=limit, dispatch_limit=None,
        ))  # fmt: skip
    except InfeasibleError:
        return None


def _whole_layers() -> list:
    from jaxscaler.program import SAME_DEVICE, forbid, op_assign, region

    return [forbid(op_assign(region(phase="forward"), SAME_DEVICE))]


def _zero() -> list:
    from jaxscaler import recipes

    return recipes.zero()


def _tensor() -> list:
    from jaxscaler import recipes

    return recipes.tensor_parallel()


WAYS: dict[str, Callable] = {
    "searched": searched, "megatron": megatron, "zero-3": alone(_zero), "tensor": alone(_tensor),
    "alpa": alpa,
}  # fmt: skip


def _powers(first: int, last: int) -> list[int]:
    return [n for n in (2**k for k in range(20)) if first <= n <= last]


def _scans(step: Any) -> list[tuple[int, int]]:
    """(equation, length) of the loops over layers of the loss."""
    return [
        (i, eqn.params["length"])
        for i, eqn in enumerate(step.losses[0].eqns)
        if eqn.primitive.name == "scan"
    ]


# --- the published plan ---------------------------------------------------------------------------


def llama(nodes: int, layers: int = 126, stages: int = 16, chunks: int = 8, batch: int = 2048,
          **options: Any) -> tuple[Any, Any]:  # fmt: skip
    """(traced step, pipeline's plan) of Llama 3 405B in bfloat16 with attention in one kernel.

    Tensor parallelism 8, one sequence a replica at a time, gradients added once a step, state split
    over replicas, products kept. `chunks` a stage, of equal numbers of layers, but that embedding
    and head each count as one: with 8 the first chunk is the embedding alone and the last the head,
    as section 3.3 of the paper says it.
    """
    from jaxscaler.cluster import Cluster
    from jaxscaler.estimate.stack import under_stack
    from jaxscaler.graph.build import build
    from jaxscaler.pipeline.again import cheap_again
    from jaxscaler.pipeline.planner import plan_pipeline
    from jaxscaler.program import ALL, ANY, Split, if_possible, op_trans, ops, values
    from jaxscaler.recipes import COMPUTE, STATE
    from jaxscaler.rewrite.changes import Stages

    given = {"size": "405b", "layers": layers, "scan": True, "attention": "flash"} | options
    step = traced_of(made("llama", batch, given | {"dtype": "bfloat16"}), "bfloat16")
    ((scan, _),) = _scans(step)
    count = stages * chunks
    each = (layers + 2) // count
    points = [(scan, n * each - 1, n % stages) for n in range(1, count)]
    if points[-1][1] == layers:
        points[-1] = (scan + 1, 0, points[-1][2])
    compute, data = ops(phase=COMPUTE), nodes // stages
    weights = [values(f"*{name}", role="parameter", to=compute) for name in ("kernel", "embedding")]
    plan = plan_pipeline(
        step,
        under_stack(Cluster.parse(f"h100:8x{nodes}"), "pytorch"),
        stages=Stages(0, ((0, 0, 0), *points)),
        micro=batch // data,
        order="interleaved" if chunks > 1 else "1f1b",
        constraints=[
            op_trans(compute, Split("batch"), data),
            *(op_trans(weight, Split(ANY), 8) for weight in weights),
            # every device sends its share (Narayanan et al. 2021, section 4.1)
            if_possible(op_trans(values("received/*", role="batch"), Split(ANY), ALL)),
            op_trans(values(role=STATE), Split(ANY), ALL),
        ],
        changes=cheap_again(build(step), 0),
        lanes=data,
        memory=1.0,
        dispatch_limit=None,
    )
    return step, plan


def published(nodes: int) -> dict:
    """The row of the published plan on so many nodes."""
    from jaxscaler.schedule.simulate import simulate

    begin = time.perf_counter()
    _, plan = llama(nodes)
    seconds = simulate(plan.pipeline, plan.order).seconds  # its ranks have hosts of their own
    step = 1e-12 * work_of_llama() / (8 * nodes) / LLAMA[nodes]
    return {
        "model": "llama", "size": "405b", "cluster": f"h100:8x{nodes}", "batch": 2048,
        "way": "published", **of_pipeline(plan), "seconds": seconds, "published": step,
        "planning_s": time.perf_counter() - begin,
    }  # fmt: skip


def work_of_llama() -> float:
    """FLOPs of a step as model work counts them: 6 a parameter and token, and causal attention."""
    parameters, tokens, context = 405.85e9, 2048 * 8192, 8192
    return 6 * parameters * tokens + 12 * 126 * 16384 * context * tokens / 2


# --- rows and bars --------------------------------------------------------------------------------


def case(model: str, name: str, cluster_name: str, batch: int, options: dict, limit: float,
         ways: Any = WAYS) -> Iterator[dict]:  # fmt: skip
    """Rows of one model on one cluster."""
    from jaxscaler.cluster import Cluster

    step, cluster = traced(model, batch, options), Cluster.parse(cluster_name)
    best = None
    for way in ways:
        begin = time.perf_counter()
        more = {"visits": 4} if (model, way) == ("alphafold2", "searched") else {}
        found = WAYS[way](step, cluster, batch, limit, **more)
        row = {"model": model, "size": name, "cluster": cluster_name, "batch": batch, "way": way}
        row |= found or {"seconds": None, "peak_GB": None, "plan": "nothing fits"}
        best = row["seconds"] if way == "searched" else best
        row["speedup"] = row["seconds"] / best if row["seconds"] and best else None
        yield row | {
            "published": PUBLISHED.get((model, way)),
            "planning_s": time.perf_counter() - begin,
        }


def measure(quick: bool):
    if quick:
        yield from case("gpt", *QUICK, QUICK_LIMIT)
        return
    for model, sizes in CASES.items():
        for given in sizes:
            yield from case(model, *given, TIME_LIMIT)
    for nodes in LLAMA:
        yield published(nodes)


def judge(rows):
    for row in rows:
        if row["way"] == "published":
            off = abs(row["seconds"] / row["published"] - 1)
            yield at_most(f"llama 405b on {row['cluster']}: off the published step", off, OFF)
    cases = [row for row in rows if row["way"] != "published"]
    for model, size in dict.fromkeys((row["model"], row["size"]) for row in cases):
        mine = {r["way"]: r for r in cases if (r["model"], r["size"]) == (model, size)}
        best = mine.pop("searched")["seconds"]
        yield at_most(f"{model} {size}: searched seconds", best, float("inf"))
        for way, row in mine.items():
            if best is not None and row["seconds"] is not None:
                yield at_most(f"{model} {size}: searched / {way}", best / row["seconds"], ROOM)


if __name__ == "__main__":
    sys.exit(main("headline", measure, lambda rows: list(judge(rows))))
