"""Planned steps beside recipes and plain `jit`, measured on whatever devices are present.

    python benchmarks/harness.py [--quick] [--json FILE|-] [--plot FILE.png] [--models gpt,resnet]
                                 [--plans planned,jit] [--size KEY=VALUE ...] [--profile FILE]

Runs unattended, on one host or in each of several processes (started as docs/calibrate.md says;
process 0 prints and writes). `--quick`: small models on 8 simulated CPU devices, within a minute.
`--size`: arguments of the models other than those of `MODELS`.

Per model each plan is compiled, and then all take turns (A B C A B C ...): a turn makes the state
anew, so that one state lies on the devices at a time, warms up, and times a few steps together. The
median of the turns counts; `spread` is the slowest turn less the fastest, over it. `mfu`: the
floating-point work of the author's step (recomputation does not count) at the devices' peak rates,
over the time. Memory is what the allocator says; it knows the highest level since the start alone,
so plans run in order of predicted memory, and where a plan stays below an earlier one, or the
backend says nothing, the compiler's own count stands (`memory_from`). What goes wrong with a plan
(no plan, out of memory, ...) is the `status` of its row.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before JAX starts. LLVM's optimisations would take longer than all steps.
os.environ.update(
    {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8",
     "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    if __name__ == "__main__" and "--quick" in sys.argv
    else {}
)  # fmt: skip
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from _harness import Bar, Row, at_least, at_most, finite
from _harness import main as benchmark

import jaxscaler as js
from jaxscaler import processes, recipes
from jaxscaler.cluster import Cluster, Device, calibrated
from jaxscaler.given import traced_step
from jaxscaler.graph.build import build

PLANS: dict[str, Callable[[], Any] | None] = {
    "planned": list,
    "data": recipes.data_parallel,
    "zero3": recipes.zero,
    "tensor": recipes.tensor_parallel,
    "jit": None,  # the step as it is, on one device
}
# A batch of so many samples per device, and the model's arguments.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt": (8, {"size": "medium", "seq": 1024}),
    "llama": (4, {"size": "8b", "layers": 4, "seq": 2048}),
    "resnet": (64, {"size": "50"}),
}
SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt": (2, {"size": "tiny"}),
    "resnet": (2, {"size": "tiny"}),
}
TURNS, STEPS = 5, 10  # of each plan; steps timed together in one turn
WITHIN = 1.05  # a planned step may take so much longer than the fastest recipe, on real devices


@dataclass
class Runner:
    """A step that can run: `start()` makes its state and batch, `step(state, batch)` the next."""

    step: Callable[..., Any]
    start: Callable[[], tuple[Any, Any]]
    compiled: Any
    row: Row = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def measure_model(
    name: str, batch: int, arguments: dict[str, Any], plans: Sequence[str], cluster: Cluster,
    turns: int = TURNS, steps: int = STEPS,
) -> list[Row]:  # fmt: skip
    """A row per plan of a model, in the order of `plans`."""
    work = importlib.import_module(f"models.{name}").workload(batch=batch, **arguments)
    at_peak = peak_seconds(work, cluster.device)
    rows: dict[str, Row] = {plan: {"model": name, "batch": batch, "plan": plan} for plan in plans}
    runners: dict[str, Runner] = {}
    for plan in plans:
        with _named(rows[plan]):
            runners[plan] = make(work, plan, cluster)
            rows[plan] |= runners[plan].row
    order = sorted(runners, key=lambda plan: rows[plan].get("predicted_gb") or float("inf"))
    for turn in range(turns):
        for plan in order:
            if "status" in rows[plan]:
                continue  # it failed
            with _named(rows[plan]):
                before = _highest()
                run(runners[plan], steps)
                if not turn:
                    rows[plan] |= memory(runners[plan].compiled, before)
    for plan, runner in runners.items():
        row = rows[plan]
        if "status" not in row:
            took = statistics.median(runner.seconds)
            devices = 1 if plan == "jit" else cluster.num_devices
            row |= {
                "step_ms": 1e3 * took,
                "spread": (max(runner.seconds) - min(runner.seconds)) / took,
                "samples_s": batch / took,
                "mfu": at_peak / devices / took,
                "status": "ok",
            }
    return list(rows.values())


def make(work: Any, plan: str, cluster: Cluster) -> Runner:
    """Plan, and compile, one row's step. Raises what planning and compiling raise."""
    if plan == "jit":
        step = jax.jit(work.step, donate_argnums=0)
        init = jax.jit(work.init)
        compiled = step.lower(work.state, work.batch).compile()
        row = {"mesh": "one device", "predicted_ms": None, "predicted_gb": None}
        return Runner(compiled, lambda: (init(jax.random.key(0)), work.make_batch()), compiled, row)
    lines = PLANS[plan]
    assert lines is not None
    planned = js.parallelize(work.step, cluster=cluster, constraints=lines())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*matches nothing")  # said in the row's status
        found = planned.plan_for(work.init, jax.random.key(0), batch=work.batch)
    if lines() and any(note.endswith("matches nothing") for note in found.notes):
        raise js.InfeasibleError("the model has nothing of the kind")  # as `jaxscaler compare`
    shardings = jax.tree.map(lambda leaf: leaf.sharding, planned.abstract_state())
    init = jax.jit(work.init, out_shardings=shardings)  # compiled once, for all turns

    def start() -> tuple[Any, Any]:
        return init(jax.random.key(0)), next(planned.feed([work.make_batch()]))

    compiled = planned.compiled()
    return Runner(planned, start, getattr(compiled, "compiled", None), {
        "mesh": " ".join(f"{axis}={size}" for axis, size in found.axes) or "one device",
        "predicted_ms": 1e3 * found.predicted.seconds,
        "predicted_gb": found.predicted.peak_bytes / 1e9,
    })  # fmt: skip


def run(runner: Runner, steps: int) -> None:
    """One turn: a new state, a step that does not count, and `steps` that do, timed together."""
    state, batch = runner.start()
    state, _ = jax.block_until_ready(runner.step(state, batch))
    start = time.perf_counter()
    for _ in range(steps):
        state, metrics = runner.step(state, batch)
    jax.block_until_ready((state, metrics))
    runner.seconds.append((time.perf_counter() - start) / steps)


def memory(compiled: Any, before: int | None) -> Row:
    """Peak bytes on a device, and who says so; `before`: the allocator's peak before it ran."""
    after = _highest()
    if after is not None and before is not None and after > before:
        return {"memory_gb": after / 1e9, "memory_from": "allocator"}
    stats = None if compiled is None else compiled.memory_analysis()
    if stats is None:
        return {"memory_gb": None, "memory_from": "not known"}
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {"memory_gb": (held + stats.temp_size_in_bytes) / 1e9, "memory_from": "compiler"}


def _highest() -> int | None:
    """The most bytes that any device of this process ever held, where the backend counts."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks) if peaks else None


def peak_seconds(work: Any, device: Device) -> float:
    """Seconds that one device takes for the step's products, at the peak rate of their dtypes."""
    graph = build(traced_step(work.step, (work.state, work.batch), {}, {}, None, device))
    total = 0.0
    for op in graph.ops:
        kind = graph.kinds[op.kind]
        if "heavy" in kind.traits:
            total += op.repeat * kind.flops / device.flops(kind.operand_dtypes[0])
    return total


class _named:
    """Gives a row the name of what goes wrong within; nothing is raised."""

    def __init__(self, row: Row):
        self.row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        text = str(error).strip().partition("\n")[0]
        if isinstance(error, js.InfeasibleError | js.ConstraintError):
            self.row["status"] = f"no plan: {text}"
        elif "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
            self.row["status"] = "out of memory"
        else:
            self.row["status"] = f"{kind.__name__}: {text}"
            traceback.print_exception(error)
        traceback.clear_frames(trace)  # arrays that live in them
        return True


def judge(rows: list[Row]) -> list[Bar]:
    """Every planned step ran; on real devices none is slower than the fastest recipe."""
    bars = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = {row["plan"]: row for row in rows if row["model"] == model}
        planned = mine.get("planned", {})
        bars.append(at_least(f"{model}: planned steps that ran", planned.get("status") == "ok", 1))
        others = [row["step_ms"] for plan, row in mine.items() if plan != "planned"
                  and plan != "jit" and row["status"] == "ok"]  # fmt: skip
        if others and "step_ms" in planned and jax.default_backend() != "cpu":
            ratio = planned["step_ms"] / min(others)
            bars.append(at_most(f"{model}: planned over the fastest recipe", ratio, WITHIN))
    return bars


def plot(rows: list[Row], path: str) -> None:
    """Step time and memory, measured beside predicted, of all rows that ran."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'jaxscaler[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = [row for row in rows if row["status"] == "ok"]
    names = [f"{row['model']}\n{row['plan']}" for row in ran]
    figure, axes = pyplot.subplots(2, 1, figsize=(max(6, 1.2 * len(ran)), 7), squeeze=False)
    for ax, what, unit in ((axes[0, 0], "step", "ms"), (axes[1, 0], "memory", "gb")):
        for shift, key in ((-0.2, f"{what}_{unit}"), (0.2, f"predicted_{unit}")):
            heights = [row[key] or 0.0 for row in ran]
            label = "predicted" if key.startswith("predicted") else "measured"
            ax.bar([i + shift for i in range(len(ran))], heights, 0.4, label=label)
        ax.set_xticks(range(len(ran)), names)
        ax.set_ylabel(f"{what} ({'GB' if unit == 'gb' else unit})")
        ax.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models", help="by commas")
    parser.add_argument("--plans", default=",".join(PLANS), help="by commas")
    parser.add_argument("--size", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--cluster", help="what the devices form (default: as JAX says)")
    parser.add_argument("--plot", metavar="FILE")
    options, rest = parser.parse_known_args(argv)
    sizes = dict(_setting(text) for text in options.size)
    seen: list[Row] = []

    def measure(quick: bool) -> Iterator[Row]:
        cluster = Cluster.parse(options.cluster) if options.cluster else Cluster.local()
        cluster = calibrated(cluster, options.profile)
        models = SMALL if quick else MODELS
        for name in options.models.split(",") if options.models else models:
            per_device, arguments = models.get(name, (8, {}))
            given = {"batch": per_device * cluster.num_devices, **arguments, **sizes}
            batch = given.pop("batch")
            many = (2, 3) if quick else (TURNS, STEPS)
            plans = options.plans.split(",")
            seen.extend(rows := measure_model(name, batch, given, plans, cluster, *many))
            yield from rows

    processes.join()
    if jax.process_index():  # process 0 says what all of them measure
        list(measure("--quick" in rest))
        return 0
    status = benchmark("harness", measure, judge, rest)
    if options.plot:
        plot(finite(seen), options.plot)
    return status


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--size {text}: it must be of the form KEY=VALUE")
    return key, int(value) if value.isdigit() else value


if __name__ == "__main__":
    sys.exit(main())
