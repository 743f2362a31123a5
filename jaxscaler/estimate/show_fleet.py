"""What training takes on two kinds of devices: tables for people, lines, plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxscaler.estimate.explain import Line
from jaxscaler.estimate.fleet import Fleet, Split

PACE = "a synchronous step ends with its slowest device"


def show_fleet(fleet: Fleet, console: Console | None = None) -> None:
    """Print the answers, and the splits."""
    console = console or Console()
    table = Table(title=f"{fleet.model.name} on {fleet.cluster.name}", show_header=False)
    for row in _summary(fleet):
        table.add_row(*row)
    console.print(table)
    console.print(_splits(fleet))


def _summary(fleet: Fleet) -> list[tuple[str, str]]:
    best, o = fleet.best, fleet.options
    rows = [("batch", f"{o.batch} x {o.seq} tokens")]
    rows += [
        (f"{kind.name} alone", f"{rate:.4g} samples/s, reductions and updates left out")
        for kind, rate in zip(fleet.kinds, fleet.rates)
    ]
    if fleet.even is None:
        rows.append(("even split", "none fits on both"))
    else:
        rows.append(("even split", f"{fleet.even.seconds:.4g} s, at the pace of {fleet.slowest}: "
                     f"{fleet.even.seconds / fleet.bound:.2f} times the bound"))  # fmt: skip
    rows += [
        ("bound", f"{fleet.bound:.4g} s, at the sum of the rates"),
        ("best", f"{best.name}: {best.seconds:.4g} s, {best.seconds / fleet.bound:.2f} times the "
         f"bound, {o.batch * o.seq / best.seconds:.4g} tokens/s"),
        ("time", f"{fleet.days:.4g} days for {fleet.tokens:.4g} tokens, failures left out"),
    ]  # fmt: skip
    return rows


def _splits(fleet: Fleet) -> Table:
    table = Table(title="splits")
    for column in ("split", "step", "kind", "samples", "busy until", "memory", "way"):
        table.add_column(column, justify="left" if column in ("split", "kind", "way") else "right")
    for split in fleet.others:
        for i, share in enumerate(split.shares):
            table.add_row(
                split.name if i == 0 else "", f"{split.seconds:.4g} s" if i == 0 else "",
                share.cluster.name, str(share.samples), f"{share.seconds:.4g} s",
                f"{share.priced.memory_bytes / 1e9:.3g} of "
                f"{share.priced.memory_limit / 1e9:.3g} GB",
                f"{share.parallel}, b={share.micro} x {share.micro_batches}, {share.recompute}",
            )  # fmt: skip
    return table


def lines(fleet: Fleet) -> list[Line]:
    """Each number with formula, values and source."""
    found = [
        Line(f"rate of {kind.name}", rate, "samples/s", "samples of a micro-batch / its seconds",
             f"{kind.num_devices} devices, the best of the ways that fit",
             "the price of a step without dp, update and bubble")
        for kind, rate in zip(fleet.kinds, fleet.rates)
    ]  # fmt: skip
    found.append(
        Line("bound", fleet.bound, "s", "batch / (sum of rates)",
             f"batch={fleet.options.batch}, rates {', '.join(f'{x:.4g}' for x in fleet.rates)}",
             "no split has a kind do more than its rate allows")
    )  # fmt: skip
    if fleet.even is not None:
        times = ", ".join(f"{x.cluster.name} {x.seconds:.4g}" for x in fleet.even.shares)
        found += [
            Line("even split", fleet.even.seconds, "s", "max over kinds", times, PACE),
            Line("what the slowest costs", fleet.even.seconds / fleet.bound, "times the bound",
                 "even split / bound", f"{fleet.even.seconds:.4g}, {fleet.bound:.4g}", PACE),
        ]  # fmt: skip
    for share in fleet.best.shares:
        found.append(
            Line(f"share of {share.cluster.name}", share.samples, "samples",
                 "dp * micro-batch * micro-batches",
                 f"{share.parallel.dp} * {share.micro} * {share.micro_batches}",
                 "the counts at which neither kind waits for long")
        )  # fmt: skip
        found += [
            Line(f"{share.cluster.name}: {name}", seconds, "s", "as `estimate` explains it",
                 f"{share.parallel}", share.priced.constants.source)
            for name, seconds in share.priced.parts.items()
        ]  # fmt: skip
    found.append(Line("step", fleet.best.seconds, "s", "max over kinds", fleet.best.name, PACE))
    return found


def _split(split: Split) -> dict[str, Any]:
    return {
        "name": split.name, "seconds": split.seconds, "fits": split.fits,
        "shares": [
            {
                "cluster": x.cluster.name, "devices": x.cluster.num_devices,
                "parallel": asdict(x.parallel), "samples": x.samples, "micro_batch": x.micro,
                "micro_batches": x.micro_batches, "recompute": x.recompute, "seconds": x.seconds,
                "parts": dict(x.priced.parts), "memory": dict(x.priced.memory),
                "memory_bytes": x.priced.memory_bytes, "memory_limit": x.priced.memory_limit,
            }
            for x in split.shares
        ],
    }  # fmt: skip


def fleet_data(fleet: Fleet) -> dict[str, Any]:
    """Plain data for JSON."""
    o = fleet.options
    return {
        "model": asdict(fleet.model), "batch": o.batch, "seq": o.seq, "tokens": fleet.tokens,
        "kinds": [
            {"cluster": kind.name, "devices": kind.num_devices, "samples_per_second": rate}
            for kind, rate in zip(fleet.kinds, fleet.rates)
        ],
        "network_bandwidth": fleet.cluster.link.bandwidth, "bound": fleet.bound,
        "even": None if fleet.even is None else _split(fleet.even), "slowest": fleet.slowest,
        "best": _split(fleet.best), "splits": [_split(x) for x in fleet.others],
        "days": fleet.days, "explain": [asdict(line) for line in lines(fleet)],
    }  # fmt: skip
