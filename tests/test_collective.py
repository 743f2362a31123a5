"""Collective times: laws that hold for any link, and what was measured on real ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscaler.cluster import Axis, Cluster, Level, Link, Part, candidate_meshes, join_axes
from jaxscaler.cluster.links import KINDS as LINKS
from jaxscaler.cost.collective import KINDS, collective_time
from jaxscaler.errors import ClusterError

MIB = 2**20


@st.composite
def links(draw):
    kind = draw(st.sampled_from(LINKS))
    return Link(
        kind,
        bandwidth=draw(st.floats(1e9, 1e12)),
        latency=draw(st.floats(0, 1e-4)),
        launch=draw(st.floats(0, 1e-4)),
        max_efficiency=draw(st.floats(0.1, 1)),
        half_bytes=draw(st.floats(0, 1e8)),
        sharpness=draw(st.floats(0.2, 1)),
        wrap=kind == "torus" and draw(st.booleans()),
    )


@st.composite
def axes(draw):
    parts = []
    for i in range(draw(st.integers(1, 3))):
        size, stride = draw(st.integers(1, 16)), draw(st.sampled_from([1, 1, 2, 3]))
        parts.append(Part(Level(f"l{i}", size * stride, draw(links())), size, stride))
    return Axis("axis", tuple(parts))


def faster(axis, factor):
    return Axis(
        axis.name,
        tuple(
            replace(
                p,
                level=replace(
                    p.level,
                    link=replace(p.level.link, bandwidth=p.level.link.bandwidth * factor),
                ),
            )
            for p in axis.parts
        ),
    )


@settings(max_examples=200)
@given(axes(), st.sampled_from(list(KINDS)), st.floats(1, 100))
def test_laws(axis, kind, factor):
    nbytes = np.concatenate([[0], np.logspace(0, 11, 40)])
    times = collective_time(kind, axis, nbytes)
    assert times.shape == nbytes.shape and times[0] == 0 and np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()
    assert (collective_time(kind, faster(axis, factor), nbytes) <= times * (1 + 1e-12)).all()
    if axis.size == 1:
        assert not times.any()
    one = [float(collective_time(kind, axis, b)) for b in nbytes]
    np.testing.assert_allclose(times, one, rtol=1e-14)


@settings(max_examples=100)
@given(axes())
def test_all_reduce_is_reduce_scatter_and_all_gather(axis):
    nbytes = np.logspace(0, 11, 40)
    reduce, scatter, gather = (
        collective_time(kind, axis, nbytes)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    launch = max((p.link.launch for p in axis.parts if p.size > 1), default=0)
    np.testing.assert_allclose(reduce + launch, scatter + gather, rtol=1e-9)


def ideal(kind, size, wrap=False, bandwidth=1e9):
    return Axis("a", (Part(Level("a", size, Link(kind, bandwidth, wrap=wrap)), size),))


@pytest.mark.parametrize(
    ("axis", "kind", "seconds"),
    [
        (ideal("switch", 8), "all_gather", 7 / 8),
        (ideal("switch", 8), "reduce_scatter", 7 / 8),
        (ideal("switch", 8), "all_reduce", 14 / 8),
        (ideal("switch", 8), "all_to_all", 7 / 8),
        (ideal("switch", 8), "collective_permute", 1),
        (ideal("torus", 16), "all_gather", 15 / 16),
        (ideal("torus", 16, wrap=True), "all_gather", 15 / 32),
        # scaling book: the whole array (16 GB) / (4 * both ways of one wire)
        (ideal("torus", 16, wrap=True), "all_to_all", 16 / 8),
        (ideal("torus", 16), "all_to_all", 16 / 4),
        (ideal("torus", 3), "all_to_all", 2 / 3),
        (ideal("torus", 16, wrap=True), "collective_permute", 1),
    ],
)
def test_closed_forms(axis, kind, seconds):
    np.testing.assert_allclose(collective_time(kind, axis, 1e9), seconds, rtol=1e-12)


def test_joined_axes():
    x, y = (Axis(n, (Part(Level(n, 4, Link("torus", 1e9, wrap=True)), 4),)) for n in "xy")
    np.testing.assert_allclose(
        collective_time("all_gather", join_axes([x, y]), 1e9), 15 / 16 / 4, rtol=1e-12
    )
    device = Axis("d", (Part(Level("d", 8, Link("switch", 100e9)), 8),))
    node = Axis("n", (Part(Level("n", 4, Link("network", 1e9)), 4),))
    # each of the 8 devices of a node passes an eighth through its own port
    np.testing.assert_allclose(
        collective_time("all_reduce", join_axes([node, device]), 1e9), 2 * 31 / 32 / 8, rtol=1e-12
    )
    halves = next(m for m in candidate_meshes(Cluster.parse("v5e:16x16")) if len(m.axes) == 3)
    (flat,) = (m for m in candidate_meshes(Cluster.parse("v5e:16x16")) if len(m.axes) == 2)
    for kind in KINDS:
        assert collective_time(kind, join_axes(halves.axes[:2]), 1e8) == collective_time(
            kind, flat.axes[0], 1e8
        )


def test_unknown_kind():
    with pytest.raises(ClusterError, match="unknown collective 'gather'"):
        collective_time("gather", ideal("switch", 8), 1.0)


# (cluster, collective, bytes, seconds measured): stas00/ml-engineering (NCCL tests), and the
# scaling book's all-gather on a v5e axis of 4
MEASURED = [
    *(
        ("a100:8", "all_reduce", size, us * 1e-6)
        for size, us in [
            (MIB // 32, 43.8), (MIB, 101.9), (4 * MIB, 101.5), (8 * MIB, 133.6), (16 * MIB, 276.5),
            (64 * MIB, 684.8), (128 * MIB, 1327.8), (256 * MIB, 2421.5), (512 * MIB, 4218.8),
            (1024 * MIB, 8205.5), (4096 * MIB, 32134.2), (16384 * MIB, 127989.7),
        ]
    ),
    *(
        ("h200:8", "all_reduce", size, us * 1e-6)
        for size, us in [
            (MIB // 32, 39.8), (MIB, 46.0), (4 * MIB, 68.5), (16 * MIB, 133.5), (64 * MIB, 338.9),
            (256 * MIB, 1077.4), (1024 * MIB, 4053.2), (16384 * MIB, 62375.0),
        ]
    ),
    ("h200:8x4", "all_reduce", 4096 * MIB, 22821e-6),
    ("b200:8", "all_reduce", 16384 * MIB, 1.75 * 16384 * MIB / 838e9),
    ("v5e:4x4", "all_gather", 34e6, 680e-6),
]  # fmt: skip
# mean and largest relative error allowed; the A100 measured the same at 1 and at 4 MiB
BANDS = {"a100:8": (0.12, 0.35), "h200:8": (0.04, 0.08), "h200:8x4": (0.1, 0.1),
         "b200:8": (0.05, 0.05), "v5e:4x4": (0.05, 0.05)}  # fmt: skip


@pytest.mark.parametrize("name", BANDS)
def test_measured(name):
    cluster = Cluster.parse(name)
    mesh = candidate_meshes(cluster, max_axes=len(cluster.levels))
    axis = next(m for m in mesh if len(m.axes) == len(cluster.levels)).axes
    axis = join_axes(axis) if "network" in {a.link.kind for a in axis} else axis[0]
    rows = [row for row in MEASURED if row[0] == name]
    errors = np.array([collective_time(k, axis, size) / t - 1 for _, k, size, t in rows])
    mean, largest = BANDS[name]
    print(f"{name}: {np.round(100 * errors, 1)} %")
    assert abs(errors).mean() < mean and abs(errors).max() < largest
