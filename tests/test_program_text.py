"""Programs as YAML: the same lines come back, and what is wrong is said with its line."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hy

from jaxscaler import ConstraintError, read_program
from jaxscaler import program as p
from jaxscaler.program_text import as_program, dump_program, parse_program

text = hy.text(hy.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)
names = hy.sampled_from(["tp", "dp", "yes", "null", "n"])
layers = hy.one_of(hy.none(), hy.integers(0, 9), hy.tuples(hy.integers(0, 4), hy.integers(4, 9)))
phases = hy.lists(hy.sampled_from(p.PHASES), min_size=1, unique=True).map(tuple)
roles = hy.lists(hy.sampled_from(p.ROLES), min_size=1, unique=True).map(tuple)
maybe = hy.one_of(hy.none(), text)
selected = hy.builds(p.ops, text, text, phases, maybe, layers, maybe)
regions = hy.builds(p.region, text, phase=phases, layers=layers)
ops = hy.one_of(selected, regions, hy.just(p.ops()), text.map(lambda name: p.ops(name=name)))
values = hy.one_of(
    hy.builds(p.values, text, roles, text, layers, hy.one_of(hy.none(), ops)),
    hy.just(p.values()),
)
factors = hy.one_of(text, hy.just(p.ANY), hy.lists(text, min_size=1, max_size=3).map(tuple))
holes = names.map(lambda name: p.hole(name, 1, 1 + len(name)))
numbers = hy.one_of(
    hy.just(p.AT_LEAST_TWO), hy.just(p.ALL), hy.integers(1, 64), holes,
    hy.tuples(hy.integers(1, 8), hy.integers(8, 64)),
)  # fmt: skip
splits = hy.one_of(
    hy.builds(p.op_trans, hy.one_of(ops, values), factors.map(p.Split), numbers),
    hy.builds(p.op_trans, values, hy.integers(0, 3).map(p.Split), numbers),
)
others = hy.builds(
    p.op_trans, hy.one_of(ops, values),
    hy.one_of(hy.just(p.Replicate()), text.map(p.Cast), text.map(p.Kernel)),
)  # fmt: skip
places = hy.one_of(
    text, hy.just(p.SAME_DEVICE), hy.integers(0, 5).map(p.Stage),
    hy.lists(text, min_size=1, max_size=3).map(tuple),
)  # fmt: skip
assigned = hy.one_of(
    hy.builds(p.op_assign, hy.one_of(ops, values, splits), places),
    hy.builds(p.op_assign, values, hy.sampled_from(p.MEMORIES)),
)
lines = hy.one_of(splits, others, assigned)
lines = hy.one_of(lines, lines.map(p.forbid), lines.map(p.if_possible))
linear = hy.one_of(
    holes, hy.integers(-9, 9).flatmap(lambda n: holes.map(lambda h: h * n + 1)),
    hy.tuples(holes, holes).map(lambda two: two[0] * 2 - two[1]),
)  # fmt: skip
relations = hy.tuples(linear, linear, hy.sampled_from("=<>")).map(
    lambda x: x[0] == x[1] if x[2] == "=" else x[0] <= x[1] if x[2] == "<" else x[0] >= x[1]
)
programs = hy.lists(hy.one_of(lines, relations, hy.builds(p.op_order, ops, ops)), max_size=6)


def bare(program):
    return [replace(line, source="") for line in program]


@settings(max_examples=150, deadline=None)
@given(programs)
def test_text_of_lines_reads_as_the_same_lines(program):
    written = dump_program(program)
    again = parse_program(written)
    assert bare(again) == bare(program)
    assert dump_program(again) == written


@given(lines)
@settings(max_examples=60, deadline=None)
def test_python_text_of_a_line_is_that_line(line):
    again = eval(str(line), vars(p))
    assert replace(again, source="") == replace(line, source="")


def test_the_words_are_those_of_python():
    tp = p.hole("tp", 1, 8)
    program = [
        p.op_trans(p.ops(phase=("forward", "backward")), p.Split("batch"), p.ALL),
        p.op_assign(p.op_trans(p.values(role="parameter"), p.Split(p.ANY), tp), "device"),
        p.forbid(p.op_trans(p.ops("h_*/attn", layers=(0, 3)), p.Split("sequence"))),
        p.op_assign(p.values(to=p.ops("attn")), p.HOST),
        p.op_trans(p.region("mlp"), p.Replicate()),
        p.op_order(p.ops(phase="forward"), p.ops(phase="backward")),
        tp * 2 <= 8,
    ]
    assert dump_program(program) == (
        "- op_trans: [{ops: {phase: [forward, backward]}}, {Split: batch}, ALL]\n"
        "- hole: [tp, 1, 8]\n"
        "- op_assign: [{op_trans: [{values: {role: parameter}}, {Split: ANY}, tp]}, device]\n"
        "- forbid: {op_trans: [{ops: {path: h_*/attn, layers: [0, 3]}}, {Split: sequence}]}\n"
        "- op_assign: [{values: {to: {ops: attn}}}, HOST]\n"
        "- op_trans: [{region: mlp}, Replicate]\n"
        "- op_order: [{ops: {phase: forward}}, {ops: {phase: backward}}]\n"
        "- tp * 2 <= 8\n"
    )


def test_a_file_gives_lines_with_their_sources(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(
        "# a comment\n- hole: [tp, 1, 8]\n\n- op_trans: [ops, Split: batch, tp]\n- tp >= 2\n"
    )
    program = read_program(file)
    assert [line.source for line in program] == [f"{file}:4", f"{file}:5"]
    assert as_program(str(file)) == program
    assert dump_program([]) == "[]\n" and parse_program("[]\n") == () == parse_program("")
    with pytest.raises(ConstraintError, match="nowhere\\.yaml: No such file"):
        read_program(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "x: a program is a list of lines"),
        ("- [", "x:2: not YAML|x:1: not YAML"),
        ("- op_tran: [ops, Split: x]", "x:1: no 'op_tran' here.*did you mean 'op_trans'"),
        ("- op_trans: [ops: {pth: a}, Split: b]", "x:1: ops has no 'pth'; did you mean 'path'"),
        ("- op_trans: [ops: {path: a, path: b}, Replicate]", "x:1: 'path' is given twice"),
        ("- op_trans: [ops: off, Replicate]", "x:1: path=False is no text"),
        ("- op_trans: [ops, Split: batch, tp]", "x:1: no hole 'tp' before this line"),
        ("- op_trans: [ops, Split: batch, 2, 3]", "x:1: op_trans is given a list of 2 or 3"),
        ("- op_trans: [ops, Replicate: 3]", "x:1: Replicate takes nothing, not 3"),
        ("- op_trans: [ops, Cast]", "x:1: Cast needs a name"),
        ("- op_assign: [ops, {Stage: a}]", "x:1: Stage: 'a' is no number"),
        ("- op_assign: [ops, HOST]", "x:1: op_assign: HOST is a memory"),
        ("- forbid: {op_order: [ops, ops]}", "x:1: forbid: .* is no op_trans or op_assign line"),
        ("- hole: [tp, 1, 8]", "x: hole 'tp' stands in no line"),
        ("- hole: [tp, 1, 8]\n- hole: [tp, 1, 4]", "x:2: hole 'tp' is there already"),
        ("- hole: [tp, 8, 1]", "x:1: hole\\('tp', 8, 1\\)"),
        ("- hole: [tp, 1, 8]\n- tp < 4", "x:2: 'tp < 4': a relation is sums of holes"),
        ("- hole: [tp, 1, 8]\n- tp * tp <= 4", "x:2: .*only whole numbers times holes|x:2: "),
        ("- __import__('os')", "x:1: .*a relation is sums"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(text, message):
    with pytest.raises(ConstraintError, match=message):
        parse_program(text, "x")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ([p.ops()], r"ops\(.*no line of a program: use op_trans"),
        ([1], "1 is no line of a program"),
    ],
)
def test_what_is_no_program(what, message):
    with pytest.raises(ConstraintError, match=message):
        as_program(what)


class TestHoles:
    tp, dp = p.hole("tp", 1, 8), p.hole("dp", 1, 64)

    def test_relations_hold_for_numbers(self):
        numbers = {"tp": 2, "dp": 3}
        assert (self.tp * 2 <= self.dp + 1).holds(numbers)
        assert not (self.tp * 2 <= self.dp).holds(numbers)
        assert (self.dp - self.tp == 1).holds(numbers)
        assert (7 - self.tp >= self.dp).holds(numbers)

    def test_a_relation_is_neither_true_nor_false(self):
        with pytest.raises(ConstraintError, match="neither true nor false"):
            1 <= self.tp <= 4  # noqa: B015
        assert self.tp == p.hole("tp", 1, 8) and self.tp != self.dp

    @pytest.mark.parametrize("bad", ["a b", "", "if", "ALL", 3])
    def test_what_is_no_name(self, bad):
        with pytest.raises(ConstraintError, match="is no name"):
            p.hole(bad, 1, 2)

    def test_what_is_no_linear_relation(self):
        for wrong in (lambda: self.tp * 2.5, lambda: self.tp + "a", lambda: self.tp * self.dp):
            with pytest.raises(ConstraintError):
                wrong()
