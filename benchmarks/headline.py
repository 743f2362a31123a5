"""Searched plans beside those of other systems, at the model and cluster sizes of nnScaler's paper.

Swin and T5 with the sizes of its artifact, GPT-3 with those of its authors' own comparisons, and
AlphaFold2 as published, on 4 to 32 V100-32GB, 8 to a node, at one global batch for all ways.
Nothing is run: seconds and memory of a step are predicted, by the same prices for all.
`--only t5 v100-32:4` are the rows that have all of these names.

- `searched`: the joint search over plans with stages and without; for AlphaFold2 also 3F1B.
- `megatron`: tensor parallelism inside nodes, tables cut alike, 1F1B over stages of equal work or
  of equal numbers of layers, data parallelism. Of the least model parallelism that fits the
  fastest; one sample a replica at a time; as little recomputation as fits, of none, all but
  products, whole layers. State at rest is left open.
- `zero-3`: data parallelism with split state; recomputation and accumulation are searched.
- `tensor`: tensor parallelism alone; recomputation and accumulation are searched.
- `alpa`: the joint search without co-shards, interlacing, recycled stages, orders but 1F1B.
- `dap` (AlphaFold2 alone): one sample on all devices, weights whole, alignments and pairs split
  along axes that are searched; so are recomputation and accumulation.

Parameters are cast to half precision once a step, as mixed precision with master weights has it.

- `published`: the plan that trained Llama 3 405B, given as constraints, at what its stack makes of
  the device (`jaxscaler.estimate.stack`), beside its published step.
- `joint`: what the joint search finds for the same step, speeds, memory and hosts, without a line.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from _harness import at_most, main
from _headline_ways import WAYS, Result, of_pipeline, scans_of, told

ROOM = 1.005  # what the search calls equal
TIME_LIMIT = 60.0  # seconds of one search
JOINT = 45.0  # of the joint search of Llama 405B: a pipeline that is begun within ends within 60
BATCH, EACH = 64, {"swin": 4}  # global; or samples a device
CLUSTERS = ("v100-32:4", "v100-32:8", "v100-32:8x2", "v100-32:8x4")


def gpt(layers: int, hidden: int, heads: int) -> dict:
    return {"size": "6.7b", "layers": layers, "hidden": hidden, "heads": heads}


CASES = {  # model -> (name, options of the model) for each of the clusters
    "gpt": (  # Zheng et al. 2022, "Alpa", table 4; the first with heads that are 128 wide
        ("1.3b", gpt(24, 2048, 16)),
        ("2.6b", gpt(32, 2560, 32)),
        ("6.7b", gpt(32, 4096, 32)),
        ("15b", gpt(48, 5120, 32)),
    ),
    "t5": tuple((size, {"size": size}) for size in (
        "vocab-512k", "vocab-1m", "vocab-1.5m", "vocab-2m",
    )),
    "alphafold2": tuple((size, {"size": size}) for size in (
        "initial", "initial", "finetune", "finetune",
    )),
    "swin": tuple((size, {"size": size}) for size in ("1.8b", "5b", "10b", "27b")),
}  # fmt: skip
# Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 4: nodes of 8 H100 -> TFLOP/s a GPU
# of model work, at 2048 sequences of 8192 tokens, tensor parallelism 8, 16 stages.
LLAMA = {1024: 430.0, 2048: 400.0}
OFF = 0.15  # of the published step
ALPHAFOLD_VISITS = 4  # 3 recyclings
QUICK = ("tiny", "v100-32:4", 16, {"size": "tiny", "layers": 4, "scan": True})
QUICK_LIMIT = 5.0
# Published: "up to" so many times as fast as which way.
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


# --- the published plan ---------------------------------------------------------------------------


def llama(nodes: int, layers: int = 126, stages: int = 16, chunks: int = 8, batch: int = 2048,
          **options: Any) -> tuple[Any, Any]:  # fmt: skip
    """(traced step, pipeline's plan) of Llama 3 405B in bfloat16 with attention in one kernel.

    Tensor parallelism 8, one sequence a replica at a time, gradients added once a step, state split
    over replicas, products kept. `chunks` a stage, of equal numbers of layers, but that embedding
    and head each count as one: with 8 the first chunk is the embedding alone and the last the head,
    as section 3.3 of the paper says it.
    """
    from jaxscaler.graph.build import build
    from jaxscaler.pipeline.again import cheap_again
    from jaxscaler.pipeline.planner import plan_pipeline
    from jaxscaler.program import ALL, ANY, Split, if_possible, op_trans, ops, values
    from jaxscaler.recipes import COMPUTE, STATE
    from jaxscaler.rewrite.changes import Stages

    step, cluster = llama_on(nodes, layers, batch, **options)
    ((scan, _),) = scans_of(step)
    count = stages * chunks
    each = (layers + 2) // count
    points = [(scan, n * each - 1, n % stages) for n in range(1, count)]
    if points[-1][1] == layers:
        points[-1] = (scan + 1, 0, points[-1][2])
    compute, data = ops(phase=COMPUTE), nodes // stages
    weights = [values(f"*{name}", role="parameter", to=compute) for name in ("kernel", "embedding")]
    plan = plan_pipeline(
        step,
        cluster,
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
        dispatch=False,  # its ranks have hosts of their own
    )
    return step, plan


def llama_on(nodes: int, layers: int = 126, batch: int = 2048, **options: Any) -> tuple[Any, Any]:
    """(traced step, cluster) of Llama 3 405B."""
    from jaxscaler.cluster import Cluster
    from jaxscaler.estimate.stack import under_stack

    given = {"size": "405b", "layers": layers, "scan": True, "attention": "flash"} | options
    step = traced_of(made("llama", batch, given | {"dtype": "bfloat16"}), "bfloat16")
    return step, under_stack(Cluster.parse(f"h100:8x{nodes}"), "pytorch")


def published(nodes: int) -> dict:
    """The row of the published plan on so many nodes."""
    begin, spent = time.perf_counter(), time.process_time()
    _, plan = llama(nodes)
    return _row_of_llama(nodes, "published", of_pipeline(plan)) | {
        "planning_s": time.perf_counter() - begin, "cpu_s": time.process_time() - spent,
    }  # fmt: skip


def joint(nodes: int, limit: float = JOINT) -> dict:
    """The row of the joint search on so many nodes. tracing_s: of the cuts of the step, in
    planning_s but not in cpu_s."""
    from jaxscaler.pipeline.search import search_pipelines

    step, cluster = llama_on(nodes)
    begin, spent = time.perf_counter(), time.process_time()
    found = search_pipelines(
        step, cluster, memory=1.0, time_limit=limit, dispatch=False
    )  # fmt: skip
    return _row_of_llama(nodes, "joint", told(found)) | {
        "planning_s": time.perf_counter() - begin,
        "cpu_s": time.process_time() - spent - found.tracing, "tracing_s": found.tracing,
    }  # fmt: skip


def _row_of_llama(nodes: int, way: str, found: Result) -> dict:
    step = 1e-12 * work_of_llama() / (8 * nodes) / LLAMA[nodes]
    where = {"model": "llama", "size": "405b", "cluster": f"h100:8x{nodes}", "batch": 2048}
    return where | {"way": way, **found, "published": step}


def work_of_llama() -> float:
    """FLOPs of a step as model work counts them: 6 a parameter and token, and causal attention."""
    parameters, tokens, context = 405.85e9, 2048 * 8192, 8192
    return 6 * parameters * tokens + 12 * 126 * 16384 * context * tokens / 2


# --- rows and bars --------------------------------------------------------------------------------


def row_of(model: str, name: str, cluster_name: str, batch: int, options: dict, way: str,
           limit: float) -> dict:  # fmt: skip
    """One model on one cluster, planned one way."""
    from jaxscaler.cluster import Cluster

    begin, spent = time.perf_counter(), time.process_time()
    step = traced(model, batch, {"scan": True} | options)
    recycled = (model, way) == ("alphafold2", "searched")
    more = {"visits": ALPHAFOLD_VISITS} if recycled else {}
    found = WAYS[way](step, Cluster.parse(cluster_name), batch, limit, **more)
    return {
        "model": model, "size": name, "cluster": cluster_name, "batch": batch, "way": way,
        **(found or {"seconds": None, "peak_GB": None, "plan": "nothing fits"}),
        "published_speedup": PUBLISHED.get((model, way)),
        "planning_s": time.perf_counter() - begin, "cpu_s": time.process_time() - spent,
    }  # fmt: skip


def cases(only: Sequence[str] = ()) -> Iterator[tuple]:
    """(model, size, cluster, batch, options, way); of the names in `only` alone, if any."""
    for model, sizes in CASES.items():
        for n, (cluster, (name, options)) in enumerate(zip(CLUSTERS, sizes, strict=True)):
            for way in WAYS:
                names = {model, name, cluster, way, f"{model}/{cluster}"}
                if names.issuperset(only) and (way != "dap" or model == "alphafold2"):
                    batch = EACH[model] * 4 * 2**n if model in EACH else BATCH
                    yield model, name, cluster, batch, options, way


def measure(quick: bool, only: Sequence[str] = ()) -> Iterator[dict]:
    """Rows, each made in a process of its own: what one has in memory is not the next one's."""
    if quick:
        for way in WAYS:
            if way != "dap":
                yield row_of("gpt", *QUICK, way, QUICK_LIMIT)
        return
    for given in cases(only):
        yield _apart(row_of, *given, TIME_LIMIT)
    for nodes in LLAMA if not only else ():
        yield _apart(published, nodes)
        yield _apart(joint, nodes)


def _apart(function: Callable, *args: Any) -> dict:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as one:
        return one.submit(function, *args).result()


def judge(rows: list[dict]) -> Iterator[dict]:
    for row in rows:
        if row["way"] == "published":
            off = abs(row["seconds"] / row["published"] - 1)
            yield at_most(f"llama 405b on {row['cluster']}: off the published step", off, OFF)
        if row["way"] == "joint":
            same = (r for r in rows if r["way"] == "published" and _where(r) == _where(row))
            for other in same:
                ratio = row["seconds"] / other["seconds"]
                yield at_most(f"{_where(row)}: joint search / published plan", ratio, ROOM)
            beyond = row["planning_s"] - row["tracing_s"]
            yield at_most(f"{_where(row)}: seconds beyond tracing", beyond, TIME_LIMIT)
    cases = [row for row in rows if row["way"] not in ("published", "joint")]
    for where in dict.fromkeys(_where(row) for row in cases):
        mine = {row["way"]: row["seconds"] for row in cases if _where(row) == where}
        best = mine.pop("searched", None)
        yield at_most(f"{where}: searched seconds", best, float("inf"))
        for way, seconds in mine.items():
            if best is not None and seconds is not None:
                yield at_most(f"{where}: searched / {way}", best / seconds, ROOM)


def _where(row: dict) -> str:
    return f"{row['model']} {row['size']} on {row['cluster']}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", nargs="+", default=(), help="models, sizes, clusters, ways")
    options, rest = parser.parse_known_args()
    one = functools.partial(measure, only=options.only)
    sys.exit(main("headline", one, lambda rows: list(judge(rows)), rest))
