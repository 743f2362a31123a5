"""Loops over parts that a program asks for or forbids: lines with SAME_DEVICE."""

import pytest

import jaxscaler as js
from jaxscaler import op_assign, op_trans, ops, region
from jaxscaler.cluster import Cluster
from jaxscaler.errors import ConstraintError
from jaxscaler.planner import plan_step
from jaxscaler.program import ANY, SAME_DEVICE, Split, if_possible
from jaxscaler.program_text import dump_program, parse_program
from jaxscaler.rewrite.changes import Accumulate, CoShard
from jaxscaler.trace import trace
from models import gpt, resnet
from models.workload import cross_entropy

CLUSTER = Cluster.parse("v100-32:1")
BOTH = ("forward", "backward")


def marked(work):
    """The workload's step, its loss marked for the planner."""

    def step(state, batch):
        def loss(params):
            outputs = state.apply_fn({"params": params}, batch["inputs"])
            return cross_entropy(outputs, batch["targets"])

        value, grads = js.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


@pytest.fixture(scope="module")
def traced():
    work = gpt.workload(layers=2, batch=16, seq=16)
    return trace(marked(work), work.state, work.batch)


def asked(*parts, subject=None, factor="batch"):
    subject = region("h_*/up", phase="forward") if subject is None else subject
    return op_assign(op_trans(subject, Split(factor), *parts), SAME_DEVICE)


def loops_of(plan):
    return [c for c in plan.changes if isinstance(c, CoShard | Accumulate)]


@pytest.mark.parametrize("factor", ["batch", "sequence"])
def test_a_region_in_parts(traced, factor):
    plan = plan_step(traced, CLUSTER, constraints=asked(4, factor=factor)).plan
    assert [type(c) for c in loops_of(plan)] == [CoShard, CoShard]
    assert [c.parts for c in loops_of(plan)] == [4, 4]
    assert plan.constraints == (str(asked(4, factor=factor)),)
    (loss,) = traced.losses
    for change in loops_of(plan):
        eqn = loss.eqns[change.seed[0]]
        shape = eqn.invars[change.seed[1]].aval.shape
        assert shape[change.seed[2]] == 16 and "/up" in str(eqn.source_info.name_stack)
        dim = 0 if factor == "batch" else 1
        assert change.seed[2] == dim


def test_any_number_and_factor(traced):
    line = asked((4, 8), factor=ANY, subject=region("h_0/attn", phase="forward"))
    (change,) = loops_of(plan_step(traced, CLUSTER, constraints=line).plan)
    assert change.parts in (4, 8)


def test_accumulation_from_yaml(traced):
    text = dump_program([asked(2, subject=ops(phase=BOTH))])
    (line,) = parse_program(text)
    assert line == asked(2, subject=ops(phase=BOTH)) or line.place == SAME_DEVICE
    (change,) = loops_of(plan_step(traced, CLUSTER, constraints=[line]).plan)
    assert isinstance(change, Accumulate) and change.parts == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (asked(4, subject=region("nowhere", phase="forward")), "selects no op"),
        (asked(5), "has no such parts"),
        (
            asked(4, factor="sequence", subject=region("h_*/attn/bqhd*", phase="forward")),
            "no loop by",
        ),
        (asked(js.ALL), "a number or a range"),
        (asked(4, subject=js.values("h_*/up", role="parameter")), "values do not run"),
        (if_possible(asked(4)), "leave if_possible out"),
        (op_assign(region("h_*"), SAME_DEVICE), "say what is divided"),
        (asked(2, factor="sequence", subject=ops(phase=BOTH)), "divided by samples"),
    ],
)
def test_lines_that_no_loop_carries_out(traced, line, why):
    with pytest.raises(ConstraintError, match=why):
        plan_step(traced, CLUSTER, constraints=line)


def test_without_a_marked_loss():
    work = gpt.workload(layers=1, batch=16, seq=16)
    traced = trace(work.step, work.state, work.batch)
    with pytest.raises(ConstraintError, match=r"marked by jaxscaler\.value_and_grad"):
        plan_step(traced, CLUSTER, constraints=asked(4))


def test_batch_norm_stands_in_the_way_of_accumulation():
    work = resnet.workload(batch=8)

    def step(state, batch):
        def loss(params):
            outputs, _ = state.apply_fn(
                {"params": params, **state.variables}, batch["inputs"], mutable=["batch_stats"]
            )
            return cross_entropy(outputs, batch["targets"])

        grads = js.grad(loss)(state.params)
        return state.apply_gradients(grads=grads)

    traced = trace(step, work.state, work.batch)
    with pytest.raises(ConstraintError, match=r"loss 0: `\w+` at .*bn|loss 0: `\w+` at "):
        plan_step(traced, CLUSTER, constraints=asked(2, subject=ops(phase=BOTH)))
