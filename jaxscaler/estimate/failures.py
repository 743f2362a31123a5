"""Failures: how often, what they cost, and how often to write a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxscaler.errors import ConfigError

# Hours between failures of one device: 419 unexpected interruptions of 16,384 GPUs in 54 days.
# Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.4.
MTBF_HOURS = 16384 * 54 * 24 / 419
RESTART_SECONDS = 300.0  # until a run is back where its checkpoint was written: assumed
WRITE_BYTES = 1e9  # bytes/s that a device writes a checkpoint at: assumed


@dataclass(frozen=True)
class Goodput:
    """mtbf: seconds between failures of the whole cluster. write: seconds that a checkpoint takes.
    interval: seconds between checkpoints. share: of time that is progress."""

    mtbf: float
    write: float
    interval: float
    share: float


def young(write: float, mtbf: float) -> float:
    """sqrt(2 delta M). Young 1974, "A first order approximation to the optimum checkpoint
    interval"."""
    return math.sqrt(2 * write * mtbf)


def daly(write: float, mtbf: float) -> float:
    """sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 18M) - delta, or M where delta is 2M and
    more. Daly 2006, "A higher order estimate of the optimum checkpoint interval", equation 37."""
    if write >= 2 * mtbf:
        return mtbf
    x = write / (2 * mtbf)
    return young(write, mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - write


def goodput(
    devices: int,
    state_bytes: float,
    *,
    mtbf_hours: float = MTBF_HOURS,
    write_bytes: float = WRITE_BYTES,
    restart: float = RESTART_SECONDS,
) -> Goodput:
    """Of a run on `devices`, each of which fails every `mtbf_hours` on average.

    `state_bytes`: of a checkpoint, written by all devices at `write_bytes` a second each. Of the
    time 1 - delta / (T + delta) is not spent on writing; a failure, every M seconds, costs half an
    interval and `restart` seconds. Raises ConfigError, naming the field.
    """
    for name, value in (("mtbf_hours", mtbf_hours), ("write_bytes", write_bytes)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r}: a number above 0")
    if not 0 <= restart < math.inf:
        raise ConfigError(f"restart={restart!r}: seconds, 0 or more")
    mtbf = mtbf_hours * 3600 / devices
    write = state_bytes / (devices * write_bytes)
    interval = daly(write, mtbf)
    share = interval / (interval + write) * (1 - ((interval + write) / 2 + restart) / mtbf)
    return Goodput(mtbf, write, interval, max(0.0, share))
