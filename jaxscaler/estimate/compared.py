"""A way with gradients reduced as they are beside the same with each compression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import JaxscalerError
from jaxscaler.estimate.compression import COMPRESSIONS
from jaxscaler.estimate.options import Options
from jaxscaler.estimate.price import Priced, price


@dataclass(frozen=True)
class Compared:
    """A way priced with gradients reduced as they are, and narrowed. `worth`: the name of the
    fastest that fits, "" for none."""

    plain: Priced
    narrowed: Mapping[str, Priced]

    @property
    def worth(self) -> str:
        seconds = {"": self.plain.seconds}
        seconds |= {name: x.seconds for name, x in self.narrowed.items() if x.fits}
        return min(seconds, key=seconds.__getitem__)

    def to_dict(self) -> dict:
        """Plain data: seconds, exposed and hidden reduction, quantising, memory."""
        return {"worth": self.worth} | {
            name or "none": {
                "seconds": x.seconds, "exposed": x.parts.get("dp", 0.0), "hidden": x.hidden,
                "quantising": x.parts.get("compress", 0.0), "memory_bytes": x.memory_bytes,
                "error_feedback_bytes": x.memory.get("error feedback", 0.0), "fits": x.fits,
            }
            for name, x in ({"": self.plain} | dict(self.narrowed)).items()
        }  # fmt: skip


def compared(way: Priced, cluster: Cluster, options: Options) -> Compared:
    """What each compression brings to a way; those that narrow nothing are left out."""

    def again(name: str) -> Priced:
        return price(
            way.model, way.parallel, cluster, micro_batch=way.micro_batch, recompute=way.recompute,
            **replace(options, compress=name).keywords(),
        )  # fmt: skip

    narrowed = {}
    for name in COMPRESSIONS:
        try:
            narrowed[name] = again(name)
        except JaxscalerError:  # as narrow already
            continue
    return Compared(again("") if options.compress else way, narrowed)
