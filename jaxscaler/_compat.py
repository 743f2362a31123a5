"""The one place that knows about JAX versions: names that move, parameters that change shape.

Small functions, each with what it promises in its docstring; nothing here knows about plans.
Written against jax 0.10; a private name that is missing fails here, with the name in the message.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

# --- jaxprs inside equations ------------------------------------------------------------------

# Which parameters of an equation hold its sub-jaxprs, in the order that keys count them.
# What is not listed (shard_map, pallas_call, ffi_call, ...) is opaque: planned as a whole.
SUBJAXPR_PARAMS: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
INLINED_CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")


def subjaxprs(eqn) -> tuple:
    """The jaxprs (open or closed, as the equation holds them) inside `eqn`, in key order."""
    found: list = []
    for name in SUBJAXPR_PARAMS.get(eqn.primitive.name, ()):
        value = eqn.params[name]
        found.extend(value if isinstance(value, tuple) else (value,))
    return tuple(found)


def with_subjaxprs(eqn, bodies) -> dict[str, Any]:
    """The parameters of `eqn` with `bodies` in place of `subjaxprs(eqn)`."""
    rest = iter(bodies)
    params = dict(eqn.params)
    for name in SUBJAXPR_PARAMS.get(eqn.primitive.name, ()):
        value = params[name]
        params[name] = tuple(next(rest) for _ in value) if isinstance(value, tuple) else next(rest)
    return params


def open_jaxpr(jaxpr) -> tuple[Any, tuple]:
    """(jaxpr with constvars, consts) of an open or a closed jaxpr."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr.jaxpr, tuple(jaxpr.consts)
    return jaxpr, ()


def with_eqns(jaxpr, eqns, outvars):
    """`jaxpr`, open or closed, with other equations and results; arguments and effects stay."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr.replace(jaxpr=with_eqns(jaxpr.jaxpr, eqns, outvars))
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)


def fresh_var(var):
    """A new variable of the same type; what is dropped stays dropped."""
    return jex.DropVar(var.aval) if isinstance(var, jex.DropVar) else jex.Var(var.aval)


def is_inlinable(eqn) -> bool:
    """Whether `eqn` is a call that adds nothing to its body: no shardings, no constants."""
    if eqn.primitive.name not in INLINED_CALLS:
        return False
    specified = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(s).__name__ == "UnspecifiedValue" for s in specified) and not any(
        open_jaxpr(body)[1] or open_jaxpr(body)[0].constvars for body in subjaxprs(eqn)
    )


def scoped(eqn, call):
    """`eqn` of the body of the equation `call`, named as an equation of the jaxpr around it."""
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def constraint_eqn(var, result, sharding, like):
    """`result = with_sharding_constraint(var, sharding)`, in the scope of the equation `like`."""
    template = _constraint_template(sharding.mesh)
    return template.replace(
        invars=[var],
        outvars=[result],
        params={**template.params, "sharding": sharding},
        source_info=like.source_info if like is not None else None,
        ctx=like.ctx if like is not None else None,
    )


@functools.lru_cache(maxsize=8)
def _constraint_template(mesh):
    """A sharding-constraint equation on `mesh`, traced by JAX: its parameters are JAX's own."""
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, whole))(0.0)
    return traced.jaxpr.eqns[-1]


def emit(closed, args) -> list:
    """Results of `closed` on `args`, its equations taken over as they are.

    Like `jax.core.eval_jaxpr`, but inside a `jit` trace no equation is traced again (no shape
    inference, no tracing of bodies, custom rules untouched; names and source lines kept).
    """
    from jax._src import source_info_util
    from jax._src.interpreters import partial_eval as pe  # no public way to add an equation

    source = source_info_util.current()
    with jex.take_current_trace() as trace:
        if not isinstance(trace, pe.DynamicJaxprTrace):
            raise TypeError("emit() belongs inside a jit trace")
        jaxpr, consts = open_jaxpr(closed)
        env = {}
        for var, value in zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True):
            env[var] = trace.to_jaxpr_tracer(value, source)

        def read(atom):
            if isinstance(atom, jex.Literal):
                return pe.DynamicJaxprTracer(trace, atom.aval, atom, source)
            return env[atom]

        for eqn in jaxpr.eqns:
            tracers = trace.emit_eqn(
                [read(v) for v in eqn.invars],
                [v.aval for v in eqn.outvars],
                eqn.primitive,
                eqn.params,
                eqn.effects,
                eqn.source_info,
                eqn.ctx,
            )
            env.update(zip(eqn.outvars, tracers))
        return [read(v) for v in jaxpr.outvars]


# --- effects, references, meshes --------------------------------------------------------------


def ordered_effects(eqn_or_jaxpr) -> tuple:
    """The ordered effects of an equation or jaxpr (printing, io_callback with ordered=True)."""
    from jax._src import effects  # ordered_effects has no public home

    return tuple(e for e in eqn_or_jaxpr.effects if effects.ordered_effects.contains(e))


def is_ref(aval) -> bool:
    """Whether `aval` is the type of a mutable `jax.Ref`."""
    return type(aval).__name__ == "AbstractRef"


def explicit_axes(mesh) -> tuple[str, ...]:
    """Names of the axes of `mesh` (concrete or abstract) in Explicit mode."""
    explicit = jax.sharding.AxisType.Explicit
    types = mesh.axis_types or ()
    return tuple(n for n, t in zip(mesh.axis_names, types) if t == explicit)


LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("jax", "flax", "optax"))


def source_line(eqn) -> str:
    """`file:line (function)` of the innermost frame that is not a library's, "" if none is."""
    from jax._src import source_info_util  # no public way to the frames of a traceback

    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = (f for f in frames if not any(name in f.file_name for name in LIBRARIES))
    frame = next(own, frames[0] if frames else None)
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})" if frame else ""


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


# --- single equations -------------------------------------------------------------------------


def bind_equation(eqn, args) -> list:
    """Results of one equation on `args`, as the primitive binds them in its own context."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


# --- reading equations ------------------------------------------------------------------------

CONTROL_FLOW = ("scan", "while", "cond")
REMAT = ("remat", "remat2", "remat3", "checkpoint")
CALLS = frozenset(SUBJAXPR_PARAMS) - frozenset(CONTROL_FLOW)  # inlined for planning


Literal = jex.Literal  # an operand of an equation that stands in the jaxpr itself
DropVar = jex.DropVar  # a result of an equation that is thrown away


def dtype_name(aval) -> str:
    """Name of an abstract value's dtype ("bfloat16", "int4", "key<fry>"), "" if it has none."""
    dtype = getattr(aval, "dtype", None)
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = "" if dtype is None else str(dtype)
    return name


_dtype_names: dict[Any, str] = {}  # a dtype takes microseconds to print, a step has 100,000 values


def scan_sizes(eqn) -> tuple[int, int, int]:
    """(constants, carries, length) of a `scan` equation; jax 0.11 keeps the first two in a tree."""
    params = eqn.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"], params["length"]
    consts, carry, _ = map(len, params["ft_in"].unpack())
    return consts, carry, params["length"]


# --- several processes ------------------------------------------------------------------------


def coordination_client() -> Any:
    """The client of JAX's coordination service; None where `jax.distributed` is not started."""
    from jax._src import distributed

    return distributed.global_state.client


# --- kernels ----------------------------------------------------------------------------------


_cudnn_lock = threading.RLock()


@contextlib.contextmanager
def cudnn_on_any_host(capability: str | None = None) -> Iterator[None]:
    """Inside, cuDNN attention traces and lowers for a GPU of this compute capability anywhere.

    None: the capability of the context around, or 9.0. jax asks the host for a cuDNN library and a
    GPU while it traces; a plan is for other devices than the host's. One thread at a time. jax
    traces a call of equal types once in a process, and asks no more.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused  # has no public home

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    target = capability or _cudnn_capability.get()
    patched = {
        "check_cudnn_version": lambda: CUDNN_VERSION,
        "check_compute_capability": lambda least: numbers(target) >= numbers(least),
        "is_cuda_compute_capability_equal": lambda one: numbers(target) == numbers(one),
    }
    with _cudnn_lock:
        token = _cudnn_capability.set(target)
        kept = {name: getattr(fused, name) for name in patched}
        try:
            for name, function in patched.items():
                setattr(fused, name, function)
            yield
        finally:
            for name, function in kept.items():
                setattr(fused, name, function)
            _cudnn_capability.reset(token)


_cudnn_capability = contextvars.ContextVar("capability", default="9.0")
CUDNN_VERSION = 91100  # the first that runs all attention that jax asks it for


def parse_sharding_rule(text: str, **options: Any) -> Any:
    """JAX's own form of a rule "i k, k j -> i j" (`SdyShardingRule`). ValueError if unreadable."""
    from jax._src import custom_partitioning_sharding_rule as rules  # no public home

    return rules.str_to_sdy_sharding_rule(text, **options)


def new_kernel_primitive(name: str, run: Any) -> Any:
    """A primitive of arrays whose equations say `kernel=`; `run(kernel, *arrays)` is what it does.

    `run` returns a tuple of arrays. It has no derivative and no batching rule: jax says so by name.
    """
    from jax.interpreters import mlir  # lowering rules have no other public home

    primitive = jex.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_impl
    def _(*args, kernel):
        return jax.jit(functools.partial(run, kernel))(*args)

    @primitive.def_abstract_eval
    def _(*avals, kernel):
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        made = jax.eval_shape(functools.partial(run, kernel), *args)
        return [jax.core.ShapedArray(a.shape, a.dtype) for a in made]

    lower = mlir.lower_fun(lambda *args, kernel: run(kernel, *args), multiple_results=True)
    mlir.register_lowering(primitive, lower)
    return primitive


def on_shards(eqn, mesh, in_specs, out_specs):
    """A closed jaxpr that runs `eqn` on each device's part alone: a `shard_map` over all of `mesh`.

    The specs are `PartitionSpec`s per operand and result. All axes are manual, as a Mosaic kernel
    wants it. Of equations whose parameters hold global shapes only a `pallas_call` may be cut.
    """

    def part(*args):  # not in the equation's context: its mesh has no manual axes
        if eqn.primitive.name == SHIFT:
            return [_shift_on_part(eqn, spec_dims(in_specs[0]), *args)]
        own = _pallas_on_part(eqn, args)
        made = own.primitive.bind(*args, **own.primitive.get_bind_params(own.params))
        return list(made) if own.primitive.multiple_results else [made]

    run = jax.shard_map(
        part,
        mesh=mesh, in_specs=tuple(in_specs), out_specs=list(out_specs), check_vma=False,
    )  # fmt: skip
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(run)(*avals)


def pallas_grid(eqn) -> tuple[int, ...]:
    """The grid of a `pallas_call`; () if it is known only when it runs."""
    grid = tuple(eqn.params["grid_mapping"].grid)
    return grid if all(isinstance(n, int) for n in grid) else ()


def pallas_blocks(eqn) -> list[list[tuple[int, int] | None]]:
    """Per operand and result of a `pallas_call`, per dim: (grid axis, block) or None.

    The grid axis that walks the dim block by block, where the kernel's runs along that axis are
    apart: it stands in index maps only as it is, cuts every result, and the kernel never asks where
    it is along it (`program_id`).
    """
    mapping, grid = eqn.params["grid_mapping"], pallas_grid(eqn)
    atoms = (*eqn.invars, *eqn.outvars)
    whole: list[list[tuple[int, int] | None]] = [[None] * len(v.aval.shape) for v in atoms]
    if not grid or mapping.num_index_operands or len(mapping.block_mappings) != len(atoms):
        return whole
    found, used = [], set(_asked_places(eqn.params["jaxpr"]))
    for block, atom in zip(mapping.block_mappings, atoms):
        index = block.index_map_jaxpr.jaxpr
        axis_of = {v: g for g, v in enumerate(index.invars[: len(grid)])}
        dims: list[tuple[int, int] | None] = []
        used.update(axis_of[v] for e in index.eqns for v in e.invars
                    if not isinstance(v, Literal) and v in axis_of)  # fmt: skip
        for out, spec, size in zip(index.outvars, block.block_shape, atom.aval.shape):
            g = None if isinstance(out, Literal) else axis_of.get(out)
            lengths = {"Blocked": getattr(spec, "block_size", 0), "Squeezed": 1}
            length = lengths.get(type(spec).__name__, 0)  # others may overlap
            if g is not None and size != grid[g] * length:
                used.add(g)
            if g is not None and any(d and d[0] == g for d in dims):
                used.add(g)  # a diagonal
            dims.append(None if g is None or g in used else (g, length))
        found.append(dims)
    for dims in found[len(eqn.invars) :]:  # what some result lacks is summed up, or written twice
        used.update(set(range(len(grid))) - {d[0] for d in dims if d})
    return [[d if d and d[0] not in used else None for d in dims] for dims in found]


def _asked_places(jaxpr) -> Iterator[int]:
    """Grid axes along which a kernel's body asks where it is, or how many there are."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield eqn.params["axis"]
        for body in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(body):
                yield from _asked_places(body)


def _is_jaxpr(x) -> bool:
    return isinstance(x, jex.ClosedJaxpr | jex.Jaxpr)


def _pallas_on_part(eqn, args):
    """A `pallas_call` for operands that are parts of its own: fewer steps along its grid."""
    shapes = [tuple(a.shape) for a in args]
    if eqn.primitive.name != "pallas_call" or shapes == [v.aval.shape for v in eqn.invars]:
        return eqn
    blocks, mapping = pallas_blocks(eqn), eqn.params["grid_mapping"]
    parts = [1] * len(mapping.grid)
    for dims, var, shape in zip(blocks, eqn.invars, shapes):
        for d, size, part in zip(dims, var.aval.shape, shape):
            if size != part:
                if d is None:
                    raise ValueError(f"a part of {shape} of an operand of shape {var.aval.shape}")
                parts[d[0]] = size // part

    def shrink(aval, dims):
        shape = (n // parts[d[0]] if d else n for n, d in zip(aval.shape, dims))
        return aval.update(shape=tuple(shape))

    outs = tuple(map(shrink, eqn.params["out_avals"], blocks[len(eqn.invars) :]))
    mappings = tuple(
        dataclasses.replace(block, array_aval=shrink(block.array_aval, dims))
        for block, dims in zip(mapping.block_mappings, blocks)
    )
    grid = tuple(n // p for n, p in zip(mapping.grid, parts))
    new = dataclasses.replace(mapping, grid=grid, block_mappings=mappings)
    return eqn.replace(params={**eqn.params, "grid_mapping": new, "out_avals": outs})


# --- what users say of shardings --------------------------------------------------------------


def annotation(eqn) -> tuple[tuple, tuple] | None:
    """(spec, axes) of a `with_sharding_constraint` with names of a mesh; None of any other.

    `spec`: per dim the axes that cut it, major first, or None where it is left open; `axes`:
    (name, size) of the mesh, major first.
    """
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    rank = len(eqn.outvars[0].aval.shape)
    spec = spec_dims(sharding.spec)
    return (*spec, *((),) * (rank - len(spec))), tuple(sharding.mesh.shape.items())


def spec_dims(spec) -> tuple[tuple[str, ...] | None, ...]:
    """A `PartitionSpec` per dim: the axes that cut it, major first, or None where it is open."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    return tuple(
        None if part is free else part if isinstance(part, tuple) else (part,) if part else ()
        for part in spec
    )


def on_mesh(eqn, mesh):
    """A named sharding-constraint equation moved to `mesh`; axes that it lacks are of size 1."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    dims = [
        free if cut is None else tuple(name for name in cut if name in mesh.shape) or None
        for cut in spec_dims(eqn.params["sharding"].spec)
    ]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims))
    empty = _constraint_template(mesh).params["context_mesh"]
    return eqn.replace(params={**eqn.params, "sharding": sharding, "context_mesh": empty})


def run_inside_mesh(step, mesh):
    """`step`, plain or jitted, as a plain function that runs `inside_mesh(mesh)`."""
    plain = step.__wrapped__ if is_jitted(step) else step

    @functools.wraps(plain)
    def run(*args, **kwargs):
        with inside_mesh(mesh):
            return plain(*args, **kwargs)

    return run


def inside_mesh(mesh):
    """A context in which specs may name the axes of `mesh`, as under `jax.set_mesh`.

    `mesh`: a `Mesh`, an `AbstractMesh`, sizes by name, or None. A mesh that is set already stays.
    """
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = mesh.abstract_mesh
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        mesh = abstract_mesh(tuple(mesh.items()))
    return jax.sharding.use_abstract_mesh(mesh)


def abstract_mesh(axes):
    """A mesh of no devices with `axes` ((name, size), major first) in Auto mode."""
    names, sizes = zip(*axes)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.AbstractMesh(sizes, names, axis_types=auto)


def in_mesh_context(jaxpr) -> bool:
    """Whether a step was traced where a mesh was set."""
    eqns = open_jaxpr(jaxpr)[0].eqns
    return bool(eqns) and not eqns[0].ctx.cur_abstract_mesh.empty


# --- compiling a program for devices that are not there ----------------------------------------


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


# --- rewriting forward jaxprs -----------------------------------------------------------------


def is_literal(atom) -> bool:
    """Whether an operand stands in the jaxpr itself."""
    return isinstance(atom, jex.Literal)


def is_dropped(var) -> bool:
    """Whether a result of an equation is thrown away."""
    return isinstance(var, jex.DropVar)


def in_scope(eqn, name: str):
    """`eqn` with `name` last in its name stack."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


@contextlib.contextmanager
def where_it_stands(eqn) -> Iterator[None]:
    """A context in which what is bound has the names, source line and settings of `eqn`."""
    from jax._src import source_info_util  # as `jax.core.eval_jaxpr` does it

    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind_where_it_stands(eqn, args) -> list:
    """Results of `eqn` on `args`, with its names and source line; custom rules stay whole."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with where_it_stands(eqn):
        results = eqn.primitive.bind(*args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def last_uses(jaxpr) -> dict:
    """Per variable, the last equation that reads it; those of results, the number of equations."""
    found = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not is_literal(v)}
    found.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if not is_literal(v))
    return found


def closed_over_nothing(jaxpr, invars, eqns, outvars):
    """A closed jaxpr of some equations of `jaxpr`."""
    effects = {effect for eqn in eqns for effect in eqn.effects}
    part = jaxpr.replace(
        constvars=[],
        invars=invars,
        outvars=outvars,
        eqns=eqns,
        effects=effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.ClosedJaxpr(part, ())


def changes_nothing(eqn) -> bool:
    """Whether an equation only hands its operand on: a name, a rounding to what it is already."""
    if eqn.primitive.name != "reduce_precision":
        return eqn.primitive.name == "name"
    info = jax.numpy.finfo(eqn.invars[0].aval.dtype)
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    return bits == (info.nexp, info.nmant)


planning = jax.make_user_context(None)  # what the step is traced for; caches of jit tell it apart


def custom_jvp_rule(eqn, zeros: tuple[bool, ...]):
    """(closed jaxpr, zeros of the results) of the derivative rule of a `custom_jvp_call`.

    `zeros`: which operands have no tangent. The jaxpr takes the operands, then the tangents that
    there are, and gives the results, then their tangents that are not zero.
    """
    jaxpr, consts, out_zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return jex.ClosedJaxpr(jaxpr, tuple(consts)), tuple(out_zeros)


# --- dead code --------------------------------------------------------------------------------


def without_dead_code(closed):
    """`closed` without the equations that no result or effect needs, in bodies too, as XLA leaves
    them out; differentiation makes some. Arguments and results stay."""
    from jax.interpreters import partial_eval as pe

    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


# --- the backward pass ------------------------------------------------------------------------


def is_made_again(eqn) -> bool:
    """Whether an equation is the backward pass of a `jax.checkpoint`, its forward pass within."""
    return eqn.primitive.name in REMAT and bool(eqn.params.get("differentiated"))


def is_transposed(eqn) -> bool:
    """Whether an equation came from transposition: it is of a backward pass."""
    return "transpose(" in str(eqn.source_info.name_stack)


def barrier_eqn(operands, like):
    """An equation that hands on variables once all are computed; where and when `like` stands."""
    made = [fresh_var(v) for v in operands]
    return _barrier_template().replace(
        invars=list(operands), outvars=made, source_info=like.source_info, ctx=like.ctx
    )


def on_host(var) -> bool:
    """Whether a variable lies in the memory of the host."""
    return getattr(var.aval, "memory_space", None) == jax.memory.Space.Host


@functools.lru_cache(maxsize=1)
def _barrier_template():
    """A barrier, traced by JAX."""
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).jaxpr.eqns[-1]


# --- a ring of devices ------------------------------------------------------------------------


SHIFT = "ring_shift"


def new_shift_primitive():
    """A primitive of one array: each element of dim `dim` goes to the next place (`by` 1) or the
    one before (-1), around the end.

    Linear. Compiled as it is, it is two slices put together; on parts, `on_shards`.
    """
    from jax.interpreters import ad, batching, mlir  # rules have no other public home

    primitive = jex.Primitive(SHIFT)

    def run(x, *, dim, by):
        return jax.numpy.roll(x, by, dim)

    @primitive.def_impl
    def _(x, **params):
        return jax.jit(functools.partial(run, **params))(x)

    @primitive.def_abstract_eval
    def _(x, *, dim, by):
        return jax.core.ShapedArray(x.shape, x.dtype)

    def transpose(ct, x, *, dim, by):
        return [ct if type(ct) is ad.Zero else primitive.bind(ct, dim=dim, by=-by)]

    def batch(args, dims, *, dim, by):
        (x,), (at,) = args, dims
        return primitive.bind(x, dim=dim + (at <= dim), by=by), at

    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    return primitive


def _shift_on_part(eqn, spec, x):
    """A shift on one device's block: every device along the axes hands its edge to the next."""
    dim, by = eqn.params["dim"], eqn.params["by"]
    axes = spec[dim] if dim < len(spec) else ()
    local, size = x.shape[dim], eqn.invars[0].aval.shape[dim]
    forward = by > 0
    edge = local - 1 if forward else 0
    moved = jax.lax.slice_in_dim(x, edge, edge + 1, axis=dim)
    if count := size // local - 1:
        step = 1 if forward else -1
        ring = [(i, (i + step) % (count + 1)) for i in range(count + 1)]
        moved = jax.lax.ppermute(moved, axes, ring)
    rest = jax.lax.slice_in_dim(x, 0 if forward else 1, local - 1 if forward else local, axis=dim)
    return jax.lax.concatenate([moved, rest] if forward else [rest, moved], dim)


def rebuilt_scan(eqn, body, consts, carries, slices, results):
    """The `scan` equation with another closed body, on other operands; as many iterations."""
    inputs = [*consts, *carries, *slices]
    params = {
        **eqn.params,
        SUBJAXPR_PARAMS["scan"][0]: body,
        "num_consts": len(consts),
        "num_carry": len(carries),
        "linear": (False,) * len(inputs),
    }
    effects = body.jaxpr.effects
    return eqn.replace(invars=inputs, outvars=list(results), params=params, effects=effects)


def zeros_eqn(var):
    """An equation that makes `var`, which is no scalar, of zeros."""
    aval = var.aval
    made = jax.make_jaxpr(lambda: jax.lax.full(aval.shape, 0, aval.dtype))()
    (eqn,) = made.jaxpr.eqns
    return eqn.replace(outvars=[var])


def zero(aval):
    """A literal 0 of a scalar type."""
    return jex.Literal(np.zeros((), aval.dtype), aval)


def with_constants(closed, variables, values):
    """A closed jaxpr whose free variables are bound to arrays."""
    return jex.ClosedJaxpr(closed.jaxpr.replace(constvars=list(variables)), list(values))
