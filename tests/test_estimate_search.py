"""Schedules of pipelines in the estimator's search."""

from dataclasses import replace

import pytest

from jaxscaler import ConfigError, estimate
from jaxscaler.cost.pipeline import bubble, in_flight
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import Constants
from jaxscaler.estimate.options import SEARCHED, Options
from jaxscaler.estimate.parallel import cluster_of
from jaxscaler.estimate.price import price
from jaxscaler.estimate.search import best_ways, schedules_for

DEEP = ModelConfig("deep", "llama", 1024, 24, 16, 8, ffn=4096, vocab=1024, context=512, gated=True)
OPTIONS = Options(64, 512, constants=Constants())
CLUSTER = cluster_of("a100", 16)


def test_schedules_are_those_that_divide():
    assert list(schedules_for(24, 1, 8)) == []
    assert list(schedules_for(24, 4, 8)) == [
        ("interleaved", 2), ("interleaved", 3), ("interleaved", 6), ("zero-bubble", 1),
        ("zero-bubble-2", 1),
    ]  # fmt: skip
    assert list(schedules_for(24, 4, 6)) == [("zero-bubble", 1)]
    assert list(schedules_for(24, 4, 8, ("1f1b", "zero-bubble"))) == [("zero-bubble", 1)]


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (8, 16)])
def test_none_idles_more_or_holds_less_than_1f1b(pp, count):
    """What the search leaves out by it is never the best, and fits nowhere that 1F1B does not."""
    for name, chunks in schedules_for(48, pp, count):
        split = (1.0, 1.0, 1.0) if name.startswith("zero-bubble") else (1.0, 2.0, 0.0)
        assert bubble(name, pp, count, chunks, *split) < bubble("1f1b", pp, count)
        for stage in range(pp):
            held = in_flight(name, stage, pp, count, chunks)
            assert held >= in_flight("1f1b", stage, pp, count)


def test_the_search_finds_the_best_of_all_schedules():
    """Every way that was priced, under every schedule that divides it, by brute force."""
    found = best_ways(DEEP, CLUSTER, OPTIONS, only="pipeline")
    everything = []
    for way in (x for x in found if x.parallel.schedule == "1f1b"):
        rest = schedules_for(DEEP.layers, way.parallel.pp, way.micro_batches)
        for name, chunks in [("1f1b", 1), *rest]:
            parallel = replace(way.parallel, schedule=name, chunks=chunks)
            priced = price(DEEP, parallel, CLUSTER, micro_batch=way.micro_batch,
                           recompute=way.recompute, **OPTIONS.keywords())  # fmt: skip
            everything += [priced] if priced.fits else []
    assert len({x.parallel.schedule for x in everything}) == len(SEARCHED)
    assert found[0].seconds == min(x.seconds for x in everything)
    assert found[0].parallel.schedule != "1f1b"
    plain = best_ways(DEEP, CLUSTER, replace(OPTIONS, schedules=("1f1b",)), only="pipeline")
    assert {x.parallel.schedule for x in plain} == {"1f1b"}
    assert plain[0].seconds > found[0].seconds


@pytest.mark.parametrize("names", [("zero-bubble",), ("1f1b", "gpipe")])
def test_schedules_that_are_not_searched_are_named(names):
    with pytest.raises(ConfigError, match=f"schedules='{','.join(names)}'"):
        estimate(DEEP, device="a100", devices=16, batch=64, seq=512, schedules=names)
