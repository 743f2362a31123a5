"""`jaxscaler calibrate`: how fast the devices present compute and talk, into a `Profile`.

Kernels are timed in chains whose links depend on each other, so that what is timed is the device
and not its being called; a block of calls lasts `BLOCK` seconds or more, and the median of `BLOCKS`
of them counts, after a warm-up. Collectives run over neighbours of each level of the cluster, in
all groups at once, as a step's do. To their times `launch + a * latency + b * bytes / bandwidth`,
with a and b from `cost.collective`, is fitted by least squares of the relative error, none of the
three below 0.

Several processes: each calls `calibrate`, on the same options; process 0's times count in all.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxscaler import processes
from jaxscaler.cluster.cluster import Cluster, Level
from jaxscaler.cluster.curves import BYTES, ELEMENTWISE, MATMUL, Curve, curve_of
from jaxscaler.cluster.host import Host
from jaxscaler.cluster.links import COLLECTIVES, Link
from jaxscaler.cluster.mesh import Axis, Part, device_grid
from jaxscaler.cluster.profile import Moved, Profile
from jaxscaler.cost.collective import unit_times
from jaxscaler.errors import ClusterError
from jaxscaler.target import progress as progress_of

BLOCK, BLOCKS = 0.02, 7  # seconds of a block of calls, at least; blocks
DISPATCHES = 20  # calls of which one's dispatch is the median
CHAIN = 8  # kernels, or collectives, of one call
FASTEST = 1e15  # bytes/s: no link is taken to be faster
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "f64": jnp.float64}
Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class Sizes:
    """What is measured: rows of square matrices, bytes that elementwise kernels read and write,
    bytes of collectives. Of rising sizes none is begun after one whose kernel took `slowest`
    seconds.
    """

    matmul: tuple[int, ...] = tuple(2**k for k in range(7, 15))
    dtypes: tuple[str, ...] = ("bf16", "f32")
    elementwise: tuple[int, ...] = tuple(4**k for k in range(7, 16))
    collective: tuple[int, ...] = tuple(4**k for k in range(6, 15))
    slowest: float = 0.1


FULL = Sizes()
QUICK = Sizes((64, 128, 256, 512), ("bf16", "f32"), (4**7, 4**9, 4**11), (4**6, 4**8, 4**10), 0.02)


def calibrate(
    cluster: Cluster | None = None,
    devices: Sequence[jax.Device] | None = None,
    sizes: Sizes = FULL,
    command: str = "",
    progress: Progress | None = None,
) -> Profile:
    """Measure `devices` (default: all that JAX sees), which form `cluster` (default: as JAX says).

    Raises ClusterError where the devices differ, or are not as many as the cluster has.
    """
    say = progress or (lambda phase, detail: None)
    devices = jax.devices() if devices is None else list(devices)
    cluster = Cluster.local(devices) if cluster is None else cluster
    grid = device_grid(tuple(level.size for level in cluster.levels), devices)
    curves = []
    for dtype in sizes.dtypes:
        if jax.dtypes.canonicalize_dtype(DTYPES[dtype]) != DTYPES[dtype]:
            raise ClusterError(f"{dtype} is measured only with JAX_ENABLE_X64=1")
        say("matmul", dtype)
        curves.append(_curve(MATMUL, dtype, sizes.matmul, sizes.slowest, lambda n: 2.0 * n**3))
    say("elementwise", "f32")
    curves.append(_curve(ELEMENTWISE, BYTES, sizes.elementwise, sizes.slowest, float))
    moved = []
    for at, level in enumerate(cluster.levels):
        for size in _lengths(level.size):
            for kind in COLLECTIVES:
                say(kind, f"{size} of {level.name}")
                moved += _collectives(kind, grid, at, level, size, sizes)
    say("dispatch", f"{len(devices)} devices")
    return Profile(
        device_kind=devices[0].device_kind,
        cluster=cluster.name,
        devices=len(devices),
        processes=len({device.process_index for device in devices}),
        curves=tuple(curves),
        links=tuple(fitted(cluster, moved).items()),
        moved=tuple(moved),
        versions=tuple((name, version(name)) for name in ("jax", "jaxlib")),
        command=command,
        host=host_of(devices) if len(devices) > 1 and jax.process_count() == 1 else None,
    )


# -- time ------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[Any], Any], state: Any, runs: int = CHAIN) -> float:
    """Seconds of one of the `runs` kernels of `state = call(state)`: the median of blocks of calls.

    The same in every process. `call` is not traced here: jit it.
    """
    for _ in range(2):  # compiles; fills caches
        state = jax.block_until_ready(call(state))
    start = time.perf_counter()
    state = jax.block_until_ready(call(state))
    once = _agreed(time.perf_counter() - start)
    calls = min(max(1, math.ceil(BLOCK / max(once, 1e-9))), 1000)
    blocks = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(calls):
            state = call(state)
        jax.block_until_ready(state)
        blocks.append(time.perf_counter() - start)
    return _agreed(statistics.median(blocks)) / (calls * runs)


def _agreed(value: float) -> float:
    """What process 0 has of it, in all."""
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))


# -- kernels ---------------------------------------------------------------------------------------


def _curve(
    op: str, dtype: str, sizes: Sequence[int], slowest: float, amount: Callable[[int], float]
) -> Curve:
    found: list[tuple[float, float]] = []
    for size in sorted(sizes):
        one = _matmul(size, dtype) if op == MATMUL else _stream(size)
        found.append((amount(size), one))
        if one > slowest:
            break
    amounts, seconds = zip(*found)
    return curve_of(op, dtype, np.array(amounts), np.array(seconds))


def _matmul(n: int, dtype: str) -> float:
    """Seconds of a product of square matrices. The factor is a reflection, so that what is passed
    on neither grows nor vanishes, with no entry 0: zeros would draw less power."""
    keys = jax.random.split(jax.random.key(0))
    v = jax.random.normal(keys[0], (n, 1))
    w = (jnp.eye(n) - 2 * v @ v.T / (v * v).sum()).astype(DTYPES[dtype])
    x = jax.random.normal(keys[1], (n, n)).astype(DTYPES[dtype])

    @jax.jit
    def chain(x, w):
        for _ in range(CHAIN):
            x = x @ w
        return x

    return seconds_of(lambda x: chain(x, w), x)


def _stream(nbytes: int) -> float:
    """Seconds of a kernel that reads and writes an array, `nbytes` together."""

    @jax.jit
    def chain(x):  # a loop: the compiler would make one kernel of them
        return jax.lax.fori_loop(0, CHAIN, lambda _, x: x * 0.5 + 1.0, x)

    return seconds_of(chain, jnp.ones(max(1, nbytes // 8), jnp.float32))


# -- collectives -----------------------------------------------------------------------------------


def _lengths(size: int) -> list[int]:
    """The lengths of neighbours to measure on a level: powers of two that divide it, and all."""
    return sorted({n for k in range(1, 20) if size % (n := 2**k) == 0} | ({size} - {1}))


def _collectives(
    kind: str, grid: np.ndarray, at: int, level: Level, size: int, sizes: Sizes
) -> Iterator[Moved]:
    """Times of one kind of collective among `size` neighbours of a level, by bytes."""
    shape = (*grid.shape[:at], level.size // size, size, *grid.shape[at + 1 :])
    names = tuple(f"a{i}" for i in range(len(shape)))
    mesh = jax.sharding.Mesh(grid.reshape(shape), names)
    over = names[at + 1]
    for nbytes in sorted(sizes.collective):
        local = nbytes // size if kind == "all_gather" else nbytes
        elements = -(-local // (4 * size)) * size  # what each device holds, in whole parts
        moves = elements * 4 * (size if kind == "all_gather" else 1)
        one = seconds_of(*chained(kind, mesh, over, elements))
        yield Moved(kind, level.name, size, float(moves), one)
        if one > sizes.slowest:
            break


def chained(
    kind: str, mesh: jax.sharding.Mesh, over: str, elements: int
) -> tuple[Callable[[Any], Any], jax.Array]:
    """(a call of `CHAIN` collectives over a mesh axis, one after the other; what it begins with).

    Each device has `elements` of f32. Raises ClusterError where the compiler makes fewer of them.
    """
    size = mesh.shape[over]
    run = _RUN[kind]

    def chain(x):
        for _ in range(CHAIN):  # each needs an element of the last
            x = x.at[0].set(run(x, over, size).ravel()[0] / size)
        return x

    spec = PartitionSpec(mesh.axis_names)
    call = jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
        donate_argnums=0,
    )
    sharding = NamedSharding(mesh, spec)
    begin = jax.jit(lambda: jnp.ones(elements * mesh.size, jnp.float32), out_shardings=sharding)()
    compiled = call.lower(begin).compile()
    try:
        made = len(re.findall(_HLO, compiled.as_text() or ""))
    except jax.errors.JaxRuntimeError as error:  # some TPU programs can not be printed
        warnings.warn(f"whether {CHAIN} {kind} are run is not known: {error}", stacklevel=2)
        made = CHAIN
    if made < CHAIN:
        raise ClusterError(f"the compiler makes {made} of {CHAIN} chained {kind}: report this")
    return compiled, begin


_RUN: dict[str, Callable[[Any, str, int], Any]] = {
    "all_gather": lambda x, axis, n: jax.lax.all_gather(x, axis, tiled=True),
    "reduce_scatter": lambda x, axis, n: jax.lax.psum_scatter(x, axis, tiled=True),
    "all_reduce": lambda x, axis, n: jax.lax.psum(x, axis),
    "all_to_all": lambda x, axis, n: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
    "collective_permute": lambda x, axis, n: jax.lax.ppermute(
        x, axis, [(i, (i + 1) % n) for i in range(n)]
    ),
}
_HLO = (
    r" (?:all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\("
    r"|calls=%?(?:all-reduce-scatter|async_collective)"
)


def fitted(cluster: Cluster, moved: Sequence[Moved]) -> dict[str, tuple[tuple[str, Link], ...]]:
    """Level -> kind of collective -> the link that fits its times best."""
    found = {}
    for level in cluster.levels:
        kinds = {p.kind: None for p in moved if p.level == level.name}
        links = tuple(
            (
                kind,
                _link(level, kind, [p for p in moved if (p.level, p.kind) == (level.name, kind)]),
            )
            for kind in kinds
        )
        if links:
            found[level.name] = links
    return found


def _link(level: Level, kind: str, points: Sequence[Moved]) -> Link:
    terms = [unit_times(kind, Axis(level.name, (Part(level, p.size),))) for p in points]
    rows = np.array([[1.0, a, b * p.nbytes] for (a, b), p in zip(terms, points)])
    if np.ptp(rows[:, 1]) == 0:  # one length: the two can not be told apart
        rows[:, 1] = 0.0
    launch, latency, per_byte = _least(rows, np.array([p.seconds for p in points]))
    bandwidth = 1.0 / max(per_byte, 1.0 / FASTEST)
    return Link(level.link.kind, bandwidth, latency, launch, wrap=level.link.wrap)


def _least(rows: np.ndarray, seconds: np.ndarray) -> list[float]:
    """x >= 0 with the least relative error of rows @ x, squared and summed."""
    from scipy.optimize import nnls  # of JAX's own needs; late, for the command line's sake

    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    x, _ = nnls(rows / scale / seconds[:, None], np.ones(len(rows)))
    return (x / scale).tolist()


# -- dispatch --------------------------------------------------------------------------------------


def host_of(devices: Sequence[jax.Device], arrays: Sequence[int] = (1, 8, 64)) -> Host:
    """What the host takes to dispatch jitted calls of so many arrays, and copies between halves.

    Times are until the call returns, medians; each call's results are waited for outside of that.
    """
    rows, seconds = [], []
    for some in (devices[:1], devices[: len(devices) // 2], devices):
        sharding = _cut_over(some)
        for n in arrays:
            xs = [jax.device_put(np.zeros(len(some), np.float32), sharding) for _ in range(n)]
            run = jax.jit(lambda *xs: [x + 1 for x in xs], out_shardings=[sharding] * n)
            rows.append((len(some), 2 * n * len(some)))
            seconds.append(_until_it_returns(functools.partial(run, *xs)))
    call, shard = _least(np.array(rows, float), np.array(seconds))
    half = len(devices) // 2
    here, there = (_cut_over(some) for some in (devices[:half], devices[half : 2 * half]))
    x = jax.block_until_ready(jax.device_put(np.zeros(half, np.float32), here))
    move = _until_it_returns(lambda: jax.device_put(x, there)) - half * call
    return Host(call, shard, max(move, 0.0), f"measured on {len(devices)} devices")


def _cut_over(devices: Sequence[jax.Device]) -> NamedSharding:
    return NamedSharding(jax.sharding.Mesh(np.array(devices), "d"), PartitionSpec("d"))


def _until_it_returns(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(DISPATCHES + 2):  # the first ones compile and fill caches
        start = time.perf_counter()
        made = call()
        times.append(time.perf_counter() - start)
        jax.block_until_ready(made)
    return statistics.median(times[2:])


# -- the command -----------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser, name: str) -> None:
    """Of `jaxscaler calibrate`, for the command line."""
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="written as JSON")
    command.add_argument(
        "--cluster", help="what the devices form, such as h100:8x4 (default: as JAX says)"
    )
    command.add_argument("--quick", action="store_true", help="few and small sizes")
    command.add_argument("--quiet", action="store_true", help="no progress")
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.out.is_dir() or not args.out.parent.is_dir():  # before a long run, not after it
        raise ClusterError(f"{args.out}: no file can be written there")
    processes.join()
    cluster = None
    if args.cluster is not None:
        toml = args.cluster.endswith(".toml")
        cluster = Cluster.load(args.cluster) if toml else Cluster.parse(args.cluster)
    writes = jax.process_index() == 0
    command = " ".join(["jaxscaler", *sys.argv[1:]])
    with progress_of(args.quiet or not writes) as report:
        found = calibrate(cluster, None, QUICK if args.quick else FULL, command, report)
    if writes:
        found.save(args.out)
        print("\n".join(_lines(found)))
    return 0


def _lines(profile: Profile) -> Iterator[str]:
    """What was measured, in a few words."""
    yield f"{profile.devices} x {profile.device_kind}, {profile.processes} processes"
    for curve in profile.curves:
        unit = 1e12 if curve.dtype else 1e9
        words = f"{curve.dtype}, TFLOP/s" if curve.dtype else "GB/s"
        yield f"{curve.op} {words}: " + " ".join(f"{rate / unit:.4g}" for rate in curve.rates)
    for level, kinds in profile.links:
        for kind, link in kinds:
            yield (
                f"{kind} over {level}: {link.bandwidth / 1e9:.4g} GB/s, "
                f"{link.launch * 1e6:.3g} us + {link.latency * 1e6:.3g} us a hop"
            )
    if (host := profile.host) is not None:
        yield (
            f"dispatch: {host.call * 1e6:.3g} us a call and device, {host.shard * 1e6:.3g} us an "
            f"array of it; {host.move * 1e6:.3g} us a copy"
        )
