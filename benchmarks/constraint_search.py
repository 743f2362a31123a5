"""What a few lines of an expert save the search: its space, variables, work, seconds, and cost.

Each case is one model on one cluster with every layer its own (`merge=False`), so that the space
is large, on the mesh of the cluster's levels. It is solved to one proved gap without constraints
and with the lines of EXPERT. `work` is what the solver counts (CP-SAT's deterministic seconds,
sweeps of its messages, its moves), so that it depends on neither the machine nor the clock.
"""

from __future__ import annotations

import importlib
import json
import math
import resource
import subprocess
import sys
import time

from _harness import at_least, at_most, main

GAP = 0.001  # proved, relative
SECONDS = 1800.0  # of one search
LESS_WORK = 10.0  # times, on at least two cases
CASES_WITH_LESS = 2
LEAST_WORK = 1e-3  # presolve alone proves some problems, which counts as no work: as this much
DEARER = 1.01

# There are samples enough for all devices, and weights too large to lie whole: samples and state
# are cut by everything. So for a mixture on many nodes, where experts apart in each node would be
# summed over all of them.
TRANSFORMER = """
- op_trans: [{ops: {phase: [forward, backward]}}, {Split: batch}, ALL]
- op_trans: [{values: {role: [parameter, optimizer]}}, {Split: ANY}, ALL]
"""
# Each device of a node has one of the eight experts; attention needs no other than its samples.
HELD = "{values: {path: experts/%s, role: parameter, to: {ops: {phase: [forward, backward]}}}}"
MIXTURE = "- op_trans: [{ops: {path: attn, phase: [forward, backward]}}, {Split: batch}, ALL]\n"
for weight in ("gate", "up", "down"):
    MIXTURE += f"- op_assign: [{{op_trans: [{HELD % weight}, {{Split: 0}}, 8]}}, device]\n"
# On many nodes the tables of biases of the long third stage cost more to reduce than what splitting
# its attention in a node does: the search is left to split attention, and the short last stage.
LONG_STAGE = "- op_trans: [{values: {role: [parameter, optimizer]}}, {Split: ANY}, ALL]\n"
for layer in ("up", "down"):
    selected = f"{{path: stage_2_block_*/{layer}, phase: [forward, backward]}}"
    LONG_STAGE += f"- op_trans: [{{ops: {selected}}}, {{Split: batch}}, ALL]\n"
EXPERT = {  # by case and devices
    "gpt-175b": {32: TRANSFORMER, 1024: TRANSFORMER},
    "llama-70b": {32: TRANSFORMER, 1024: TRANSFORMER},
    "moe-8x7b": {32: MIXTURE, 1024: TRANSFORMER},
    "swin-27b": {32: TRANSFORMER, 1024: LONG_STAGE},
}
REMAT = {"remat": True}
CASES = {
    # name: (module, workload arguments without the batch, samples per device)
    "gpt-175b": ("gpt", {"size": "175b", **REMAT}, 2),
    "llama-70b": ("llama", {"size": "70b", "seq": 4096, "scan": False, **REMAT}, 2),
    "moe-8x7b": ("moe", {"size": "8x7b", "seq": 4096, "scan": False, **REMAT}, 2),
    "swin-27b": ("swin", {"size": "27b", **REMAT}, 1),
}
CLUSTERS = {32: "h200:8x4", 1024: "h200:8x128"}
QUICK = {"gpt-175b": ("gpt", {"size": "175b", "layers": 2, **REMAT}, 2)}


def run_case(name: str, module: str, options: dict, samples: int, cluster: str) -> list[dict]:
    """Both searches of a case in this process, on problems of one graph."""
    import numpy as np

    from jaxscaler.cluster import Cluster
    from jaxscaler.cluster.mesh import candidate_meshes
    from jaxscaler.cost.memory import live_buffers
    from jaxscaler.errors import InfeasibleError
    from jaxscaler.graph.build import build
    from jaxscaler.graph.fold import fold
    from jaxscaler.graph.labels import factor_labels
    from jaxscaler.planner import MEMORY
    from jaxscaler.program_text import parse_program
    from jaxscaler.solve import solve, warm
    from jaxscaler.space.build import build_space
    from jaxscaler.space.constraints import Constraints
    from jaxscaler.space.price import price
    from jaxscaler.space.problem import model
    from jaxscaler.trace import trace

    warm()
    where = Cluster.parse(cluster)
    mesh = candidate_meshes(where)[0]
    work = importlib.import_module(f"models.{module}").workload(
        batch=samples * where.num_devices, **options
    )
    graph = build(trace(work.step, work.state, work.batch))
    folded = fold(graph, False)
    space = build_space(graph, folded, factor_labels(graph, folded))
    once = model(graph, folded, space, live_buffers(graph, folded))
    limit = int(where.device.hbm_bytes * MEMORY)
    rows = []
    for kind, text in (("none", "[]"), ("expert", EXPERT[name][where.num_devices])):
        lines = parse_program(text, f"{name}.yaml")
        start = time.perf_counter()
        bound = Constraints(lines, graph, folded, space)
        priced = price(once, mesh, where.device, limit, bound.mask)
        pricing = time.perf_counter() - start
        strategies = np.diff(priced.problem.node_ptr)
        found = solve(priced.problem, time_limit=SECONDS, gap=GAP)
        if found.cost is None:
            raise InfeasibleError(f"{name} on {cluster}, constraints {kind}: {found.status}")
        rows.append(
            {
                "case": f"{name} on {where.num_devices}",
                "constraints": kind,
                "lines": len(lines),
                "nodes": len(strategies),
                "log10_space": float(np.log10(strategies).sum()),
                "variables": int(strategies.sum()),
                "pricing": pricing,
                "presolve": found.statistics["presolve_seconds"],
                "kernel": found.statistics["kernel_strategies"],
                "seconds": found.seconds,
                "work": found.statistics["work"],
                "gap": found.gap,
                "status": found.status,
                "step_seconds": found.cost * priced.unit,
                "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            }
        )
    return rows


def measure(quick):
    """Two rows per case, each case in a process of its own."""
    for devices, cluster in CLUSTERS.items():
        if quick and devices > 32:
            continue
        for name, (module, options, samples) in (QUICK if quick else CASES).items():
            case = json.dumps([name, module, options, samples, cluster])
            done = subprocess.run(
                [sys.executable, __file__, "--case", case], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{name} on {cluster}:\n{done.stderr[-2000:]}")
            yield from json.loads(done.stdout.splitlines()[-1])


def judge(rows):
    """How much less work the lines leave, on the best cases, and how much dearer the plan is."""
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    ratios = sorted((a["work"] / max(b["work"], LEAST_WORK) for a, b in pairs), reverse=True)
    wanted = min(CASES_WITH_LESS, len(ratios))
    bars = [at_least(f"times less work on {wanted} cases", ratios[wanted - 1], LESS_WORK)]
    for a, b in pairs:
        dearer = b["step_seconds"] / a["step_seconds"]
        bars.append(at_most(f"{a['case']}: cost with / without", dearer, DEARER))
        reached = a["gap"] <= GAP and b["gap"] <= GAP and math.isfinite(a["gap"])
        bars.append(at_least(f"{a['case']}: both proved to the gap", float(reached), 1.0))
    return bars


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(*json.loads(sys.argv[2]))))
    else:
        sys.exit(main("constraint_search", measure, judge))
