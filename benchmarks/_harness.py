"""The one shape of every benchmark: `python benchmarks/NAME.py [--quick] [--json FILE|-]`.

A benchmark measures rows and judges bars by them:

    def measure(quick):                 # yields one dict of plain values per row
        yield {"model": "gpt-xl", "seconds": 3.1}

    def judge(rows):                    # from the rows alone
        return [at_most("gpt-xl seconds", rows[0]["seconds"], 5.0)]

    if __name__ == "__main__":
        sys.exit(main("planning_time", measure, judge))

It prints a table for people and, with --json, writes
`{"benchmark", "env", "rows": [{...}], "bars": [{"name", "value", "limit", "ok"}]}`.
The exit status is 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
Bar = dict[str, Any]

PACKAGES = ("jaxscaler", "jax", "jaxlib", "flax", "optax", "ortools", "numpy", "numba")


def at_most(name: str, value: float | None, limit: float) -> Bar:
    """The bar value <= limit. None (not measured) and NaN miss it."""
    return {
        "name": name,
        "value": value,
        "limit": limit,
        "ok": value is not None and value <= limit,
    }


def at_least(name: str, value: float | None, limit: float) -> Bar:
    """The bar value >= limit. None (not measured) and NaN miss it."""
    return {
        "name": name,
        "value": value,
        "limit": limit,
        "ok": value is not None and value >= limit,
    }


def alternate(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[list[float], list[float], float]:
    """Seconds of each of two calls made in turns (A B A B ...), and the median ratio of the turns.

    Each call must itself wait for what it measures. One turn before the first is not counted. The
    ratio is second / first within a turn, so that what slows the machine for a while slows both.
    """
    calls = (first, second)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for call, seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn:
                seconds.append(time.perf_counter() - start)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    return *times, ratio


def main(
    name: str,
    measure: Callable[[bool], Iterable[Row]],
    judge: Callable[[list[Row]], list[Bar]],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark as a command and return its exit status (1: a bar was missed)."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py")
    parser.add_argument("--quick", action="store_true", help="within a minute on two cores")
    parser.add_argument("--json", metavar="FILE", help="also write the result here; - is stdout")
    options = parser.parse_args(argv)
    console = Console(stderr=options.json == "-")

    rows = []
    with console.status(name) as status:
        for row in measure(options.quick):
            rows.append(row)
            status.update(f"{name}: {len(rows)} rows, last {' '.join(map(cell, row.values()))}")
    if not rows:
        raise RuntimeError(f"{name} measured nothing")
    bars = judge(rows)

    console.print(table(name, rows))
    if bars:
        console.print(table("bars", bars))
    if options.json:
        result = {"benchmark": name, "env": environment(), "rows": rows, "bars": bars}
        text = json.dumps(finite(result), indent=2, allow_nan=False) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    return int(not all(bar["ok"] for bar in bars))


def environment() -> Row:
    """Versions of Python and of what counts here, cores that may be used, devices by kind."""
    import jax  # late: what solves without JAX should measure without it

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    usable = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(usable(0)) if usable else os.cpu_count()
    devices = Counter(device.device_kind for device in jax.devices())
    return {"versions": versions, "cores": cores, "devices": dict(devices)}


def table(title: str, rows: list[Row]) -> Table:
    """Rows under the union of their keys, in order of first appearance; numbers to the right."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    out = Table(title=title)
    for key in keys:
        number = all(isinstance(row.get(key), int | float) for row in rows)
        out.add_column(key, justify="right" if number else "left")
    for row in rows:
        out.add_row(*(cell(row.get(key)) for key in keys))
    return out


def cell(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def finite(value: Any) -> Any:
    """The same tree with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
