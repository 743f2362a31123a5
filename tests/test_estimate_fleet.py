"""Two kinds of devices: what the slower one costs, the bound, and the split that comes near it."""

import json

import pytest

from jaxscaler import Cluster, ConfigError, InfeasibleError, cli, estimate
from jaxscaler.cluster.links import Link
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import Constants
from jaxscaler.estimate.fleet import _Search, fleet, mixed_of, network_between
from jaxscaler.estimate.options import Options
from jaxscaler.estimate.parallel import ParallelConfig
from jaxscaler.estimate.price import price
from jaxscaler.estimate.search import best_ways

SMALL = ModelConfig("small", "llama", 1024, 8, 16, 8, ffn=4096, vocab=8192, context=1024,
                    gated=True)  # fmt: skip
TEXT = "h100:8x2+a100:8x2"
OPTIONS = Options(256, 1024, constants=Constants(hidden=0.5))


@pytest.fixture(scope="module")
def found():
    return fleet(SMALL, mixed_of(TEXT), OPTIONS, 1e10)


def mixed(*kinds):
    return Mixed(kinds, network_between(kinds))


def busy(priced):
    return sum(s for what, s in priced.parts.items() if what not in ("dp", "update", "bubble"))


# -- what the numbers are --------------------------------------------------------------------------


def test_an_even_split_runs_at_the_pace_of_the_slower_kind(found):
    fast, slow = found.even.shares
    assert fast.samples == slow.samples == 128
    assert (fast.parallel, fast.micro, fast.recompute) == (
        slow.parallel, slow.micro, slow.recompute,
    )  # fmt: skip
    assert found.slowest == slow.cluster.name == "a100-80:8x2"
    assert found.even.seconds == slow.seconds > fast.seconds


def test_no_split_beats_the_sum_of_the_rates(found):
    assert found.bound == pytest.approx(OPTIONS.batch / sum(found.rates))
    for kind, rate in zip(found.kinds, found.rates):
        way = best_ways(SMALL, kind, OPTIONS)[0]
        assert rate >= way.batch / busy(way) * (1 - 1e-9)
    assert all(split.seconds > found.bound for split in found.others)


def test_whole_micro_batches_of_both_make_up_the_batch(found):
    names = {split.name for split in found.others}
    assert {"uneven, together", "uneven, apart", "h100:8x2 alone", "a100-80:8x2 alone"} <= names
    for split in found.others:
        assert sum(share.samples for share in split.shares) == OPTIONS.batch
        for share in split.shares:
            assert share.samples == share.parallel.dp * share.micro * share.micro_batches
            assert share.parallel.devices == share.cluster.num_devices
            assert share.priced.fits


def test_the_best_is_no_slower_than_any_and_gives_the_faster_kind_more(found):
    assert found.best.seconds == min(split.seconds for split in found.others)
    assert found.best.seconds < found.even.seconds
    fast, slow = found.best.shares
    assert fast.samples > slow.samples


# -- each is the planner's price -------------------------------------------------------------------


def test_a_share_apart_is_that_of_a_hybrid_of_as_many_groups(found):
    (split,) = (x for x in found.others if x.name == "uneven, apart")
    link, looked = found.cluster.link, 0
    for share in split.shares:
        p, kind = share.parallel, share.cluster
        if p.pp > 1:
            continue
        data = kind.to_dict()
        assert kind.levels[0].link.bandwidth >= link.bandwidth
        if kind.levels[0].link != link:
            continue
        data["levels"].insert(0, {**data["levels"][0], "name": "kind", "size": 2})
        looked += 1
        again = price(
            SMALL, ParallelConfig(**{**vars(p), "dp": 2 * p.dp, "shard": p.dp * p.cp}),
            Cluster.from_dict(data), batch=2 * share.samples, seq=1024, micro_batch=share.micro,
            recompute=share.recompute, constants=OPTIONS.constants,
        )  # fmt: skip
        assert share.seconds == pytest.approx(again.seconds, rel=1e-12)
    assert looked


def test_the_counts_are_the_best_of_all():
    """`balanced` against every pair of counts, for ways of both kinds."""
    search = _Search(SMALL, mixed_of(TEXT), Options(96, 1024, constants=Constants()))
    looked = 0
    for a in search.apart[0][:3]:
        for b in search.apart[1][:3]:
            everything = {
                (m, n): max(a.run(m).seconds, b.run(n).seconds)
                for m in range(1, 97)
                for n in range(1, 97)
                if m * a.unit + n * b.unit == 96
            }
            counts = search.balanced(a, b)
            assert (counts is None) == (not everything)
            if counts is not None:
                looked += 1
                assert everything[counts] == min(everything.values())
    assert looked >= 3


def test_equal_kinds_are_split_evenly():
    """Two kinds that differ in memory alone: equal shares, and the whole cluster's own price."""
    base = Cluster.parse("a100:8x2").to_dict()
    base["device"] |= {"name": "larger", "hbm_bytes": 160e9}
    kinds = (Cluster.parse("a100:8x2"), Cluster.from_dict(base))
    found = fleet(SMALL, mixed(*kinds), OPTIONS, 1e10)
    whole = best_ways(SMALL, Cluster.parse("a100:8x4"), Options(**{
        **vars(OPTIONS), "schedules": ("1f1b", "zero-bubble")}))[0]  # fmt: skip
    assert found.even.seconds == pytest.approx(whole.seconds, rel=0.05)
    assert found.best.seconds <= found.even.seconds


def test_the_smaller_memory_rules_an_even_split():
    tight = {"name": "tight", "device": {"base": "a100-40", "name": "tight", "hbm_bytes": 3e9},
             "levels": [{"name": "node", "size": 2}, {"name": "device", "size": 8}]}  # fmt: skip
    kinds = (Cluster.parse("h100:8x2"), Cluster.from_dict(tight))
    found = fleet(SMALL, mixed(*kinds), OPTIONS, 1e10)
    limit = 0.92 * 3e9
    assert found.even.shares[1].priced.memory_limit == pytest.approx(limit)
    assert all(share.priced.memory_bytes <= limit for share in found.even.shares)
    none = Cluster.from_dict({**tight, "device": {**tight["device"], "hbm_bytes": 1e7}})
    other = Cluster.from_dict({**tight, "device": {**tight["device"], "name": "b",
                                                   "hbm_bytes": 1e7}})  # fmt: skip
    with pytest.raises(InfeasibleError, match="no split of batch=256 over tight and tight fits"):
        fleet(SMALL, mixed(none, other), OPTIONS, 1e10)


def test_tori_share_no_nodes_and_reduce_over_the_slower_network():
    both = mixed_of("h100:8+v5e:4x4")
    assert both.link.kind == "network"
    found = fleet(SMALL, both, Options(64, 1024, constants=Constants()), 1e10)
    assert not any("together" in split.name for split in found.others)
    slow = Link("network", 1e8)
    levels = [{"name": "node", "size": 1, "link": vars(slow) | {"measured": {}}},
              {"name": "device", "size": 8}]  # fmt: skip
    far = Cluster.from_dict({"name": "far", "device": {"base": "h100"}, "levels": levels})
    assert network_between((far, both.parts[1])) == slow
    slower = fleet(SMALL, mixed(far, both.parts[1]), Options(64, 1024, constants=Constants()), 1e10)
    near, apart = (
        next(x.seconds for x in some.others if x.name == "uneven, apart")
        for some in (found, slower)
    )
    assert apart > near


# -- what is refused, and the command --------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cluster": "h100:8+h100:8x2"}, "two clusters of different devices"),
        ({"cluster": "h100:8+a100:8+v100:8"}, "two clusters of different devices"),
        ({"cluster": "h100:8+x100:8"}, "unknown device 'x100'"),
        ({"cluster": TEXT, "budget": 1.0, "only": "data"}, "budget, only: not an option of"),
        ({"cluster": TEXT, "tokens": -1.0}, "tokens=-1"),
        ({"cluster": TEXT, "batch": 0}, "batch=0"),
    ],
)
def test_what_is_no_fleet_is_named(given, said):
    with pytest.raises(ValueError, match=said):
        estimate(SMALL, **given)


def test_an_unknown_device_without_a_network_is_named():
    data = {"name": "lab", "device": {"base": "a100", "name": "lab-gpu"},
            "levels": [{"name": "device", "size": 8}]}  # fmt: skip
    with pytest.raises(ConfigError, match="lab: no level of it is a network"):
        network_between((Cluster.from_dict(data), Cluster.parse("h100:8")))


def test_the_command_prints_a_fleet(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["estimate", "--hidden", "1024", "--layers", "8", "--heads", "16", "--vocab", "8192",
             "--kv-heads", "8", "--ffn", "4096", "--context", "1024", "--gated", "--cluster", TEXT,
             "--batch", "256", "--seq", "1024", "--tokens", "1e10", "--quiet"]  # fmt: skip
    assert cli.main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["best"]["seconds"] == min(split["seconds"] for split in data["splits"])
    assert data["slowest"] == "a100-80:8x2" and data["bound"] < data["best"]["seconds"]
    assert {line["name"] for line in data["explain"]} >= {"bound", "even split", "step"}
    assert cli.main([*words, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "at the pace of a100-80:8x2" in out and "what the slowest costs" in out
    assert cli.main([*words, "--plot", "x.png"]) == 2
    assert "plot: neither fleets nor rlhf" in capsys.readouterr().err
