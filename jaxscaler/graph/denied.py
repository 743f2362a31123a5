"""What the compiler does badly, as data: the deny-list, and what a rule becomes by it.

Each entry is reproduced by a numeric test, which fails once it no longer is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jaxlib.version

from jaxscaler.graph.ir import FROZEN, PASS, REDUCE, Factor, Rule


class Hazard(NamedTuple):
    """What the compiler does badly with one factor of a primitive.

    `factor` is a name in `ROLES`; `since` and `until` bound jaxlib's version (`until` is exclusive,
    empty: no fix is known); `backend` is a platform, or "" for all. `remedy`: a name in `REMEDIES`.
    """

    primitive: str
    factor: str
    since: tuple[int, ...]
    until: tuple[int, ...]
    backend: str
    reason: str
    remedy: str = "whole"


# Wrong numbers, or no program at all.
DENIED = (
    Hazard(
        "conv_general_dilated",
        "reduced, with batch groups",
        (0, 10),
        (),
        "",
        "partial weight gradients of a grouped convolution are summed over all devices, also those "
        "that hold copies: split on some mesh axes but not all, the sum is too large",
        "all or none",
    ),
    Hazard("reduce_xor", "reduced", (0, 4), (), "", "there is no all-reduce of xor"),
)

# Right numbers, but split operands are gathered first. Planned whole, the gather has its price.
GATHERED = (
    Hazard("fft", "passed", (0, 4), (), "", "the compiler gathers split batch dims of an fft"),
    Hazard(
        "top_k",
        "passed",
        (0, 10),
        (),
        "",
        "the compiler gathers split batch dims unless every mesh axis splits them",
        "all or none",
    ),
    Hazard(
        "select_and_scatter_add",
        "passed",
        (0, 10),
        (),
        "cpu",
        "the CPU compiler expands it before partitioning, and gathers",
        "note",
    ),
)

ROLES: dict[str, Callable[..., set[int]]] = {
    "passed": lambda eqn, rule: {f for f, x in enumerate(rule.factors) if x.kind == PASS},
    "reduced": lambda eqn, rule: {f for f, x in enumerate(rule.factors) if x.kind == REDUCE},
    "reduced, with batch groups": lambda eqn, rule: (
        ROLES["reduced"](eqn, rule) if eqn.params["batch_group_count"] > 1 else set()
    ),
}
_LISTED = frozenset(h.primitive for h in (*DENIED, *GATHERED))


def freeze(rule: Rule, bad: set[int], note: str) -> Rule:
    """The rule with some factors FROZEN."""
    bad = {f for f in bad if rule.factors[f].kind != FROZEN}
    if not bad:
        return rule
    factors = tuple(Factor(f.size, FROZEN) if i in bad else f for i, f in enumerate(rule.factors))
    return noted(Rule(factors, rule.operands, rule.results, rule.note), note)


def together(rule: Rule, bad: set[int], note: str) -> Rule:
    """The rule with some factors to be cut by all mesh axes or none."""
    factors = tuple(f._replace(together=i in bad) for i, f in enumerate(rule.factors))
    return noted(replace(rule, factors=factors), note)


def noted(rule: Rule, note: str) -> Rule:
    """The rule with a note added."""
    return replace(rule, note="; ".join(n for n in (rule.note, note) if n))


REMEDIES: dict[str, Callable[[Rule, set[int], str], Rule]] = {
    "whole": freeze,
    "all or none": together,
    "note": lambda rule, bad, note: noted(rule, note),
}


def _applies(hazard: Hazard, eqn: Any, backend: str, version: tuple[int, ...]) -> bool:
    return (
        hazard.primitive == eqn.primitive.name
        and (not backend or hazard.backend in ("", backend))
        and version >= hazard.since
        and (not hazard.until or version < hazard.until)
    )


def deny(
    eqn: Any,
    rule: Rule,
    backend: str = "",
    version: tuple[int, ...] = jaxlib.version.__version_info__,
) -> Rule:
    """Apply the remedies of `DENIED` and `GATHERED`; no backend means every backend."""
    if eqn.primitive.name not in _LISTED:
        return rule
    for h in (*DENIED, *GATHERED):
        if _applies(h, eqn, backend, version) and (bad := ROLES[h.factor](eqn, rule)):
            rule = REMEDIES[h.remedy](rule, bad, f"{h.primitive}: {h.reason}")
    return rule
