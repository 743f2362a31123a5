"""A pipeline's plan as a table: what each stage takes, and what the simulated step makes of it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from jaxscaler.report.show import mesh_text, size_text, time_text


def show_pipeline(plan: Any, console: Console | None = None) -> None:
    """Print a `pipeline.plan.PipelinePlan`: a row per stage, in the order of the forward pass.

    Seconds are of one micro-batch (of one step: the update), bytes those of one device: what is
    kept of one micro-batch until its backward pass, and at rest (state, gradients, prepared
    weights) of the stage's place; where stages have copies, of one of these.
    """
    console = console or Console()
    time = plan.timeline
    both = ", each twice: in both directions" if plan.copies > 1 else ""
    head = f"pipeline of {len(plan.places)} stages for {plan.cluster['name']}{both}"
    console.print(head, highlight=False, style="bold")
    table = Table(box=None, pad_edge=False)
    for n, name in enumerate(
        ("stage", "devices", "mesh", "F", "B", "W", "update", "kept", "at rest")
    ):
        table.add_column(name, justify="left" if n < 3 else "right", overflow="fold")
    places = plan.places
    for run, (stage, place) in enumerate(zip(plan.pipeline.stages, places)):
        devices = (copy[place] for copy in plan.sites)
        tasks = [stage.forward, stage.backward, stage.weight, stage.update]
        table.add_row(
            str(run),
            ", ".join(f"{a}-{a + n - 1}" if n > 1 else str(a) for a, n in devices),
            mesh_text(plan.plans[place]),
            *("" if t is None else time_text(t) for t in tasks),
            size_text(stage.kept),
            size_text(stage.static) if place not in places[:run] else "",
        )
    console.print(table, highlight=False)
    peaks = ", ".join(size_text(peak.bytes) for peak in time.peak)
    idle = ", ".join(f"{share:.0%}" for share in time.bubble)
    summary = Table.grid(padding=(0, 2, 0, 0))
    summary.add_row("step", f"{time_text(time.seconds)} in {plan.micro} micro-batches")
    summary.add_row("idle", f"{idle}   (by device group)")
    summary.add_row("memory", f"{peaks}   (of one device, by group)")
    count = len(time.tasks)
    summary.add_row(
        "host", f"{count} tasks, {time_text(plan.dispatch)} each to dispatch, from one thread"
    )
    for note in plan.notes:
        summary.add_row("note", note)
    console.print(summary, markup=False, highlight=False)
