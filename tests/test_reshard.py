"""Changes of layout: prices against their own collectives, and collectives against XLA's."""

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscaler.cluster import Cluster, candidate_meshes, device_grid
from jaxscaler.cost.collective import collective_time
from jaxscaler.cost.reshard import local_bytes, reshard_collectives, reshard_time
from jaxscaler.errors import JaxscalerError

MESHES = [
    mesh
    for text in ("h100:8x4", "v5p:4x4x4", "v5e:16x4", "gb200:12x3", "mi300x:8")
    for mesh in candidate_meshes(Cluster.parse(text))
]


def mesh_of(text, *shape):
    return next(m for m in candidate_meshes(Cluster.parse(text)) if m.shape == shape)


def all_layouts(rank, k, low=-1, high=None):
    values = range(low, rank + 1 if high is None else high)
    return np.array(list(itertools.product(values, repeat=k)))


@settings(max_examples=150)
@given(st.sampled_from(MESHES), st.integers(0, 4), st.floats(1, 1e10), st.data())
def test_time_is_the_sum_of_the_collectives(mesh, rank, nbytes, data):
    k, shape = len(mesh.axes), (64,) * rank
    layout = st.tuples(*[st.integers(-1, rank)] * k)
    src, dst = data.draw(st.lists(layout, min_size=1, max_size=4)), data.draw(layout)
    times = reshard_time(mesh, shape, nbytes, np.array(src), np.array([dst]))
    assert times.shape == (len(src), 1)
    for a, seconds in zip(src, times[:, 0], strict=True):
        if any(d == rank != s for s, d in zip(a, dst, strict=True)):
            assert seconds == math.inf
            with pytest.raises(JaxscalerError, match="summands"):
                reshard_collectives(mesh, shape, nbytes, a, dst)
            continue
        steps = reshard_collectives(mesh, shape, nbytes, a, dst)
        total = sum(float(collective_time(kind, mesh.axis(n), b)) for kind, n, b in steps)
        np.testing.assert_allclose(seconds, total, rtol=1e-12)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_laws(mesh):
    rank, k = 2, len(mesh.axes)
    layouts = all_layouts(rank, k)
    small, large = (reshard_time(mesh, (64, 64), b, layouts, layouts) for b in (1e6, 2e6))
    assert (large >= small).all()
    assert not np.diag(small).any()
    sums = layouts == rank
    np.testing.assert_array_equal(np.isinf(small), (sums[None] & ~sums[:, None]).any(-1))
    # free, from anything whole: every cut of it; and nothing else that is not equal
    whole = int(np.flatnonzero((layouts == -1).all(1))[0])
    cuts = ~sums.any(1)
    assert not small[whole, cuts].any()
    for i, j in zip(*np.nonzero(small == 0), strict=True):
        assert ((layouts[i] == layouts[j]) | (layouts[i] == -1)).all()
    # what is gathered last is what the target holds, on every device
    local = local_bytes(mesh, (64, 64), 1e6, layouts)
    np.testing.assert_allclose(local[whole], 1e6)
    assert (local >= 1e6 / mesh.size * (1 - 1e-12)).all()


X, Y, R, P = 0, 1, -1, 2  # dims of a matrix; unused; summand
CASES = [  # on node=2, device=4; bytes of a matrix of 800
    ((R, R), (X, Y), []),
    ((X, R), (X, Y), []),
    ((P, P), (P, P), []),
    ((P, P), (R, R), [("all_reduce", "node,device", 800)]),
    ((P, P), (X, X), [("reduce_scatter", "node,device", 800)]),
    ((P, P), (X, Y), [("reduce_scatter", "node", 800), ("reduce_scatter", "device", 400)]),
    ((X, P), (X, R), [("all_reduce", "device", 400)]),
    ((R, P), (X, R), [("all_reduce", "device", 400)]),
    ((X, X), (R, R), [("all_gather", "node,device", 800)]),
    ((X, Y), (R, R), [("all_gather", "node", 200), ("all_gather", "device", 800)]),
    ((X, X), (X, R), [("all_gather", "device", 400)]),
    ((X, X), (R, X), [("collective_permute", "node", 100), ("all_gather", "node", 200)]),
    ((R, X), (X, X), [("collective_permute", "node", 100)]),
    ((X, R), (X, X), []),
    ((X, R), (Y, R), [("all_to_all", "node", 400)]),
    ((X, X), (Y, Y), [("all_to_all", "node,device", 100)]),
    ((X, X), (X, Y), [("all_to_all", "device", 100)]),
    ((X, R), (R, X), [("collective_permute", "node", 200)]),
    ((R, X), (X, R), [("collective_permute", "node", 100), ("all_gather", "device", 400)]),
    ((X, X), (R, Y), [("all_gather", "node,device", 800)]),  # XLA gathers, then slices
    ((X, Y), (R, X), [("all_gather", "node", 200), ("all_to_all", "device", 200)]),
]


@pytest.mark.parametrize(("src", "dst", "expected"), CASES)
def test_collectives(src, dst, expected):
    mesh = mesh_of("h100:4x2", 2, 4)
    steps = reshard_collectives(mesh, (10, 20), 800, src, dst)
    assert list(steps) == expected


def test_one_device():
    mesh = candidate_meshes(Cluster.parse("h100:1"))[0]
    none = np.zeros((1, 0), int)
    assert reshard_time(mesh, (4,), 16, none, none).tolist() == [[0]]
    assert reshard_collectives(mesh, (4,), 16, (), ()) == ()
    assert local_bytes(mesh, (4,), 16, none).tolist() == [16]


def test_local_bytes():
    mesh = mesh_of("h100:4x2", 2, 4)
    layouts = np.array([[R, R], [X, R], [R, Y], [X, X], [P, P], [P, Y]])
    assert local_bytes(mesh, (8, 8), 256, layouts).tolist() == [256, 128, 64, 32, 256, 64]


@pytest.mark.parametrize("layouts", [[[0, 3]], [[-2, 0]], [[0]], [0, 0]])
def test_malformed_layouts(layouts):
    mesh = mesh_of("h100:4x2", 2, 4)
    with pytest.raises(JaxscalerError, match=r"array \[m, 2\] of -1..2"):
        local_bytes(mesh, (8, 8), 256, np.array(layouts))


def test_partitioner_agrees():
    """XLA changes one layout into another by the same collectives, in most cases."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = mesh_of("h100:4x2", 2, 4)
    devices = jax.sharding.Mesh(device_grid(mesh.shape, jax.devices()), mesh.names)
    pattern = r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("

    def sharding(layout):
        axes = [tuple(n for n, d in zip(mesh.names, layout, strict=True) if d == i) for i in (0, 1)]
        return NamedSharding(devices, PartitionSpec(*(a or None for a in axes)))

    def compiled(src, dst):
        step = jax.jit(lambda x: x, in_shardings=sharding(src), out_shardings=sharding(dst))
        text = step.lower(jax.ShapeDtypeStruct((64, 64), np.float32)).compile().as_text()
        return Counter(kind.replace("-", "_") for kind in re.findall(pattern, text))

    pairs = list(itertools.permutations(all_layouts(2, 2, high=2).tolist(), 2))
    same = sum(
        compiled(a, b)
        == Counter(kind for kind, _, _ in reshard_collectives(mesh, (64, 64), 1, a, b))
        for a, b in pairs
    )
    print(f"{same} of {len(pairs)} changes as XLA makes them")
    assert same >= 0.9 * len(pairs)
