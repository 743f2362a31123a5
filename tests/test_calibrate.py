"""Measured devices: what is measured, what is fitted to it, and how prices follow from it."""

import json
import os
import socket
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler import calibrate, cli, recipes
from jaxscaler.cluster import Axis, Cluster, Curve, Link, Part, Profile, calibrated
from jaxscaler.cluster.curves import curve_of
from jaxscaler.cluster.links import COLLECTIVES
from jaxscaler.cluster.profile import Moved
from jaxscaler.cost import compute
from jaxscaler.cost.collective import KINDS, collective_time
from jaxscaler.errors import ClusterError, PlanError
from models import mlp

SIZES = calibrate.Sizes((32, 64), ("f32",), (4**7, 4**8), (4**6, 4**8), 10.0)
MATMUL = Curve("matmul", "f32", (1e6, 1e8), (1e10, 1e11))
STREAM = Curve("elementwise", "", (1e4, 1e6), (1e9, 4e9))
LINK = Link("switch", 2e9, 3e-6, 5e-6)


def profile(**changes):
    links = (("device", tuple((kind, LINK) for kind in COLLECTIVES)),)
    made = Profile("cpu", "cpu:8", 8, 1, (MATMUL, STREAM), links, (), (("jax", "0"),), "by hand")
    return replace(made, **changes)


def over(cluster, size, at=-1):
    level = cluster.levels[at]
    return Axis("a", (Part(level, size),))


@pytest.fixture(scope="module")
def measured():
    """Four simulated devices, measured; blocks are short, nothing is asserted of the times."""
    before = calibrate.BLOCK, calibrate.BLOCKS, calibrate.CHAIN, calibrate.DISPATCHES
    calibrate.BLOCK, calibrate.BLOCKS, calibrate.CHAIN, calibrate.DISPATCHES = 1e-4, 3, 2, 3
    try:
        return calibrate.calibrate(devices=jax.devices()[:4], sizes=SIZES)
    finally:
        calibrate.BLOCK, calibrate.BLOCKS, calibrate.CHAIN, calibrate.DISPATCHES = before


class TestMeasuring:
    def test_everything_is_there_once(self, measured):
        found = [(curve.op, curve.dtype) for curve in measured.curves]
        assert found == [("matmul", "f32"), ("elementwise", "")]
        assert measured.curves[0].sizes == (2.0 * 32**3, 2.0 * 64**3)
        points = [(p.level, p.size, p.kind, p.nbytes) for p in measured.moved]
        assert len(set(points)) == len(points) == 2 * len(COLLECTIVES) * 2
        assert {p[3] for p in points} == {4.0**6, 4.0**8}
        assert all(p.seconds > 0 for p in measured.moved)
        ((level, kinds),) = measured.links
        assert level == "device" and {kind for kind, _ in kinds} == set(COLLECTIVES) == set(KINDS)
        assert (measured.device_kind, measured.devices, measured.processes) == ("cpu", 4, 1)
        assert measured.host is not None and measured.host.calls(4, 10) > 0
        assert measured.applied(Cluster.parse("cpu:4")).device.host == measured.host

    def test_prices_rise_with_size(self, measured):
        cluster = measured.applied(Cluster.parse("cpu:4"))
        for kind in COLLECTIVES:
            times = collective_time(kind, over(cluster, 4), np.geomspace(1, 1e9, 50))
            assert (np.diff(times) >= 0).all() and times[0] > 0
        for curve in measured.curves:
            times = curve.seconds(np.geomspace(1, 1e12, 50))
            assert (np.diff(times) >= -1e-12 * times[1:]).all() and times[0] > 0

    def test_a_file_gives_it_back(self, measured, tmp_path):
        measured.save(tmp_path / "p.json")
        again = Profile.load(tmp_path / "p.json")
        assert replace(again, file="") == measured
        assert json.loads((tmp_path / "p.json").read_text())["version"] == 1

    @pytest.mark.parametrize("kind", COLLECTIVES)
    def test_every_link_of_a_chain_is_compiled(self, kind, devices):
        mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
        call, begin = calibrate.chained(kind, mesh, "b", 16)
        assert call(begin).shape == (128,)

    def test_lengths(self):
        assert [calibrate._lengths(n) for n in (1, 2, 8, 12)] == [[], [2], [2, 4, 8], [2, 4, 12]]


@pytest.mark.parametrize(("name", "at"), [("h100:8", 0), ("h100:2x4", 0), ("v5e:4x16", 1),
                                          ("v100-16:8", 0)])  # fmt: skip
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_the_fit_finds_the_link_that_the_times_are_of(name, at, kind):
    """Latency, launch and bandwidth come out as they went in, on switches, networks and tori."""
    cluster = Cluster.parse(name)
    level = cluster.levels[at]
    true = replace(LINK, kind=level.link.kind, wrap=level.link.wrap)
    real = replace(cluster, levels=tuple(replace(lv, link=true) for lv in cluster.levels))
    points = [
        Moved(kind, level.name, n, b, float(collective_time(kind, over(real, n, at), b)))
        for n in calibrate._lengths(level.size)
        for b in (4096.0, 1e6, 1e8)
    ]
    ((kind_found, link),) = calibrate.fitted(cluster, points)[level.name]
    assert kind_found == kind
    assert link.bandwidth == pytest.approx(true.bandwidth, rel=1e-6)
    links = (("device", ()), (level.name, ((kind, link),)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing of the other levels
        used = profile(device_kind=cluster.device.name, links=links[1:]).applied(cluster)
    for point in points:
        time = collective_time(kind, over(used, point.size, at), point.nbytes)
        assert float(time) == pytest.approx(point.seconds, rel=1e-6)


class TestPrices:
    def test_collectives_are_priced_by_the_formula(self):
        cluster = Cluster.parse("cpu:8", profile=profile())
        time = float(collective_time("all_gather", over(cluster, 8), 8e6))
        assert time == pytest.approx(5e-6 + 3 * 3e-6 + 7 / 8 * 8e6 / 2e9)
        time = float(collective_time("all_reduce", over(cluster, 4), 8e6))
        assert time == pytest.approx(5e-6 + 2 * 2 * 3e-6 + 2 * 3 / 4 * 8e6 / 2e9)

    def test_kernels_are_priced_by_the_curves(self):
        device = Cluster.parse("cpu:8", profile=profile()).device
        ones = np.ones((1, 1), np.int64)

        def price(flops, nbytes, **options):
            given = dict(dtype="float32", factors=(0,), runs=3, kernel=True, op="matmul") | options
            work = compute.Work(flops=flops, tensors=((0, nbytes),), **given)
            return float(compute.seconds(work, ones, {0: np.ones(1)}, device)[0])

        assert price(1e7, 8.0) == pytest.approx(3 * 1e7 / np.sqrt(1e10 * 1e11))  # between points
        assert price(1e9, 8.0) == pytest.approx(3 * 1e9 / 1e11)  # above the last
        assert price(1.0, 8.0) == pytest.approx(3 * 1e6 / 1e10)  # below the first
        assert price(1.0, 1e8) == pytest.approx(3 * 1e8 / 4e9)  # bytes bind
        assert price(1e9, 8.0, kernel=False) == pytest.approx(3 * 1e9 / 1e11)
        assert price(1e5, 8.0, kernel=False) == pytest.approx(3 * 1e5 / 1e11)  # no start-up
        nominal = 3 * 1e9 / (device.flops("float64") * device.achievable)
        assert price(1e9, 8.0, dtype="float64") == pytest.approx(nominal)  # nobody measured it

    def test_a_plan_is_priced_by_its_profile(self, tmp_path):
        """Links half as fast, latencies twice as long: communication takes twice as long."""
        work = mlp.workload(size="tiny")
        slow = replace(LINK, bandwidth=1e9, latency=6e-6, launch=1e-5)
        slower = profile(links=(("device", tuple((kind, slow) for kind in COLLECTIVES)),))
        slower.save(tmp_path / "slow.json")
        plans = [
            js.plan(work.step, work.state, work.batch, cluster="cpu:8", cache=False,
                    constraints=recipes.data_parallel(), profile=given)
            for given in (None, profile(), tmp_path / "slow.json")
        ]  # fmt: skip
        moved = [sum(t.seconds for t in p.traffic if t.kind in COLLECTIVES) for p in plans]
        assert moved[2] == pytest.approx(2 * moved[1])
        assert plans[2].predicted.compute == plans[1].predicted.compute
        assert plans[1].predicted.compute != plans[0].predicted.compute
        read = js.Plan.from_dict(json.loads(json.dumps(plans[1].to_dict())))
        assert Cluster.from_dict(read.cluster) == Cluster.parse("cpu:8", profile=profile())

    def test_without_a_profile_a_cluster_is_written_as_ever(self):
        data = Cluster.parse("h100:8x2").to_dict()
        assert "curves" not in data["device"]
        assert all("measured" not in level["link"] for level in data["levels"])


class TestRefused:
    def test_another_kind_of_device(self):
        with pytest.raises(ClusterError, match=r"profile is of cpu .* of h100:8 are h100"):
            Cluster.parse("h100:8", profile=profile())

    def test_a_level_that_was_not_measured_is_named(self):
        with pytest.warns(UserWarning, match="nothing of links over node of cpu:4x2"):
            found = calibrated(Cluster.parse("cpu:4x2"), profile())
        assert not found.levels[0].link.measured and found.levels[1].link.measured

    @pytest.mark.parametrize(
        ("text", "words"),
        [("{", "not JSON"), ('{"version": 99}', "version 99"), ("[]", "version None"),
         ('{"version": 1}', "no profile of `calibrate`")],
    )  # fmt: skip
    def test_files_that_are_no_profiles(self, text, words, tmp_path):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(ClusterError, match=words):
            Cluster.parse("cpu:8", profile=tmp_path / "p.json")

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(ClusterError, match="No such file"):
            Profile.load(tmp_path / "p.json")

    def test_a_wrong_field_is_named(self):
        data = profile().to_dict()
        data["links"]["device"]["all_gather"]["bandwidth"] = -1.0
        with pytest.raises(ClusterError, match=r"links.device.all_gather.*bandwidth"):
            Profile.from_dict(data)

    def test_a_curve_on_which_more_takes_less_time(self):
        with pytest.raises(ClusterError, match="a larger size take no less time"):
            Curve("matmul", "f32", (1.0, 2.0), (1.0, 3.0))
        flat = curve_of("matmul", "f32", np.array([2.0, 1.0]), np.array([1.0, 3.0]))
        assert flat.seconds(np.array([1.0, 1.5, 2.0])) == pytest.approx([3.0, 3.0, 3.0])

    def test_a_profile_beside_a_plan(self):
        work = mlp.workload(size="tiny")
        plan = js.plan(work.step, work.state, work.batch, cluster="cpu:8", cache=False)
        with pytest.raises(PlanError, match="leave one of them out"):
            js.parallelize(work.step, plan=plan, profile=profile())


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "BLOCK", 1e-4)
    monkeypatch.setattr(calibrate, "CHAIN", 1)
    monkeypatch.setattr(calibrate, "QUICK", replace(SIZES, matmul=(32,), collective=(4**6,)))
    out = tmp_path / "p.json"
    assert cli.main(["calibrate", "--quick", "--quiet", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "8 x cpu, 1 processes" in said and "all_reduce over device" in said
    target = ["models.mlp:workload", "--cluster", "cpu:8", "--size", "tiny", "--quiet", "--json"]
    assert cli.main(["plan", *target, "--profile", str(out)]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert "measured" in planned["cluster"]["levels"][0]["link"]
    assert cli.main(["plan", *target, "--profile", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err
    assert cli.main(["calibrate", "--out", str(tmp_path / "no" / "p.json")]) == 2


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "4"}, ()),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ()),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
         ("h:1", 2, 1)),
    ],
)  # fmt: skip
def test_processes_join_as_the_environment_says(environment, given, monkeypatch):
    from jaxscaler import processes

    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    processes.join()
    assert calls == ([] if given is None else [given])


@pytest.mark.slow
def test_processes_measure_together(tmp_path):
    """Each of two processes calibrates; the first writes what both measured."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    code = (
        "import sys\nfrom jaxscaler import calibrate, cli\n"
        "calibrate.BLOCK, calibrate.CHAIN = 1e-4, 2\n"
        'calibrate.QUICK = calibrate.Sizes((32,), ("f32",), (4**7,), (4**6,), 10.0)\n'
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    files = [tmp_path / f"{i}.json" for i in range(2)]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, "calibrate", "--quick", "--out", str(file)],
            env=os.environ | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2",
                              "JAX_PROCESS_ID": str(i), "JAX_NUM_CPU_DEVICES": "2",
                              "PYTHONPATH": str(Path(__file__).parent.parent)},
            stderr=subprocess.PIPE, text=True,
        )
        for i, file in enumerate(files)
    ]  # fmt: skip
    for run in runs:
        _, err = run.communicate(timeout=300)
        assert run.returncode == 0, err[-2000:]
    found = Profile.load(files[0])
    assert not files[1].exists()
    assert (found.cluster, found.devices, found.processes) == ("cpu:2x2", 4, 2)
    assert [level for level, _ in found.links] == ["node", "device"]
