"""`jaxscaler plan | compare | verify | show | solve`: their arguments, and what they do."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxscaler import planner
from jaxscaler.api import plan as plan_step
from jaxscaler.api import with_step
from jaxscaler.compare import as_data, compare, comparison_table
from jaxscaler.errors import InfeasibleError, JaxscalerError
from jaxscaler.pipeline.joint import candidates
from jaxscaler.plan import Plan
from jaxscaler.program import Statement
from jaxscaler.program_text import dump_program, read_program
from jaxscaler.recipes import RECIPES
from jaxscaler.solve import Solution, StrategyProblem, solve
from jaxscaler.solve.iopddl import read_problem, write_problem
from jaxscaler.target import (
    DONE,
    FAILED,
    INFEASIBLE,
    Report,
    UsageError,
    cluster_of,
    progress,
    setting,
    traceable,
)
from jaxscaler.verify.worker import TIMEOUT


def add_arguments(command: argparse.ArgumentParser, name: str) -> None:
    """Those of one of the commands."""
    ARGUMENTS[name](command)


# -- what may be typed -----------------------------------------------------------------------------


def _plan_arguments(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_plan)
    _add_target(command)
    command.add_argument(
        "--recipe", choices=RECIPES, action="extend", nargs="+", default=[], help="constrain to it"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write the plan here as JSON")
    command.add_argument(
        "--export-problem", type=Path, metavar="FILE",
        help="write the strategy problem of the plan's mesh here (.json or .json.gz)",
    )  # fmt: skip
    command.add_argument(
        "--verify", action="store_true",
        help="compile with the cluster's compiler, and plan again until the step fits",
    )  # fmt: skip
    command.add_argument(
        "--best-of", type=_positive_int, default=False, metavar="N",
        help="the same with the best plans of N meshes: the fastest by the compiler's word",
    )  # fmt: skip
    command.add_argument(
        "--pipelines", action="store_true",
        help="let pipelines compete with plans without stages, and print what was tried",
    )  # fmt: skip
    command.add_argument(
        "--simplest", type=_fraction, default=0.0, metavar="SHARE",
        help="with --pipelines: of the plans slower by this share at most, the simplest",
    )  # fmt: skip
    _add_search(command, planner.TIME_LIMIT)


def _verify_arguments(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_verify)
    command.add_argument("file", type=Path, help="the plan, as `jaxscaler plan --out` writes it")
    _add_workload(command)
    command.add_argument(
        "--for", metavar="CLUSTER", dest="compiled_for", help="default: the plan's own cluster"
    )
    command.add_argument(
        "--audit", action="store_true", help="ask the partitioner alone, which takes seconds"
    )
    command.add_argument(
        "--timeout", type=_positive_float, default=TIMEOUT, metavar="SECONDS",
        help="of compiling (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.add_argument("--quiet", action="store_true", help="no progress")


def _compare_arguments(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_compare)
    _add_target(command)
    command.add_argument(
        "--recipe", choices=RECIPES, action="extend", nargs="+", default=[],
        help="to be compared (default: all)",
    )  # fmt: skip
    _add_search(command, planner.TIME_LIMIT)


def _show_arguments(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_show)
    command.add_argument("file", type=Path)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as JSON")
    form.add_argument(
        "--program", action="store_true", help="print the plan as a program (for --constraints)"
    )


def _solve_arguments(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_solve)
    command.add_argument("file", type=Path)
    _add_search(command, planner.TIME_LIMIT)


ARGUMENTS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "plan": _plan_arguments,
    "verify": _verify_arguments,
    "compare": _compare_arguments,
    "show": _show_arguments,
    "solve": _solve_arguments,
}


def _add_workload(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "target", help="MODULE:FUNCTION that returns a workload: an object with step, state, batch"
    )
    command.add_argument("--size", help="the workload's size")
    command.add_argument("--batch", type=_positive_int, help="samples per step")
    command.add_argument("--seq", type=_positive_int, help="tokens per sample")
    command.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], type=setting, dest="settings",
        help="any other argument of FUNCTION; may be given again",
    )  # fmt: skip


def _add_target(command: argparse.ArgumentParser) -> None:
    _add_workload(command)
    command.add_argument("--cluster", required=True, help="such as h100:8x4, or a file NAME.toml")
    command.add_argument(
        "--constraints", type=Path, action="append", default=[], metavar="FILE",
        help="of lines of the language as YAML; may be given again",
    )  # fmt: skip
    command.add_argument(
        "--profile", type=Path, metavar="FILE", help="what `calibrate` measured on such devices"
    )
    command.add_argument(
        "--memory", type=_share, default=planner.MEMORY, metavar="SHARE",
        help="of a device's memory that may be filled (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--loops", action=argparse.BooleanOptionalAction, default=True,
        help="look for loops over parts of a marked loss where memory decides",
    )  # fmt: skip


def _add_search(command: argparse.ArgumentParser, time_limit: float) -> None:
    command.add_argument(
        "--time-limit", type=_positive_float, default=time_limit, metavar="SECONDS",
        help="of search (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--seed", type=_seed, default=0)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.add_argument("--quiet", action="store_true", help="no progress")


def _number(text: str, kind: type, rule: str, holds: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}")
    return value


def _positive_int(text: str) -> int:
    return _number(text, int, "a whole number above 0", lambda n: n > 0)


def _seed(text: str) -> int:
    return _number(text, int, "a whole number from 0 to 2^31 - 1", lambda n: 0 <= n < 2**31)


def _positive_float(text: str) -> float:
    return _number(text, float, "a number above 0", lambda x: 0 < x < float("inf"))


def _share(text: str) -> float:
    return _number(text, float, "above 0 and at most 1", lambda x: 0 < x <= 1)


def _fraction(text: str) -> float:
    return _number(text, float, "0 or above", lambda x: 0 <= x < float("inf"))


# -- commands --------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> int:
    for path in (args.out, args.export_problem):
        if path is not None:
            _check_writable(path)
    recipes = [line for name in args.recipe for line in RECIPES[name]()]
    if args.pipelines:
        return _plan_pipelines(args, recipes)
    with progress(args.quiet) as report:
        found = _searched(args, recipes, report, verify=args.best_of or args.verify)
    if args.export_problem is not None:
        problem = found.session.best.priced.problem
        _write(args.export_problem, lambda path: write_problem(problem, path))
    if args.out is not None:
        _write(args.out, found.save)
    _print_plan(found, args.json)
    return DONE


def _plan_pipelines(args: argparse.Namespace, recipes: Sequence[Statement]) -> int:
    if args.verify or args.best_of or args.export_problem is not None:
        raise UsageError("--pipelines: a plan with stages is no one program to verify or export")
    written = [line for path in args.constraints for line in read_program(path)]
    with progress(args.quiet) as report:
        work, batch = traceable(args, report)
        found = candidates(
            work.step, work.state, *batch, cluster=cluster_of(args.cluster), profile=args.profile,
            options=dict(constraints=[*written, *recipes], memory=args.memory,
                         time_limit=args.time_limit, simplest=args.simplest, progress=report),
        )  # fmt: skip
    if args.out is not None:
        _write(args.out, found.plan.save)
    if args.json:
        print(json.dumps({"plan": found.plan.to_dict(), "tried": found.rows()}))
    else:
        found.show()
        found.plan.show()
    return DONE


def _compare(args: argparse.Namespace) -> int:
    with progress(args.quiet) as report:
        found = _searched(args, [], report, cache=False)
        names = args.recipe or RECIPES
        rows = compare(found, {name: RECIPES[name]() for name in names}, report)
    if args.json:
        print(json.dumps(as_data(rows)))
    else:
        Console().print(comparison_table(rows))
    return DONE


def _verify(args: argparse.Namespace) -> int:
    plan = Plan.load(args.file)
    cluster = None if args.compiled_for is None else cluster_of(args.compiled_for)
    with progress(args.quiet) as report:
        work, batch = traceable(args, report)
        plan = with_step(plan, work.step, work.state, *batch)
        if args.audit:
            audit = plan.audit()
        else:
            found = plan.verify(cluster, timeout=args.timeout, progress=report)
    if args.audit:
        print(json.dumps(audit.to_dict()) if args.json else audit)
        return DONE
    print(json.dumps(found.to_dict()) if args.json else found)
    return {True: DONE, False: INFEASIBLE, None: FAILED}[found.fits]


def _searched(
    args: argparse.Namespace, lines: Sequence[Statement], report: Report, **options: Any
) -> Plan:
    """The plan of the target, under the constraints that are named and `lines`."""
    cluster = cluster_of(args.cluster)
    written = [line for path in args.constraints for line in read_program(path)]
    work, batch = traceable(args, report)
    found: Any = plan_step(
        work.step, work.state, *batch,
        cluster=cluster, profile=args.profile, constraints=[*written, *lines], memory=args.memory,
        time_limit=args.time_limit, seed=args.seed, progress=report, loops=args.loops, **options,
    )  # fmt: skip
    return found


def _show(args: argparse.Namespace) -> int:
    try:
        found = Plan.load(args.file)
    except UnicodeDecodeError as error:
        raise UsageError(f"{args.file}: not text: {error}") from error
    if args.program:
        print(dump_program(found.program()), end="")
    else:
        _print_plan(found, args.json)
    return DONE


def _solve(args: argparse.Namespace) -> int:
    problem = read_problem(args.file)
    with progress(args.quiet) as report:
        report("solve", f"{problem.num_nodes} nodes, {len(problem.edge_nodes)} edges")

        def improved(seconds: float, cost: int | None, bound: int) -> None:
            report("solve", f"{seconds:.1f} s: cost {cost}, bound {bound}")

        found = solve(problem, time_limit=args.time_limit, seed=args.seed, progress=improved)
    result = _result(problem, found)
    if args.json:
        print(json.dumps(result))
    elif found.choice is not None:
        print("\n".join(f"{key}: {value}" for key, value in result.items() if key != "choice"))
    if found.status == "infeasible":
        raise InfeasibleError(f"{args.file}: {found.statistics.get('reason', 'no choice fits')}")
    if found.choice is None:
        raise JaxscalerError(
            f"{args.file}: no choice found in {args.time_limit:g} s; give it a longer --time-limit"
        )
    return DONE


def _result(problem: StrategyProblem, found: Solution) -> dict[str, Any]:
    return {
        "name": problem.name,
        "status": found.status,
        "cost": found.cost,
        "bound": found.bound,
        "gap": None if found.cost is None else found.gap,
        "peak_usage": found.peak_usage,
        "usage_limit": problem.usage_limit,
        "seconds": found.seconds,
        "choice": None if found.choice is None else found.choice.tolist(),
    }


def _print_plan(found: Plan, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        found.show()


# -- files -----------------------------------------------------------------------------------------


def _check_writable(path: Path) -> None:
    """Before a long search, not after it."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: the directory {path.parent} can not be written to")


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` make the file; it appears whole or not at all."""
    part = path.with_name(f"part-{path.name}")  # in front: the suffix may say how to write
    try:
        write(part)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
