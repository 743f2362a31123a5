"""Plans kept from one start to the next: found when all is the same, else searched."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import jaxscaler as js
from jaxscaler import cache, recipes, search
from jaxscaler.cache import Cache, cache_key, find_cache
from jaxscaler.graph.build import build
from jaxscaler.trace import trace
from models import mlp

WORK = mlp.workload(dtype="float32")


def planned(folder, workload=WORK, **options):
    options = {"cluster": "cpu:8", "time_limit": 10, **options}
    return js.plan(workload.step, workload.state, workload.batch, cache=folder, **options)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """(a folder with one entry, the plan in it)."""
    folder = tmp_path_factory.mktemp("plans")
    return folder, planned(folder, constraints=recipes.zero())


@pytest.fixture
def searches(monkeypatch):
    """What was given to the solver, per search."""
    found, solve = [], search.solve
    monkeypatch.setattr(search, "solve", lambda *a, **k: found.append(a) or solve(*a, **k))
    return found


def test_the_second_time_nothing_is_searched(kept, searches):
    folder, plan = kept
    said = []
    again = planned(
        folder, constraints=recipes.zero(), progress=lambda phase, text: said.append((phase, text))
    )
    assert again == plan
    assert again.digest() == plan.digest()
    assert not searches
    assert said[-1][0] == "cache"


def test_a_step_runs_from_the_cache(kept, searches):
    folder, plan = kept
    step = js.parallelize(
        WORK.step, cluster="cpu:8", constraints=recipes.zero(), time_limit=10, cache=folder
    )
    state = step.init(WORK.init, jax.random.key(0), batch=WORK.batch)
    assert step.plan == plan
    assert not searches
    _, metrics = step(state, WORK.make_batch())
    _, expected = jax.jit(WORK.step)(WORK.init(jax.random.key(0)), WORK.make_batch())
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)


def test_why_is_answered_by_searching_again(kept, searches):
    folder, _ = kept
    again = planned(folder, constraints=recipes.zero())
    assert "pair_0/up/kernel" in again.why("pair_0/up/kernel")
    assert searches


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": "cpu:4"},
        {"constraints": recipes.zero(1)},
        {"memory": 0.5},
        {"seed": 1},
        {"time_limit": 11},
        {"workload": mlp.workload(dtype="float32", batch=16)},
        {"workload": mlp.workload(dtype="float32", activation="gelu")},
        {"roles": {"state/params/pair_0/up/bias": "optimizer"}},
    ],
    ids=["cluster", "constraints", "memory", "seed", "time", "batch", "primitives", "roles"],
)
def test_anything_else_is_another_entry(kept, searches, tmp_path, change):
    folder, _ = kept
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "entry").mkdir()
    for name, text in before.items():
        (tmp_path / "entry" / name).write_bytes(text)
    planned(tmp_path / "entry", **{"constraints": recipes.zero(), **change})
    assert searches
    assert len(list((tmp_path / "entry").iterdir())) == len(before) + 1


def test_other_versions_are_another_entry(monkeypatch):
    graph = build(trace(WORK.step, WORK.state, WORK.batch))
    key = cache_key(graph, 1)
    assert cache_key(graph, 1) == key != cache_key(graph, 2)
    for n in range(3):
        versions = list(cache._versions())
        versions[n] += ".1"
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_versions", lambda versions=versions: tuple(versions))
            assert cache_key(graph, 1) != key


def test_a_kind_that_changes_is_another_entry():
    """The rule of a primitive decides what may be split: it is part of the graph."""
    graph = build(trace(WORK.step, WORK.state, WORK.batch))
    kind = graph.kinds[0]
    other = kind._replace(rule=replace(kind.rule, note="frozen"))
    assert cache_key(replace(graph, kinds=(other, *graph.kinds[1:]))) != cache_key(graph)


def test_the_key_is_the_same_in_every_process(monkeypatch):
    """Sets have another order in each, as hashes are seeded anew."""
    monkeypatch.setattr(cache, "_versions", cache._versions)  # put back after the test
    code = "from tests.test_cache import key_of_work; print(key_of_work())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert other.stdout.strip() == key_of_work()


def key_of_work():
    """Without versions: files of this package may be edited while its tests run."""
    cache._versions = lambda: ()
    return cache_key(build(trace(WORK.step, WORK.state, WORK.batch)), {"a": 1})


@pytest.mark.parametrize("damage", ["{", '{"version": 1}', "", "other"])
def test_an_entry_that_can_not_be_used_is_noted_and_replaced(kept, tmp_path, searches, damage):
    folder, plan = kept
    (entry,) = folder.glob("*.json")
    broken = tmp_path / entry.name
    if damage == "other":  # a plan, but of another step
        js.plan(lambda w: w + 1, jax.ShapeDtypeStruct((8,), "f4"), cluster="cpu:8").save(broken)
    else:
        broken.write_text(damage)
    again = planned(tmp_path, constraints=recipes.zero())
    assert searches
    assert again.digest() == plan.digest()
    (note,) = set(again.notes) - set(plan.notes)
    assert note.startswith("plan cache: ")
    assert note.endswith("; searched again")
    searches.clear()
    assert planned(tmp_path, constraints=recipes.zero()).notes == plan.notes
    assert not searches


def test_a_folder_that_can_not_be_written_is_noted(tmp_path):
    (tmp_path / "file").write_text("")
    plan = planned(tmp_path / "file" / "plans")
    assert "the plan is not kept" in plan.notes[-1]


def test_the_oldest_entries_go_first(kept, tmp_path, monkeypatch):
    _, plan = kept
    monkeypatch.setattr(cache, "ENTRIES", 2)
    store = Cache(tmp_path)
    for age, key in enumerate(("first", "second")):
        assert store.store(key, plan) == ""
        os.utime(tmp_path / f"{key}.json", (age, age))
    store.load("first")  # now it is the younger one
    store.store("third", plan)
    assert {path.stem for path in tmp_path.iterdir()} == {"first", "third"}


def test_an_entry_is_whole_at_any_moment(kept, tmp_path):
    """Several write it while one reads; no parts are left."""
    _, plan = kept
    store = Cache(tmp_path)
    store.store("key", plan)
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(store.store, "key", plan) for _ in range(40)]
        reads = [store.load("key") for _ in range(40)]
    assert {write.result() for write in writes} == {""}
    assert all(found == plan for found, _ in reads)
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("JAXSCALER_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    where = {"linux": ".cache", "darwin": "Library/Caches", "win32": "AppData/Local"}
    for platform, folder in where.items():
        monkeypatch.setattr(sys, "platform", platform)
        assert find_cache(True) == Cache(tmp_path / folder / "jaxscaler")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert find_cache(True) == Cache(tmp_path / "xdg" / "jaxscaler")
    monkeypatch.setenv("JAXSCALER_CACHE", "~/plans")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache(True) == Cache(tmp_path / "plans")
    assert find_cache(False) is None
    assert find_cache(tmp_path) == Cache(tmp_path)
    monkeypatch.setenv("JAXSCALER_CACHE", "off")
    assert find_cache(True) is None
    assert find_cache("here") == Cache(Path("here"))
