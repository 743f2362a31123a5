"""What a search over pipelines tried, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from jaxscaler.report.show import size_text, time_text

SHOWN = 20


def show_candidates(found: Any, console: Console | None = None) -> None:
    """Print a `pipeline.search.Found`: the fastest plans, and what was refused for which reason."""
    console = console or Console()
    good = sorted((r for r in found.tried if r.seconds is not None), key=lambda r: r.seconds)
    bad = [r for r in found.tried if r.seconds is None]
    console.print(f"{len(found.tried)} candidates", highlight=False, style="bold")
    table = Table(box=None, pad_edge=False)
    for name in ("plan", "step", "memory", "of the best"):
        table.add_column(name, justify="left" if name == "plan" else "right", overflow="fold")
    for row in good[:SHOWN]:
        slower = row.seconds / good[0].seconds
        table.add_row(row.what, time_text(row.seconds), size_text(row.peak_bytes), f"{slower:.3f}")
    console.print(table, highlight=False)
    if len(good) > SHOWN:
        console.print(f"and {len(good) - SHOWN} slower ones", highlight=False)
    if bad:
        refused = Table(box=None, pad_edge=False)
        for name in ("refused", "why"):
            refused.add_column(name, overflow="fold")
        for row in bad[:SHOWN]:
            refused.add_row(row.what, row.why)
        console.print(refused, highlight=False, markup=False)
        if len(bad) > SHOWN:
            console.print(f"and {len(bad) - SHOWN} others refused", highlight=False)
    for note in found.notes:
        console.print(note, highlight=False, markup=False)
