"""How well predictions of published steps do: errors, their floor, ranks and regret.

Everything here is of a list of `Scored`: a published row and what was predicted for it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from _published import Published
from scipy.optimize import nnls
from scipy.stats import spearmanr

REPEATS = 200  # draws of a noise ceiling
FEW = 5  # plans that a group must have to be ranked
ENOUGH = 3  # repeated plans that a source must have for a noise of its own
SIZES = 4  # micro-batches that show a curve
DEGREES = ("tp", "pp", "micro_batch", "zero", "recompute")  # that plans differ in, but for dp
SURE = 2.0  # standard deviations by which seconds differ that are not the same


@dataclass(frozen=True)
class Scored:
    """A row and its prediction: seconds a step, bytes a device (None: not asked)."""

    row: Published
    seconds: float
    memory: float | None = None


@dataclass(frozen=True)
class Errors:
    """Relative errors of predicted over measured: mean and median of their size, and their mean."""

    rows: int
    mape: float
    median: float
    bias: float


def errors(pairs: Iterable[tuple[float, float]]) -> Errors | None:
    """Of (predicted, measured) pairs; None without any."""
    found = [predicted / measured - 1 for predicted, measured in pairs]
    if not found:
        return None
    sizes = [abs(e) for e in found]
    return Errors(len(found), statistics.fmean(sizes), statistics.median(sizes),
                  statistics.fmean(found))  # fmt: skip


def seconds_errors(scored: Iterable[Scored]) -> Errors | None:
    """Errors of the seconds of a step, where they were measured."""
    return errors((s.seconds, s.row.seconds) for s in scored if s.row.seconds)


def memory_errors(scored: Iterable[Scored]) -> Errors | None:
    """Errors of bytes a device, where they were measured and predicted."""
    return errors((s.memory, s.row.memory) for s in scored if s.row.memory and s.memory)


def grouped(scored: Iterable[Scored], key: Callable[[Published], Hashable]) -> dict:
    """Lists of `scored` by a key of their rows, in order of first appearance."""
    groups: dict = defaultdict(list)
    for s in scored:
        groups[key(s.row)].append(s)
    return dict(groups)


def noise(scored: Iterable[Scored]) -> tuple[int, float]:
    """(repeated plans, their coefficient of variation): no prediction can do better on those.

    The same seconds twice are one measurement that was listed twice.
    """
    repeated = [
        sorted({s.row.seconds for s in same if s.row.seconds})
        for same in grouped(scored, lambda r: (r.group, r.plan)).values()
    ]
    spread = [_variation(times) for times in repeated if len(times) > 1]
    return len(spread), float(np.sqrt(np.mean(np.square(spread)))) if spread else 0.0


def _variation(times: Sequence[float]) -> float:
    return statistics.stdev(times) / statistics.fmean(times)


def floors(scored: Sequence[Scored]) -> dict[str, float]:
    """Source -> noise of a measurement: its own where it has `ENOUGH` repeated plans, else that of
    all sources."""
    of_all = noise(scored)[1]
    found = {}
    for source, own in grouped(scored, lambda r: r.source).items():
        plans, spread = noise(own)
        found[source] = spread if plans >= ENOUGH else of_all
    return found


def unevenness(scored: Iterable[Scored]) -> tuple[int, float]:
    """(families, how far measured seconds lie from any smooth curve over the micro-batch).

    A family is a plan at `SIZES` micro-batches b or more. Its step is (B / b + p - 1) times what a
    micro-batch takes, itself a start and a part for each sample: x + y b + z / b, none negative.
    What is left of the best such curve, relative, is noise that repeated plans would show, if there
    were any.
    """
    left = []
    for same in grouped(scored, lambda r: (r.group, replace(r, micro_batch=None).plan)).values():
        times = {s.row.micro_batch: s.row.seconds for s in same if s.row.seconds}
        if len(times) < SIZES:
            continue
        b, seconds = np.array(sorted(times.items())).T
        curve = np.stack([np.ones_like(b), b, 1 / b], axis=1) / seconds[:, None]
        residual = nnls(curve, np.ones_like(b))[1]
        left.append(residual**2 / (len(b) - curve.shape[1]))
    return len(left), float(np.sqrt(np.mean(left))) if left else 0.0


@dataclass(frozen=True)
class Ranked:
    """How the plans of one group (same model, devices, batch) are ranked.

    `spearman`: of predicted and measured seconds; `ceiling`: of measured seconds and themselves
    with the noise of a measurement, mean of seeded draws; `regret`: how much longer than the best
    the plan takes that is predicted to be best; `pairs`: those whose measured seconds differ by
    more than noise makes of equal ones, `wrong`: the share of them that is ranked wrongly.
    `uneven`: see `unevenness`, of the group.
    """

    group: tuple
    plans: int
    spearman: float
    ceiling: float
    regret: float
    pairs: int
    wrong: float
    uneven: float


class Plans(NamedTuple):
    """The different plans of a group: a row of each, mean measured and predicted seconds, and the
    noise of the mean, relative."""

    rows: list[Published]
    measured: np.ndarray
    predicted: np.ndarray
    spread: np.ndarray

    def apart(self) -> tuple[np.ndarray, np.ndarray]:
        """(a, b) of the pairs whose measured seconds differ by more than noise makes of equal
        ones."""
        a, b = np.triu_indices(len(self.rows), 1)
        noise = SURE * np.hypot(self.spread[a], self.spread[b])
        sure = np.abs(np.log(self.measured[a] / self.measured[b])) > noise
        return a[sure], b[sure]


def plans_of(members: Iterable[Scored], floor: float) -> Plans:
    """Repeated measurements count as their mean. `floor`: noise of a measurement."""
    rows, measured, predicted, times = [], [], [], []
    for same in grouped(members, lambda r: r.plan).values():
        seconds = {s.row.seconds for s in same if s.row.seconds}
        if seconds:
            rows.append(same[0].row)
            measured.append(statistics.fmean(seconds))
            predicted.append(same[0].seconds)
            times.append(len(seconds))
    spread = floor / np.sqrt(np.array(times, float))
    return Plans(rows, np.array(measured), np.array(predicted), spread)


def ranks(scored: Sequence[Scored], floor: dict[str, float]) -> list[Ranked]:
    """Of every group of at least `FEW` plans. `floor`: noise of a measurement by source."""
    found = []
    for group, members in grouped(scored, lambda r: r.group).items():
        plans = plans_of(members, floor.get(group[0], 0.0))
        measured, predicted = plans.measured, plans.predicted
        if len(measured) < FEW:
            continue
        again = np.random.default_rng(0).normal(1.0, plans.spread, (REPEATS, len(measured)))
        ceiling = np.mean([spearmanr(measured, times).statistic for times in again * measured])
        regret = measured[np.argmin(predicted)] / measured.min() - 1
        rank = float(spearmanr(measured, predicted).statistic)
        a, b = plans.apart()
        order = (measured[a] - measured[b]) * (predicted[a] - predicted[b])
        wrong = float(np.mean(order <= 0)) if len(order) else 0.0
        found.append(Ranked(group, len(measured), rank, float(ceiling), float(regret), len(order),
                            wrong, unevenness(members)[1]))  # fmt: skip
    return found


class Differing(NamedTuple):
    """Pairs of plans of ranked groups that differ in `what` (and in dp, which follows), measured
    seconds apart by more than noise: how many, how many of them are ranked wrongly, and by how much
    the slower one of these is slower, measured and predicted (a negative share: faster)."""

    source: str
    what: str
    pairs: int
    wrong: int
    measured: float
    predicted: float


def differing(scored: Sequence[Scored], floor: dict[str, float]) -> list[Differing]:
    """By what differs, most wrong pairs first."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for group, members in grouped(scored, lambda r: r.group).items():
        plans = plans_of(members, floor.get(group[0], 0.0))
        if len(plans.rows) < FEW:
            continue
        for a, b in zip(*plans.apart()):
            slow, fast = (a, b) if plans.measured[a] > plans.measured[b] else (b, a)
            both = plans.rows[slow], plans.rows[fast]
            what = "+".join(n for n in DEGREES if getattr(both[0], n) != getattr(both[1], n))
            measured = plans.measured[slow] / plans.measured[fast] - 1
            predicted = plans.predicted[slow] / plans.predicted[fast] - 1
            found[group[0], what].append((float(measured), float(predicted)))
    out = []
    for (source, what), pairs in found.items():
        if wrong := [pair for pair in pairs if pair[1] <= 0]:
            means = (statistics.fmean(x) for x in zip(*wrong))
            out.append(Differing(source, what, len(pairs), len(wrong), *means))
    return sorted(out, key=lambda d: -d.wrong)
