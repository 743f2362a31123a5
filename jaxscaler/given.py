"""What a user gives to have a step planned, as planning takes it: the cluster, the step and its
arguments, the mesh, where arguments lie.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jaxscaler import _compat
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.devices import CAPABILITY, Device
from jaxscaler.cluster.profile import Profile, calibrated
from jaxscaler.errors import ConstraintError
from jaxscaler.space.annotations import Author
from jaxscaler.trace import Traced, trace


def as_cluster(
    cluster: str | Cluster | None,
    devices: Sequence[jax.Device] | None = None,
    profile: Profile | str | Path | None = None,
) -> Cluster:
    """A cluster from its name, itself, or (None) the devices that JAX sees; as it was measured."""
    if cluster is None:
        cluster = Cluster.local(devices)
    elif isinstance(cluster, str):
        cluster = Cluster.parse(cluster)
    return calibrated(cluster, profile)


def traced_step(
    step: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    roles: Mapping[str, str],
    mesh: Any,
    device: Device,
) -> Traced:
    """The step as it is on the mesh that the user gives, for a device of the cluster."""
    with _compat.inside_mesh(mesh), _compat.cudnn_on_any_host(CAPABILITY.get(device.name)):
        return replace(trace(step, *args, **kwargs), roles=tuple(roles.items()))


def author_of(mesh: Any, specs: Mapping[str, Any]) -> Author:
    """What the user says of the mesh and of arguments, without JAX's types."""
    if explicit := _compat.explicit_axes(mesh) if hasattr(mesh, "axis_types") else ():
        raise ConstraintError(
            f"mesh=: axes {explicit} are in Explicit mode, where types fix all shardings and "
            "nothing is left to plan: use axis_types=(AxisType.Auto, ...)"
        )
    axes = None if mesh is None else tuple(dict(getattr(mesh, "shape", mesh)).items())
    return Author(axes, tuple((glob, _compat.spec_dims(spec)) for glob, spec in specs.items()))


def _nnx() -> ModuleType | None:
    """`jaxscaler.nnx`, in a program that uses flax.nnx."""
    return importlib.import_module("jaxscaler.nnx") if "flax.nnx" in sys.modules else None


def nnx_for(step: Callable, arguments: Any) -> ModuleType | None:
    """The same, if the step works on objects of it."""
    nnx = _nnx()
    return nnx if nnx and nnx.wanted(step, arguments) else None


def without_objects(create: Callable) -> Callable:
    """`create` with pytrees in place of flax.nnx objects, which need no mesh to be made."""

    def made(*args: Any, **kwargs: Any) -> Any:
        nnx = _nnx()
        with nnx.unsharded() if nnx else contextlib.nullcontext():
            result = create(*args, **kwargs)
        return nnx.take(result) if nnx and nnx.holds_objects(result) else result

    return made


class StepOnObjects:
    """A step as a function of pytrees, whether it takes such or flax.nnx objects."""

    step: Callable
    _nnx: ModuleType | None = None  # the adapter, for a step on flax.nnx objects

    def _meet(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments as pytrees; the step is from now on a function of such."""
        if self._nnx is None and (nnx := nnx_for(self.step, (args, kwargs))):
            self._nnx, self.step = nnx, nnx.functional(self.step)
        if self._nnx:
            args, kwargs, _ = self._nnx.take_call(self.step, args, kwargs)
        return args, kwargs

    def _as_arguments(self, made: Any, rest: tuple) -> tuple:
        """What stands before `rest` in a call: `made`, or its parts if the step takes as many."""
        if type(made) is tuple:
            try:
                inspect.signature(self.step).bind(made, *rest)
            except TypeError:
                return made
        return (made,)
