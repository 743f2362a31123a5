"""Clusters: what strings, files and present devices mean, and the meshes that they form."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from jaxscaler.cluster import (
    Cluster,
    Link,
    Mesh,
    candidate_meshes,
    device_grid,
    find_device,
    join_axes,
    known_devices,
)
from jaxscaler.errors import ClusterError


def levels(text):
    return [(level.name, level.size) for level in Cluster.parse(text).levels]


@pytest.mark.parametrize(
    ("text", "expected", "count"),
    [
        ("h100:8", [("device", 8)], 8),
        ("h100:8x4", [("node", 4), ("device", 8)], 32),
        (" A100:6×3 ", [("node", 3), ("device", 6)], 18),
        ("gb200:72x2", [("node", 2), ("device", 72)], 144),
        ("v5p:4x4x8", [("x", 4), ("y", 4), ("z", 8)], 128),
        ("v5e:16x16x2", [("slice", 2), ("x", 16), ("y", 16)], 512),
        ("v7x:2x2x1", [("x", 2), ("y", 2), ("z", 1), ("core", 2)], 8),
        ("v3:4x4", [("x", 4), ("y", 4), ("core", 2)], 32),
        ("mi250x:8x2", [("node", 2), ("device", 8)], 16),
        ("cpu:1024x2", [("node", 2), ("device", 1024)], 2048),
    ],
)
def test_parse(text, expected, count):
    assert levels(text) == expected
    assert Cluster.parse(text).num_devices == count


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("h10:8", 0, "closest: h100"),
        ("h100", 4, "h100:DEVICESxNODES"),
        ("h100:", 5, "a number is missing"),
        ("h100:8x", 7, "a number is missing"),
        ("h100:8xq", 7, "found 'q'"),
        ("h100:8x-4", 7, "found '-4'"),
        ("h100:0", 5, "above 0"),
        ("h100:8 4", 5, "found '8 4'"),
        ("h100:16", 5, "at most 8"),
        ("h100:8x4x2", 5, "at most 2"),
        ("v5p:8", 4, "3D torus"),
        ("v5e:2x2x2x2", 4, "2D torus"),
        ("v5e:32x32", 4, "at most 256"),
        ("", 0, "unknown device"),
    ],
)
def test_parse_says_what_is_wrong_and_where(text, position, words):
    with pytest.raises(ClusterError) as error:
        Cluster.parse(text)
    message = str(error.value)
    assert f"cluster {text!r}, position {position}:" in message
    assert words in message
    assert message.endswith(f"\n  {' ' * position}^")


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("v5p:4x4x8", "xyz"),
        ("v5p:2x4x4", ""),
        ("v4:4x4x4", "xyz"),
        ("v5e:16x8", "x"),
        ("v6e:16x16", "xy"),
        ("v5e:8x8", ""),
    ],
)
def test_torus_axes_wrap_where_the_hardware_does(text, wrapped):
    assert "".join(lev.name for lev in Cluster.parse(text).levels if lev.link.wrap) == wrapped


def test_device_rates():
    h100, v100, v5e, a100 = (find_device(n)[0] for n in ("h100", "v100-32", "v5e", "a100"))
    assert a100.name == "a100-80"
    assert h100.flops("bfloat16") == h100.flops("bf16") == 989e12
    assert h100.flops("float8_e4m3fn") == 2 * 989.5e12
    assert h100.flops("float32") == 494.5e12  # TF32, JAX's default on it
    assert v100.flops("bf16") == v100.flops("f32") == 15.7e12 and v100.flops("f16") == 125e12
    assert a100.flops("f8") == a100.flops("bf16")
    assert v5e.flops("f32") == v5e.flops("bf16") == 197e12
    assert v5e.flops("int8") == 394e12
    assert 0 < v5e.flops("f64") < v5e.flops("f32")
    with pytest.raises(ClusterError, match="no rate for dtype 'bf17'"):
        h100.flops("bf17")


def test_table_is_sane():
    for name, (device, fabric) in known_devices().items():
        assert 4e9 < device.hbm_bytes < 400e9, name
        assert fabric.inter.bandwidth < fabric.intra.bandwidth, name
        for dtype in ("bf16", "f16", "f32", "f8", "f64"):
            assert device.flops(dtype) > 0, (name, dtype)
        numbers = "x".join(["2"] * (fabric.torus_rank or 1))
        assert Cluster.parse(f"{name}:{numbers}").device is device


@pytest.mark.parametrize("text", ["h100:8x4", "v7x:4x4x4x2", "cpu:8", "mi300x:8"])
def test_json_round_trip(text):
    cluster = Cluster.parse(text)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


TOML = """
name = "lab"
[device]
base = "a100-80"
name = "a100-pcie"
hbm_bytes = 80e9
peak_flops = { bf16 = 312e12, f32 = 19.5e12 }
[[levels]]
name = "node"
size = 3
[[levels]]
name = "device"
size = 4
link = { kind = "switch", bandwidth = 25e9, max_efficiency = 0.8, half_bytes = 4_000_000 }
"""


def test_load(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(TOML)
    cluster = Cluster.load(path)
    base = Cluster.parse("a100-80:8x2")
    assert (cluster.name, cluster.num_devices) == ("lab", 12)
    assert cluster.device.name == "a100-pcie" and cluster.device.hbm_bytes == 80e9
    assert cluster.device.hbm_bandwidth == base.device.hbm_bandwidth
    assert cluster.levels[0].link == base.levels[0].link
    assert cluster.levels[1].link == Link("switch", 25e9, max_efficiency=0.8, half_bytes=4e6)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hbm_bytes = 80e9", "hbm_byte = 80e9", "did you mean `hbm_bytes`"),
        ("hbm_bytes = 80e9", 'hbm_bytes = "80GB"', "`device.hbm_bytes` must be a number"),
        ("hbm_bytes = 80e9", "hbm_bytes = -1", "`hbm_bytes` must be more than 0"),
        ("bf16 = 312e12, f32", "bf61 = 312e12, f32", "`peak_flops` needs"),
        ('base = "a100-80"', 'base = "a10"', "unknown device 'a10'"),
        ('base = "a100-80"', "", "`device` lacks the field `achievable`"),
        ("size = 3", "size = 0", "`size` must be an integer above 0"),
        ("size = 3", "", "`levels[0]` lacks the field `size`"),
        ('name = "node"', 'name = "rack"', "levels[0]: `link` is missing"),
        ('name = "node"', 'name = "device"', "distinct names"),
        ("bandwidth = 25e9", "bandwidth = 0", "levels[1].link`: link: `bandwidth`"),
        ("bandwidth = 25e9, ", "", "`levels[1].link` lacks the field `bandwidth`"),
        ('"switch"', '"switched"', "`kind` must be one of"),
        ("max_efficiency = 0.8", "max_efficiency = 80", "`max_efficiency`"),
        ("[[levels]]", "[[levels", "line"),
    ],
)
def test_load_names_the_field(tmp_path, old, new, words):
    assert old in TOML
    path = tmp_path / "lab.toml"
    path.write_text(TOML.replace(old, new, 1))
    with pytest.raises(ClusterError) as error:
        Cluster.load(path)
    assert words in str(error.value) and str(path) in str(error.value)


def gpu(i, process, kind="NVIDIA H100 80GB HBM3"):
    return SimpleNamespace(platform="gpu", device_kind=kind, process_index=process, id=i)


def tpu(i, coords, core=0, slice_index=0, kind="TPU v5p"):
    return SimpleNamespace(
        platform="tpu",
        device_kind=kind,
        process_index=i // 4,
        id=i,
        coords=coords,
        core_on_chip=core,
        slice_index=slice_index,
    )


def test_local_is_what_jax_sees():
    assert Cluster.local() == Cluster.parse("cpu:8")


def test_local_groups_devices():
    assert Cluster.local([gpu(i, i // 8) for i in range(16)]) == Cluster.parse("h100:8x2")
    box = [(x, y, z) for z in range(4) for y in range(4) for x in range(2)]
    assert Cluster.local([tpu(i, c) for i, c in enumerate(box)]) == Cluster.parse("v5p:2x4x4")
    flat = [tpu(i, (i % 4, i // 4, 0), slice_index=s, kind="TPU v5 lite")
            for s in range(2) for i in range(16)]  # fmt: skip
    assert Cluster.local(flat) == Cluster.parse("v5e:4x4x2")
    twins = [tpu(i, (i // 2, 0, 0), core=i % 2, kind="TPU7x") for i in range(8)]
    assert Cluster.local(twins) == Cluster.parse("v7x:4x1x1")


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([gpu(0, 0), gpu(1, 0, "NVIDIA L4")], "one kind"),
        ([], "one kind"),
        ([gpu(0, 0, "NVIDIA H1000")], "not in the table"),
        ([gpu(0, 0), gpu(1, 0), gpu(2, 1)], "differ in size"),
        ([gpu(i, i) for i in range(16)], "does not say"),
        ([tpu(i, c) for i, c in enumerate([(0, 0, 0), (1, 1, 0)])], "do not fill a box"),
    ],
)
def test_local_refuses_what_it_can_not_tell(devices, words):
    with pytest.raises(ClusterError, match=words):
        Cluster.local(devices)


def names(text, **kwargs):
    return [str(mesh) for mesh in candidate_meshes(Cluster.parse(text), **kwargs)]


def test_candidate_meshes():
    assert names("h100:8") == ["device=8", "device0=2,device1=4", "device0=4,device1=2"]
    assert names("h100:8x4") == [
        "node=4,device=8",
        "node0=2,node1=2,device=8",
        "node=4,device0=2,device1=4",
        "node=4,device0=4,device1=2",
    ]
    assert names("v5p:4x4x4")[:3] == ["x_y_z=64", "x=4,y_z=16", "x_y=16,z=4"]
    assert "x=4,y=4,z=4" in names("v5p:4x4x4")
    assert names("h100:8x1", max_axes=1) == ["device=8"]
    assert names("h100:8x4", max_axes=1) == ["node_device=32"]
    assert names("a100:3") == ["device=3"]
    assert names("h100:1") == ["one device"]
    with pytest.raises(ClusterError, match="max_axes"):
        names("h100:8", max_axes=0)


@pytest.mark.parametrize(
    "text", ["h100:8x2048", "gb200:72x6", "v5e:16x16x4", "v7x:4x8x8", "cpu:360"]
)
@pytest.mark.parametrize("max_axes", [1, 2, 3, 4])
def test_every_candidate_has_all_devices(text, max_axes):
    cluster = Cluster.parse(text)
    meshes = candidate_meshes(cluster, max_axes)
    assert 1 <= len(meshes) <= 24
    assert len({str(mesh) for mesh in meshes}) == len(meshes)
    counts = [len(mesh.axes) for mesh in meshes]
    assert counts == sorted(counts) and counts[-1] <= max_axes
    for mesh in meshes:
        assert mesh.size == cluster.num_devices
        assert all(size > 1 for size in mesh.shape)
        hash(mesh)


def test_limit_prefers_small_powers_of_two():
    minors = {mesh.shape[-1] for mesh in candidate_meshes(Cluster.parse("cpu:360"), limit=4)}
    assert minors == {360, 2, 4, 8}


def test_factors_of_a_level():
    (mesh,) = (m for m in candidate_meshes(Cluster.parse("v5e:16x2")) if str(m) == "x0=4,x1=4,y=2")
    major, minor, _ = mesh.axes
    whole = Cluster.parse("v5e:16x2").levels[0].link
    # neighbours keep the wire but not the ring; strided rings share their wires
    assert minor.link.bandwidth == whole.bandwidth and not minor.link.wrap
    assert major.link.bandwidth == whole.bandwidth / 4 and major.link.wrap
    assert major.link.latency == 4 * whole.latency
    assert (
        join_axes([major, minor]).parts
        == candidate_meshes(Cluster.parse("v5e:16x2"))[1].axes[0].parts
    )
    assert mesh.axis("x0,x1").size == 16 and mesh.axis("y") is mesh.axes[2]
    with pytest.raises(ClusterError, match="no axis 'q'"):
        mesh.axis("q")
    # a pair of a full mesh has one of its wires
    pair = candidate_meshes(Cluster.parse("mi300x:8"))[-1].axes[1]
    assert pair.size == 2 and math.isclose(pair.link.bandwidth, 448e9 / 7)


def test_device_grid():
    mesh = candidate_meshes(Cluster.parse("h100:4x2"))[0]
    devices = [gpu(i, i // 4) for i in range(8)]
    grid = device_grid(mesh.shape, devices[::-1])
    assert grid.shape == (2, 4)
    assert [d.id for d in grid.ravel()] == list(range(8))
    box = [(x, y, 0) for y in range(4) for x in range(2)]
    torus = candidate_meshes(Cluster.parse("v5e:2x4"))[1]
    grid = device_grid(torus.shape, [tpu(i, c) for i, c in enumerate(box)])
    assert torus.shape == (2, 4)
    assert all(grid[x, y].coords == (x, y, 0) for x, y in np.ndindex(2, 4))
    with pytest.raises(ClusterError, match="needs 8 devices, but 7"):
        device_grid(mesh.shape, devices[1:])


def test_axis_names_are_distinct():
    axis = candidate_meshes(Cluster.parse("h100:8"))[0].axes[0]
    with pytest.raises(ClusterError, match="distinct"):
        Mesh((axis, axis))
