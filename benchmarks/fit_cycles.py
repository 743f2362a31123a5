"""How fast kernels run on TPUs, by the TPU compiler's own estimates, and how far that is off.

    python benchmarks/fit_cycles.py [--quick] [--json FILE|-] [--compile] [--write]

`--compile` makes a table of single ops, of pairs of ops, and two whole steps, with the real TPU
compiler (no TPU is needed; `pip install 'jaxscaler[tpu]'`) and keeps its `estimated_cycles` in
`tpu_cycles.csv`; minutes for each device, less with FIT_CYCLES_CACHE, a folder in which compiles
are kept. `--write` fits rates by kind and size to the ops that are not held out, and writes them to
`jaxscaler/cost/tpu_rates.csv`, which prices are made of. Otherwise nothing is compiled and nothing
written: what stands there is measured again on the ops that were held out and on the steps, with
those rates (`after`) and without (`before`): the median, over ops, of |predicted / estimated - 1|.

What the compiler estimates is no measurement, but it is the word of who makes the kernels. Gathers
and scatters it gives a few cycles whatever their size, and copies between memories none: neither is
fitted, and what it prefetched reads faster than memory does, so no rate is above the nominal one.
Some programs for v5p and v6e it can not print: ops are then compiled in smaller groups, and a step
has no row. `--quick`: without the steps.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from _harness import Bar, Row, at_most, main
from _tpu_cases import ALONE, FUSED, Case, cases, pairs, singles

from jaxscaler import planner, recipes
from jaxscaler.cluster import Cluster, Curve, Device, find_device
from jaxscaler.cluster.curves import (
    BATCH_MATMUL,
    BYTES,
    CONV,
    CONV_REDUCE,
    ELEMENTWISE,
    MATMUL,
    REDUCE,
    curve_of,
)
from jaxscaler.cost import compute
from jaxscaler.cost.memory import live_buffers, rules_for
from jaxscaler.given import traced_step
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.labels import factor_labels
from jaxscaler.report import describe
from jaxscaler.space.annotations import Author
from jaxscaler.space.build import build_space
from jaxscaler.space.problem import model
from jaxscaler.trace import trace
from jaxscaler.verify.cycles import clock
from jaxscaler.verify.worker import Compiled, compile_for

CYCLES = Path(__file__).with_name("tpu_cycles.csv")
RATES = Path(compute.__file__).with_name("tpu_rates.csv")
DEVICES = ("v4", "v5e", "v5p", "v6e")
ONE = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}
EIGHT = {"v4": "v4:2x2x2", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
PRODUCTS = (MATMUL, BATCH_MATMUL, CONV)
FREE = 10  # times the memory's bandwidth: no rate is above that, whatever a difference says
GROUP = 27  # ops that are compiled together
STEP = "step"  # what whole steps are under in the table
ALL = "all ops"
TEXT = {"context": 512, "batch": 32, "seq": 512}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"size": "small", "layers": 2, "padded_vocab": 50304, **TEXT}),
    "resnet": ("resnet", {"size": "50", "stages": (1, 1, 1, 1), "batch": 128}),
}

# -- compiling ---------------------------------------------------------------------------------


def compile_cases(device: str, group: Sequence[Case], folder: Path) -> Counter[str]:
    """Estimated cycles by the name of the op. What makes a text that can not be printed is compiled
    in halves; a single op of that kind has none."""

    def step(*arguments):
        out = []
        for case, given in zip(group, arguments):
            with jax.named_scope(case.name):
                out.append(case.run(*given))
        return out

    traced = jax.jit(step).trace(*(case.arguments for case in group))
    found = compile_for(ONE[device], traced.lower(lowering_platforms=("tpu",)), cache=folder)
    if found.cycles is None:
        _refuse_failures(found)
        half = len(group) // 2
        halves = [group[:half], group[half:]] if half else []
        return sum((compile_cases(device, part, folder) for part in halves), Counter())
    names = {case.name for case in group}
    cycles: Counter[str] = Counter()
    for path, n in found.cycles:
        for part in names.intersection(path.split("/")):
            cycles[part] += n
    return cycles


def compile_step(device: str, name: str, folder: Path) -> int | None:
    """Estimated cycles of a whole step on eight devices with data parallelism."""
    planned = data_parallel(name)
    cluster = Cluster.parse(EIGHT[device])
    plan = replace(planned.plan, cluster=cluster.to_dict())
    found = plan.verify(cache=folder).compiled
    if found.cycles is None:
        _refuse_failures(found)
        return None
    return sum(n for _, n in found.cycles)


def _refuse_failures(found: Compiled) -> None:
    if not found.ok:
        raise SystemExit(f"{found.target.name}: {found.status}: {found.detail}")


def compile_all(devices: Sequence[str]) -> None:
    """Make `tpu_cycles.csv` anew; compiles that a kept folder has are not made again."""
    folder = Path(os.environ.get("FIT_CYCLES_CACHE") or tempfile.mkdtemp(prefix="fit-cycles-"))
    table, rows = singles(), []
    count = -(-len(table) // GROUP)
    groups = [*(table[i::count] for i in range(count)), pairs()]
    for device in devices:
        found = sum((compile_cases(device, group, folder) for group in groups), Counter())
        rows += [(device, c.kind, c.name, found[c.name]) for c in cases() if c.name in found]
        for name in STEPS:
            if cycles := compile_step(device, name, folder):
                rows.append((device, STEP, name, cycles))
        print(f"{device}: {len(found)} of {len(cases())} ops", file=sys.stderr)
    with CYCLES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("device", "op", "name", "cycles"))
        writer.writerows(rows)


@cache
def cycles() -> dict[tuple[str, str], int]:
    """(device, name of the op or step) -> estimated cycles."""
    rows = csv.DictReader(CYCLES.read_text().splitlines())
    return {(row["device"], row["name"]): int(row["cycles"]) for row in rows}


# -- what is predicted -------------------------------------------------------------------------


@cache
def works(at: int) -> tuple[compute.Work, ...]:
    """The kernels that the planner sees in an op of the table, on one device."""
    case = cases()[at]
    graph = build(trace(lambda *arrays: case.run(*arrays), *case.arguments))
    folded = fold(graph, True)
    space = build_space(graph, folded, factor_labels(graph, folded), frozenset())
    made = model(graph, folded, space, live_buffers(graph, folded, rules_for("Google")))
    return tuple(work for work in made.works if work is not None)


def predicted(at: int, device: Device) -> float:
    """Seconds of an op of the table."""
    return sum(_seconds(work, device) for work in works(at))


def _seconds(work: compute.Work, device: Device) -> float:
    ones = np.ones((1, max(work.factors, default=0) + 1), np.int64)
    local = {port: np.ones(1) for port, _ in work.tensors}
    return float(compute.seconds(work, ones, local, device)[0])


@cache
def data_parallel(name: str) -> planner.Planned:
    module, arguments = STEPS[name]
    work = importlib.import_module(f"models.{module}").workload(**arguments)
    cluster = Cluster.parse(EIGHT["v5e"])
    traced = traced_step(work.step, (work.state, work.batch), {}, {}, None, cluster.device)
    return planner.plan_step(
        traced, cluster, constraints=recipes.data_parallel(), author=Author((("d", 8),), ())
    )


def predicted_step(name: str, device: Device) -> float:
    """Seconds that a whole step computes."""
    best = data_parallel(name).plan.session.best
    return describe.prediction(best.priced, best.choice, device, 1.0).compute


# -- the fit -----------------------------------------------------------------------------------


def hertz(device: str) -> float:
    """Cycles a second."""
    rate = clock(find_device(device)[0])
    assert rate is not None, device
    return rate


def held_out(at: int) -> bool:
    """Whether an op of the table is kept for the test: a third of each kind."""
    kind = cases()[at].kind
    return sum(case.kind == kind for case in cases()[:at]) % 3 == 1


def points(device: str, kind: str, test: bool) -> list[tuple[int, float]]:
    """(place in the table, estimated seconds) of a kind's ops, of the test or of the fit."""
    return [
        (at, cycles()[device, case.name] / hertz(device))
        for at, case in enumerate(cases())
        if case.kind == kind and (device, case.name) in cycles() and held_out(at) == test
    ]


def fit(device: str) -> tuple[Curve, ...]:
    """Curves of a TPU.

    Of products, per kind, `start + max(work / rate, bytes / stream)` with the least sum of the
    absolute logarithms of the error; batched products have the rate of the others, since what
    bounds theirs is not seen apart. Of reductions one rate, and one of those after a convolution,
    which costs them next to nothing: their bytes over what the ops of the pairs take longer with
    them than without. Elementwise ops keep the nominal bandwidth: alone they
    are estimated at it or far below, by how many arrays they stream, and in a step they are fused.
    """
    nominal = find_device(device)[0]
    found: list[Curve] = []
    rate = None
    for kind in PRODUCTS:
        given = [(_main(at, kind), seconds) for at, seconds in points(device, kind, test=False)]
        work = np.array([w.flops for w, _ in given])
        moved = np.array([sum(n for _, n in w.tensors) for w, _ in given])
        start, own, stream = _fitted(
            work, moved, np.array([s for _, s in given]), rate if kind == BATCH_MATMUL else None
        )
        own = min(own, nominal.flops("bf16"))
        rate = own if kind == MATMUL else rate
        found.append(_written(kind, "bf16", work, start, own))
        found.append(_written(kind, BYTES, moved, start, min(stream, nominal.hbm_bandwidth)))
    for kind in (REDUCE, CONV_REDUCE):
        longer, reduced = 0.0, 0.0
        for at, seconds in points(device, FUSED, test=False):
            alone = cycles().get((device, f"{cases()[at].name}.{ALONE}"))
            nbytes = sum(n for w in works(at) if w.op == kind for _, n in w.tensors)
            if alone is not None and nbytes:
                longer += seconds - alone / hertz(device)
                reduced += nbytes
        stream = reduced / max(longer, reduced / (FREE * nominal.hbm_bandwidth))
        found.append(_written(kind, BYTES, np.array([1.0, 1e12]), 0.0, stream))
    return tuple(found)


def _main(at: int, kind: str) -> compute.Work:
    """The kernel of an op of the table that the op is there for."""
    mine = [work for work in works(at) if work.op == kind]
    return max(mine, key=lambda work: (work.flops, sum(n for _, n in work.tensors)))


def _fitted(
    work: np.ndarray, moved: np.ndarray, seconds: np.ndarray, known: float | None
) -> tuple[float, float, float]:
    """(start, rate, stream); `known`: the rate."""
    from scipy.optimize import minimize

    def parts(x: np.ndarray) -> tuple[float, float, float]:
        start, stream, *rate = (float(f) for f in np.exp(x))
        return start, known if known is not None else rate[0], stream

    def error(x: np.ndarray) -> float:
        start, rate, stream = parts(x)
        guess = start + np.maximum(work / rate, moved / stream)
        return float(np.abs(np.log(guess / seconds)).sum())

    first = [seconds.min() / 2, (moved / seconds).max(), (work / seconds).max()]
    best = None
    for shift in itertools.product((0.3, 1.0), repeat=3):  # the error has corners
        begin = np.log(np.array(first) * shift)[: 2 if known is not None else 3]
        found = minimize(error, begin, method="Nelder-Mead",
                         options={"maxiter": 4000, "xatol": 1e-6, "fatol": 1e-9})  # fmt: skip
        best = found if best is None or found.fun < best.fun else best
    assert best is not None
    return parts(best.x)


def _written(kind: str, dtype: str, seen: np.ndarray, start: float, rate: float) -> Curve:
    low, high = np.log(seen.min()) / np.log(4), np.log(seen.max()) / np.log(4)
    sizes = 4.0 ** np.arange(np.floor(low), np.ceil(high) + 1)
    sizes = sizes if start else sizes[[0, -1]]
    return curve_of(kind, dtype, sizes, start + sizes / rate)


def write(fitted: dict[str, tuple[Curve, ...]]) -> None:
    with RATES.open("w", newline="") as file:
        file.write(
            "# python benchmarks/fit_cycles.py --write: rates by the TPU compiler's estimates\n"
        )
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("device", "op", "dtype", "size", "rate"))
        for device, curves in fitted.items():
            for c in curves:
                for size, rate in zip(c.sizes, c.rates):
                    writer.writerow((device, c.op, c.dtype, f"{size:.0f}", f"{rate:.5g}"))


# -- before and after --------------------------------------------------------------------------


def measure(quick: bool) -> Iterator[Row]:
    """Errors with the rates that stand in `tpu_rates.csv`, and without: of each kind of op, of all
    that were held out, of the steps."""
    for device in DEVICES:
        with_rates = find_device(device)[0]
        nominal = replace(with_rates, name=f"{device} without rates")
        together: list[tuple[float, float]] = []
        for kind in (*PRODUCTS, ELEMENTWISE, FUSED):
            errors = [
                (
                    abs(predicted(at, nominal) / seconds - 1),
                    abs(predicted(at, with_rates) / seconds - 1),
                )
                for at, seconds in points(device, kind, test=True)
            ]
            yield _row(device, kind, errors)
            together += errors
        yield _row(device, ALL, together)
        for name in STEPS if not quick else ():
            if (device, name) in cycles():
                seconds = cycles()[device, name] / hertz(device)
                before, after = (
                    abs(predicted_step(name, d) / seconds - 1) for d in (nominal, with_rates)
                )
                yield {**_row(device, f"{STEP} {name}", [(before, after)]), "ms": 1e3 * seconds}


def _row(device: str, what: str, errors: list[tuple[float, float]]) -> Row:
    before, after = (median(e) for e in zip(*errors))
    return {"device": device, "what": what, "ops": len(errors), "before": before, "after": after}


def judge(rows: list[Row]) -> list[Bar]:
    """The rates make neither the ops of a device nor its steps worse."""
    return [
        at_most(f"{row['device']} {row['what']}: error after", row["after"], row["before"])
        for row in rows
        if row["what"] == ALL or row["what"].startswith(STEP)
    ]


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a not in ("--compile", "--write")]
    if "--compile" in sys.argv:
        compile_all(DEVICES)
    if "--write" in sys.argv:
        write({device: fit(device) for device in DEVICES})
        compute._of_tpus.cache_clear()
        compute.curves.cache_clear()
    sys.exit(main("fit_cycles", measure, judge, arguments))
