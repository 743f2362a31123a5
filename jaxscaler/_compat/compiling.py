"""Jitted functions, lowered modules, compilers for devices that are not there, processes."""

from __future__ import annotations

from typing import Any

# --- jitted functions -------------------------------------------------------------------------


def is_jitted(fun) -> bool:
    """Whether `fun` is what `jax.jit` returns."""
    return hasattr(fun, "_jit_info")


def jit_options(jitted) -> dict[str, Any]:
    """What the user said to `jax.jit`: `static_argnums`, `static_argnames`, `fixes_shardings`."""
    info = jitted._jit_info
    unspecified = all(type(s).__name__ == "UnspecifiedValue" for s in info.out_shardings_leaves)
    return {
        "static_argnums": tuple(info.static_argnums),
        "static_argnames": tuple(info.static_argnames),
        "fixes_shardings": bool(info.user_specified_in_shardings) or not unspecified,
    }


def jit_donation(jitted) -> dict[str, Any]:
    """What the user said to `jax.jit`: `donate_argnums`, `donate_argnames`."""
    info = jitted._jit_info
    return {
        "donate_argnums": tuple(info.donate_argnums),
        "donate_argnames": tuple(info.donate_argnames),
    }


# --- several processes ------------------------------------------------------------------------


def coordination_client() -> Any:
    """The client of JAX's coordination service; None where `jax.distributed` is not started."""
    from jax._src import distributed

    return distributed.global_state.client


# --- compiling a program for devices that are not there ---------------------------------------


def module_bytes(lowered) -> bytes:
    """The StableHLO of a `jax.stages.Lowered`, as MLIR bytecode that this version reads back."""
    from jax._src.interpreters import mlir

    return mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))


def parse_module(code: bytes):
    """The MLIR module of `module_bytes`, in a context of its own."""
    from jax._src.interpreters import mlir
    from jax.extend.mlir import ir

    with mlir.make_ir_context():
        return ir.Module.parse(code)


def compile_module(module, devices, compiler_options):
    """The XLA executable of a module on a grid of devices (of a topology, or present); not loaded
    where they are not there. Arguments and results without a sharding are XLA's to lay out."""
    from jax._src import compiler
    from jax._src.interpreters import pxla
    from jax._src.lib import _jax
    from jax.extend.mlir import ir

    functions = [view.operation for view in module.body.operations]
    main = next(f for f in functions if str(f.attributes["sym_name"]) == '"main"')
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)

    def free(name: str, count: int) -> list[bool]:
        if name not in main.attributes:
            return [True] * count
        each = ir.ArrayAttr(main.attributes[name])
        return ["sdy.sharding" not in ir.DictAttr(attributes) for attributes in each]

    backend, flat = devices.flat[0].client, devices.reshape(-1)
    options = pxla.create_compile_options(
        module, False, free("arg_attrs", len(kind.inputs)), free("res_attrs", len(kind.results)),
        backend, flat, dict(compiler_options),
    )  # fmt: skip
    with module.context:
        return compiler.backend_compile_and_load(
            backend, module, _jax.DeviceList(tuple(flat)), options, []
        )


def topology_devices(platform: str, name: str, options: dict[str, Any]) -> list:
    """The devices of a topology that need not be there, of a platform whose plugin is installed."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(name, platform, **options).devices)
