"""The package is lazy: the solver comes without JAX, public names are found when asked for."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

import jaxscaler


def test_the_solver_comes_without_jax() -> None:
    code = "import sys, jaxscaler.solve; print(sorted({'jax', 'jaxlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_found_and_listed() -> None:
    for name in jaxscaler.__all__:
        assert name in dir(jaxscaler)
        assert getattr(jaxscaler, name) is not None, name
    with pytest.raises(AttributeError, match="'absent'"):
        jaxscaler.absent  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    imports = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(inspect.getsource(jaxscaler)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jaxscaler.")
        for alias in node.names
    }
    assert imports == {name: f"jaxscaler.{home}" for name, home in jaxscaler._MODULE.items()}


def test_a_module_does_not_hide_a_public_name() -> None:
    """jaxscaler/plan.py and the function jaxscaler.plan: the import of one keeps the other."""
    code = "from jaxscaler.plan import Plan; import jaxscaler; print(callable(jaxscaler.plan))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
