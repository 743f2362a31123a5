"""Plans that are nearly decided: the cheapest by elimination, for all sizes of the axes, without
compiled code."""

import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
from solve_problems import random_problem

from jaxscaler.cost import compute
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.parallel import axes_of, cluster_of
from jaxscaler.estimate.template import Task
from jaxscaler.solve import elimination, evaluate, make_problem, solve
from jaxscaler.solve.elimination import cheapest
from jaxscaler.solve.shared import Shared

body_module = import_module("jaxscaler.estimate.body")  # the package has a function of this name
GPT = ModelConfig("gpt", "gpt", 512, 2, 8, vocab=4096, context=512, tied=True, positions=True)
LLAMA = ModelConfig("llama", "llama", 512, 2, 16, 4, ffn=1024, vocab=4096, gated=True)
T5 = ModelConfig("t5", "t5", 512, 2, 8, head_size=32, ffn=1024, vocab=4096, gated=True)
MOE = ModelConfig("moe", "moe", 512, 2, 8, 4, ffn=1024, vocab=4096, gated=True, experts=8, chosen=2)


@pytest.mark.parametrize("large", [2, elimination.LARGE])  # strategies are left out early, and late
def test_a_choice_costs_as_little_as_the_solver_s(monkeypatch, large):
    monkeypatch.setattr(elimination, "LARGE", large)
    monkeypatch.setattr(elimination, "MORE", 2)
    rng = np.random.default_rng(0)
    infeasible = 0
    for _ in range(150):
        problem = random_problem(rng, memory=False)
        found, best = cheapest(Shared.of(problem)), solve(problem)
        if best.choice is None:
            infeasible += 1
            assert found is None
        else:
            assert found is not None and evaluate(problem, found)[0] == best.cost
    assert 0 < infeasible < 100


def test_tables_that_grow_too_large_are_left_to_the_solver(monkeypatch):
    monkeypatch.setattr(elimination, "MOST", 8)
    rng = np.random.default_rng(1)
    edges = [(i, j, rng.integers(0, 99, (3, 3)).tolist()) for j in range(5) for i in range(j)]
    problem = make_problem([[0, 0, 0]] * 5, edges, [], None)
    assert cheapest(Shared.of(problem)) is None


def bodies(model, sizes, monkeypatch):
    """(seconds with the plan of few devices, with that of the sizes themselves)."""
    axes = axes_of(cluster_of("h100", 8), {"dp": 1} | sizes)
    inner = tuple(axes[name] for name in sizes)
    attention = "unfused" if model.family == "t5" else "flash"
    task = Task(model, max(sizes["tp"], model.kv_heads), model.vocab, 512, attention=attention)
    device = cluster_of("h100", 8).device
    found = []
    for few in (body_module._few, lambda axis: axis):
        monkeypatch.setattr(body_module, "_few", few)
        body_module._body.cache_clear()
        found.append(body_module._body(task, 2, inner, True, device).seconds)
    body_module._body.cache_clear()
    return found


@pytest.mark.parametrize("model", [GPT, LLAMA, MOE, T5], ids=lambda model: model.name)
def test_a_plan_of_few_devices_is_as_good_as_one_of_the_size(model, monkeypatch):
    few, own = bodies(model, {"tp": 8}, monkeypatch)
    assert few == pytest.approx(own, rel=1e-3)
    assert own > 10 * compute.RAMP


def test_an_estimate_compiles_nothing():
    code = (
        "import sys; from jaxscaler.cli import main; "
        "main(['estimate', 'gpt2', '--device', 'a100', '--devices', '8', '--json']); "
        "print(sorted({'numba', 'ortools', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
