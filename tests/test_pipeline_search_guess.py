"""What the joint search guesses before it prices, and what stages share."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import headline
import jax
import pytest
from test_pipeline_search import tower

from jaxscaler.cluster import Cluster
from jaxscaler.cluster.mesh import named_mesh
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.lower.sites import Places
from jaxscaler.pipeline.balance import Works
from jaxscaler.pipeline.guess import Guesses
from jaxscaler.pipeline.memo import Room, _frugal
from jaxscaler.pipeline.planner import plan_pipeline
from jaxscaler.pipeline.prices import _anew
from jaxscaler.pipeline.search import search_pipelines
from jaxscaler.pipeline.space import AGAIN, KEPT, Candidate, Shape, space_of
from jaxscaler.schedule.simulate import simulate


@dataclass(frozen=True, eq=False)
class Value:
    """What stands for a variable."""

    aval: Any


DEEP = (4096,) * 17  # sixteen equal layers


def price(traced, space, candidate):
    shape = candidate.shape
    return plan_pipeline(
        traced, space.cluster, stages=space.cut(candidate), micro=shape.micro,
        order=candidate.schedule, submeshes=shape.sizes, changes=space.changes(candidate),
        dispatch=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def deep():
    """(traced step, its space, guesses from one priced pipeline, that candidate, its plan)."""
    traced = tower(DEEP)
    space = space_of(traced, Cluster.parse("v100:2"))
    guesses = Guesses(Works(space))
    candidate = Candidate(Shape(4, (1, 1)), (8,), "1f1b")
    plan = price(traced, space, candidate)
    guesses.learn(candidate, plan)
    return traced, space, guesses, candidate, plan


def test_a_guess_of_what_was_priced_is_the_price(deep):
    _, _, guesses, candidate, plan = deep
    guess = guesses.of(candidate)
    assert guess.near and guess.seconds == pytest.approx(plan.seconds, rel=1e-3)
    peak = max(p.bytes for p in plan.timeline.peak)
    assert 0.8 * peak <= guess.bytes <= peak * (1 + 1e-6)


def test_chunks_are_guessed_from_stages(deep):
    traced, space, guesses, _, plan = deep
    chunks = Candidate(Shape(4, (1, 1), turns=4), tuple(range(2, 16, 2)), "interleaved")
    guess, true = guesses.of(chunks), price(traced, space, chunks)
    assert guess.near and guess.seconds == pytest.approx(true.seconds, rel=0.05)
    assert guess.seconds < plan.seconds


def test_what_is_made_again_is_guessed_to_take_longer(deep):
    _, _, guesses, candidate, _ = deep
    kept, again = (
        guesses.of(replace(candidate, shape=replace(candidate.shape, again=name)))
        for name in (KEPT, AGAIN)
    )
    assert not again.near and again.seconds > kept.seconds and again.bytes < kept.bytes


def test_what_is_not_guessed(deep):
    traced, _, guesses, candidate, _ = deep
    wide = replace(candidate, shape=replace(candidate.shape, wide=True))
    assert guesses.of(wide) is None
    assert guesses.of(replace(candidate, shape=replace(candidate.shape, sizes=(1, 2)))) is None
    assert guesses.of(replace(candidate, schedule="nf1b")) is None  # does not apply
    mixed = Guesses(Works(space_of(traced, Mixed.parse("v100-32:1+a100-80:1"))))
    assert mixed.of(candidate) is None and not mixed.known(candidate.shape)


def test_no_host_that_all_tasks_wait_for(deep):
    traced, space, _, candidate, plan = deep
    assert plan.dispatch == 0.0 and plan.seconds == simulate(plan.pipeline, plan.order).seconds
    host = plan_pipeline(
        traced, space.cluster, stages=space.cut(candidate), micro=4, dispatch_limit=None
    )
    assert host.dispatch > 0.0 and host.seconds > plan.seconds


def test_as_many_chunks_as_pay():
    """More than steps from one number to the next would reach."""
    found = search_pipelines(
        tower(DEEP), Cluster.parse("v100:2"), stages=2, micro=(2, 4, 8, 16), lanes=(1,),
        changes=((),), schedules=("1f1b", "interleaved"), spmd=False, dispatch=False,
        time_limit=1e9,
    )  # fmt: skip
    priced = [r for r in found.tried if r.candidate is not None]
    chain = min(r.seconds for r in priced if r.candidate.shape.turns == 1)
    assert found.plan.places == (0, 1) * (len(found.plan.places) // 2)
    assert len(found.plan.places) > 8 and found.seconds < chain
    assert found.tracing > 0


def test_a_plan_for_less_room_is_taken_for_more():
    known = {Room(0.9): 1.0, Room(0.9, 8.0): 1.008, Room(0.5, 8.0): 1.2}
    assert _frugal(known, Room(0.9, 4.0)) == Room(0.9, 8.0)
    assert _frugal(known, Room(0.9, 16.0)) is None  # none is known to fit
    assert _frugal({Room(0.9, 8.0): 1.008}, Room(0.9, 4.0)) is None  # more room may be worth more
    assert _frugal({Room(0.9): 1.0, Room(0.9, 8.0): 1.2}, Room(0.9, 4.0)) is None


def test_what_a_reader_lays_out_anew_is_priced():
    mesh = named_mesh(Cluster.parse("h100:8"), (("a", 2), ("b", 4)))
    value = Value(jax.ShapeDtypeStruct((4096, 4096), "float32"))

    def seconds(comes, wanted):
        site = SimpleNamespace(spec=lambda v: wanted)
        places = SimpleNamespace(spec=lambda v, place: comes, sites=[site])
        return _anew(value, 0, places, mesh)

    rows, both = (("a", "b"), ()), (("a",), ("b",))
    assert seconds(rows, rows) == 0.0
    assert seconds((("a",), ()), both) == 0.0  # each takes its part
    assert 0.0 < seconds(both, rows) < seconds(rows, ((), ()))


def test_between_meshes_alike_a_value_comes_as_its_maker_has_it():
    value = Value(jax.ShapeDtypeStruct((8, 8), "float32"))
    sizes = {"a": 2, "b": 4}

    def laid_out(theirs):
        sites = [
            SimpleNamespace(spec=lambda v, s=spec: s, mesh=SimpleNamespace(shape=of))
            for spec, of in (((("a",), ("b",)), sizes), ((("a", "b"), ()), theirs))
        ]
        places = Places.__new__(Places)
        places.sites, places.source, places.readers = sites, {value: 0}, {(value, 0): 1}
        places.sent, places._specs = {}, {}
        places._lay_out(value, [1])
        return places.sent[value, 1], places.spec(value, 1)

    assert laid_out(sizes) == ((("a",), ("b",)),) * 2
    assert laid_out({"a": 2, "b": 2}) == ((("a",), ()), (("a",), ()))


def test_bars_of_the_joint_search():
    row = {"model": "llama", "size": "405b", "cluster": "c", "published": 2.0}
    row |= {"planning_s": 95.0, "tracing_s": 25.0}
    rows = [row | {"way": "published", "seconds": 2.1}, row | {"way": "joint", "seconds": 2.12}]
    bars = {bar["name"].split(": ")[1]: bar["ok"] for bar in headline.judge(rows)}
    assert bars == {
        "off the published step": True,
        "joint search / published plan": False,
        "seconds beyond tracing": False,
    }


@pytest.mark.slow
@pytest.mark.parametrize("nodes", headline.LLAMA)
def test_nothing_worse_than_the_published_plan_of_llama_405b(nodes):
    """Found without a line, as the published plan is priced with its constraints."""
    found, published = headline.joint(nodes, limit=240.0), headline.published(nodes)
    assert found["seconds"] <= headline.ROOM * published["seconds"]
