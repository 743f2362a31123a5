"""The contest's format: read what is written, name what is malformed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from solve_problems import random_problem

from jaxscaler.errors import SolveError
from jaxscaler.solve import evaluate, make_problem, read_problem, solve, write_problem

GOOD = {
    "problem": {
        "name": "two nodes",
        "nodes": {
            "intervals": [[0, 5], [7, 7]],
            "costs": [[15, 20, 20], [10, 1000000000000000000]],
            "usages": [[10, 25, 25], [3, 4]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[0, 1, 2, 3, 4, 5]]},
        "usage_limit": 12,
    }
}


def test_fields(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    path.write_text(json.dumps(GOOD, indent=3))
    problem = read_problem(path)
    assert problem.name == "two nodes" and problem.usage_limit == 12
    assert problem.node_ptr.tolist() == [0, 3, 5]
    assert problem.node_costs.tolist() == [15, 20, 20, 10, 10**18]
    assert problem.edge_nodes.tolist() == [[0, 1]] and problem.edge_ptr.tolist() == [0, 6]
    assert problem.edge_costs.tolist() == [0, 1, 2, 3, 4, 5]
    assert problem.usage_lo.tolist() == [0, 7] and problem.usage_hi.tolist() == [5, 7]
    assert problem.usages.tolist() == [10, 25, 25, 3, 4]
    assert evaluate(problem, np.array([0, 0])) == (25, 10, True)
    assert evaluate(problem, np.array([1, 0])) == (32, 25, False)
    assert evaluate(problem, np.array([0, 1]))[2] is False


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_what_is_written_is_the_same_problem(tmp_path: Path, name: str) -> None:
    for seed in range(60):
        problem = random_problem(np.random.default_rng(seed))
        path = tmp_path / name
        write_problem(problem, path)
        again = read_problem(path)
        assert len(again.usage_node) == again.num_nodes  # one entry per node, as the format has it
        first, second = solve(problem), solve(again)
        assert (first.status, first.cost) == (second.status, second.cost), seed
        if second.choice is not None:
            assert evaluate(problem, second.choice[: problem.num_nodes])[2]


def test_no_limit_and_plain_json(tmp_path: Path) -> None:
    problem = make_problem([[1, 2], [3]], usages=[(0, 0, 4, [9, 9]), (1, 1, 3, [2])])
    path = tmp_path / "p.json"
    write_problem(problem, path)
    fields = json.loads(path.read_text())["problem"]
    assert fields["nodes"]["intervals"] == [[0, 0], [0, 0]]
    assert solve(read_problem(path)).cost == 4


def changed(**parts) -> str:
    text = json.loads(json.dumps(GOOD))
    for place, value in parts.items():
        *path, last = place.split("__")
        holder = text["problem"]
        for key in path:
            holder = holder[key]
        if value is None:
            del holder[last]
        else:
            holder[last] = value
    return json.dumps(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[[1, 2]]", "no 'problem'"),
        (changed(nodes__costs=None), "nodes has no 'costs'"),
        (changed(usage_limit=None), "problem has no 'usage_limit'"),
        (changed(usage_limit="much"), "usage_limit"),
        (changed(nodes__costs=[[1.5, 2, 3], [1, 2]]), "whole"),
        (changed(nodes__costs=[[1, 2, 3], [1, 10**19]]), "64 bits"),
        (changed(nodes__costs=[1, 2]), "list of lists"),
        (changed(nodes__costs=[[[1]]]), "list of lists"),
        (changed(nodes__costs=[["a"]]), "list of lists"),
        (changed(nodes__intervals=[[0, 5]]), "as many of each"),
        (changed(nodes__intervals=[[0, 5], [1]]), r"nodes.intervals\[1\] is not a pair"),
        (changed(nodes__intervals=[[5, 0], [1, 2]]), "usage entry 0: its interval"),
        (changed(nodes__costs=[[], [1, 2]]), "node 0: needs at least one strategy"),
        (changed(nodes__usages=[[1, 2], [3, 4]]), "usage entry 0: needs one usage per strategy"),
        (changed(edges__nodes=[[0, 2]]), "edge 0: joins a node outside"),
        (changed(edges__costs=[[0, 1]]), "edge 0: needs k_i"),
        (changed(edges__costs=[]), "1 pairs of nodes but 0 lists"),
        (json.dumps(GOOD)[:-40], "byte"),
        (json.dumps(GOOD).replace("[0, 5]", "[0, 5,]"), "list of lists"),
        (json.dumps(GOOD).replace("[0, 5]", "[0 5]"), "list of lists"),
        (json.dumps(GOOD).replace('"edges":', '"edges"'), "expected a name"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(SolveError, match=words) as error:
        read_problem(path)
    assert "bad.json" in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SolveError, match="cannot be read"):
        read_problem(tmp_path / "absent.json")
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-20])
    with pytest.raises(SolveError, match="cannot be read"):
        read_problem(path)
