"""What connects devices: the rate of a link, its delays, and the share a message gets of it."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

import numpy as np

from jaxscaler.errors import ClusterError

KINDS = ("switch", "full_mesh", "torus", "network")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")


@dataclass(frozen=True)
class Link:
    """A link of one of `KINDS`.

    - `switch`: any two devices talk at `bandwidth`.
    - `full_mesh`: every pair has a wire of its own; `bandwidth` is the sum of a device's wires, so
      that a group of m out of n devices has (m - 1) / (n - 1) of it.
    - `torus`: a ring (`wrap`) or a line of neighbours; `bandwidth` is that of one wire.
    - `network`: between nodes, one port per device; several levels deep, so the slowest kind.

    `bandwidth` is bytes/s, one way, per device. `latency` is seconds per hop, `launch` seconds per
    collective. A message of s bytes gets
    `bandwidth * max_efficiency / (1 + (half_bytes / s) ** sharpness)`:
    half of the best at `half_bytes`. `all_reduce_gain` is how much faster than a ring an all-reduce
    is where the switch itself adds (NVLS). `measured`: the link as single kinds of collective
    (`COLLECTIVES`) were measured to find it, by `jaxscaler calibrate`.
    """

    kind: str
    bandwidth: float
    latency: float = 0.0
    launch: float = 0.0
    max_efficiency: float = 1.0
    half_bytes: float = 0.0
    sharpness: float = 1.0
    all_reduce_gain: float = 1.0
    wrap: bool = False
    measured: tuple[tuple[str, Link], ...] = ()

    def __post_init__(self) -> None:
        rules = (
            ("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}"),
            ("bandwidth", 0 < self.bandwidth < np.inf, "bytes/s, more than 0"),
            ("latency", 0 <= self.latency < np.inf, "seconds, 0 or more"),
            ("launch", 0 <= self.launch < np.inf, "seconds, 0 or more"),
            ("max_efficiency", 0 < self.max_efficiency <= 1, "more than 0, at most 1"),
            ("half_bytes", 0 <= self.half_bytes < np.inf, "bytes, 0 or more"),
            # above 1 a larger message would take less time
            ("sharpness", 0 < self.sharpness <= 1, "more than 0, at most 1"),
            ("all_reduce_gain", 1 <= self.all_reduce_gain <= 2, "from 1 to 2"),
            ("wrap", not self.wrap or self.kind == "torus", "false unless kind is torus"),
        )
        for field, ok, rule in rules:
            if not ok:
                raise ClusterError(
                    f"link: `{field}` must be {rule}; it is {getattr(self, field)!r}"
                )
        unknown = [kind for kind, _ in self.measured if kind not in COLLECTIVES]
        if unknown:
            raise ClusterError(
                f"link: `measured` is by kind of collective ({', '.join(COLLECTIVES)}); "
                f"it has {', '.join(map(str, unknown))}"
            )

    def of(self, collective: str) -> Link:
        """The link as one kind of collective finds it."""
        return dict(self.measured).get(collective, self)

    def faster(self, factor: float) -> Link:
        """The same at `factor` times the bandwidth."""
        measured = tuple((kind, link.faster(factor)) for kind, link in self.measured)
        return replace(self, bandwidth=self.bandwidth * factor, measured=measured)

    def efficiency(self, nbytes: np.ndarray | float) -> np.ndarray:
        """Fraction of `bandwidth` that messages of `nbytes` > 0 bytes get."""
        ratio = self.half_bytes / np.asarray(nbytes, float)
        return self.max_efficiency / (1 + ratio**self.sharpness)


@cache
def _rows() -> dict[str, dict[str, str]]:
    text = resources.files("jaxscaler.cluster").joinpath("links.csv").read_text()
    return {row["name"]: row for row in csv.DictReader(text.splitlines())}


def known_link(name: str, bandwidth: float, wrap: bool = False) -> Link:
    """The link `name` of `links.csv` (which names its sources) at `bandwidth` bytes/s."""
    row = _rows()[name]
    return Link(
        kind=row["kind"],
        bandwidth=bandwidth,
        latency=float(row["latency_us"]) * 1e-6,
        launch=float(row["launch_us"]) * 1e-6,
        max_efficiency=float(row["max_efficiency"]),
        half_bytes=float(row["half_mb"]) * 1e6,
        sharpness=float(row["sharpness"]),
        all_reduce_gain=float(row["all_reduce_gain"]),
        wrap=wrap,
    )
