"""Every family of orders that a stage executor can run: the same numbers, and its shape.

Chimera: `test_stages_chimera.py`.
"""

import jax
import pytest
from test_stages import cut_of, run_planned

from jaxscaler.rewrite.changes import Stages


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def chunks():
    """Four stages, two on each of two places."""
    _, changed, _ = cut_of("tower", 4)
    (cut,) = (c for c in changed.changes if isinstance(c, Stages))
    return Stages(0, tuple((e, t, p % 2) for e, t, p in cut.points))


@pytest.mark.parametrize(
    ("family", "stages", "phases"),
    [
        ("interleaved", chunks, "FB"),
        pytest.param("zero-bubble", lambda: 2, "FBW", marks=pytest.mark.slow),
        pytest.param("gpipe", lambda: 2, "FB", marks=pytest.mark.slow),
        pytest.param("1f1b", lambda: 2, "FB", marks=pytest.mark.slow),
        pytest.param("zero-bubble-2", lambda: 2, "FBW", marks=pytest.mark.slow),
    ],
)
def test_same_numbers(family, stages, phases, devices):
    plan, _, _ = run_planned(
        "tower", {}, "cpu:4", stages=stages(), order=family, micro=4, submeshes=(2, 2)
    )
    assert {t.phase for mine in plan.order for t in mine} == {*phases, "U"}
    assert len(plan.order) == 2
