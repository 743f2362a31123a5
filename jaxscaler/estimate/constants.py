"""What a software stack makes of a device, beside what the planner assumes: `efficiency.csv`.

A row holds for a device (by name, or "*") and a stack. matmul, attention, vector: the share of the
planner's speed that products, attention, and what streams through memory reach. launch_us: start of
a kernel. wave: the share of what last waves of tiles cost (`waves.py`) that is seen. fabric,
network: the share of the planner's speed of collectives inside a node or slice, and beyond. hidden:
the share of data-parallel communication that can run beside compute. memory_gb: what the stack
takes for itself. An empty field is as the planner has it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path

from jaxscaler.cluster.devices import Device
from jaxscaler.cost.compute import RAMP
from jaxscaler.errors import ConfigError, JaxscalerError
from jaxscaler.space.problem import HIDDEN

STACKS = ("jax", "pytorch", "megatron", "megatron-deepspeed", "deepspeed")
# Megatron-DeepSpeed runs Megatron's kernels and collectives.
SHARES = {"megatron-deepspeed": "megatron"}


@dataclass(frozen=True)
class Constants:
    """A row of `efficiency.csv`; as it is, the planner's own figures."""

    matmul: float = 1.0
    attention: float = 1.0
    vector: float = 1.0
    launch_us: float = 1e6 * RAMP
    wave: float = 0.0
    fabric: float = 1.0
    network: float = 1.0
    hidden: float = 0.0
    memory_gb: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "source" and not (0 <= value < float("inf")):
                raise JaxscalerError(f"constant {field.name}={value!r}: a number, 0 or more")
        if not min(self.matmul, self.attention, self.vector, self.fabric, self.network) > 0:
            raise JaxscalerError(f"{self}: shares of a speed are above 0")
        if self.hidden > 1:
            raise JaxscalerError(f"constant hidden={self.hidden}: a share, 1 at most")


def read_rows(lines: Iterable[str]) -> dict[tuple[str, str], dict[str, str]]:
    """(device, stack) -> the fields that a row has."""
    return {
        (row["device"], row["stack"]): {k: v for k, v in row.items() if v}
        for row in csv.DictReader(lines)
    }


@cache
def _rows() -> Mapping[tuple[str, str], dict[str, str]]:
    text = resources.files("jaxscaler.estimate").joinpath("efficiency.csv").read_text()
    return read_rows(text.splitlines())


def constants_for(device: Device, stack: str, path: str | Path | None = None) -> Constants:
    """The constants of a device under a stack, from `path` or the table of the package.

    A device without a row has that of "*", a stack in `SHARES` those of the other one; `source`
    says where they are from, or that there is no row: then they are the planner's own.
    """
    if stack not in STACKS:
        raise ConfigError(f"stack={stack!r}: one of {', '.join(STACKS)}")
    if path is None:
        return _constants(device.name, device.vendor, stack)
    return _read(read_rows(Path(path).read_text().splitlines()), device.name, device.vendor, stack)


@cache
def _constants(device: str, vendor: str, stack: str) -> Constants:
    return _read(_rows(), device, vendor, stack)


def _read(
    rows: Mapping[tuple[str, str], dict[str, str]], device: str, vendor: str, stack: str
) -> Constants:
    speed = SHARES.get(stack, stack)
    row = rows.get((device, speed)) or rows.get(("*", speed)) or {}
    numbers = {
        f.name: float(row[f.name])
        for f in fields(Constants)
        if f.name in row and f.name != "source"
    }
    numbers.setdefault("hidden", HIDDEN.get(vendor, 0.0))
    return Constants(**numbers, source=row.get("source", "the planner's own figures"))
