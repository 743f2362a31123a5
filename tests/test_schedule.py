"""Orders of pipelines: families, checks, simulation, closed forms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscaler.cost.pipeline import bubble, in_flight, period_seconds, step_seconds
from jaxscaler.errors import ScheduleError
from jaxscaler.schedule import (
    FAMILIES,
    NO_MICRO,
    Edge,
    Pipeline,
    StageWork,
    Task,
    check,
    dispatch_order,
    family,
    mirrored,
    simulate,
    task_graph,
    tasks,
    uniform,
)
from jaxscaler.schedule.trace import chrome_trace, picture, text, write_trace

SECONDS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 0.7])
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def line(text: str, stage: int) -> tuple[Task, ...]:
    """ "F0 B0" as tasks of a stage."""
    return tuple(Task(stage, int(word[1:]), word[0]) for word in text.split())


@st.composite
def pipelines(draw, *, visits: bool = True) -> Pipeline:
    """Chains, towers and visits of random times, all with backward tasks at their end."""
    groups = draw(st.integers(1, 4))
    rounds = draw(st.integers(1, 3)) if visits else 1
    graded = draw(st.booleans())  # whether all visits have gradients
    whole = draw(st.booleans())
    stages = []
    for k in range(groups * rounds):
        back = graded or k >= groups * (rounds - 1)
        stages.append(
            StageWork(
                groups=(k % groups,),
                forward=draw(SECONDS),
                backward=draw(SECONDS) if back else None,
                weight=draw(SECONDS) if back and not whole else None,
                update=draw(st.one_of(st.none(), SECONDS)),
                kept=draw(SECONDS),
                kept_weight=draw(SECONDS),
                working=draw(SECONDS),
                static=draw(SECONDS),
            )
        )
    edges = [
        Edge(k, k + 1, draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from([0.0, 0.5])))
        for k in range(len(stages) - 1)
    ]
    if len(stages) > 2 and draw(st.booleans()):
        edges.append(Edge(0, len(stages) - 1))
    barrier = draw(st.sampled_from([None, 0.0, 0.4]))
    return Pipeline(tuple(stages), draw(st.integers(1, 6)), tuple(edges), barrier=barrier)


def test_schedules_come_without_jax() -> None:
    code = "import sys, jaxscaler.schedule; print(sorted({'jax', 'jaxlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_orders_as_in_the_papers() -> None:
    """Two stages, three micro-batches."""
    chain = uniform(2, 3)
    assert family("gpipe", chain) == (line("F0 F1 F2 B0 B1 B2", 0), line("F0 F1 F2 B0 B1 B2", 1))
    assert family("1f1b", chain) == (line("F0 F1 B0 F2 B1 B2", 0), line("F0 B0 F1 B1 F2 B2", 1))
    halves = uniform(2, 3, 1.0, 1.0, 1.0)
    assert family("zero-bubble", halves) == (
        line("F0 F1 B0 W0 F2 B1 W1 B2 W2", 0),
        line("F0 B0 F1 B1 W0 F2 B2 W1 W2", 1),
    )
    assert family("inference", uniform(2, 3, backward=None)) == (
        line("F0 F1 F2", 0),
        line("F0 F1 F2", 1),
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 2, 4, 5, 10])
def test_1f1b_warms_up_and_alternates(stages: int, micro: int) -> None:
    order = family("1f1b", uniform(stages, micro, 1.0, 3.0))
    for g, tasks_of in enumerate(order):
        warm = min(stages - g, micro)
        phases = "".join(t.phase for t in tasks_of)
        assert phases == "F" * warm + "BF" * (micro - warm) + "B" * warm


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro", [1, 3, 4, 12, 13])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2",
                                  "chimera", "inference"])  # fmt: skip
def test_simulation_equals_the_closed_form(name: str, stages: int, micro: int) -> None:
    """Seconds, bubbles and micro-batches in flight, for several times and transfers."""
    compared = 0
    for f, b, w in ((1.0, 2.0, 1.0), (2.0, 1.0, 3.0), (2.0, 2.0, 1.0), (1.0, 1.0, 1.0)):
        for transfer in (0.0, 0.25) if name in ("gpipe", "1f1b", "inference") else (0.0,):
            for chunks in (1, 2, 3) if name == "interleaved" else (1,):
                weight = w if name.startswith("zero") else 0.0
                back = 0.0 if name == "inference" else b
                pipeline = uniform(
                    stages, micro, f, back or None, weight or None, kept_weight=1.0,
                    chunks=chunks, transfer=transfer,
                )  # fmt: skip
                if name == "chimera":
                    pipeline = mirrored(pipeline)
                shape = (name, stages, micro)
                moved = transfer if stages > 1 else 0.0
                try:
                    want = step_seconds(*shape, f, back, weight, moved, chunks)
                except ScheduleError:  # counted below
                    continue
                timeline = check(pipeline, family(name, pipeline))
                assert timeline.seconds == pytest.approx(want, rel=1e-12)
                share = bubble(*shape, chunks, f, b, weight, moved)
                assert timeline.bubble == pytest.approx((share,) * stages, abs=1e-12)
                plain = name != "zero-bubble" or (micro >= stages and w <= min(f, b))
                if not moved and chunks == 1 and plain:
                    period = period_seconds(*shape, f, back, weight)
                    assert timeline.period == pytest.approx(period, rel=1e-12)
                for g in range(stages if micro >= stages or name != "chimera" else 0):
                    held = in_flight(name, g, stages, micro, chunks)
                    assert timeline.peak[g].bytes == pytest.approx(held, rel=1e-12)
                compared += 1
    refused = (name == "chimera" and (stages % 2 or micro % stages)) or (
        name == "zero-bubble-2" and micro < 2 * stages - 1
    )
    assert bool(compared) != bool(refused)


def test_closed_forms_as_published() -> None:
    assert bubble("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert bubble("interleaved", 4, 8, chunks=2) == pytest.approx(1.5 / 9.5)
    assert bubble("zero-bubble", 4, 8, 1, 1.0, 1.0, 1.0) == pytest.approx(3 / 27)
    assert bubble("chimera", 8, 8, 1, 1.0, 1.0) == pytest.approx(6 / 22)
    assert bubble("chimera", 8, 8, 1, 1.0, 2.0) == pytest.approx(6 / 18)
    assert period_seconds("zero-bubble-2", 4, 8, 1.0, 1.0, 1.0) == 24.0
    assert [in_flight("1f1b", s, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    with pytest.raises(ScheduleError, match="no closed form for schedule family 'none'"):
        bubble("none", 2, 2)


@FEW
@given(pipelines())
def test_every_family_that_applies_passes_the_check(pipeline: Pipeline) -> None:
    for name in FAMILIES:
        try:
            order = family(name, pipeline)
        except ScheduleError:  # it does not apply
            continue
        timeline = check(pipeline, order)
        assert timeline.seconds > 0
        for line_of in order:
            for before, after in pairwise(line_of):
                assert timeline.when[before][1] <= timeline.when[after][0]


@FEW
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), SECONDS, SECONDS)
def test_interleaved_keeps_its_bubble_for_any_number(half, micro, chunks, f, b) -> None:
    stages = 2 * half
    pipeline = uniform(stages, micro, f, b, chunks=chunks)
    timeline = check(pipeline, family("interleaved", pipeline))
    want = step_seconds("interleaved", stages, micro, f, b, chunks=chunks)
    assert timeline.seconds == pytest.approx(want)
    both = mirrored(uniform(stages, micro, f, b))
    check(both, family("chimera", both))


@FEW
@given(pipelines(), st.randoms(use_true_random=False))
def test_random_legal_orders_run_and_turned_ones_do_not(pipeline: Pipeline, random) -> None:
    """Any topological sequence is a legal order; a task put before what it needs is refused."""
    graph = task_graph(pipeline)
    left = {i: {n.task for n in needs} for i, needs in enumerate(graph.needs)}
    order: list[list[Task]] = [[] for _ in range(pipeline.groups)]
    while left:
        i = random.choice(sorted(i for i, needs in left.items() if not needs))
        del left[i]
        for needs in left.values():
            needs.discard(i)
        for g in graph.groups(pipeline, i):
            order[g].append(graph.tasks[i])
    legal = tuple(map(tuple, order))
    timeline = check(pipeline, legal)
    place = {task: k for k, task in enumerate(dispatch_order(pipeline, legal))}
    assert len(place) == len(graph.tasks)
    for i, needs in enumerate(graph.needs):
        for n in needs:
            assert place[graph.tasks[n.task]] < place[graph.tasks[i]]
            assert timeline.end[n.task] + n.seconds <= timeline.start[i] + 1e-12
    turned = tuple(tuple(reversed(tasks_of)) for tasks_of in legal)
    with pytest.raises(ScheduleError, match=r"wait for each other: .*->"):
        check(pipeline, turned)


def test_a_cycle_across_groups_is_named_as_a_path() -> None:
    order = (line("F0 B0 F1 B1", 0), line("F1 B1 F0 B0", 1))
    with pytest.raises(ScheduleError) as error:
        check(uniform(2, 2), order)
    found = re.findall(r"([FB] of micro-batch \d on stage \d)", str(error.value))
    assert found[0] == found[-1] and len(set(found)) == len(found) - 1 >= 3
    assert "ahead of the next on group 1" in str(error.value)
    assert "whose result the next needs" in str(error.value)


def test_incomplete_orders_are_refused_with_the_tasks() -> None:
    good = family("1f1b", uniform(2, 2))
    for bad, message in (
        ((good[0][:-1], good[1]), "missing on group 0: B of micro-batch 1 on stage 0"),
        ((good[0], (*good[1], good[1][0])), "more than once on group 1: F of micro-batch 0"),
        ((good[0], (*good[1], Task(1, 7, "F"))), "no task of the pipeline: F of micro-batch 7"),
        ((good[0], (*good[1], Task(0, 0, "F"))), "do not belong there: F of micro-batch 0 on st"),
        ((good[0],), "1 device groups; there are 2"),
    ):
        with pytest.raises(ScheduleError, match=re.escape(message)):
            check(uniform(2, 2), bad)


def test_malformed_pipelines_are_refused() -> None:
    stage = StageWork((0,), 1.0, 1.0)
    for make, message in (
        (lambda: Pipeline((), 1), "needs a stage"),
        (lambda: Pipeline((replace(stage, forward=-1.0),), 1), "below 0"),
        (lambda: Pipeline((replace(stage, groups=()),), 1), "needs device groups"),
        (lambda: Pipeline((replace(stage, groups=(1,)),), 1), "groups [0] run no stage"),
        (lambda: Pipeline((replace(stage, backward=None, weight=1.0),), 1), "no B tasks"),
        (lambda: Pipeline((replace(stage, micros=(2, 2)),), 1), "first < step"),
        (lambda: Pipeline((stage, stage), 1, (Edge(1, 0),)), "later one"),
        (lambda: Pipeline((stage, replace(stage, backward=None)), 1), "hands a gradient back"),
        (lambda: Pipeline((replace(stage, shares=(3,)),), 1), "shares parameters with [3]"),
        (lambda: Pipeline((stage,), 1, limits=(1.0, 1.0)), "2 memory limits for 1"),
    ):
        with pytest.raises(ScheduleError, match=re.escape(message)):
            make()


def test_memory_is_held_from_forward_to_backward_and_the_limit_names_what_is_held() -> None:
    chain = uniform(2, 4, kept=2.0)
    stages = tuple(replace(s, static=3.0, working=0.5) for s in chain.stages)
    chain = replace(chain, stages=stages, limits=(8.0, 8.0))
    timeline = check(chain, family("1f1b", chain))
    assert [p.bytes for p in timeline.peak] == [3.0 + 2 * 2.0 + 0.5, 3.0 + 2.0 + 0.5]
    with pytest.raises(ScheduleError, match=r"group 0 would hold .* F of micro-batches 0, 1, 2"):
        check(chain, family("gpipe", chain))
    # A gradient of 1 byte that waits for a busy group is held there; so is what W still reads.
    late = Pipeline(
        (StageWork((0,), 1.0, 1.0, 1.0, kept_weight=4.0), StageWork((1,), 1.0, 1.0)),
        1,
        (Edge(0, 1, 0.5, 1.0),),
    )
    held = simulate(late, family("1f1b", late)).held
    assert [(p.bytes, p.seconds) for p in held[1]] == [(0.0, 0.0), (1.0, 1.0), (0.0, 1.5)]
    assert max(p.bytes for p in held[0]) == 4.0


def test_updates_wait_for_gradients_shared_ones_and_the_barrier() -> None:
    chain = uniform(2, 2, 1.0, 1.0, update=1.0)
    order = family("1f1b", chain)
    own = simulate(chain, order)
    assert own.when[Task(1, NO_MICRO, "U")][0] == own.when[Task(1, 1, "B")][1]
    tied = replace(chain, stages=(chain.stages[0], replace(chain.stages[1], shares=(0,))))
    last = own.when[Task(0, 1, "B")][1]
    assert simulate(tied, order).when[Task(1, NO_MICRO, "U")][0] == last
    clipped = simulate(replace(chain, barrier=0.25), order)
    assert {clipped.when[Task(s, NO_MICRO, "U")][0] for s in (0, 1)} == {last + 0.25}
    assert clipped.seconds == own.seconds + 0.25


def test_one_thread_dispatches_and_delays() -> None:
    chain = uniform(2, 4, 1.0, 1.0)
    order = family("1f1b", chain)
    free, slow = simulate(chain, order), simulate(chain, order, dispatch=2.0)
    assert slow.seconds >= 2.0 * len(slow.tasks)
    dispatched = dispatch_order(chain, order)
    for place, task in enumerate(dispatched, 1):
        assert slow.when[task][0] >= 2.0 * place
    quick = simulate(chain, order, dispatch=1e-3)
    assert free.seconds < quick.seconds < free.seconds * 1.01


def test_wide_stages_run_on_all_groups_at_once() -> None:
    """Embedding and head on both groups, two stages between them, as nnScaler interlaces them."""
    wide = StageWork((0, 1), 0.5, 0.5)
    pipeline = Pipeline((wide, StageWork((0,), 1.0, 2.0), StageWork((1,), 1.0, 2.0), wide), 3)
    timeline = check(pipeline, family("interlaced", pipeline))
    for m in range(3):
        for s, phase in ((0, "F"), (3, "F"), (3, "B"), (0, "B")):
            assert all(Task(s, m, phase) in tasks_of for tasks_of in timeline.order)
    with pytest.raises(ScheduleError, match="interlaced needs stages on several groups"):
        family("interlaced", uniform(2, 2))


def test_visits_run_n_forward_and_one_backward() -> None:
    """3F1B: each group runs three forward tasks and one backward task a micro-batch."""
    stages = tuple(
        StageWork((k % 2,), 1.0, 2.0 if k >= 4 else None, kept=1.0 if k >= 4 else 0.0)
        for k in range(6)
    )
    pipeline = Pipeline(stages, 8)
    timeline = check(pipeline, family("nf1b", pipeline))
    for tasks_of in timeline.order:
        assert sorted(t.phase for t in tasks_of) == ["B"] * 8 + ["F"] * 24
    assert [p.bytes for p in timeline.peak] == [2.0, 1.0]


def test_mirrored_copies_parameters_and_adds_gradients() -> None:
    one = uniform(4, 8, update=1.0)
    one = replace(one, stages=tuple(replace(s, static=5.0) for s in one.stages))
    both = mirrored(one, exchange=0.5)
    timeline = check(both, family("chimera", both))
    assert all(profile[0].bytes == 10.0 for profile in timeline.held)
    assert both.stages[1].shares == (5,) and both.stages[5].groups == (2,)
    assert both.stages[0].update == 1.5
    assert sum(1 for _ in tasks(both)) == 2 * 4 * 8 + 8


def test_traces_text_and_picture(tmp_path) -> None:
    chain = uniform(2, 3, update=1.0, transfer=0.5)
    timeline = simulate(chain, family("1f1b", chain))
    events = chrome_trace(timeline)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(timeline.tasks)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.seconds * 1e6)
    write_trace(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"
    rows = text(timeline, width=round(timeline.seconds * 2)).splitlines()
    assert rows[0].split()[1].startswith("0011")
    assert re.fullmatch(r"[.0-2a-cU]+", rows[1].split()[1])
    pytest.importorskip("matplotlib")
    picture(timeline, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000
