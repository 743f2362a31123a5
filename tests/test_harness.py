"""Benchmarks report what they measured, and fail when a bar is missed."""

import json
import math

import pytest
from _harness import alternate, at_least, at_most, main


def measure(quick):
    for size in (1, 2) if quick else (1, 2, 3):
        yield {"size": size, "seconds": size / 4}


def judge(rows):
    return [at_most("seconds", rows[-1]["seconds"], 0.5)]


def test_json_has_the_documented_shape(capsys):
    assert main("sample", measure, judge, ["--quick", "--json", "-"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert set(result) == {"benchmark", "env", "rows", "bars"}
    assert result["benchmark"] == "sample"
    assert result["rows"] == [{"size": 1, "seconds": 0.25}, {"size": 2, "seconds": 0.5}]
    assert result["bars"] == [{"name": "seconds", "value": 0.5, "limit": 0.5, "ok": True}]
    assert set(result["env"]) == {"versions", "cores", "devices"}
    assert sum(result["env"]["devices"].values()) == 8
    assert "sample" in captured.err


def test_a_missed_bar_fails_and_is_still_written(tmp_path, capsys):
    file = tmp_path / "result.json"
    assert main("sample", measure, judge, ["--json", str(file)]) == 1
    assert json.loads(file.read_text())["bars"][0]["ok"] is False
    assert "NO" in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_bar_that_was_not_measured_is_missed(value):
    assert at_most("b", value, 1)["ok"] is False
    assert at_least("b", value, 1)["ok"] is False


def test_bars_hold_at_their_limit():
    assert at_most("b", 1.0, 1.0)["ok"] is True
    assert at_least("b", 1.0, 1.0)["ok"] is True
    assert at_most("b", 1.1, 1.0)["ok"] is False
    assert at_least("b", 0.9, 1.0)["ok"] is False


def test_infinite_numbers_become_valid_json(capsys):
    status = main(
        "sample",
        lambda quick: [{"x": math.inf}],
        lambda rows: [at_most("x", math.inf, 1)],
        ["--json=-"],
    )
    assert status == 1
    assert json.loads(capsys.readouterr().out)["rows"] == [{"x": None}]


def test_measuring_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="sample measured nothing"):
        main("sample", lambda quick: [], lambda rows: [], [])


def test_alternate_takes_turns_and_pairs_the_ratio():
    calls = []
    first, second, ratio = alternate(lambda: calls.append("a"), lambda: calls.append("b"), rounds=3)
    assert "".join(calls) == "abababab"
    assert len(first) == len(second) == 3
    pairs = sorted(b / a for a, b in zip(first, second, strict=True))
    assert ratio == pairs[1]
