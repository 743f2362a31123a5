"""From which equation of a marked loss an op of the whole step came, as it is written in names.

The drop-ins `jaxscaler.value_and_grad` and `grad` write "op@loss.equation.sub-jaxpr.equation" at
the end of the name stack of every forward equation; differentiation hands it on to all that it
makes of it.
"""

from __future__ import annotations

import re

_RUN = re.compile(r"stage@\d+")  # of a pipeline (rewrite/assign.py)
_ORIGIN = re.compile(r"op@(\d+(?:\.\d+)+)")
AGAIN = "rematted_computation"  # JAX's name for what runs once more in the backward pass
EARLY = "in time"  # of a barrier that gradients must not run behind (rewrite/early.py)


def origin_text(loss: int, key: tuple[int, ...]) -> str:
    """What stands in the name stack of equation `key` of the forward jaxpr of loss `loss`."""
    return "op@" + ".".join(map(str, (loss, *key)))


def read_origin(parts: list[str]) -> tuple[list[str], tuple[int, ...]]:
    """The other parts of a name stack (stages left out), and its last origin: (loss, *key), ()."""
    rest: list[str] = []
    last: tuple[int, ...] = ()
    for part in parts:
        match = _ORIGIN.fullmatch(part)
        if match is None:
            if not _RUN.fullmatch(part):
                rest.append(part)
        else:
            last = tuple(map(int, match[1].split(".")))
    return rest, last
