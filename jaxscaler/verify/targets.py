"""What a compiler must be told of a cluster that is not there, and which packages bring it."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata, resources
from typing import Any

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.devices import find_device
from jaxscaler.errors import PlanError

CUDA, TPU, CPU = "cuda", "tpu", "cpu"
PRESENT = "present"  # the topology of devices that are there, which kernels are tuned on

# Per platform: the extra that brings the compiler, its packages, and what an ahead-of-time compile
# of it can not know.
EXTRA = {CUDA: "gpu", TPU: "tpu", CPU: ""}
PACKAGES = {
    CUDA: ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
    TPU: ("libtpu",),
    CPU: (),
}
AS_JAXLIB = ("jax-cuda12-plugin", "jax-cuda12-pjrt")  # must be of jaxlib's own version
UNKNOWN = {
    CUDA: (
        "autotuning: on the device kernels are measured and may be others",
        "workspaces of NCCL, cuBLAS and cuDNN, allocated besides the program's buffers",
        "fragmentation of the device's allocator",
    ),
    TPU: ("fragmentation of the device's allocator", "what else runs on the chip"),
    CPU: ("CPU temporaries, which say nothing of another device's",),
}

# v4 and v5p join the two cores of a chip into one device; what libtpu calls that, and the chips of
# a host, which matter only where several slices are joined.
_TPUS: dict[str, dict[str, Any]] = {
    "v4": {"chip_config_name": "megacore"},
    "v5e": {},
    "v5p": {},
    "v6e": {},
}


@dataclass(frozen=True)
class Target:
    """Devices that a program is compiled for: `topology`, `options` as JAX's topologies take them.

    `memory`: bytes that a program can use on one device.
    """

    name: str
    platform: str
    devices: int
    memory: float
    topology: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def target_of(cluster: str | Cluster) -> Target:
    """The target that stands for a cluster. PlanError where no compiler for it is known.

    Devices by their names in the device table: the GPUs of `gpu_targets.csv`, the TPUs v4, v5e,
    v5p and v6e, and `cpu`. A device described in a file is taken for the one whose name it bears.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    device, sizes = cluster.device, [level.size for level in cluster.levels]
    count, memory = cluster.num_devices, device.hbm_bytes
    options: dict[str, Any]
    if device.name in _gpus():
        inner = sizes[-1]
        grid = f"1x{count // inner}x{inner}"  # partitions, hosts, devices of a host
        options = {"topology": grid, "target_config": _gpus()[device.name]}
        return Target(cluster.name, CUDA, count, memory, device.name, options)
    if device.name in _TPUS:
        rank = find_device(device.name)[1].torus_rank
        torus = "x".join(map(str, sizes[-rank:]))
        options = dict(_TPUS[device.name])
        if len(sizes) > rank and sizes[0] > 1:
            options["num_slices"] = sizes[0]
        return Target(cluster.name, TPU, count, memory, f"{device.name}:{torus}", options)
    if device.name == "cpu":
        return Target(cluster.name, CPU, count, memory)
    known = ", ".join((*_gpus(), *_TPUS, "cpu"))
    raise PlanError(
        f"no compiler is known for {device.name} ({cluster.name}); plans can be verified for "
        f"{known}"
    )


def missing(target: Target, version: Callable[[str], str] = metadata.version) -> tuple[str, ...]:
    """The target's packages that are not installed."""
    return tuple(name for name in PACKAGES[target.platform] if not _version(name, version))


def skewed(target: Target, version: Callable[[str], str] = metadata.version) -> str:
    """What does not fit together of the installed packages; "" if all does."""
    jaxlib = _version("jaxlib", version)
    wrong = [
        f"{name} {found}"
        for name in PACKAGES[target.platform]
        if name in AS_JAXLIB and (found := _version(name, version)) and found != jaxlib
    ]
    return f"{', '.join(wrong)} with jaxlib {jaxlib}" if wrong else ""


def versions(target: Target, version: Callable[[str], str] = metadata.version) -> dict[str, str]:
    """Versions of what compiles for a target."""
    names = ("jax", "jaxlib", *PACKAGES[target.platform])
    return {name: _version(name, version) for name in names}


def _version(name: str, version: Callable[[str], str]) -> str:
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _gpus() -> dict[str, str]:
    """Device name -> the text in which XLA takes a GPU's description."""
    text = resources.files("jaxscaler.verify").joinpath("gpu_targets.csv").read_text()
    return {row["device"]: _target_config(row) for row in csv.DictReader(text.splitlines())}


def _target_config(row: Mapping[str, str]) -> str:
    major, minor = re.fullmatch(r"(\d+)\.(\d+)", row["compute_capability"]).groups()  # type: ignore[union-attr]
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": row["shared_memory_per_core"],
        "threads_per_core_limit": 2048,
        "core_count": row["core_count"],
        "fpus_per_core": row["fpus_per_core"],
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": row["memory_bandwidth_bytes_s"],
        "l2_cache_size": row["l2_cache_bytes"],
        "clock_rate_ghz": row["clock_ghz"],
        "device_memory_size": row["device_memory_bytes"],
        "shared_memory_per_block_optin": row["shared_memory_per_block_optin"],
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return (
        f"gpu_device_info {{ {info} {capability} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } '
        f'device_description_str: "{row["description"]}"'
    )
