"""The device table: what one JAX device computes, holds and is connected by (`devices.csv`)."""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from jaxscaler.cluster.curves import Curve
from jaxscaler.cluster.host import Host
from jaxscaler.cluster.links import Link, known_link
from jaxscaler.errors import ClusterError

_RATES = ("bf16", "f16", "tf32", "f32", "f8", "f64")

# The rates to try for a dtype, best first. f32 matmuls run as TF32 where there is one, and as one
# bf16 pass on a TPU: that is JAX's default matmul precision. Types without hardware are widened
# (bf16 on V100, f8 on A100), or rounded to bf16 (f16 on a TPU).
_TRY = {
    "bf16": ("bf16", "f32"),
    "f16": ("f16", "bf16", "f32"),
    "tf32": ("tf32", "f32", "bf16"),
    "f32": ("tf32", "f32", "bf16"),
    "f8": ("f8", "bf16", "f16", "f32"),
    "f64": ("f64",),
}
_SPELLED = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "f32",
    "complex128": "f64",
    "int8": "f8",
    "uint8": "f8",
} | dict.fromkeys(("bool", "int16", "int32", "int64", "uint16", "uint32", "uint64"), "f32")
_F64_EMULATION = 1 / 16  # of the f32 rate, where f64 is made of several f32 operations


@dataclass(frozen=True)
class Device:
    """One device as JAX counts them: half a chip on v3, v7x and MI250X, else a chip.

    `peak_flops`: dense peak in FLOP/s by dtype, as (name, rate) pairs, names of `bf16 f16 tf32 f32
    f8 f64`. `achievable`: the part of it that the best measured matmul reaches. `hbm_bytes`: what
    a program can use. `hbm_bandwidth`, `host_bandwidth`: bytes/s, the latter one way between the
    device and its host. `devices_per_node`: JAX devices that share a host (on an NVL72, a switch);
    None: as many as asked for. `curves`: how fast kernels were measured to run, where they were.
    `host`: what its host takes to dispatch, where that was measured.
    """

    name: str
    vendor: str
    peak_flops: tuple[tuple[str, float], ...]
    achievable: float
    hbm_bytes: float
    hbm_bandwidth: float
    host_bandwidth: float
    devices_per_node: int | None = None
    curves: tuple[Curve, ...] = ()
    host: Host | None = None

    def __post_init__(self) -> None:
        for field in ("hbm_bytes", "hbm_bandwidth", "host_bandwidth"):
            if not getattr(self, field) > 0:
                raise ClusterError(
                    f"device {self.name!r}: `{field}` must be more than 0; "
                    f"it is {getattr(self, field)!r}"
                )
        if not 0 < self.achievable <= 1:
            raise ClusterError(
                f"device {self.name!r}: `achievable` must be more than 0 and at most 1; "
                f"it is {self.achievable!r}"
            )
        rates = dict(self.peak_flops)
        wrong = [k for k, v in rates.items() if k not in _RATES or not v > 0]
        if wrong or not rates.keys() & {"bf16", "f32"}:
            raise ClusterError(
                f"device {self.name!r}: `peak_flops` needs rates above 0 for some of "
                f"{', '.join(_RATES)}, among them bf16 or f32; it has {rates!r}"
            )

    def flops(self, dtype: str) -> float:
        """Peak matmul FLOP/s for `dtype`, by JAX's, NumPy's or HLO's name.

        A dtype that the device lacks runs at the rate of the one it is computed in: see `_TRY`.
        8-bit integers count as f8, other integers as f32.
        """
        name = _SPELLED.get(dtype, dtype)
        if name.startswith(("float8", "f8")):
            name = "f8"
        rates = dict(self.peak_flops)
        for rate in _TRY.get(name, ()):
            if rate in rates:
                return rates[rate]
        if name == "f64":
            return rates.get("f32", rates.get("bf16", 0.0)) * _F64_EMULATION
        raise ClusterError(
            f"no rate for dtype {dtype!r}; known: {', '.join((*_TRY, *sorted(_SPELLED)))}"
        )


@dataclass(frozen=True)
class Fabric:
    """How devices of one kind are wired: what `Cluster.parse` needs besides the numbers.

    `torus_rank`: 0 for nodes of switched devices. A torus axis wraps if its length is `wrap_size`,
    or, where `wrap_unit` is set, if all lengths are multiples of that. `max_chips`: the largest
    slice. `chip`: the link between the JAX devices of one chip, if `chip_devices` > 1.
    """

    intra: Link
    inter: Link
    torus_rank: int = 0
    wrap_unit: int | None = None
    wrap_size: int | None = None
    max_chips: int | None = None
    chip_devices: int = 1
    chip: Link | None = None


def rate_names(dtype: str) -> tuple[str, ...]:
    """The names of the rates that a dtype may run at, its own first."""
    name = _SPELLED.get(dtype, dtype)
    name = "f8" if name.startswith(("float8", "f8")) else name
    return tuple(dict.fromkeys((name, *_TRY.get(name, ()))))


def _int(text: str) -> int | None:
    return int(text) if text else None


def _entry(row: dict[str, str]) -> tuple[Device, Fabric]:
    device = Device(
        name=row["name"],
        vendor=row["vendor"],
        peak_flops=tuple(
            (rate, float(row[f"{rate}_tflops"]) * 1e12) for rate in _RATES if row[f"{rate}_tflops"]
        ),
        achievable=float(row["achievable"]),
        hbm_bytes=float(row["hbm_bytes"]),
        hbm_bandwidth=float(row["hbm_gbs"]) * 1e9,
        host_bandwidth=float(row["host_gbs"]) * 1e9,
        devices_per_node=_int(row["per_node"]),
    )
    chip_devices = int(row["chip_devices"])
    fabric = Fabric(
        intra=known_link(row["intra_link"], float(row["intra_gbs"]) * 1e9),
        inter=known_link(row["inter_link"], float(row["inter_gbs"]) * 1e9),
        torus_rank=_int(row["torus_rank"]) or 0,
        wrap_unit=_int(row["wrap_unit"]),
        wrap_size=_int(row["wrap_size"]),
        max_chips=_int(row["max_chips"]),
        chip_devices=chip_devices,
        chip=known_link("die", float(row["chip_gbs"]) * 1e9) if chip_devices > 1 else None,
    )
    return device, fabric


@cache
def _rows() -> tuple[dict[str, str], ...]:
    text = resources.files("jaxscaler.cluster").joinpath("devices.csv").read_text()
    return tuple(csv.DictReader(text.splitlines()))


@cache
def known_devices() -> dict[str, tuple[Device, Fabric]]:
    """Every device of the table by name and alias."""
    table = {}
    for row in _rows():
        entry = _entry(row)
        for name in (row["name"], *filter(None, row["aliases"].split("|"))):
            table[name] = entry
    return table


@cache
def known_kinds() -> dict[str, str]:
    """Device name by JAX's `device_kind`."""
    return {kind: row["name"] for row in _rows() for kind in row["device_kinds"].split("|") if kind}


def find_device(name: str) -> tuple[Device, Fabric]:
    """The device called `name` and how it is wired; ClusterError with the closest names if none."""
    table = known_devices()
    if name.lower() not in table:
        close = difflib.get_close_matches(name.lower(), table, n=3, cutoff=0.4)
        hint = f"closest: {', '.join(close)}; " if close else ""
        raise ClusterError(
            f"unknown device {name!r}; {hint}known: {', '.join(row['name'] for row in _rows())}; "
            "describe others in a file (Cluster.load)"
        )
    return table[name.lower()]


# NVIDIA's "CUDA GPU Compute Capability" table.
CAPABILITY = {
    "v100-16": "7.0", "v100-32": "7.0", "a100-40": "8.0", "a100-80": "8.0", "l4": "8.9",
    "h100": "9.0", "h800": "9.0", "h200": "9.0", "b200": "10.0", "gb200": "10.0", "gb300": "10.3",
}  # fmt: skip
