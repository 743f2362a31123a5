# ruff: noqa: E402 - what JAX is told before it starts comes before what starts it
"""One process of several: what tests/test_processes.py starts.

Its argument is a task in JSON; it prints a line of JSON for each thing that happens.
"""

import json
import os
import sys

task = json.loads(sys.argv[1])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAXSCALER_CACHE"] = "off"

import jax

jax.config.update("jax_num_cpu_devices", task["devices"])
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_enable_recoverability", task["do"] == "forever")
jax.distributed.initialize(task["coordinator"], task["count"], task["index"])

import orbax.checkpoint as ocp

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.processes import watch_processes
from models import mlp

PLANS = {"searched": list, "zero": recipes.zero, "data": recipes.data_parallel,
         "tensor": recipes.tensor_parallel}  # fmt: skip


def workload():
    return mlp.workload(dtype="float64", batch=16)


def say(**facts):
    print(json.dumps(facts), flush=True)


def own_rows(batch):
    """What this process's loader gives of a batch."""
    rows = len(batch["inputs"]) // task["count"]
    return {k: v[task["index"] * rows : (task["index"] + 1) * rows] for k, v in batch.items()}


def losses(step, state, loader):
    found = []
    with watch_processes():
        for batch in step.feed(loader):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
            say(stepped=len(found))
    return state, found


def start(work, plan, **options):
    step = js.parallelize(work.step, constraints=PLANS[plan](), time_limit=20, **options)
    return step, step.init(work.init, jax.random.key(0), batch=work.batch)


def train():
    """Three steps of each plan, and a fourth on a smaller batch; then what must be refused."""
    work = workload()
    for plan in task["plans"]:
        step, state = start(work, plan)
        batches = [work.make_batch(i) for i in range(3)]
        batches.append({k: v[:8] for k, v in work.make_batch(3).items()})
        _, found = losses(step, state, map(own_rows, batches))
        say(plan=plan, digest=step.plan.digest(), cluster=step.cluster.name, losses=found)
    state = step.init(work.init, jax.random.key(0), batch=work.batch)
    _, found = losses(step, state, (work.make_batch(i) for i in range(3)))
    say(whole=found, why=step.plan.why("pair_0/up/kernel"))
    refused(work)


def refused(work):
    def complaint(**options):
        step = js.parallelize(work.step, **options)
        try:
            step.plan_for(work.init, jax.random.key(0), batch=work.batch)
        except js.JaxscalerError as error:
            return type(error).__name__, str(error)

    own = ["data", "zero"][task["index"]]
    lines = {"constraints": PLANS[own](), "cluster": "cpu:4x2"}
    plan = js.plan(work.step, work.state, work.batch, **lines)
    say(own=plan.digest(), different=complaint(plan=plan))
    say(infeasible=complaint(memory=1e-9))


def forever():
    """Two steps, a checkpoint, and then steps without end."""
    work = workload()
    step, state = start(work, "zero")

    def batches(first, last=None):
        while first != last:
            yield own_rows(work.make_batch(first % 4))
            first += 1

    state, found = losses(step, state, batches(0, 2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(task["checkpoint"], state)
    say(saved=found)
    losses(step, state, batches(2))


def resume():
    """Steps 2 and 3 from the checkpoint, under another plan."""
    work = workload()
    step = js.parallelize(work.step, constraints=recipes.tensor_parallel())
    step.plan_for(work.init, jax.random.key(0), batch=work.batch)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(task["checkpoint"], step.abstract_state())
    say(losses=losses(step, state, (own_rows(work.make_batch(i)) for i in (2, 3)))[1])


globals()[task["do"]]()
