"""How well predictions of published steps do: errors, their floor, ranks and regret.

Everything here is of a list of `Scored`: a published row and what was predicted for it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from _published import Published
from scipy.stats import spearmanr

REPEATS = 200  # draws of a noise ceiling
FEW = 5  # plans that a group must have to be ranked


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
    """(repeated plans, their coefficient of variation): no prediction can do better on those."""
    repeated = [
        [s.row.seconds for s in same]
        for same in grouped(scored, lambda r: (r.group, r.plan)).values()
        if len(same) > 1 and all(s.row.seconds for s in same)
    ]
    spread = [statistics.stdev(times) / statistics.fmean(times) for times in repeated]
    return len(repeated), float(np.sqrt(np.mean(np.square(spread)))) if spread else 0.0


@dataclass(frozen=True)
class Ranked:
    """How the plans of one group (same model, devices, batch) are ranked.

    `spearman`: of predicted and measured seconds; `ceiling`: of measured seconds and themselves
    with the noise of a repeated measurement, mean of seeded draws; `regret`: how much longer than
    the best the plan takes that is predicted to be best.
    """

    group: tuple
    plans: int
    spearman: float
    ceiling: float
    regret: float


def ranks(scored: Sequence[Scored], spread: float) -> list[Ranked]:
    """Of every group of at least `FEW` plans; repeated measurements count as their mean."""
    found = []
    for group, members in grouped(scored, lambda r: r.group).items():
        plans = [
            (statistics.fmean(s.row.seconds for s in same), same[0].seconds)
            for same in grouped(members, lambda r: r.plan).values()
            if all(s.row.seconds for s in same)
        ]
        if len(plans) < FEW:
            continue
        measured, predicted = np.array(plans).T
        again = np.random.default_rng(0).normal(1.0, spread, (REPEATS, len(plans))) * measured
        ceiling = np.mean([spearmanr(measured, times).statistic for times in again])
        regret = measured[np.argmin(predicted)] / measured.min() - 1
        rank = float(spearmanr(measured, predicted).statistic)
        found.append(Ranked(group, len(plans), rank, float(ceiling), float(regret)))
    return found
