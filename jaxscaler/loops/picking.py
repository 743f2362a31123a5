"""Which loops over parts to take on a mesh, by what plans with them are estimated to cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.loops.estimate import Estimate, View, estimated
from jaxscaler.loops.options import Option, Pick, clash, fewer_parts, fewer_segments, more_parts
from jaxscaler.space.loops import held_bytes

MOST = 8  # loops in one plan
LOOKS = 3  # of the options, the most promising first, that are priced for each
SAME = 1.002  # of the seconds: fewer parts, or segments, that cost so much more are as good

Picks = tuple[Pick, ...]
Say = Callable[[str, str], None]


def picked(
    view: View, mesh: Mesh, found: Sequence[Option], say: Say, share: float = 1.0, picks: Picks = ()
) -> tuple[Picks, Estimate]:
    """The loops that help on a mesh in a share of the memory, as it is estimated, and the plan
    with them. `picks`: those to begin with."""
    most = tuple(Pick(p.option, max(p.parts, p.option.most)) for p in picks)
    best = _grown(view, mesh, found, say, share, most)
    if best[1].seconds is None:
        best = _thinner(view, mesh, found, say, share, *best)
    best = _fewer(view, mesh, say, share, *best)
    for n, pick in enumerate(best[0]):
        # parts with a sample for each device: then nothing else need be cut, but more is held
        samples = pick.option.size // view.session.cluster.num_devices
        if pick.option.again or not 1 <= samples < pick.parts or pick.option.size % samples:
            continue
        some = () if samples == 1 else (replace(pick, parts=samples),)
        other = _grown(view, mesh, found, say, share, (*best[0][:n], *some, *best[0][n + 1 :]),
                       pick.option, best[1].seconds)  # fmt: skip
        if other[1].better_than(best[1]):
            best = _fewer(view, mesh, say, share, *other)
        break
    return best


def _grown(
    view: View, mesh: Mesh, found: Sequence[Option], say: Say, share: float, picks: Picks,
    but: Option | None = None, beat: float | None = None,
) -> tuple[Picks, Estimate]:  # fmt: skip
    """One loop more at a time, in as many parts as can be, as long as the plan gets better: of
    those that hold most of what is in rows of memory with a price; none of `but`. Not any more
    where it is no faster than `beat` with all the memory that it takes."""
    now = estimated(view, mesh, picks, share)
    if picks:
        say("loops", f"{', '.join(map(str, picks))}, estimated: {now}")
    while len(picks) < MOST and (beat is None or now.cost < beat):
        scored = []
        for n, option in enumerate(found):
            if option is but or any(clash(p.option, option) for p in picks):
                continue
            pick = Pick(option, view.parts(option, picks))
            held = held_bytes(view.model, view.reach(pick), now.price)
            worth = held * (1 - 1 / pick.parts)
            if worth > 0:
                scored.append((-worth, n, pick))
        better = None
        for _, _, pick in sorted(scored)[:LOOKS]:
            then = estimated(view, mesh, (*picks, pick), share, now.level)
            say("loops", f"{pick}, estimated: {then}")
            if then.better_than(now):
                better, now = pick, then
        if better is None:
            break
        picks = (*picks, better)
    return picks, now


def _thinner(
    view: View, mesh: Mesh, found: Sequence[Option], say: Say, share: float, picks: Picks,
    now: Estimate,
) -> tuple[Picks, Estimate]:  # fmt: skip
    """Where nothing fits: an accumulation in more parts, until something does."""
    for pick in picks:
        for more in more_parts(pick):
            if now.seconds is None:
                alone = _grown(view, mesh, found, say, share, (more,))
                if alone[1].better_than(now):
                    picks, now = alone
    return picks, now


def _fewer(
    view: View, mesh: Mesh, say: Say, share: float, picks: Picks, now: Estimate
) -> tuple[Picks, Estimate]:
    """As good with fewer segments in a loop, or fewer parts; better, where that is possible."""
    for n in range(len(picks) if now.seconds is not None else 0):
        for smaller in (fewer_segments, fewer_parts):
            for less in smaller(picks[n]):
                some = (*picks[:n], less, *picks[n + 1 :])
                then = estimated(view, mesh, some, share, 1.0)
                if then.seconds is not None and then.seconds <= SAME * now.cost:
                    say("loops", f"{less}, estimated: {then}")
                    picks, now = some, then
                    break
    return picks, now
