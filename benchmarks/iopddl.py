"""The plan-space solver on the public IOPDDL instances (ASPLOS 2025 contest), within their limits.

    python benchmarks/iopddl.py DIR [--time-factor 1] [--seeds 0,1,2] [--ablate]
                                [--quick] [--json FILE|-]

Every .json or .json.gz in DIR is read and solved in a process of its own, within its contest limit
times the factor, reading included. The contest had 8 cores. --ablate runs each again without
CP-SAT, without multipliers and without moves. --quick runs the instances that need only seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from _harness import Bar, Row, at_least, at_most, main

# letter: (best cost known from the contest and its sequels, contest's time limit in seconds)
KNOWN = {
    "A": (6548641531, 60), "B": (532843, 60), "C": (84102445200, 60), "D": (309396217000, 60),
    "E": (331239394812, 60), "F": (361354466823, 120), "G": (217039, 120),
    "H": (527715404000, 120), "I": (583706456000, 120), "J": (1325097240000, 120),
    "K": (2242635780, 180), "L": (1970993740, 180), "M": (49928157500, 180),
    "N": (199470115000, 180), "O": (219518764980, 180), "P": (651833115436, 240),
    "Q": (526776842042, 240), "R": (351826900528, 240), "S": (1521949310, 240),
    "T": (656798881333, 240), "U": (2443995950, 300), "V": (1617084, 300),
    "W": (11614976869921, 300), "X": (278109753000, 300), "Y": (595085773000, 300),
}  # fmt: skip
UNKNOWN_LIMIT = 60  # seconds, for an instance that is not of the contest
PROVED = "ABCGP"  # to be solved to proved optimality
RATIO = {"M": 1.0005, "S": 1.00, "K": 1.00, "U": 0.98}  # largest cost / best known
LATE = 2.0  # seconds past the limit
PEAK_GB = 8.0
QUICK = "BGPCA"
QUICK_LIMIT = 10.0
TOTAL = "all"  # the rows that add up best / cost
ABLATIONS = {"no CP-SAT": "cpsat", "no multipliers": "multipliers", "no moves": "moves"}


def letter_of(path: Path) -> str | None:
    found = re.fullmatch(r"asplos-2025-iopddl-([A-Y])\.json(\.gz)?", path.name)
    return found[1] if found else None


def run_case(path: str, limit: float, seed: int, without: str | None) -> Row:
    """One run in this process; compiled functions are loaded before the clock starts."""
    from jaxscaler.solve import Use, evaluate, read_problem, solve, warm

    warm()
    start = time.perf_counter()
    problem = read_problem(path)
    reading = time.perf_counter() - start
    use = Use(**{without: False}) if without else Use()
    solution = solve(problem, time_limit=limit - reading, seed=seed, use=use)
    seconds = time.perf_counter() - start
    row: Row = {"status": solution.status, "cost": solution.cost, "bound": solution.bound}
    row |= {"gap": solution.gap, "read": reading, "seconds": seconds}
    row["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if solution.choice is not None:  # recomputed from the instance, not taken from the solver
        row["cost"], _, row["feasible"] = evaluate(problem, solution.choice)
    return row


def in_a_process(*case: object) -> Row:
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    paths: list[Path], factor: float | None, seeds: list[int], ablate: bool
) -> Iterator[Row]:
    """A row per instance, variant and seed; no factor: QUICK_LIMIT seconds each."""
    for path in paths:
        letter = letter_of(path)
        best, contest = KNOWN[letter] if letter else (None, UNKNOWN_LIMIT)
        limit = QUICK_LIMIT if factor is None else contest * factor
        for name, without in ({"": None} | (ABLATIONS if ablate else {})).items():
            for seed in seeds:
                row: Row = {"instance": letter or path.name, "variant": name, "seed": seed}
                row["limit"] = limit
                row |= in_a_process(str(path), limit, seed, without)
                row["best_known"] = best
                row["ratio"] = row["cost"] / best if best and row["cost"] else None
                row["score"] = best / row["cost"] if best and row["cost"] else None
                yield row


def totalled(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, then the sum of best / cost for every variant and seed."""
    sums: dict[tuple[str, int], float] = {}
    for row in rows:
        key = row["variant"], row["seed"]
        sums[key] = sums.get(key, 0.0) + (row["score"] or 0.0)
        yield row
    for (variant, seed), score in sums.items():
        yield {"instance": TOTAL, "variant": variant, "seed": seed, "score": score}


def judge(rows: list[Row]) -> list[Bar]:
    """The worst seed of each instance counts; ablated runs are for comparison only."""
    whole = [row for row in rows if not row["variant"] and row["instance"] != TOTAL]
    bars = []
    for letter in sorted({row["instance"] for row in whole}):
        runs = [row for row in whole if row["instance"] == letter]
        if letter in PROVED:
            proved = min(row["status"] == "optimal" for row in runs)
            bars.append(at_least(f"{letter}: proved optimal", int(proved), 1))
        if letter in RATIO:
            ratios = [row["ratio"] for row in runs]
            worst = None if None in ratios else max(ratios)
            bars.append(at_most(f"{letter}: cost / best known", worst, RATIO[letter]))
    answered = [row for row in whole if row["cost"] is not None]
    bars.append(at_least("feasible answers", sum(row["feasible"] for row in answered), len(whole)))
    late = max(row["seconds"] - row["limit"] for row in whole)
    bars.append(at_most("seconds past the limit", late, LATE))
    bars.append(at_most("peak GB", max(row["peak_gb"] for row in whole), PEAK_GB))
    return bars


def command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/iopddl.py", add_help=False)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--time-factor", type=float, default=1.0)
    parser.add_argument("--seeds", default="0", help="comma-separated; the worst run counts")
    parser.add_argument("--ablate", action="store_true")
    options, rest = parser.parse_known_args(argv)
    paths = sorted([*options.dir.glob("*.json"), *options.dir.glob("*.json.gz")])
    if not paths:
        parser.error(f"no .json or .json.gz in {options.dir}")
    seeds = [int(seed) for seed in options.seeds.split(",")]

    def measured(quick: bool) -> Iterator[Row]:
        if quick:
            short = [path for path in paths if (letter_of(path) or "-") in QUICK]
            short = short or sorted(paths, key=lambda path: path.stat().st_size)[:3]
            return totalled(measure(short, None, seeds[:1], False))
        return totalled(measure(paths, options.time_factor, seeds, options.ablate))

    return main("iopddl", measured, judge, rest)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(run_case(*json.loads(sys.argv[2]))))
    else:
        sys.exit(command(sys.argv[1:]))
