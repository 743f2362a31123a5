"""What public bug reports say goes wrong under sharding: right numbers here, or refused in words.

Every report has a row. Programs of `hazard_programs.py` run here under a searched plan and under
one that cuts every op that can be cut; what other tests hold is named, and must be there.
"""

import ast
from pathlib import Path

import hazard_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_cases
from hazard_programs import PROGRAMS
from jax.sharding import AxisType, PartitionSpec

import jaxscaler as js
from jaxscaler import ALL, ANY, Split, op_trans, ops, recipes
from models import llama, mlp

TESTS = Path(__file__).parent
HERE = "test_hazards.py::"

# R: reports of users of JAX, Flax, optax and their libraries.
# T: reports to trackers of automatic sharding (and of what it stands on).
# "program": here, in PROGRAMS. "case NAME": of tests/rule_cases.py, each factor by numbers.
REPORTS = {
    "R1": ("jax#21562 reshards between transposed meshes", "test_reshard.py::test_collectives"),
    "R2": ("sgl-jax#1083 lookup forgets the data axis", HERE + "test_a_lookup_keeps_the_batch_cut",
           "case gather: embedding"),
    "R3": ("alpa#941 gathers of all kinds", "program", "case gather: two indices",
           "case gather: labels"),
    "R4": ("xla#42481 gradient of a lookup", "program", "case scatter-add: embedding",
           "test_same_numbers_more.py::test_same_numbers"),
    "R5": ("tied embeddings", "program", "test_nnx.py::test_shared_parts_stay_shared"),
    "R6": ("logits stay cut through the loss", "program", "case reduce_max: of logsumexp"),
    "R7": ("jax#19271 top_k over a cut dim", "program", "case top_k"),
    "R8": ("jax#21403 cumsum over a cut dim", "program", "case cumsum"),
    "R9": ("jax#35650 argsort, bincount", "program", "case sort: argsort"),
    "R10": ("experts, ragged products", "program", "case ragged_dot_general: weight gradient",
            "test_same_numbers_more.py::test_same_numbers"),
    "R11": ("flax#5112 optimizer state of stacked layers",
            "test_linen_styles.py::test_scan_and_remat"),
    "R12": ("pytorch/xla#8883 stacked residuals", "program",
            "test_same_numbers.py::test_same_numbers"),
    "R14": ("jax#14056 memory of scan and unrolled", HERE + "test_scanned_and_unrolled_memory"),
    "R15": ("alpa#400 cond in optax.MultiSteps", "test_optimizers.py::test_same_numbers",
            "test_graph.py::test_cond_joins_its_branches"),
    "R16": ("jax#25010 gathers inside remat", "program"),
    "R18": ("jax#27808 sizes that do not divide", "program",
            "test_textbook.py::test_an_odd_vocabulary_is_never_split_at_rest",
            "test_textbook.py::test_a_batch_of_three_on_eight_devices_is_planned_and_said"),
    "R19": ("fewer heads than devices", "program", "case reshape: heads",
            "test_textbook.py::TestHeads::test_a_head_is_not_cut"),
    "R20": ("fused QKV", "program", "case reshape: fused qkv", "case split"),
    "R21": ("jax#23543 gathers before the cast", HERE + "test_weights_are_gathered_after_the_cast"),
    "R22": ("flax#5172 moments lie otherwise",
            "test_optimizers.py::test_moments_lie_as_their_parameters",
            "test_nnx.py::test_objects_made_eagerly_are_moved_and_split"),
    "R23": ("EasyDeL#279 masked states", "test_optimizers.py::test_same_numbers"),
    "R24": ("optax#412 injected hyperparameters", "test_optimizers.py::test_same_numbers"),
    "R26": ("maxtext#5104 a plan that does nothing",
            "test_lower.py::test_achieved_names_what_differs",
            "test_same_numbers.py::test_same_numbers"),
    "R27": ("levanter#342 reshape to microbatches", "program"),
    "R28": ("maxtext#5099 gradients of microbatches", "program"),
    "R29": ("jax#14559 dropout masks", "program", HERE + "test_bits_that_depend_on_the_split",
            "test_rules.py::test_random_bits_that_depend_on_the_split_are_frozen",
            "test_linen_styles.py::test_batch_stats_and_dropout_in_the_train_state"),
    "R30": ("flax#2417 BatchNorm of a part", "test_nnx.py::test_same_numbers",
            "test_models_more.py::test_batch_norm_keeps_the_statistics_of_the_whole_batch"),
    "R31": ("jax#15368 donated twice, donated in another layout",
            "test_lower.py::test_one_buffer_given_twice_is_not_given_up_twice",
            "test_lower.py::test_donation_follows_the_user_and_the_layouts"),
    "R32": ("flax#1495 leaves that are no arrays",
            "test_lower_trace.py::test_a_leaf_that_is_no_array",
            "test_lower_trace.py::test_none_is_structure_and_scalars_are_arrays"),
    "R33": ("jax#15924 compiled again each step", "test_lower.py::test_weak_types_do_not_recompile",
            "test_same_numbers.py::test_second_call_does_not_compile"),
    "R34": ("flax#2904 functions beside the step",
            "test_state_life.py::TestJit::test_results_that_are_state_lie_as_state"),
    "R35": ("orbax#648 restored elsewhere",
            "test_state_life.py::TestCheckpoint::test_another_plan_and_device_count",
            "test_processes.py::TestLost::test_a_lost_process_is_named_and_a_restart_resumes"),
    "R37": ("xla#47945, jax#16894, jax#39301 convolutions, roll, pad", "program",
            "case conv_general_dilated: grouped gradients", "case pad: shift",
            "test_same_numbers_more.py::test_a_grouped_weight_gradient_is_cut_by_all_axes_or_none"),
    "R38": ("jax#16909 fft", "program", "case fft"),
    "R40": ("jax#19893 huge random initial values",
            "test_lower.py::test_state_is_made_where_it_lives"),
    "R41": ("Olmax#26 time of deep nets", "test_graph.py::test_equal_layers_fold_to_three"),
    "R42": ("jax#21855 Pallas calls", HERE + "test_opaque_calls_run_whole_and_say_so",
            "test_register_rule.py::test_a_kernel_whose_runs_are_not_apart_is_whole_and_says_so"),
    "R43": ("jax#19657 shard_map in a step", HERE + "test_opaque_calls_run_whole_and_say_so",
            HERE + "test_shard_map_over_other_devices_is_refused"),
    "R44": ("steps written for pmap", "test_lower_trace.py::test_axis_names_of_pmap"),
    "T1": ("alpa#400 products in loops", "program"),
    "T2": ("tensorflow-alpa#124 tuples carried, select", "program"),
    "T3": ("alpa#787 lookup", "program"),
    "T4": ("tensorflow-alpa#133 iota and masks of odd sizes", "program"),
    "T5": ("tensorflow-alpa#99 pad, concatenate of unequal parts", "program"),
    "T6": ("tensorflow-alpa#33 equal leaves, donated",
           "test_lower.py::test_one_buffer_given_twice_is_not_given_up_twice"),
    "T7": ("alpa#776 planned twice",
           "test_state_life.py::TestShapes::test_same_numbers_and_one_storage"),
    "T8": ("jax#19735 NumPy arguments",
           "test_lower.py::test_one_compilation_whatever_carries_the_values"),
    "T10": ("jax#26946 constraints that do not divide", "program",
            "test_annotations.py::test_a_pin_that_does_not_divide"),
    "T11": ("jax#27808 shardings that do not divide", "program",
            "test_lower.py::test_plans_that_do_not_fit"),
    "T12": ("autoparallel#394 a bias of 280 on 8 x 8",
            HERE + "test_a_bias_that_divides_by_one_axis"),
    "T13": ("autoparallel#22 a dim of 32 on 32 x 8", HERE + "test_a_dim_smaller_than_the_cluster"),
    "T14": ("jax#25346 donated, laid out otherwise",
            "test_lower.py::test_donation_follows_the_user_and_the_layouts"),
    "T16": ("jax#21562 reshard prices", "test_reshard.py::test_time_is_the_sum_of_the_collectives"),
    "T17": ("jax#18591 reshards without a place",
            "test_audit.py::test_scope_and_source_say_which_op"),
    "T18": ("jax#16679 memory at the start", "test_lower.py::test_state_is_made_where_it_lives"),
    "T19": ("jax#25010 remat", "program"),
    "T20": ("jax#19271 router", "program", "test_audit.py::test_top_k_over_a_split_dim_gathers_it"),
    "T21": ("jax#35650 argsort", "program"),
    "T22": ("jax#28111 columns set and taken", "program", "case gather: columns"),
    "T23": ("jax#31795 gradients of gathers and convolutions", "program",
            "case conv_general_dilated: 1d causal"),
    "T24": ("jax#29859 reshape by a minor factor", "program", "case reshape: no common factor"),
    "T25": ("jax#16894 strided convolution", "program", "case conv_general_dilated: stride"),
    "T26": ("xla#47945 grouped convolution", "program"),
    "T27": ("xla#49118 slices that are clamped", "program", "case dynamic_update_slice"),
    "T28": ("xla#24186 update of a cut vector, x64", "program"),
    "T29": ("xla#42481 scatter-add", "program", "case scatter-add: embedding"),
    "T30": ("xla#15048 scatter in a loop", "program"),
    "T31": ("jax#40232 random numbers by shards", "program",
            "test_rules.py::test_random_bits_that_depend_on_the_split_are_frozen"),
    "T32": ("jax#17382 custom_partitioning in scan", "program",
            "test_rules.py::test_custom_partitioning_is_planned_by_its_rule"),
    "T33": ("jax#20683 vmap of fft, cholesky", "program", "case cholesky"),
    "T34": ("jax#25844 jacfwd, grad of inputs", "program"),
    "T35": ("jax#33029 gradient of scan", "program"),
    "T36": ("flax#5172 nnx optimizer", "test_nnx.py::test_roles_paths_and_pairs"),
    "T37": ("optax#548 init on one device", "test_optimizers.py::test_same_numbers_on_gpt"),
    "T38": ("sglang-jax#1083 lookup", HERE + "test_a_lookup_keeps_the_batch_cut"),
    "T40": ("xla#19166 accumulation", "program"),
    "T41": ("gemma#648 few KV heads, cache", "program", "case dynamic_update_slice: cache"),
    "T42": ("levanter#73 stacked gradients", "program"),
}  # fmt: skip

EVERY = [op_trans(ops(), Split(ANY), ALL)]  # cut every op as often as its factors allow
# XLA's CPU runtime refuses an fft whose operand its own compiler laid out column-major: loud, and
# nothing that a plan could know.
REFUSED_BY_CPU = ("fourier",)
NAMES = [name for name in PROGRAMS if name not in REFUSED_BY_CPU]
GROUPS = [NAMES[i::4] for i in range(4)]


def run(names, **options):
    """(planned step, its results, those of plain jit) in float64."""
    state = {name: PROGRAMS[name].w for name in names}
    batch = {name: PROGRAMS[name].x for name in names}
    fn = hazard_programs.step(names)
    step = js.parallelize(fn, donate=(), time_limit=10, **options)
    return step, step(state, batch), jax.jit(fn)(state, batch)


@pytest.fixture
def x64():
    """In all threads: custom_partitioning traces in one of the compiler's."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
@pytest.mark.parametrize("plan", ["searched", "every"])
def test_same_numbers(names, plan):
    options = {
        "searched": {"cluster": "cpu:8"},
        "every": {"cluster": "cpu:4x2", "constraints": EVERY},
    }
    step, got, want = run(names, **options[plan])
    assert_close(got, want)
    if plan == "every":
        cut = [bool(d.cuts) for d in step.plan.decisions]
        assert sum(cut) > 0.7 * len(cut)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("lines", [[], [op_trans(ops(), Split("batch"), ALL)]])
def test_fourier_transforms(lines):
    assert_close(*run(REFUSED_BY_CPU, cluster="cpu:4x2", constraints=lines)[1:])


@pytest.mark.usefixtures("x64")
def test_fourier_transforms_of_a_cut_dim_are_still_refused_by_the_cpu():
    with pytest.raises(jax.errors.JaxRuntimeError, match="fft_thunk"):
        jax.block_until_ready(run(REFUSED_BY_CPU, cluster="cpu:4x2", constraints=EVERY)[1])


def assert_close(got, want):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path)
        )


# -- the table


def names_in(file):
    found = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        head = getattr(node, "name", "")
        found |= {head, *(f"{head}::{getattr(part, 'name', '')}" for part in inner)}
    return found


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_is_held_by_tests_that_exist(report):
    _, *held = REPORTS[report]
    assert held
    for by in held:
        if by == "program":
            assert any(report in program.ids.split() for program in PROGRAMS.values())
        elif by.startswith("case "):
            assert by.removeprefix("case ") in {case.name for case in rule_cases.CASES}
        else:
            file, name = by.split("::", 1)
            assert name in names_in(file), by


def test_every_program_has_its_reports():
    for program in PROGRAMS.values():
        for report in program.ids.split():
            assert "program" in REPORTS[report]


# -- reports that are about plans, not numbers


def planned(step, *args, cluster="h100:8", **options):
    return js.plan(step, *args, cluster=cluster, cache=False, **options)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense(state, x):
    grad = jax.grad(lambda s: ((x @ s["w"] + s["b"]) ** 2).mean())(state)
    return jax.tree.map(lambda a, g: a - 0.1 * g, state, grad)


def spec_of(plan, path):
    return next(t.spec for t in plan.tensors if t.path == path)


def test_a_lookup_keeps_the_batch_cut():
    """Ids cut on samples, a table cut on features: no collective on samples behind the lookup."""

    def step(table, ids):
        return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table)

    table, ids = f32(4096, 1024), jax.ShapeDtypeStruct((64, 32), jnp.int32)
    plan = planned(step, table, ids, cluster="h100:4x2", constraints=[
        op_trans(ops(primitive="gather"), Split("batch"), 2),
        op_trans(js.values("table"), Split(1), 4),
    ])  # fmt: skip
    lookups = [d for d in plan.decisions if d.subject.endswith("gather")]
    assert lookups and all("batch" in dict(d.cuts).values() for d in lookups)
    assert not [t for t in plan.traffic if t.kind == "all_gather" and "gather" in t.value]


def test_scanned_and_unrolled_memory():
    peaks = []
    for scan in (False, True):
        work = llama.workload("tiny", scan=scan, seq=64, batch=16, layers=6)
        plan = planned(work.step, work.state, work.batch, constraints=recipes.data_parallel())
        peaks.append(plan.predicted.peak_bytes)
    # What a loop stacks stays until its end, JAX stacks softmaxes in f32 too, and the largest stack
    # is laid out anew between the loops: compiled for H100 the ratio is 1.56 at 3 layers.
    assert 1 <= peaks[1] / peaks[0] < 1.8


def test_weights_are_gathered_after_the_cast():
    work = mlp.workload("tiny", dtype="bfloat16", batch=64)
    plan = planned(work.step, work.state, work.batch, constraints=recipes.zero())
    gathers = [t for t in plan.traffic if t.kind == "all_gather" and "convert" in t.value]
    assert len(gathers) == 4
    assert {t.nbytes for t in gathers} == {2 * 32 * 128}  # bytes of bfloat16, not of float32


def test_bits_that_depend_on_the_split():
    """The generator `rbg` draws other numbers for other splits: it is not split, and says so."""

    def step(w, x, key):
        return w * 0.9, (x * jax.random.bernoulli(key, 0.5, x.shape) * w).sum()

    x, key = np.ones((64, 64), np.float32), jax.random.key(0, impl="rbg")
    lines = [op_trans(ops(phase="forward"), Split("batch"), ALL)]
    run = js.parallelize(step, cluster="cpu:8", constraints=lines, donate=())
    _, total = run(np.float32(1), x, key)
    assert float(total) == float(jax.jit(step)(np.float32(1), x, key)[1])
    assert any("can not split forward::random_bits" in note for note in run.plan.notes)


def test_a_bias_that_divides_by_one_axis():
    plan = planned(dense, {"w": f32(64, 280), "b": f32(280)}, f32(64, 64), cluster="h100:8x8",
                   constraints=recipes.zero())  # fmt: skip
    assert sum(map(len, spec_of(plan, "state/b"))) == 1
    assert any("state/b can not be split that often" in note for note in plan.notes)


def test_a_dim_smaller_than_the_cluster():
    plan = planned(dense, {"w": f32(32, 64), "b": f32(64)}, f32(256, 32), cluster="h100:8x32",
                   constraints=recipes.zero())  # fmt: skip
    sizes = dict(plan.axes)
    for dim, axes in zip((32, 64), spec_of(plan, "state/w")):
        assert dim % int(np.prod([sizes[a] for a in axes], initial=1)) == 0


@pytest.fixture
def mapped(devices):
    def make(count):
        mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:count])
        rows = PartitionSpec("x")
        return jax.shard_map(
            lambda x: jax.lax.psum(x.sum(0), "x") + x, mesh=mesh, in_specs=rows, out_specs=rows
        )

    return make


def pallas(x):
    from jax.experimental import pallas as pl

    def kernel(source, target):
        target[...] = jnp.cumsum(source[...], 0)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
        x
    )


@pytest.mark.parametrize("call", ["shard_map", "pallas_call"])
def test_opaque_calls_run_whole_and_say_so(call, mapped):
    inner = mapped(8) if call == "shard_map" else pallas

    def step(w, x):
        return w * 0.9, inner(x * w).sum(0)

    x = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    run = js.parallelize(step, cluster="cpu:8", donate=False)
    _, got = run(np.float32(2), x)
    np.testing.assert_allclose(got, jax.jit(step)(np.float32(2), x)[1], rtol=1e-5)
    assert any(call in n and "every device runs it whole" in n for n in run.plan.notes)


def test_shard_map_over_other_devices_is_refused(mapped):
    inner = mapped(4)

    def step(w, x):
        return jax.lax.scan(lambda w, _: (w + inner(x * w).sum(), None), w, length=2)[0]

    arguments = np.float32(2), np.ones((16, 8), np.float32)
    message = r"shard_map over a mesh \{'x': 4\} of 4 devices at .*test_hazards.*plan is for 8"
    with pytest.raises(js.TraceError, match=message):
        js.parallelize(step, cluster="cpu:8")(*arguments)
    with pytest.raises(js.TraceError, match=message):
        js.plan(step, *arguments, cluster="cpu:8")
