"""Gradients that are narrowed before they are reduced: what that saves on links, and what it takes.

bf16: rings that sum up in 16 bits. int8: every device quantises its gradient in blocks with a scale
each, sends each of the others its part, sums up what it gets in f32, inside nodes first, and, where
all need the sum, quantises that again and gathers it (Wang et al. 2023, "ZeRO++", section 4.3; Tang
et al. 2021, "1-bit Adam", section 5). What rounding lost at first is kept and added to the next
gradient (error feedback: Seide et al. 2014, "1-bit stochastic gradient descent").

It is credited as all communication is: only what is exposed, and does not run beside compute, makes
a step shorter. Quantising streams gradients through memory and is paid in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxscaler.cluster.mesh import Axis
from jaxscaler.errors import ConfigError

BLOCK = 2048  # numbers that share a scale: Dettmers et al. 2022
F32 = 4.0


class Pass(NamedTuple):
    """A collective on an axis; `nbytes`: of it, per element that is reduced."""

    collective: str
    axis: Axis
    nbytes: float


class Compression(NamedTuple):
    """How gradients are reduced. `kept`: bytes per element of the error that is fed back."""

    name: str
    wire: float  # bytes of an element on a link
    exchanged: bool  # parts go to who sums them up, in place of rings that sum on the way
    kept: float

    def passes(self, kind: str, axis: Axis) -> tuple[list[Pass], float]:
        """What an "all_reduce" or a "reduce_scatter" on `axis` comes to, and the bytes per element
        that pass through memory to narrow and to widen.

        Parts are exchanged inside nodes first, and what is summed up there between them.
        """
        whole = kind == "all_reduce"
        if not self.exchanged:  # f32 read, narrow written; the sum the other way round
            streamed = (F32 + self.wire) * (1 + (1.0 if whole else 1 / axis.size))
            return [Pass(kind, axis, self.wire)], streamed
        found, inside = [], 1
        streamed = 2 * self.kept  # the error is read and written
        for part in reversed(axis.parts):
            found.append(Pass("all_to_all", Axis(axis.name, (part,)), self.wire / inside))
            streamed += (F32 + 2 * self.wire) / inside  # quantised; the codes of all are read
            inside *= part.size
            streamed += F32 / inside  # their sum is written
        if whole:
            found.append(Pass("all_gather", axis, self.wire))
            streamed += (F32 + self.wire) / inside + self.wire + F32
        return found, streamed


COMPRESSIONS: Mapping[str, Compression] = {
    "bf16": Compression("bf16", 2.0, False, 0.0),
    "int8": Compression("int8", 1.0 + F32 / BLOCK, True, F32),
}


def compression_of(name: str, gradient: str) -> Compression | None:
    """That of a name, None of an empty one. ConfigError for another, or where nothing is saved."""
    if not name:
        return None
    if name not in COMPRESSIONS:
        raise ConfigError(f"compress={name!r}: one of {', '.join(COMPRESSIONS)}")
    if name == "bf16" and gradient != "float32":
        raise ConfigError(
            f"compress='bf16', gradient={gradient!r}: gradients are as narrow already"
        )
    return COMPRESSIONS[name]
