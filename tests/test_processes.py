"""Several processes: one plan, the numbers of one process, and what is said when one is lost."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.errors import PlanError
from models import mlp

WORKER = Path(__file__).with_name("process_worker.py")
ROOT = WORKER.parent.parent
COUNT, DEVICES = 2, 4
LIMIT = 120  # seconds after which a run hangs, on whatever machine
PLANS = {"searched": list, "tensor": recipes.tensor_parallel}


class Run:
    """A task in COUNT processes. What each says is read as it comes; all are dead afterwards."""

    def __init__(self, **task):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            coordinator = f"localhost:{free.getsockname()[1]}"
        task |= {"count": COUNT, "devices": DEVICES, "coordinator": coordinator}
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, WORKER, json.dumps(task | {"index": i})],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
            for i in range(COUNT)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()

    def until(self, index, fact):
        """What process `index` says of `fact`, when it says it."""
        process = self.processes[index]
        for line in process.stdout:
            if line.startswith("{") and fact in (said := json.loads(line)):
                return said
        pytest.fail(f"process {index} ended without {fact}: {process.stderr.read()[-2000:]}")

    def end(self, index):
        """(exit status, facts, stderr) of a process that ends by itself."""
        process = self.processes[index]
        out, err = process.communicate(timeout=LIMIT)
        facts = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return process.returncode, [f for f in facts if "stepped" not in f], err


def one_process(work, plan, batches):
    """Losses and plan digest of the same steps in this process, on as many devices."""
    step = js.parallelize(
        work.step, cluster=f"cpu:{DEVICES}x{COUNT}", constraints=PLANS[plan](), time_limit=20
    )
    state = step.init(work.init, jax.random.key(0), batch=work.batch)
    losses = []
    for batch in step.feed(batches):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, step.plan.digest()


@pytest.fixture(autouse=True, scope="module")
def _x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def work():
    return mlp.workload(dtype="float64", batch=16)


class TestTogether:
    @pytest.fixture(scope="class")
    @staticmethod
    def said():
        """What the processes say, by fact, in the order of the processes."""
        with Run(do="train", plans=list(PLANS)) as run:
            ends = [run.end(i) for i in range(COUNT)]
        for status, _, err in ends:
            assert status == 0, err[-3000:]
        return [facts for _, facts, _ in ends]

    @pytest.mark.parametrize("n", range(len(PLANS)), ids=list(PLANS))
    def test_plan_and_numbers_of_one_process(self, said, work, n):
        batches = [work.make_batch(i) for i in range(3)]
        batches.append({k: v[:8] for k, v in work.make_batch(3).items()})
        losses, digest = one_process(work, list(PLANS)[n], batches)
        assert len(losses) == 4
        for facts in said:
            assert facts[n]["cluster"] == f"cpu:{DEVICES}x{COUNT}"
            assert facts[n]["digest"] == digest
            np.testing.assert_allclose(facts[n]["losses"], losses, rtol=1e-9)

    def test_loaders_that_give_the_whole_batch(self, said):
        for facts in said:
            np.testing.assert_allclose(
                facts[len(PLANS)]["whole"], facts[1]["losses"][:3], rtol=1e-9
            )

    def test_every_process_can_be_asked_why(self, said):
        whys = {facts[len(PLANS)]["why"] for facts in said}
        assert len(whys) == 1 and "pair_0/up/kernel" in whys.pop()

    def test_different_plans_are_refused_by_all(self, said):
        digests = [facts[-2]["own"] for facts in said]
        assert digests[0] != digests[1]
        for facts in said:
            kind, text = facts[-2]["different"]
            assert kind == "PlanError"
            assert f"{digests[0]} on process 0, {digests[1]} on process 1" in text

    def test_what_the_planning_process_raises_all_raise(self, said):
        kinds, texts = zip(*(facts[-1]["infeasible"] for facts in said))
        assert kinds == ("InfeasibleError", "InfeasibleError")
        assert texts[0] in texts[1] and "process 0, which plans for all" in texts[1]


class TestLost:
    def test_a_lost_process_is_named_and_a_restart_resumes(self, work, tmp_path):
        checkpoint = str(tmp_path / "state")
        losses, _ = one_process(work, "searched", [work.make_batch(i) for i in range(4)])
        with Run(do="forever", checkpoint=checkpoint) as run:
            assert run.until(1, "saved")["saved"] == pytest.approx(losses[:2], rel=1e-9)
            run.until(1, "stepped")
            lost = run.processes[1]
            lost.kill()
            status, _, err = run.end(0)
        assert status == 1, err[-3000:]
        message = err[err.index("LostProcessError") :]
        assert "lost process 1 (" in message and f"pid {lost.pid})" in message
        assert "restore the last checkpoint into step.abstract_state()" in message
        with Run(do="resume", checkpoint=checkpoint) as run:
            for i in range(COUNT):
                status, facts, err = run.end(i)
                assert status == 0, err[-3000:]
                assert facts[-1]["losses"] == pytest.approx(losses[2:], rel=1e-9)


class TestFeed:
    @pytest.fixture(scope="class")
    @staticmethod
    def step(work):
        step = js.parallelize(work.step, cluster="cpu:8", constraints=recipes.data_parallel())
        step.plan_for(work.init, jax.random.key(0), batch=work.batch)
        return step

    def test_batches_lie_as_planned_and_one_is_ahead(self, step, work):
        taken = []

        def loader():
            for i in range(3):
                taken.append(i)
                yield work.make_batch(i)

        fed = step.feed(loader())
        first = next(fed)
        assert taken == [0, 1]
        assert first["inputs"].sharding.shard_shape((16, 32)) == (2, 32)
        np.testing.assert_array_equal(first["inputs"], work.make_batch(0)["inputs"])
        assert len(list(fed)) == 2

    def test_another_tree(self, step, work):
        with pytest.raises(PlanError, match="the step is planned for"):
            next(step.feed([{"inputs": work.make_batch(0)["inputs"]}]))

    def test_several_batch_arguments(self):
        step = js.parallelize(lambda w, x, y: (w - (x @ w * y).mean(), w.sum()), cluster="cpu:8")
        x, y = np.ones((8, 4)), np.ones(8)
        step.plan_for(lambda: jax.numpy.ones(4), batch=(x, y))
        (batch,) = step.feed([(x, y)])
        np.testing.assert_array_equal(batch[0], x)
        np.testing.assert_array_equal(batch[1], y)

    def test_before_there_is_a_plan(self, work):
        with pytest.raises(PlanError, match="there is no plan yet"):
            js.parallelize(work.step, cluster="cpu:8").feed([])

    def test_a_step_without_a_batch(self):
        step = js.parallelize(lambda w: w * 0.9, cluster="cpu:8")
        step(np.ones(8))
        with pytest.raises(PlanError, match="no argument of the step is a batch"):
            step.feed([])

    def test_nnx(self):
        def train(model, optimizer, batch):
            grads = nnx.grad(lambda m: (m(batch) ** 2).mean())(model)
            optimizer.update(model, grads)

        model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        step = js.parallelize(train, cluster="cpu:8", constraints=recipes.data_parallel())
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        x = np.ones((8, 4), np.float32)
        step(model, optimizer, x)
        (batch,) = step.feed([x])
        assert batch.sharding.shard_shape((8, 4)) == (1, 4)
        step(model, optimizer, batch)
