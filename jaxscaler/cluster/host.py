"""What one thread of the host takes to hand work to devices: jitted calls and copies."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from jaxscaler.errors import ClusterError


@dataclass(frozen=True)
class Host:
    """Seconds of the thread that dispatches, until it goes on; not until the work is done.

    A jitted call on n devices with a arrays (operands and results): n (`call` + a `shard`). A copy
    of an array to n other devices: `move` + n `call`. `source`: where the numbers are from.
    """

    call: float
    shard: float
    move: float
    source: str = "measured"

    def __post_init__(self) -> None:
        for field in fields(self)[:3]:
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ClusterError(
                    f"host: `{field.name}` must be seconds, 0 or more; it is {value!r}"
                )

    def calls(self, devices: int, arrays: int) -> float:
        """Seconds to dispatch a jitted call."""
        return devices * (self.call + arrays * self.shard)

    def moves(self, devices: int) -> float:
        """Seconds to begin a copy of an array to other devices."""
        return self.move + devices * self.call


# Where `calibrate` measured nothing. The code that dispatches is JAX's own and the same for every
# kind of device.
ASSUMED = Host(5e-6, 0.8e-6, 100e-6, "assumed, as of eight CPU devices and JAX 0.10")
