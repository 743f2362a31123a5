"""`jaxscaler.estimate`: what it takes to train or serve a transformer, on what, how long, at what
price."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.devices import find_device
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.errors import ConfigError, InfeasibleError
from jaxscaler.estimate import failures, flops
from jaxscaler.estimate.compared import Compared, compared
from jaxscaler.estimate.config import ModelConfig, model_of
from jaxscaler.estimate.constants import constants_for
from jaxscaler.estimate.fleet import fleet, mixed_of
from jaxscaler.estimate.parallel import ParallelConfig
from jaxscaler.estimate.price import Priced, dtype_for, price
from jaxscaler.estimate.rlhf import Rollouts, feedback
from jaxscaler.estimate.search import (
    GAIN,
    Key,
    Options,
    Point,
    best_ways,
    grower,
    knee,
    scaling,
    smallest,
    usual_batch,
)

BAND = 0.15  # relative error of step times that the constants are held to (benchmarks)
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, "Training Compute-Optimal LLMs", table 3
MOST = 1024  # devices that the scaling curve goes to
KEPT = 14.0  # bytes per parameter of a checkpoint: f32 parameter, two moments, and one copy in bf16


@dataclass(frozen=True)
class Run:
    """A whole run on a number of devices: failures, days, price.

    days: with what failures cost. cost: in the unit of the price per device-hour, None without one.
    """

    point: Point
    goodput: failures.Goodput
    days: float
    cost: float | None


@dataclass(frozen=True)
class Estimate:
    """What training takes.

    where: a device by name, or a cluster that grows by nodes. chosen: the recommended run: on the
    devices that were asked for, or else the smallest number that keeps a deadline, the fastest
    within a budget, or the knee of the scaling curve. why: which of these. runs: of the scaling
    curve from the smallest cluster that fits (`smallest`). ways: how to spread the model over the
    chosen devices, fastest first. tflops: (floor, expected, best) of model TFLOP/s per device:
    below the floor something is wrong. compression: what narrower gradients bring to the chosen
    way, None where nothing is reduced.
    """

    model: ModelConfig
    where: str | Cluster
    options: Options
    tokens: float
    work: flops.Work
    smallest: int | None
    runs: tuple[Run, ...]
    knee: int | None
    chosen: Run
    why: str
    ways: tuple[Priced, ...]
    tflops: tuple[float, float, float]
    price_per_hour: float | None
    notes: tuple[str, ...] = ()
    compression: Compared | None = None

    @property
    def best(self) -> Priced:
        """The price of a step as chosen."""
        return self.chosen.point.best

    def explain(self) -> list[Any]:
        """Each number with formula, values and source: `explain.Line`s."""
        from jaxscaler.estimate.explain import lines

        return lines(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        from jaxscaler.estimate.show import as_data

        return as_data(self)

    def show(self) -> None:
        """Print tables."""
        from jaxscaler.estimate.show import show

        show(self)

    def plot(self, path: str | Path) -> None:
        """Memory, scaling and families of plans as a picture (.png, .svg); needs matplotlib."""
        from jaxscaler.estimate.plot import plot

        plot(self, path)


def estimate(
    model: Any,
    *args: Any,
    device: str | None = None,
    cluster: str | Cluster | Mixed | None = None,
    devices: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    tokens: float | None = None,
    parallel: ParallelConfig | Mapping[str, Any] | None = None,
    micro_batch: int | None = None,
    recompute: str | None = None,
    deadline_days: float | None = None,
    budget: float | None = None,
    price_per_hour: float | None = None,
    mtbf_hours: float = failures.MTBF_HOURS,
    measured_tflops: float | None = None,
    most: int = MOST,
    only: str | None = None,
    rlhf: Rollouts | Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """What it takes to train a model.

    model: a `ModelConfig`, the name of one, a Hugging Face `config.json` (path or contents), or a
    train step, with `args` its abstract arguments and `cluster` (then see `estimate_step`).
    device: such as "h100"; `cluster`: such as "h100:8x4", or a `Cluster` (its network and nodes;
    devices then defaults to all of it), or two kinds ("h100:8x4+a100:8x4", or a `Mixed`), for
    which the answer is a `fleet.Fleet`. devices: how many; 0, or a device alone: as recommended.
    batch: samples a step, as usual for the size of the model unless given; seq: tokens a sample,
    the model's context unless given. tokens: of the run, 20 per parameter unless given. parallel,
    micro_batch, recompute: the way to spread it, searched for unless given. deadline_days, budget
    (in the unit of price_per_hour, of one device), mtbf_hours (of one device): for the recommended
    number. measured_tflops: what one device was measured to reach on this model; speeds are scaled
    to that. most: devices of the scaling curve at most. only: a family of ways ("data", "tensor",
    "tensor+pipeline", …) that alone are looked at. rlhf: what an iteration of reinforcement
    learning is (`rlhf.Rollouts`, or its fields), in place of a training run; the answer is then a
    `rlhf.Feedback`. options: fields of `search.Options`.

    Raises ConfigError, naming the fields, for what can not be; InfeasibleError where nothing fits.
    """
    if callable(model):
        from jaxscaler.estimate.workload import estimate_step

        if cluster is None or isinstance(cluster, Mixed):
            raise ConfigError("cluster: a train step is estimated on one, such as h100:8x4")
        return estimate_step(
            model, *args, cluster=cluster, price_per_hour=price_per_hour, mtbf_hours=mtbf_hours,
            **options,
        )  # fmt: skip
    model = model_of(model)
    if isinstance(cluster, str) and "+" in cluster:
        cluster = mixed_of(cluster)
    one_kind = {
        "parallel": parallel, "micro_batch": micro_batch, "recompute": recompute,
        "deadline_days": deadline_days, "budget": budget, "price_per_hour": price_per_hour,
        "measured_tflops": measured_tflops, "only": only,
    }  # fmt: skip
    if isinstance(cluster, Mixed):
        _refuse("a fleet of two kinds", device=device, devices=devices, rlhf=rlhf, **one_kind)
        job = _options(model, batch, seq, options)
        return fleet(model, cluster, job, _tokens(model, tokens))
    if rlhf is not None:
        _refuse("rlhf, which needs a cluster", device=device, devices=devices, seq=seq,
                tokens=tokens, **one_kind)  # fmt: skip
        if cluster is None:
            raise ConfigError("cluster: rlhf is estimated on one, such as h100:8x4")
        where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        return feedback(model, where, _rollouts(rlhf, batch), _options(model, 1, 1, options))
    kind, devices = _kind(device, cluster, devices)
    grow, _ = grower(kind)
    for name, value in (("deadline_days", deadline_days), ("budget", budget),
                        ("price_per_hour", price_per_hour),
                        ("measured_tflops", measured_tflops)):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value!r}: a number above 0")
    if budget is not None and price_per_hour is None:
        raise ConfigError(f"budget={budget!r} needs price_per_hour, of one device")
    job = _options(model, batch, seq, options)
    notes: list[str] = []
    if measured_tflops is not None:
        job, note = _scaled(model, grow, kind, job, measured_tflops)
        notes.append(note)
    tokens = _tokens(model, tokens)

    def run(point: Point) -> Run:
        goodput = failures.goodput(point.devices, KEPT * model.parameters, mtbf_hours=mtbf_hours)
        seconds = tokens / point.best.tokens_per_second
        days = seconds / 86400 / goodput.share if goodput.share else float("inf")
        cost = None if price_per_hour is None else days * 24 * point.devices * price_per_hour
        return Run(point, goodput, days, cost)

    known: set[Key] = set()
    given = parallel is not None or micro_batch is not None or recompute is not None
    if given:
        ways = [_given(model, grow, parallel, micro_batch, recompute, devices, job, notes)]
        runs, first, bend = [run(Point(ways[0].parallel.devices, ways[0], 1.0))], None, None
        chosen, why = runs[0], "the way that was given"
    elif devices is not None:
        ways = best_ways(model, grow(devices), job, known=known, only=only)
        runs, first, bend = [run(Point(devices, ways[0], 1.0))], None, None
        chosen, why = runs[0], f"the {devices} devices that were asked for"
    else:
        _, ways = smallest(model, kind, job, known=known, only=only)
        first = ways[0].parallel.devices
        points = scaling(model, kind, job, ways[0], max(most, first), known=known, only=only)
        runs = [run(point) for point in points]
        bend = knee(points).devices
        chosen, why = _recommended(runs, bend, deadline_days, budget)
        if chosen.point.devices != first:
            ways = best_ways(model, grow(chosen.point.devices), job, 2, known, only)
    best = chosen.point.best
    notes.append(f"speeds: {best.constants.source}")
    narrowed = None
    if best.parallel.dp * best.parallel.cp > 1:
        narrowed = compared(best, grow(best.parallel.devices), job)
    return Estimate(
        model, kind, job, tokens, flops.training(model, job.batch, job.seq), first,
        tuple(runs), bend, chosen, why, tuple(ways),
        (best.tflops * (1 - BAND), best.tflops, best.tflops * (1 + BAND)), price_per_hour,
        tuple(notes), narrowed,
    )  # fmt: skip


def _refuse(what: str, **given: Any) -> None:
    if wrong := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{', '.join(wrong)}: not an option of {what}")


def _rollouts(given: Rollouts | Mapping[str, Any], batch: int | None) -> Rollouts:
    """`batch` is that of `rlhf` unless it has its own."""
    if isinstance(given, Rollouts):
        _refuse("rlhf, whose rollouts have their own", batch=batch)
        return given
    known = [field.name for field in fields(Rollouts)]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"rlhf: unknown {', '.join(unknown)}; there is {', '.join(known)}")
    values = ({} if batch is None else {"batch": batch}) | dict(given)
    if lacking := [name for name in known[:4] if name not in values]:
        raise ConfigError(f"rlhf: {', '.join(lacking)} is missing")
    return Rollouts(**values)


def _tokens(model: ModelConfig, given: float | None) -> float:
    if given is not None and not 0 < given < float("inf"):
        raise ConfigError(f"tokens={given!r}: a number above 0")
    return float(given or TOKENS_PER_PARAMETER * model.parameters)


def _kind(
    device: str | None, cluster: str | Cluster | None, devices: int | None
) -> tuple[str | Cluster, int | None]:
    if (device is None) == (cluster is None):
        raise ConfigError("give one of device (such as h100) and cluster (such as h100:8x4)")
    if device is not None:
        find_device(device)  # an unknown one is an error here
        return device, devices or None
    assert cluster is not None
    found = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    growable = found.levels[0].link.kind == "network"
    if devices is not None and devices != found.num_devices and not growable:
        raise ConfigError(f"devices={devices}: cluster {found.name} has {found.num_devices}")
    if not growable:
        return found.device.name, found.num_devices
    return found, found.num_devices if devices is None else devices or None


def _options(
    model: ModelConfig, batch: int | None, seq: int | None, given: Mapping[str, Any]
) -> Options:
    known = [field.name for field in fields(Options) if field.name not in ("batch", "seq")]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"unknown option {', '.join(unknown)}; there is {', '.join(known)}")
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}={value!r}: a whole number, 1 or more")
    seq = seq or model.context
    return Options(batch or usual_batch(model, seq), seq, **given)


def _given(
    model: ModelConfig, grow: Callable[[int], Cluster], parallel: Any, micro: int | None,
    recompute: str | None, devices: int | None, options: Options, notes: list[str],
) -> Priced:  # fmt: skip
    if parallel is None:
        parallel = ParallelConfig(dp=devices or 1)
    elif isinstance(parallel, Mapping):
        known = [field.name for field in fields(ParallelConfig)]
        if unknown := sorted(set(parallel) - set(known)):
            raise ConfigError(f"unknown option {', '.join(unknown)}; there is {', '.join(known)}")
        parallel = ParallelConfig(**parallel)
    priced = price(
        model, parallel, grow(devices or parallel.devices), micro_batch=micro or 1,
        recompute=recompute or "none", **options.keywords(),
    )  # fmt: skip
    if not priced.fits:
        notes.append(
            f"it does not fit: {priced.memory_bytes / 1e9:.3g} GB of "
            f"{priced.memory_limit / 1e9:.3g} GB"
        )
    return priced


def _scaled(
    model: ModelConfig, grow: Callable[[int], Cluster], kind: str | Cluster, options: Options,
    measured: float,
) -> tuple[Options, str]:  # fmt: skip
    """Options whose speeds of a device make one of them reach the model TFLOP/s measured on it."""
    if isinstance(kind, str):
        cluster = grow(1)
    else:
        cluster = replace(kind, levels=tuple(replace(x, size=1) for x in kind.levels))
    constants = options.constants or constants_for(cluster.device, options.stack)
    small = replace(options, batch=1, constants=constants)
    found = price(model, ParallelConfig(), cluster, micro_batch=1, **small.keywords()).tflops
    share = measured / found
    peak = cluster.device.flops(options.dtype or dtype_for(cluster.device)) / 1e12
    if measured > peak:
        raise ConfigError(f"measured_tflops={measured!r}: the device's peak is {peak:.4g}")
    scaled = replace(
        constants,
        matmul=constants.matmul * share, attention=constants.attention * share,
        vector=constants.vector * share, launch_us=constants.launch_us / share,
        source=f"{constants.source}, scaled by {share:.3g} to {measured:g} TFLOP/s as measured",
    )  # fmt: skip
    note = f"one device: {found:.4g} TFLOP/s priced, {measured:g} measured; speeds scaled by that"
    return replace(options, constants=scaled), note


def _recommended(
    runs: Sequence[Run], bend: int, deadline: float | None, budget: float | None
) -> tuple[Run, str]:
    left = list(runs)
    if budget is not None:
        left = [run for run in left if run.cost is not None and run.cost <= budget]
        if not left:
            least = min(run.cost for run in runs if run.cost is not None)
            raise InfeasibleError(f"budget={budget:g}: the cheapest run costs {least:.4g}")
    if deadline is not None:
        soon = [run for run in left if run.days <= deadline]
        if not soon:
            fastest = min(left, key=lambda run: run.days)
            raise InfeasibleError(
                f"deadline_days={deadline:g}: the fastest run, on {fastest.point.devices} devices, "
                f"takes {fastest.days:.4g}: allow more devices (most), or another batch"
            )
        return min(soon, key=lambda run: run.point.devices), "the fewest that keep the deadline"
    if budget is not None:
        return min(left, key=lambda run: run.days), "the fastest within the budget"
    chosen = next(run for run in runs if run.point.devices == bend)
    if chosen is runs[-1]:
        return chosen, f"every doubling up to here brings {2 * GAIN:g} times the speed or more"
    return chosen, f"the knee: twice as many bring less than {2 * GAIN:g} times the speed"
