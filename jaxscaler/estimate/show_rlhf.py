"""What reinforcement learning from feedback takes: tables for people, lines, plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxscaler.estimate.explain import PLANNER, Line
from jaxscaler.estimate.rlhf import ACTOR, MOVES, Feedback, Placed
from jaxscaler.estimate.show import parts_table, served_data

FORMULAS = {
    "generate": ("rounds * (prefill + (answer - 1) * decode)",
                 "estimate/inference.py: weights and cache read once a token"),
    "train": ("epochs * updates * steps of the models that train", "the price of a step"),
    "reshard weights": ("all-gather of 2 B * P / tp of generation among stages, shards, tp",
                        "Sheng et al. 2024 (HybridFlow), section 5; " + PLANNER),
    "send weights": ("2 B * P / min(tp of generation, devices that send) over a port", PLANNER),
    "move to the host and back": ("2 * bytes that stay / host bandwidth", "cluster/devices.csv"),
}  # fmt: skip
SCORE = ("forward pass over all tokens, head included", "the price of a forward pass")


def show_feedback(found: Feedback, console: Console | None = None) -> None:
    """Print the answer, the placements, and the memory of both sides of the best one."""
    console = console or Console()
    r, best = found.rollouts, found.best
    table = Table(title=f"{r.method} of {found.model.name} on {found.cluster.name}",
                  show_header=False)  # fmt: skip
    table.add_row(
        "iteration",
        f"{r.batch} answers of {r.answer} tokens to prompts of {r.prompt}, "
        f"{r.epochs * r.updates} optimizer step{'s' * (r.epochs * r.updates > 1)}",
    )
    table.add_row(
        "fastest", f"{best.name}: {best.seconds:.4g} s, {r.batch / best.seconds:.4g} answers/s"
    )
    if not found.placed[0].on_policy:
        stale = found.placed[0]
        table.add_row("off-policy", f"{stale.name}: {stale.seconds:.4g} s")
    generation = best.generation.served
    table.add_row(
        "generation",
        f"{generation.parallel}, {generation.batch} answers at a time, "
        f"{1e3 * generation.decode:.4g} ms a token",
    )
    table.add_row("training", f"{best.training.ways[ACTOR].parallel}")
    console.print(table)
    console.print(_placements(found))
    console.print(parts_table(f"an iteration: {best.name}", best.phases, 1.0, "s"))
    for side, memory in best.memory.items():
        limit = best.training.ways[ACTOR].memory_limit
        console.print(parts_table(f"memory of a device: {side}", memory, 1e9, "GB", limit))


def _placements(found: Feedback) -> Table:
    table = Table(title="placements")
    for column in ("placement", "iteration", "generate", "score", "train", "weights", "trains on",
                   "generates on"):  # fmt: skip
        table.add_column(column, justify="left" if column.endswith(("ment", " on")) else "right")
    for placed in found.placed:
        phases = placed.phases
        score = sum(x for name, x in phases.items() if name.startswith("score"))
        moves = sum(phases.get(name, 0.0) for name in MOVES)
        generation, training = placed.generation, placed.training
        table.add_row(
            placed.name, f"{placed.seconds:.4g} s", f"{phases['generate']:.4g} s",
            f"{score:.4g} s", f"{phases['train']:.4g} s", f"{moves:.4g} s",
            f"{training.cluster.name}: {training.ways[ACTOR].parallel}",
            f"{generation.served.cluster}: {generation.served.parallel}, "
            f"{generation.rounds} x {generation.served.batch}",
        )  # fmt: skip
    return table


def lines(found: Feedback) -> list[Line]:
    """Each number of the best placement with formula, values and source."""
    best, model = found.best, found.model
    served, way = best.generation.served, best.training.ways[ACTOR]
    values = {
        "generate": f"rounds={best.generation.rounds}, {served.batch} at a time, prefill "
        f"{served.prefill:.4g} s, decode {1e3 * served.decode:.4g} ms, answer={served.answer}",
        "train": f"epochs={found.rollouts.epochs}, updates={found.rollouts.updates}, steps "
        + ", ".join(f"{role} {x.seconds:.4g} s" for role, x in best.training.ways.items()),
        "reshard weights": f"P={model.parameters:.4g}, {way.parallel} to {served.parallel}",
        "send weights": f"P={model.parameters:.4g}, tp={served.parallel.tp}",
        "move to the host and back": f"{best.training.resident / 1e9:.4g} GB",
    }
    found_lines = [
        Line(name, seconds, "s", *_formula(name, values.get(name, f"{way.parallel}")))
        for name, seconds in best.phases.items()
    ]
    found_lines.append(
        Line("iteration", best.seconds, "s",
             "sum of phases" if best.on_policy else "max(generate, the rest) + send", best.name,
             "phases of one policy follow each other")
    )  # fmt: skip
    for side, memory in best.memory.items():
        found_lines += [
            Line(f"memory, {side}: {name}", nbytes / 1e9, "GB",
                 "2 * bytes * L * K * H * T * b / min(tp, K)" if name == "KV cache"
                 else "as `estimate` explains it", f"{served.parallel}" if side == "generation"
                 else f"{way.parallel}", "Scaling book, Transformer math")
            for name, nbytes in memory.items()
        ]  # fmt: skip
    return found_lines


def _formula(name: str, values: str) -> tuple[str, str, str]:
    formula, source = FORMULAS.get(name, SCORE)
    return formula, values, source


def _placed(placed: Placed) -> dict[str, Any]:
    training = placed.training
    return {
        "name": placed.name, "on_policy": placed.on_policy, "seconds": placed.seconds,
        "phases": dict(placed.phases), "rounds": placed.generation.rounds,
        "memory": {side: dict(memory) for side, memory in placed.memory.items()},
        "training": {
            "cluster": training.cluster.name, "devices": training.cluster.num_devices,
            "ways": {
                role: {
                    "parallel": asdict(x.parallel), "micro_batch": x.micro_batch,
                    "recompute": x.recompute, "seconds": x.seconds,
                }
                for role, x in training.ways.items()
            },
        },
        "generation": served_data(placed.generation.served),
    }  # fmt: skip


def feedback_data(found: Feedback) -> dict[str, Any]:
    """Plain data for JSON."""
    r = found.rollouts
    return {
        "model": asdict(found.model), "cluster": found.cluster.name, "method": r.method,
        "batch": r.batch, "prompt": r.prompt, "answer": r.answer, "updates": r.updates,
        "epochs": r.epochs, "best": found.best.name,
        "placements": [_placed(x) for x in found.placed],
        "explain": [asdict(line) for line in lines(found)],
    }  # fmt: skip
