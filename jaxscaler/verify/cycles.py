"""The TPU compiler's own estimate of time, in cycles, from compiled HLO."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping

from jaxscaler.cluster.devices import Device
from jaxscaler.verify import hlo_text

# Floating-point operations of a cycle: cores x matrix units x rows x columns x 2.
PER_CYCLE = {
    "v4": 2 * 4 * 128 * 128 * 2, "v5e": 4 * 128 * 128 * 2, "v5p": 2 * 4 * 128 * 128 * 2,
    "v6e": 4 * 256 * 256 * 2,
}  # fmt: skip
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def clock(device: Device) -> float | None:
    """Cycles a second: of a TPU its peak over what its matrix units do in a cycle, else None."""
    done = PER_CYCLE.get(device.name)
    return device.flops("bf16") / done if done else None


def op_cycles(text: str, trip_counts: Mapping[str, int] = {}) -> tuple[tuple[str, int], ...]:
    """(op path, cycles a step), most first, of compiled HLO that carries `estimated_cycles`.

    A fusion counts under the path that the compiler gives it. What it has no estimate for, waits
    for collectives above all, counts nothing. Loops count as often as they run (`trip_counts`, by
    the loop's path, or what the text says; else once, with a warning), branches all.
    """
    computations, entry = hlo_text.computations(text)
    found: Counter[str] = Counter()

    def walk(name: str, times: int) -> None:
        for op in computations.get(name, ()):
            if cycles := _CYCLES.search(op.attributes):
                found[hlo_text.scope(op)] += times * int(cycles[1])
            if op.opcode == "while":
                trips = hlo_text.trip_count(op, name, computations, trip_counts)
                if trips is None:
                    warnings.warn(
                        f"how often the loop `{hlo_text.scope(op) or op.name}` runs is not known: "
                        "its cycles count once; say it with `trip_counts`",
                        stacklevel=3,
                    )
                walk(hlo_text.loop(op)[1], times * (1 if trips is None else trips))
            elif op.opcode == "conditional":
                for branch in hlo_text.branches(op):
                    walk(branch, times)
            elif op.opcode in ("call", "async-start") and (called := hlo_text.called(op)):
                walk(called, times)

    walk(entry, 1)
    return tuple(found.most_common())
