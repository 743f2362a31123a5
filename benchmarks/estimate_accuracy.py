"""How near `jaxscaler.estimate` comes to published measurements of training steps.

    python benchmarks/estimate_accuracy.py [TABLE.csv] [--fit] [--quick] [--json FILE|-]

A table has the columns of `_published.COLUMNS`; without one a few rows of each source are taken
(`_published_sample.csv`). Rows become one form (`_published.py`), contradictory ones are named and
not scored. Fully configured rows are priced as they are and scored; of rows that leave a part of
their plan out, the fastest plan that fits is priced, and they are counted apart.

Constants are per device kind and software stack (`efficiency.csv` of the package). `--fit` fits
them anew to the table and prints the file. "held out" is the error of each source with constants
that were fitted without it: of the same device and stack if other sources have them, else of the
stack alone.

Rows: one per source and device. Errors are of seconds a step, and of bytes a device.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _harness import at_least, at_most, main
from _published import Published, problems, read, settled
from _scores import Scored, differing, floors, grouped, memory_errors, noise, ranks, seconds_errors
from scipy.optimize import least_squares

from jaxscaler.cluster import Cluster
from jaxscaler.cluster.devices import find_device
from jaxscaler.errors import JaxscalerError
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import SHARES, Constants, constants_for
from jaxscaler.estimate.parallel import ParallelConfig, cluster_of
from jaxscaler.estimate.price import Priced, price
from jaxscaler.space.problem import HIDDEN

# What is fitted, where the fit begins, and how far it may go for the same cost (a prior's width, as
# a factor): rates of devices and links are known, so only what stacks make of them moves.
FITTED = {
    "matmul": (0.85, 1.2), "attention": (0.7, 1.6), "vector": (0.7, 1.6), "launch_us": (5.0, 2.0),
    "wave": (1.0, 1.5), "fabric": (0.8, 1.4), "network": (0.8, 1.4),
}  # fmt: skip
# Microseconds that a kernel takes longer where its launch blocks: 200B on 80 devices, 8 layers of
# some 100 kernels a stage, at 91.04 against 97.20 TFLOP/s; BigScience, chronicles-prequel of tr11,
# "dealing with JZ hanging". Two pairs of runs on 160 devices show no difference.
BLOCKED_US = 35.0
PRIOR = 1.0  # weight of the prior beside one row
SOFT = 0.1  # errors beyond that count less
EACH = 40  # rows of a source that a fit looks at, evenly spread
MICRO = (1, 2, 4, 8, 16)  # micro-batches that are tried where none is told
CAN = {"micro_batch", "recompute", "zero", "tp", "pp", "dp"}  # what a search completes
QUICK = 6  # rows of a source in a quick run
SAMPLE = str(Path(__file__).with_name("_published_sample.csv"))
GROUPS = ("vTrain", "BigScience chronicles")  # whose plans are ranked


def jobs(row: Published) -> Iterator[dict[str, Any]]:
    """Arguments of `price` for a row: one if it is fully configured, else every plan it may be."""
    family = "moe" if row.experts else "gpt" if _plain(row) else "llama"
    model = ModelConfig(
        row.model, family, row.hidden, row.layers, row.heads, row.kv_heads, row.head_size,
        row.ffn, row.vocab, max(row.seq, 2048), row.gated, experts=row.experts,
        chosen=row.experts_used, embed_norm=row.embed_norm,
    )  # fmt: skip
    cluster = cluster_for(row)
    n, batch = row.devices, row.global_batch
    assert n and batch, "asked for by complete() and completed()"
    pp = row.pp or 1
    tps = [row.tp] if row.tp else [t for t in (1, 2, 4, 8) if n % t == 0]
    for tp in tps:
        dp = row.dp or n // (pp * tp * row.cp)
        micros = [int(row.micro_batch)] if row.micro_batch and row.micro_batch >= 1 else MICRO
        zeros = [row.zero] if row.zero is not None else [3]
        again = [row.recompute] if row.recompute else ["none", "selective", "full"]
        for micro, zero, recompute in itertools.product(micros, zeros, again):
            if batch % (dp * micro):
                continue
            parallel = ParallelConfig(
                tp, pp, dp, row.cp, row.ep, zero, row.sequence, row.shard, row.schedule or "1f1b",
                row.chunks if row.schedule == "interleaved" else 1,
            )  # fmt: skip
            yield {
                "model": model, "parallel": parallel, "cluster": cluster, "batch": batch,
                "seq": row.seq, "micro_batch": micro, "recompute": recompute,
                "dtype": {"f8": "float8", "f16": "float16", "bf16": None}[row.dtype],
                "attention": "flash" if row.attention == "flash" else "unfused",
                "stack": stack_of(row), "dropout": row.stack.startswith("megatron"),
                "gradient": row.gradient,
            }  # fmt: skip


def stack_of(row: Published) -> str:
    """What `price` calls the software of a row."""
    return "pytorch" if row.stack == "torch" else row.stack


def constants_of(row: Published, constants: Constants | None = None) -> Constants:
    """Those given, or of the package, with what the launches of a row cost."""
    found = constants or constants_for(find_device(row.device)[0], stack_of(row))
    return replace(found, launch_us=found.launch_us + BLOCKED_US) if row.blocking else found


def speed_of(row: Published) -> str:
    """The stack whose constants of speed hold for a row."""
    return SHARES.get(stack_of(row), stack_of(row))


def memory_of(row: Published, at: Priced) -> float:
    """Bytes a device, where the source read them."""
    stages = {"first": at.ends[0], "ends": max(at.ends)}
    return stages.get(row.memory_at, at.memory_bytes)


def _plain(row: Published) -> bool:
    return not row.gated and row.kv_heads == row.heads and row.hidden % row.heads == 0


@cache
def _cluster(
    device: str, devices: int, per_node: int | None, node_gbs: float | None,
    fabric_gbs: float | None,
) -> Cluster:  # fmt: skip
    if per_node and devices > per_node:
        found = Cluster.parse(f"{device}:{per_node}x{devices // per_node}")
    else:
        found = cluster_of(device, devices)
    inner = found.levels[-1].size
    said = {True: node_gbs and node_gbs / inner, False: fabric_gbs}  # of a device, by network
    levels = []
    for level in found.levels:
        if gbs := said[level.link.kind == "network"]:
            level = replace(level, link=replace(level.link, bandwidth=gbs * 1e9))
        levels.append(level)
    return replace(found, levels=tuple(levels))


def cluster_for(row: Published) -> Cluster:
    """The cluster of a row, its links as the source says."""
    assert row.devices
    return _cluster(row.device, row.devices, row.per_node, row.node_gbs, row.fabric_gbs)


def priced(row: Published, constants: Constants | None = None) -> Priced:
    """The price of a row; of several plans that it may be, the fastest that fits, else the least.

    Raises JaxscalerError where there is none.
    """
    found, fault = [], None
    for job in jobs(row):
        try:
            found.append(price(**job, constants=constants_of(row, constants)))
        except JaxscalerError as error:
            fault = error
    if not found:
        raise fault or JaxscalerError(f"{row.source}, {row.model}: no plan divides it")
    fitting = [p for p in found if p.fits]
    if fitting:
        return min(fitting, key=lambda p: p.seconds)
    return min(found, key=lambda p: p.memory_bytes)


# --- fitting --------------------------------------------------------------------------------------


def fit(rows: Sequence[Published], start: Constants) -> Constants:
    """Constants that bring the prices of rows nearest to what was measured.

    Least squares of logarithms, soft beyond `SOFT`, with a prior round the start of `FITTED`.
    """
    names = tuple(FITTED)
    first = np.log([FITTED[name][0] for name in names])
    width = np.log([FITTED[name][1] for name in names])
    sources = _by(rows, lambda row: row.source).values()
    some = [row for own in sources for row in own[:: -(-len(own) // EACH)] if row.seconds]
    asked = [
        (row, job, float(row.seconds or 0))
        for row in some
        for job in itertools.islice(jobs(row), 1)
    ]

    def constants(x: np.ndarray) -> Constants:
        given: dict[str, Any] = dict(zip(names, map(float, np.exp(x))))
        return replace(start, **given)

    def misses(x: np.ndarray) -> np.ndarray:
        at = constants(x)
        found = [
            np.log(price(**job, constants=constants_of(row, at)).seconds / seconds)
            for row, job, seconds in asked
        ]
        off = np.array(found) / SOFT
        soft = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([soft, np.sqrt(PRIOR) * (x - first) / width])

    upper = np.log([100.0 if name in ("launch_us", "wave") else 1.3 for name in names])
    return constants(least_squares(misses, first, bounds=(np.log(0.05), upper)).x)


def overheads(rows: Iterable[Published]) -> dict[str, float]:
    """Stack -> GB beside what is priced, with the least mean error."""
    found = {}
    for stack, of_it in _by([r for r in rows if r.memory], speed_of).items():
        pairs = [
            (memory_of(r, priced(r, Constants())) / 1e9, r.memory / 1e9) for r in of_it if r.memory
        ]

        def error(gb: float, pairs=pairs) -> float:
            return statistics.fmean(abs((p + gb) / m - 1) for p, m in pairs)

        found[stack] = min([0.0, *(max(0.0, m - p) for p, m in pairs)], key=error)
    return found


def _by(rows: Iterable[Published], key: Any) -> dict[Any, list[Published]]:
    found: dict[Any, list[Published]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def fitted_table(rows: Sequence[Published]) -> dict[tuple[str, str], Constants]:
    """(device, stack) -> constants, and ("*", stack) of all devices together."""
    found = {}
    for stack, of_stack in _by(rows, speed_of).items():
        start = start_of(rows, stack)
        found["*", stack] = fit(of_stack, start)
        for device, of_device in _by(of_stack, lambda row: row.device).items():
            found[device, stack] = fit(of_device, start)
    return found


def start_of(rows: Sequence[Published], stack: str) -> Constants:
    """What is not fitted to seconds: the planner's own, and the memory that the stack takes."""
    memory = overheads(row for row in rows if row.memory and speed_of(row) == stack)
    own = Constants(hidden=HIDDEN["Google" if stack == "jax" else "NVIDIA"])
    return replace(own, source="fitted", memory_gb=memory.get(stack, 0.0))


def as_csv(table: dict[tuple[str, str], Constants], path: str) -> str:
    """`efficiency.csv` as the package reads it."""
    out = io.StringIO()
    names = [*FITTED, "memory_gb"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["device", "stack", *names, "source"])
    for (device, stack), constants in sorted(table.items()):
        values = [f"{getattr(constants, name):.3g}" for name in names]
        writer.writerow(
            [device, stack, *values, f"benchmarks/estimate_accuracy.py {Path(path).name} --fit"]
        )
    return out.getvalue()


# --- scoring --------------------------------------------------------------------------------------


def scored(rows: Iterable[Published], table: Any = None) -> list[Scored]:
    """Predictions for rows; `table`: constants by (device, stack) instead of the package's."""
    found = []
    for row in rows:
        at = priced(row, _fitted(table, row))
        found.append(Scored(row, at.seconds, memory_of(row, at)))
    return found


def _fitted(table: Any, row: Published) -> Constants | None:
    stack = speed_of(row)
    return table and (table.get((row.device, stack)) or table.get(("*", stack)))


def held_out(rows: Sequence[Published]) -> list[Scored]:
    """Every source predicted with constants that were fitted without it."""
    found = []
    for own in _by(rows, lambda row: (row.source, row.device, speed_of(row))).values():
        source, device, stack = own[0].source, own[0].device, speed_of(own[0])
        others = [row for row in rows if row.source != source and speed_of(row) == stack]
        near = [row for row in others if row.device == device] or others
        start = start_of(others, stack)
        constants = fit(near, start) if near else start
        found += scored(own, {(device, stack): constants})
    return found


def complete(rows: Iterable[Published]) -> list[Published]:
    """Rows with a whole plan, without contradictions, with seconds."""
    return [row for row in rows if row.seconds and not row.missing and not row.faults]


def completed(rows: Iterable[Published]) -> list[Published]:
    """Rows that leave out parts of their plan which the search can fill in."""
    return [
        row for row in rows
        if row.seconds and row.missing and CAN.issuperset(row.missing) and not row.faults
    ]  # fmt: skip


def lacking(rows: Iterable[Published]) -> dict[tuple[str, str], int]:
    """(source, what a price needs and its rows do not say) -> how many of them, of those that are
    neither complete nor can be completed."""
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.missing and not row.faults and not (row.seconds and set(row.missing) <= CAN):
            key = row.source, ", ".join(name for name in row.missing if name not in CAN)
            found[key] = found.get(key, 0) + 1
    return found


def priceable(rows: Iterable[Published]) -> tuple[list[Published], list[str]]:
    """(rows that have a price, a line per other row)."""
    able, lines = [], []
    for row in rows:
        try:
            priced(row)
        except JaxscalerError as error:
            lines.append(f"{row.source}, {row.model}: {error}")
        else:
            able.append(row)
    return able, lines


def _say(what: str, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"{what}: {line}", file=sys.stderr)


def measure(quick: bool) -> Iterator[dict[str, Any]]:
    table = read(OPTIONS.table)
    rows, disputed = settled(table.rows)
    if table.ignored:
        _say("columns not looked at", [", ".join(table.ignored)])
    _say("not read", table.unread)
    _say("not scored", problems(rows))
    _say("memory not scored", disputed)
    if quick:
        rows = [r for own in _by(rows, lambda r: r.source).values() for r in own[:QUICK]]
    begin, spent = time.perf_counter(), time.process_time()
    whole, refused = priceable(complete(rows))
    each = {  # models' traces in it
        "seconds_per_row": (time.perf_counter() - begin) / max(len(whole), 1),
        "cpu_seconds_per_row": (time.process_time() - spent) / max(len(whole), 1),
    }
    _say("not priced", refused)
    for (source, what), count in lacking(rows).items():
        _say("not priced", [f"{source}: {count} rows do not say, or no price has, {what}"])
    fitted = None
    if OPTIONS.fit:
        fitted = fitted_table(whole)
        print(as_csv(fitted, OPTIONS.table))
    own = scored(whole, fitted)
    out = held_out(whole)
    for part, found in (("fitted", own), ("held out", out)):
        yield _line(part, "all", "", found, **(each if part == "fitted" else {}))
        for (source, device), of_it in grouped(found, lambda r: (r.source, r.device)).items():
            yield _line(part, source, device, of_it)
    for rank in ranks(own, floors(own)):
        yield {
            "part": "plans", "source": rank.group[0], "device": rank.group[1], "rows": rank.plans,
            "hidden": rank.group[3], "layers": rank.group[4], "batch": rank.group[9],
            "devices": rank.group[2], "setup": rank.group[11], "spearman": rank.spearman,
            "ceiling": rank.ceiling, "regret": rank.regret, "pairs": rank.pairs,
            "wrong": rank.wrong, "uneven": rank.uneven,
        }  # fmt: skip
    for some in differing(own, floors(own)):
        yield {
            "part": "ranked wrongly", "source": some.source, "differ": some.what,
            "rows": some.wrong, "pairs": some.pairs, "measured": some.measured,
            "predicted": some.predicted,
        }  # fmt: skip
    able, refused = priceable(completed(rows))
    _say("no plan", refused)
    late = scored(able, fitted)
    for (source, device), of_it in grouped(late, lambda r: (r.source, r.device)).items():
        yield _line("completed", source, device, of_it)
    broken = [row for row in rows if row.out_of_memory and not row.missing and not row.faults]
    fits = [row for row in broken if priced(row, _fitted(fitted, row)).fits]
    if broken:
        yield {"part": "out of memory", "source": "all", "rows": len(broken),
               "called_fitting": len(fits)}  # fmt: skip


def _line(part: str, source: str, device: str, found: list[Scored], **more: Any) -> dict[str, Any]:
    seconds, memory = seconds_errors(found), memory_errors(found)
    repeated, floor = noise(found)
    line = {
        "part": part, "source": source, "device": device, "rows": len(found),
        "mape": seconds.mape if seconds else None, "median": seconds.median if seconds else None,
        "bias": seconds.bias if seconds else None, "noise": floor if repeated else None,
        "memory_rows": memory.rows if memory else None,
        "memory_mape": memory.mape if memory else None,
        "memory_bias": memory.bias if memory else None,
    }  # fmt: skip
    return line | more


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    total = next(r for r in rows if (r["part"], r["source"]) == ("fitted", "all"))
    plans = [r for r in rows if r["part"] == "plans" and r["source"].startswith(GROUPS)]
    below = [r["spearman"] - min(0.9, r["ceiling"]) for r in plans]
    bars = [
        at_most("median error of seconds", total["median"], 0.10),
        at_most("mean error of seconds", total["mape"], 0.15),
        at_most("mean error of memory", total["memory_mape"], 0.10),
        at_most("seconds a row, traces of models in it", total["seconds_per_row"], 0.3),
    ]
    if plans:
        bars += [
            at_least("least Spearman above 0.9 or the noise's ceiling", min(below), 0.0),
            at_most(
                "worst regret of the plan predicted best", max(r["regret"] for r in plans), 0.05
            ),
        ]
    return bars


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("table", nargs="?", default=SAMPLE)
    parser.add_argument("--fit", action="store_true")
    OPTIONS, rest = parser.parse_known_args()
    sys.exit(main("estimate_accuracy", measure, judge, rest))
