"""A timeline to look at: Chrome's and Perfetto's trace format, a picture, lines of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxscaler.schedule.simulate import Timeline
from jaxscaler.schedule.tasks import BACKWARD, FORWARD, UPDATE, WEIGHT, Task

WORDS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradients", UPDATE: "update"}
COLOURS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", WEIGHT: "#54a24b", UPDATE: "#b279a2"}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The step as a trace for chrome://tracing or ui.perfetto.dev: a row a group, bytes below.

    Times are microseconds, as the format has them.
    """
    pipeline = timeline.pipeline
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": g, "name": "thread_name", "args": {"name": f"group {g}"}}
        for g in range(pipeline.groups)
    ]
    for g, line in enumerate(timeline.order):
        for task in line:
            start, end = timeline.when[task]
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": g,
                    "name": _label(task),
                    "cat": WORDS[task.phase],
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"stage": pipeline.called(task.stage), "micro-batch": task.micro},
                }
            )
        for size, at in timeline.held[g]:
            counter = {"ph": "C", "pid": 0, "name": f"bytes of group {g}", "ts": at * 1e6}
            events.append({**counter, "args": {"bytes": size}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """`chrome_trace` as a file."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)) + "\n")


def text(timeline: Timeline, width: int = 100) -> str:
    """A line a group, `width` characters for the step.

    A forward task is the last digit of its micro-batch, a backward one a letter (a for 0), weight
    gradients are +, updates U, and a point is idle. A task shorter than a character may be missing.
    """
    scale = width / timeline.seconds if timeline.seconds else 0.0
    lines = []
    for g, line in enumerate(timeline.order):
        row = ["."] * width
        for task in line:
            start, end = (round(t * scale) for t in timeline.when[task])
            row[start:end] = _sign(task) * (end - start)
        peak = timeline.peak[g].bytes
        lines.append(f"{g:>3} {''.join(row)} {timeline.bubble[g]:5.1%} idle, {peak:.3g} bytes")
    return "\n".join(lines)


def picture(timeline: Timeline, path: str | Path) -> None:
    """The step as a picture (PNG, SVG or PDF by the path's suffix). Needs the extra `plot`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as missing:
        raise ImportError("pictures need matplotlib: pip install 'jaxscaler[plot]'") from missing
    groups = timeline.pipeline.groups
    figure = Figure(figsize=(14, 1 + 0.5 * groups), layout="constrained")
    axes = figure.add_subplot()
    for g, line in enumerate(timeline.order):
        for task in line:
            start, end = timeline.when[task]
            axes.broken_barh(
                [(start, end - start)], (g - 0.4, 0.8), color=COLOURS[task.phase],
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            if end - start > timeline.seconds / 90 and task.phase != UPDATE:
                middle = (start + end) / 2
                label = str(task.micro)
                axes.text(middle, g, label, ha="center", va="center", size=7, color="white")
    axes.set_yticks(range(groups), [f"group {g}" for g in range(groups)])
    axes.set_ylim(groups - 0.5, -0.5)
    axes.set_xlim(0, timeline.seconds)
    axes.set_xlabel("seconds")
    phases = [p for p in WORDS if any(t.phase == p for t in timeline.tasks)]
    figure.legend(
        handles=[Patch(color=COLOURS[p], label=WORDS[p]) for p in phases],
        loc="outside upper right", ncols=len(phases), frameon=False,
    )  # fmt: skip
    figure.savefig(path)


def _label(task: Task) -> str:
    return f"{task.phase}{task.stage}" if task.phase == UPDATE else f"{task.phase}{task.micro}"


def _sign(task: Task) -> str:
    if task.phase in (WEIGHT, UPDATE):
        return "+" if task.phase == WEIGHT else "U"
    last = task.micro % 10
    return str(last) if task.phase == FORWARD else "abcdefghij"[last]
