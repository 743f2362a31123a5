"""An estimate as a picture: memory, the scaling curve, which family of plans is best where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscaler.errors import ConfigError, InfeasibleError, JaxscalerError
from jaxscaler.estimate.search import Key, best_ways, family, grower

if TYPE_CHECKING:
    from jaxscaler.estimate.estimate import Estimate

FORMATS = (".png", ".svg")
COLUMNS, ROWS = 6, 6  # of the phase diagram: devices, tokens per device, both by doubling
LEAST_TOKENS = 1024  # per device, of the phase diagram


def plot(estimate: Estimate, path: str | Path) -> None:
    """Write a picture of the estimate; its suffix says in which of `FORMATS`.

    Raises ConfigError for another one, JaxscalerError without matplotlib (the extra `plot`).
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: a picture is one of {', '.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise JaxscalerError(
            "pictures are drawn by matplotlib: pip install 'jaxscaler[plot]'"
        ) from None
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    memory, scaling, phases = figure.subplots(1, 3)
    _memory(memory, estimate)
    _scaling(scaling, estimate)
    _phases(phases, estimate)
    figure.suptitle(f"{estimate.model.name} on {estimate.best.cluster}")
    figure.savefig(path, dpi=150)


def _memory(axes: Any, estimate: Estimate) -> None:
    runs = estimate.runs
    names = list(dict.fromkeys(name for run in runs for name in run.point.best.memory))
    labels = [str(run.point.devices) for run in runs]
    bottom = [0.0] * len(runs)
    for name in names:
        heights = [run.point.best.memory.get(name, 0.0) / 1e9 for run in runs]
        axes.bar(labels, heights, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, heights)]
    axes.axhline(estimate.best.memory_limit / 1e9, color="black", linestyle="--", label="limit")
    axes.set(title="memory of a device", xlabel="devices", ylabel="GB")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


def _scaling(axes: Any, estimate: Estimate) -> None:
    points = [run.point for run in estimate.runs]
    devices = [point.devices for point in points]
    speed = [point.best.tokens_per_second for point in points]
    axes.loglog(devices, speed, marker="o", label="best way")
    axes.loglog(devices, [speed[0] * n / devices[0] for n in devices], "--", label="linear")
    if estimate.knee is not None:
        axes.axvline(estimate.knee, color="grey", linestyle=":", label="knee")
    axes.set(title="scaling", xlabel="devices", ylabel="tokens/s")
    axes.legend(fontsize="small")


def phase_diagram(estimate: Estimate) -> dict[tuple[int, int], str]:
    """(devices, tokens per device and step) -> the family of the fastest way; none if none fits."""
    o, best = estimate.options, estimate.best
    grow, sizes = grower(estimate.where)
    first = estimate.smallest or best.parallel.devices
    counts = [n for n in sizes(first * 2**COLUMNS) if n % first == 0 and _power(n // first)]
    known: set[Key] = {
        Key(w.parallel.tp, w.parallel.cp, w.parallel.ep, w.micro_batch, w.recompute)
        for w in estimate.ways
    }
    found = {}
    for n in counts[:COLUMNS]:
        for row in range(ROWS):
            tokens = max(LEAST_TOKENS, o.seq) * 2**row
            batch = max(1, n * tokens // o.seq)
            try:
                ways = best_ways(estimate.model, grow(n), replace(o, batch=batch), 1, known)
            except InfeasibleError:
                continue
            found[n, tokens] = family(ways[0].parallel)
    return found


def _power(n: int) -> bool:
    return n & (n - 1) == 0


def _phases(axes: Any, estimate: Estimate) -> None:
    found = phase_diagram(estimate)
    names = sorted(set(found.values()))
    for i, name in enumerate(names):
        cells = [cell for cell, family_ in found.items() if family_ == name]
        axes.scatter(
            [n for n, _ in cells], [t for _, t in cells], marker="s", s=350, color=f"C{i}",
            label=name,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.margins(0.12)
    axes.set(title="fastest family", xlabel="devices", ylabel="tokens per device and step")
    if names:
        axes.legend(fontsize="small", markerscale=0.5, loc="upper left")
