"""The search for orders: optimal on tiny pipelines, never worse than a family, within memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscaler.errors import ScheduleError
from jaxscaler.schedule import (
    FAMILIES,
    Edge,
    Pipeline,
    StageWork,
    Task,
    best_family,
    check,
    family,
    fits,
    least_seconds,
    mirrored,
    search,
    simulate,
    task_graph,
    uniform,
)
from jaxscaler.schedule.extend import extended, few
from jaxscaler.schedule.pattern import find_pattern, least_period
from jaxscaler.schedule.window import rearrange, ticks

WHOLE = st.sampled_from([1.0, 2.0, 3.0])


def chain(forward, backward, micro: int, *, weight=None, transfer=0.0, limit=None, kept=1.0):
    """A stage a group, of seconds by stage."""
    stages = tuple(
        StageWork((g,), f, b, weight and weight[g], kept=kept, kept_weight=kept / 2)
        for g, (f, b) in enumerate(zip(forward, backward))
    )
    edges = tuple(Edge(g, g + 1, transfer) for g in range(len(stages) - 1))
    return Pipeline(stages, micro, edges, () if limit is None else (limit,) * len(stages))


def visits(micro: int, limit: float = 4.0) -> Pipeline:
    """4 unequal groups, three visits without a gradient before one with it."""
    scale = (1.5, 1.0, 1.0, 1.25)
    stages = tuple(
        StageWork((k % 4,), scale[k % 4], 2 * scale[k % 4] if k > 11 else None, kept=float(k > 11))
        for k in range(16)
    )
    return Pipeline(stages, micro, limits=(limit,) * 4)


def brute_force(pipeline: Pipeline) -> float:
    """The least seconds of all orders that run and fit."""
    graph = task_graph(pipeline)
    mine = [
        [t for i, t in enumerate(graph.tasks) if g in graph.groups(pipeline, i)]
        for g in range(pipeline.groups)
    ]
    least = float("inf")
    for order in product(*(permutations(tasks_of) for tasks_of in mine)):
        try:
            timeline = simulate(pipeline, order)
        except ScheduleError:
            continue
        if fits(timeline):
            least = min(least, timeline.seconds)
    return least


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_tiny_pipelines_are_solved_to_the_optimum(data) -> None:
    """All orders of 8 tasks in unequal times, limits, transfers, with and without W."""
    draw = data.draw
    shape = draw(st.sampled_from(["chain", "split", "visits", "wide", "towers"]))
    times = [draw(WHOLE) for _ in range(6)]
    transfer = draw(st.sampled_from([0.0, 1.0]))
    limit = draw(st.sampled_from([1.0, 2.0, 4.0]))
    if shape == "chain":
        pipeline = chain(times[:2], times[2:4], 2, transfer=transfer, limit=limit)
    elif shape == "split":
        pipeline = chain(times[:2], times[2:4], 1, weight=times[4:], transfer=transfer)
    elif shape == "visits":
        first = [StageWork((g,), times[g]) for g in (0, 1)]
        last = [StageWork((g,), times[g], times[2 + g], kept=1.0) for g in (0, 1)]
        pipeline = Pipeline((*first, *last), 1, limits=(limit, limit))
    elif shape == "wide":
        work = [StageWork(g, times[k], times[2 + k], kept=1.0)
                for k, g in enumerate([(0,), (0, 1), (1,)])]  # fmt: skip
        pipeline = Pipeline(tuple(work), 1, limits=(limit, limit))
    else:
        towers = [StageWork((g,), times[g], times[3 + g]) for g in (0, 1, 0)]
        pipeline = Pipeline(tuple(towers), 1, (Edge(0, 2), Edge(1, 2, transfer)))
    least = brute_force(pipeline)
    if least == float("inf"):
        with pytest.raises(ScheduleError, match="no order was found that fits"):
            search(pipeline)
        return
    found = search(pipeline)
    assert found.seconds == pytest.approx(least)
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert least_seconds(pipeline) <= least * (1 + 1e-9)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(WHOLE, min_size=2, max_size=3), st.integers(2, 5), st.data())
def test_never_worse_than_any_family_and_within_memory(forward, micro, data) -> None:
    split = data.draw(st.booleans())
    limit = data.draw(st.sampled_from([None, 2.0, 3.0]))
    backward = data.draw(st.lists(WHOLE, min_size=len(forward), max_size=len(forward)))
    pipeline = chain(
        forward, backward, micro, transfer=0.5, limit=limit, weight=forward if split else None
    )
    found = search(pipeline, work=0.2)
    check(pipeline, found.order)
    for name in FAMILIES:
        try:
            timeline = check(pipeline, family(name, pipeline))
        except ScheduleError:
            continue
        assert found.bound * (1 - 1e-9) <= found.seconds <= timeline.seconds
    best = best_family(pipeline)
    assert found.family == (best and best[0])


def test_uniform_stages_have_no_better_order_and_the_bound_says_so() -> None:
    for pipeline, name in (
        (uniform(4, 16), "gpipe"),
        (uniform(4, 16, 1.0, 1.0, 1.0), "zero-bubble"),
        (replace(uniform(4, 16), limits=(4.0,) * 4), "1f1b"),
    ):
        found = search(pipeline)
        assert (found.family, found.work) == (name, 0.0)
        assert found.gap == pytest.approx(0.0, abs=1e-12)


def test_better_than_families_where_stages_are_unequal_or_transfers_take_time() -> None:
    """Proved optima, by CP-SAT, of what families miss."""
    transfers = chain([2.0] * 4, [4.0] * 4, 8, transfer=1.0, limit=5.0)
    found = search(transfers)
    assert (found.family, found.family_seconds, found.seconds) == ("1f1b", 82.0, 74.0)
    assert found.gap == pytest.approx(0.0, abs=1e-12)
    both = replace(mirrored(uniform(4, 8)), limits=(5.0,) * 4)
    found = search(both)
    assert (found.family, found.family_seconds, found.seconds) == ("chimera", 30.0, 27.0)
    check(both, found.order)


def test_equal_problems_have_equal_answers() -> None:
    pipeline = chain([3.0, 1.0, 2.0], [2.0, 4.0, 2.0], 12, transfer=1.0, limit=4.0)
    first, second = (search(pipeline, work=0.3, seed=7) for _ in range(2))
    assert first.order == second.order
    assert first.work == second.work


def test_a_window_moves_only_its_own_tasks() -> None:
    pipeline = chain([2.0] * 4, [4.0] * 4, 12, transfer=1.0, limit=5.0)
    old = simulate(pipeline, family("1f1b", pipeline))
    first, last = 0.0, 50.0
    got = rearrange(old, first, last, work=0.5)
    assert got.timeline is not None
    assert got.bound <= got.timeline.seconds < old.seconds
    for before, after in zip(old.order, got.timeline.order):
        for was, now in zip(before, after):
            if not first <= old.when[was][0] < last:
                assert was == now


def test_patterns_repeat_within_memory() -> None:
    """Groups of 6 seconds a micro-batch, transfers, 5 in flight: no pattern of 6, one of 7."""
    pipeline = chain([2.0] * 4, [4.0] * 4, 12, transfer=1.0, limit=5.0)
    assert least_period(pipeline) == 6.0
    pattern, _ = find_pattern(pipeline, 6.0, ticks(pipeline), work=0.5)
    assert pattern is None
    pattern, _ = find_pattern(pipeline, 7.0, ticks(pipeline), work=0.5)
    assert pattern is not None
    timeline = check(pipeline, pattern.order(pipeline))
    assert timeline.seconds <= max(pattern.offsets.values()) + 4.0 + 11 * 7.0
    longer = simulate(replace(pipeline, micro=112), pattern.order(replace(pipeline, micro=112)))
    assert longer.seconds <= timeline.seconds + 100 * 7.0 + 7.0
    # Room for 2 in flight where one takes 24 + 6 seconds to come back: 15 seconds each.
    assert least_period(replace(pipeline, limits=(2.0,) * 4)) == 15.0


def test_tasks_shorter_than_a_tick_keep_their_turn() -> None:
    """A loss of a millionth of its stage's time, on a group with other stages."""
    work = [StageWork((g,), f, 2 * f, kept=1.0) for g, f in ((0, 1.1), (1, 1.3), (1, 1e-6))]
    pipeline = Pipeline(tuple(work), 12, limits=(2.0, 4.0))
    tick = ticks(pipeline)
    assert tick.of(1e-6) == 0 and not tick.exact
    pattern, _ = find_pattern(pipeline, 1.2 * least_period(pipeline), tick, work=0.2)
    assert pattern is not None
    check(pipeline, pattern.order(pipeline))
    check(pipeline, search(pipeline, work=0.2).order)


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "chimera"])
def test_few_micro_batches_are_extended_to_many(name: str) -> None:
    """The same order as the family has for all of them, or one that is as fast."""
    many = uniform(4, 64, 1.0, 1.0, 1.0 if name == "zero-bubble" else None, kept_weight=1.0)
    if name == "chimera":
        many = mirrored(many)
    small = replace(many, micro=few(64, 16, many))
    assert 16 <= small.micro < 64
    whole = extended(simulate(small, family(name, small)), many)
    assert whole is not None
    check(many, whole.order)
    assert whole.seconds == pytest.approx(simulate(many, family(name, many)).seconds)


def test_many_micro_batches_take_no_more_work_than_few() -> None:
    work = {}
    for micro in (24, 200):
        pipeline = chain([2.0, 3.0, 3.0], [4.0, 6.0, 6.0], micro, transfer=2.0, limit=4.0)
        found = search(pipeline, work=0.4)
        check(pipeline, found.order)
        assert found.seconds < found.family_seconds
        work[micro] = found.work
    assert work[200] <= 2 * work[24] + 0.4


def test_what_cannot_fit_is_refused_with_the_bytes() -> None:
    pipeline = chain([1.0, 1.0], [1.0, 1.0], 4, limit=0.5)
    with pytest.raises(ScheduleError, match=r"group 0 needs 1 bytes and may hold 0\.5"):
        search(pipeline)


def test_a_searched_step_ends_with_updates_after_the_barrier() -> None:
    stages = tuple(StageWork((g,), f, 2 * f, update=1.0) for g, f in enumerate((2.0, 1.0, 3.0)))
    pipeline = Pipeline(stages, 4, barrier=0.5)
    found = search(pipeline, work=0.3)
    updates = [found.timeline.when[Task(s, -1, "U")][0] for s in range(3)]
    last = max(e for t, (_, e) in found.timeline.when.items() if t.phase == "B")
    assert min(updates) >= last + 0.5


@pytest.mark.slow
def test_recycled_visits_come_close_to_the_bound() -> None:
    for micro in (8, 32):
        pipeline = visits(micro)
        found = search(pipeline)
        check(pipeline, found.order)
        assert found.seconds < 0.97 * found.family_seconds
        assert found.gap < 0.02
