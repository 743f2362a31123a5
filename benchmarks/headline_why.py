"""Why the speedups of `headline.py` are not the published ones: its baselines, changed piecewise.

T5 and its Megatron-style baseline: stages forced or not, of equal work or of equal numbers of
layers (the first with the table, the last with the head), all layers made again or all but
products, one sample a replica at a time or several, the table cut over the tensor axis or as is
best. AlphaFold2: data parallelism with one sample a replica at a time, 1F1B over stages of equal
work (every visit of the stack passes through all of it once), and visits that share their devices
(what 3F1B does). Predicted, like there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import _headline_ways as ways
import headline
from _harness import main

WORK, LAYERS, VISITS = "equal work", "equal layers", "visits on the same devices"
NONE, CHEAP, AGAIN = "nothing", "all but products", "layers"


class Way(NamedTuple):
    """stages x tensor x what is left of the devices; `again`: what is made again."""

    stages: int
    tensor: int = 1
    cut: str = WORK
    again: str = AGAIN
    samples: int = 1
    cut_table: bool = False


CASES = {  # model -> cluster, devices, options, ways
    "t5": ("v100-32:4", 4, {"size": "vocab-512k"}, (
        Way(1, 2, again=CHEAP),
        Way(1, 2, again=CHEAP, samples=2),
        Way(1, 2, samples=4),
        Way(1, 2),
        Way(1, 2, cut_table=True),
        Way(1, 4),
        Way(2, 2),
        Way(2, 2, LAYERS),
        Way(4, 1, LAYERS),
    )),
    "alphafold2": ("v100-32:4", 4, {"size": "initial"}, (
        Way(1),
        Way(1, samples=4),
        Way(2),
        Way(2, cut=VISITS),
        Way(4, cut=VISITS),
    )),
}  # fmt: skip
QUICK = {"t5": ("v100-32:2", 2, {"size": "tiny"}, (Way(1, 2), Way(2, 1, LAYERS)))}


def changed(way: Way, model: str, step: Any, cluster: Any, devices: int) -> dict:
    """The plan of a way, or why there is none."""
    from jaxscaler.errors import InfeasibleError
    from jaxscaler.graph.build import build
    from jaxscaler.pipeline.again import cheap_again, layers_again
    from jaxscaler.pipeline.planner import plan_pipeline

    data = devices // way.stages // way.tensor
    given = way.tensor > 1
    lines = ways.megatron_lines(way.tensor, data, way.cut_table) if given else []
    again: dict = {NONE: lambda graph, loss: (), CHEAP: cheap_again, AGAIN: layers_again}
    scans = ways.scans_of(step)
    cuts: dict = {
        WORK: lambda: way.stages,
        LAYERS: lambda: ways.of_layers(way.stages, scans),
        VISITS: lambda: ways.visited(scans[-headline.ALPHAFOLD_VISITS :], way.stages),
    }
    begin = time.perf_counter()
    try:
        plan = plan_pipeline(
            step, cluster, stages=cuts[way.cut](), order="1f1b", constraints=lines, lanes=data,
            micro=headline.BATCH // data // way.samples, changes=again[way.again](build(step), 0),
            memory=ways.MEMORY, dispatch_limit=None,
        )  # fmt: skip
        found = ways.of_pipeline(plan)
        works = [w.forward + (w.backward or 0.0) for w in plan.pipeline.stages]
        busy = [f"{plan.micro * seconds:.3g}" for seconds in works]
    except InfeasibleError as error:
        found = ways.Result(seconds=None, peak_GB=error.need and error.need / 1e9)
        busy = ["does not fit"]
    return {
        "model": model, **way._asdict(), "data": data, "seconds": found["seconds"],
        "peak_GB": found["peak_GB"], "stage_seconds": " ".join(busy),
        "planning_s": time.perf_counter() - begin,
    }  # fmt: skip


def measure(quick: bool) -> Iterator[dict]:
    from jaxscaler.cluster import Cluster

    for model, (cluster, devices, options, changes) in (QUICK if quick else CASES).items():
        step = headline.traced(model, headline.BATCH, {"scan": True} | options)
        for way in changes:
            yield changed(way, model, step, Cluster.parse(cluster), devices)


if __name__ == "__main__":
    sys.exit(main("headline_why", measure, lambda rows: []))
