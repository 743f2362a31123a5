"""An estimate as tables for people, and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jaxscaler.estimate.compared import Compared
from jaxscaler.estimate.inference import Served
from jaxscaler.estimate.price import Priced
from jaxscaler.estimate.search import family

if TYPE_CHECKING:
    from jaxscaler.estimate.estimate import Estimate

WAYS = 5  # of the chosen devices that are listed
OPEN = 0.02  # share of exposed reduction from which a table says what narrower gradients bring


def show(estimate: Estimate, console: Console | None = None) -> None:
    """Print what training takes."""
    console = console or Console()
    best = estimate.best
    table = Table(title=f"{estimate.model.name}: {estimate.tokens:.4g} tokens", show_header=False)
    for row in summary(estimate):
        table.add_row(*row)
    console.print(table)
    console.print(parts_table("memory of a device", best.memory, 1e9, "GB", best.memory_limit))
    console.print(parts_table("a step", best.parts, 1.0, "s"))
    narrowed = estimate.compression
    if narrowed and (estimate.options.compress or _open_share(narrowed.plain) > OPEN):
        console.print(compression_table(narrowed))
    if len(estimate.runs) > 1:
        console.print(scaling_table(estimate))
    if len(estimate.ways) > 1:
        console.print(ways_table(estimate))
    for note in estimate.notes:
        console.print(note, highlight=False)


def summary(estimate: Estimate) -> list[tuple[str, str]]:
    """The answers, by question."""
    m, best, run = estimate.model, estimate.best, estimate.chosen
    floor, expected, most = estimate.tflops
    rows = [
        ("parameters", f"{m.parameters / 1e9:.4g} B"
         + (f", {m.active_parameters / 1e9:.4g} B active" if m.experts else "")),
        ("FLOPs (6 P D)", f"{6 * m.active_parameters * estimate.tokens:.3g}"),
        ("FLOPs, exact", f"{estimate.work.total / (best.batch * best.seq) * estimate.tokens:.3g}"),
        ("batch", f"{best.batch} x {best.seq} tokens"),
    ]  # fmt: skip
    if estimate.smallest is not None:
        rows.append(("fewest devices", str(estimate.smallest)))
    if estimate.knee is not None:
        rows.append(("knee", f"{estimate.knee} devices"))
    rows += [
        ("recommended", f"{best.parallel.devices} devices ({best.cluster}): {estimate.why}"),
        ("way", f"{best.parallel}, micro-batch {best.micro_batch}, recompute {best.recompute}"),
        ("step", f"{best.seconds:.4g} s, {best.tokens_per_second:.4g} tokens/s"),
        ("MFU, HFU", f"{best.mfu:.1%}, {best.hfu:.1%}"),
        ("TFLOP/s a device", f"{expected:.4g} ({floor:.4g} to {most:.4g}); below {floor:.4g} "
         "something is wrong"),
        ("memory", f"{best.memory_bytes / 1e9:.4g} of {best.memory_limit / 1e9:.4g} GB"),
        ("time", f"{run.days:.4g} days at a goodput of {run.goodput.share:.1%}"),
    ]  # fmt: skip
    if run.cost is not None:
        rows.append(("cost", f"{run.cost:,.0f}"))
    return rows


def parts_table(
    title: str, parts: Mapping[str, float], unit: float, name: str, limit: float | None = None
) -> Table:
    """What something is made of, the largest first."""
    whole = sum(parts.values())
    table = Table(title=title)
    for column in ("", name, "share"):
        table.add_column(column, justify="right" if column else "left")
    for part, value in sorted(parts.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{value / unit:.3g}", f"{value / whole:.1%}")
    table.add_row("sum", f"{whole / unit:.4g}", f"of {limit / unit:.4g}" if limit else "")
    return table


def _open_share(priced: Priced) -> float:
    return priced.parts.get("dp", 0.0) / priced.seconds


def compression_table(found: Compared) -> Table:
    """What narrower gradients bring to the chosen way."""
    table = Table(title="gradients as they are reduced")
    for column in ("", "step", "exposed", "hidden", "quantising", "error kept", "fits"):
        table.add_column(column, justify="right" if column else "left")
    for name, x in ({"": found.plain} | dict(found.narrowed)).items():
        mark = " *" if name == found.worth else ""
        table.add_row(
            f"{name or 'as they are'}{mark}", f"{x.seconds:.4g} s",
            f"{x.parts.get('dp', 0.0):.3g} s", f"{x.hidden:.3g} s",
            f"{x.parts.get('compress', 0.0):.3g} s",
            f"{x.memory.get('error feedback', 0.0) / 1e9:.3g} GB", "yes" if x.fits else "no",
        )  # fmt: skip
    return table


def scaling_table(estimate: Estimate) -> Table:
    table = Table(title="scaling")
    for column in ("devices", "tokens/s", "of linear", "MFU", "goodput", "days", "cost"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("way")
    for run in estimate.runs:
        best = run.point.best
        mark = " *" if run.point.devices == estimate.chosen.point.devices else ""
        table.add_row(
            f"{run.point.devices}{mark}", _short(best.tokens_per_second),
            f"{run.point.efficiency:.0%}", f"{best.mfu:.1%}", f"{run.goodput.share:.1%}",
            _short(run.days), "" if run.cost is None else _short(run.cost),
            f"{best.parallel}, b={best.micro_batch}, {best.recompute}",
        )  # fmt: skip
    return table


def _short(x: float) -> str:
    """Three digits, with a k or an M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= unit:
            return f"{x / unit:.3g}{name}"
    return f"{x:.3g}"


def ways_table(estimate: Estimate) -> Table:
    table = Table(title=f"ways on {estimate.best.parallel.devices} devices")
    for column in ("way", "family", "step", "of best", "memory"):
        table.add_column(column, justify="left" if column in ("way", "family") else "right")
    for way in estimate.ways[:WAYS]:
        table.add_row(
            f"{way.parallel}, b={way.micro_batch}, {way.recompute}", family(way.parallel),
            f"{way.seconds:.4g} s", f"{way.seconds / estimate.ways[0].seconds:.2f}",
            f"{way.memory_bytes / 1e9:.3g} GB",
        )  # fmt: skip
    return table


def explained(lines: list[Any]) -> Table:
    """The lines of `explain`."""
    table = Table(title="where the numbers are from")
    for column in ("what", "value", "formula", "values", "source"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for line in lines:
        value = f"{line.value:.5g} {line.unit}".strip()
        table.add_row(line.name, value, line.formula, line.values, line.source)
    return table


# -- plain data ------------------------------------------------------------------------------------


def priced_data(priced: Priced) -> dict[str, Any]:
    """Seconds, bytes and FLOPs."""
    return {
        "cluster": priced.cluster, "devices": priced.parallel.devices,
        "parallel": asdict(priced.parallel), "batch": priced.batch, "seq": priced.seq,
        "micro_batch": priced.micro_batch, "micro_batches": priced.micro_batches,
        "recompute": priced.recompute, "seconds": priced.seconds, "parts": dict(priced.parts),
        "hidden": priced.hidden, "memory": dict(priced.memory),
        "memory_bytes": priced.memory_bytes, "memory_limit": priced.memory_limit,
        "fits": priced.fits, "model_flops": priced.model_flops,
        "hardware_flops": priced.hardware_flops, "mfu": priced.mfu, "hfu": priced.hfu,
        "tflops": priced.tflops, "tokens_per_second": priced.tokens_per_second,
        "constants": asdict(priced.constants),
    }  # fmt: skip


def as_data(estimate: Estimate) -> dict[str, Any]:
    """All of an estimate."""

    def run(run: Any) -> dict[str, Any]:
        return {
            "devices": run.point.devices, "efficiency": run.point.efficiency, "days": run.days,
            "cost": run.cost, "goodput": asdict(run.goodput), "best": priced_data(run.point.best),
        }  # fmt: skip

    return {
        "model": asdict(estimate.model), "parameters": estimate.model.parameters,
        "active_parameters": estimate.model.active_parameters, "tokens": estimate.tokens,
        "flops_of_step": asdict(estimate.work), "smallest": estimate.smallest,
        "knee": estimate.knee, "chosen": run(estimate.chosen), "why": estimate.why,
        "scaling": [run(x) for x in estimate.runs],
        "ways": [priced_data(x) for x in estimate.ways],
        "compression": None if estimate.compression is None else estimate.compression.to_dict(),
        "tflops": dict(zip(("floor", "expected", "most"), estimate.tflops)),
        "notes": list(estimate.notes), "explain": [asdict(line) for line in estimate.explain()],
    }  # fmt: skip


def served_data(served: Served) -> dict[str, Any]:
    data = {key: value for key, value in vars(served).items() if key != "model"}
    return data | {
        "model": served.model.name, "parallel": asdict(served.parallel),
        "parts": dict(served.parts), "memory": dict(served.memory),
        "memory_bytes": served.memory_bytes, "fits": served.fits,
        "constants": asdict(served.constants),
    }  # fmt: skip


def show_served(served: Served, price: float | None, console: Console | None = None) -> None:
    """Print what serving takes."""
    console = console or Console()
    table = Table(title=f"serving {served.model.name}", show_header=False)
    n = served.parallel.devices
    table.add_row("devices", f"{n} ({served.cluster}): {served.parallel}")
    table.add_row("batch", f"{served.batch} prompts of {served.prompt}, answers of {served.answer}")
    table.add_row("first token", f"{served.prefill:.4g} s")
    table.add_row("each token", f"{1e3 * served.decode:.4g} ms")
    table.add_row("answer", f"{served.seconds:.4g} s")
    table.add_row("tokens/s", f"{served.tokens_per_second:.4g}")
    if price is not None:
        dear = price * n / 3600 / served.tokens_per_second * 1e6
        table.add_row("cost of 1M decoded tokens", f"{dear:.4g}")
    console.print(table)
    console.print(parts_table("memory of a device", served.memory, 1e9, "GB", served.memory_limit))
    console.print(parts_table("a decoded token", served.parts, 1e-3, "ms"))
