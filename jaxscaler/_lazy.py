"""Packages whose public names are looked up when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. modules: public name -> module of the package that has it.

    From here on no module takes the place of a public name, as plan.py would of `jaxscaler.plan`.
    """

    class Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if not (name in modules and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    sys.modules[package].__class__ = Package
    return find
