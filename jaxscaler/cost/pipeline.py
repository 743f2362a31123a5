"""Closed forms of pipelines of equal stages: step, bubble, micro-batches in flight.

p stages, m micro-batches, F, B, W seconds of one stage for one micro-batch (with W, B is that of
the inputs' gradients only), v chunks of the model a group, t seconds of a transfer between groups.
They explain and test; unequal stages are simulated (`schedule/simulate.py`, which gives the same).

- gpipe, 1f1b: m (F + B) + (p - 1) (F + B). Huang et al., GPipe, 2019; Narayanan et al.,
  PipeDream-2BW, 2021. Transfers add 2 t for each of the p - 1 edges to GPipe. A 1F1B order also
  shows them in its steady state, where two neighbours wait for each other in turn: 2 t for each
  micro-batch but the first and one more in p.
- interleaved: m (F + B) + (p - 1) (F + B) / v. Narayanan et al., Efficient Large-Scale Language
  Model Training on GPU Clusters, 2021. With m < p: (p - m + (m - 1) / v) (F + B) idle.
- zero-bubble (ZB-H1): m (F + B + W) + (p - 1) (F + B) - (min(m, p) - 1) min(F, B, W); with m >= p
  and W the least this is the published bubble (p - 1) (F + B - W). zero-bubble-2 (ZB-H2), from
  m = 2 p - 1 on: m (F + B + W) + (p - 1) max(F, F + B - 2 W). The published (p - 1) (F + B - 2 W)
  counts from each group's own first task, see `period_seconds`. Qi et al., Zero Bubble Pipeline
  Parallelism, 2024.
- chimera: m (F + B) + (p - 2) (min(F, B) + m / p |B - F|) where p divides m; m = p gives the
  published (p - 2) / (2 m + p - 2) for F = B, (p - 2) / (3 m / 2 + p - 2) for B = 2 F. Li and
  Hoefler, Chimera, 2021.
- inference: m F + (p - 1) (F + t).
"""

from __future__ import annotations

from typing import NamedTuple

from jaxscaler.errors import ScheduleError

CLOSED_FORMS = (
    "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2", "chimera", "inference",
)  # fmt: skip
_WITH_TRANSFER = ("gpipe", "1f1b", "inference")


class _Shape(NamedTuple):
    p: int
    m: int
    f: float
    b: float
    w: float
    t: float
    v: int


def step_seconds(
    family: str,
    stages: int,
    micro: int,
    forward: float,
    backward: float,
    weight: float = 0.0,
    transfer: float = 0.0,
    chunks: int = 1,
) -> float:
    """Seconds of a step from its first task to its last, without updates.

    forward, backward, weight: seconds of a device group for one micro-batch, all its chunks.
    ScheduleError: there is no closed form (an unknown family, transfers in a family other than
    gpipe, 1f1b and inference, Chimera with odd stages or micro-batches that they do not divide).
    """
    shape = _Shape(stages, micro, forward, backward, weight, transfer, chunks)
    _known(family)
    if transfer and family not in _WITH_TRANSFER:
        raise ScheduleError(
            f"{family} has no closed form with transfers; simulate a pipeline with them"
        )
    if family == "chimera" and (stages % 2 or micro % stages):
        raise ScheduleError(
            f"chimera has a closed form for an even number of stages that divides the "
            f"micro-batches, not for {stages} and {micro}; simulate it"
        )
    if family == "zero-bubble-2" and micro < 2 * stages - 1:
        raise ScheduleError(
            f"zero-bubble-2 has a closed form from {2 * stages - 1} micro-batches on, not for "
            f"{micro}; simulate it"
        )
    return micro * (forward + backward + weight) + _IDLE[family](shape)


def bubble(
    family: str,
    stages: int,
    micro: int,
    chunks: int = 1,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 0.0,
    transfer: float = 0.0,
) -> float:
    """Share of the step in which a group idles; only the ratios of the seconds matter."""
    if family == "inference":
        backward = weight = 0.0
    seconds = step_seconds(family, stages, micro, forward, backward, weight, transfer, chunks)
    return 1.0 - micro * (forward + backward + weight) / seconds


def period_seconds(
    family: str, stages: int, micro: int, forward: float, backward: float, weight: float = 0.0
) -> float:
    """Seconds between steps where each group begins the next as soon as it is done with this one.

    Less than `step_seconds` only for zero-bubble-2, whose groups end in the order in which they
    begin, and for inference. A barrier between steps (clipping by the global norm) undoes it.
    ScheduleError: as `step_seconds`, or zero-bubble with fewer micro-batches than stages or W above
    F or B.
    """
    if family == "zero-bubble" and (micro < stages or weight > min(forward, backward)):
        raise ScheduleError(
            "zero-bubble has a closed form of its period where there are as many micro-batches as "
            "stages and W takes no longer than F and B; simulate it"
        )
    whole = step_seconds(family, stages, micro, forward, backward, weight)
    if family == "zero-bubble-2":
        left = max(0.0, forward + backward - 2 * weight, backward - forward)
        return micro * (forward + backward + weight) + (stages - 1) * left
    return micro * forward if family == "inference" else whole


def in_flight(family: str, stage: int, stages: int, micro: int, chunks: int = 1) -> float:
    """Micro-batches whose activations device group `stage` holds at its worst.

    A group's whole share of the model counts as one, so a chunk is 1 / chunks. In zero-bubble an
    activation is held until W, in the others until B. Sources: as above; interleaved holds
    2 (p - stage - 1) + (v - 1) n + 1 chunks with rounds of n micro-batches (p where p divides m).
    """
    _known(family)
    if not 0 <= stage < stages:
        raise ScheduleError(f"stage {stage} of {stages}")
    last = stages - 1
    if family == "interleaved" and chunks > 1:
        rounds = max(1, micro // stages)
        warm = 2 * (last - stage) + (chunks - 1) * -(-micro // rounds) + 1
        return min(chunks * micro, warm) / chunks
    if family == "chimera" and micro < stages:
        raise ScheduleError(f"chimera's formula needs {stages} micro-batches; simulate {micro}")
    most = {
        "gpipe": micro,
        "zero-bubble": stages,
        "zero-bubble-2": 2 * stages - 1,
        "chimera": stages // 2 + min(stage, last - stage) + 1,
        "inference": 1,
    }
    return min(micro, most.get(family, stages - stage))


def _known(family: str) -> None:
    if family not in CLOSED_FORMS:
        raise ScheduleError(
            f"no closed form for schedule family {family!r}; there is one for "
            f"{', '.join(CLOSED_FORMS)}"
        )


# Seconds in which a group idles.
_IDLE = {
    "gpipe": lambda x: (x.p - 1) * (x.f + x.b + 2 * x.t),
    "1f1b": lambda x: (
        (x.p - 1) * (x.f + x.b) + 2 * x.t * (x.p - 1 + (x.m - 1) - -(-(x.m - 1) // x.p))
    ),
    "interleaved": lambda x: (max(x.p - x.m, 0) + (min(x.m, x.p) - 1) / x.v) * (x.f + x.b),
    "zero-bubble": lambda x: (x.p - 1) * (x.f + x.b) - (min(x.m, x.p) - 1) * min(x.f, x.b, x.w),
    "zero-bubble-2": lambda x: (x.p - 1) * max(x.f, x.f + x.b - 2 * x.w),
    "chimera": lambda x: (x.p - 2) * (min(x.f, x.b) + x.m // x.p * abs(x.b - x.f)),
    "inference": lambda x: (x.p - 1) * (x.f + x.t),
}
