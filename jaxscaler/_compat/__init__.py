"""The one place that knows about JAX versions: names that move, parameters that change shape.

Small functions, each with what it promises in its docstring; nothing here knows about plans.
Written against jax 0.10; a private name that is missing fails here, with the name in the message.
Everything that others use is a name of the package: `_compat.open_jaxpr`.
"""

# ruff: noqa: F401
from jaxscaler._compat.compiling import (
    compile_module,
    coordination_client,
    is_jitted,
    jit_donation,
    jit_options,
    module_bytes,
    parse_module,
    topology_devices,
)
from jaxscaler._compat.jaxprs import (
    CALLS,
    INLINED_CALLS,
    REMAT,
    SUBJAXPR_PARAMS,
    DropVar,
    Literal,
    bind_equation,
    dtype_name,
    emit,
    explicit_axes,
    fresh_var,
    is_inlinable,
    is_ref,
    open_jaxpr,
    ordered_effects,
    scan_sizes,
    scoped,
    source_line,
    subjaxprs,
    with_eqns,
    with_subjaxprs,
)
from jaxscaler._compat.kernels import (
    SHIFT,
    cudnn_on_any_host,
    new_kernel_primitive,
    new_shift_primitive,
    on_shards,
    pallas_blocks,
    pallas_grid,
    parse_sharding_rule,
)
from jaxscaler._compat.meshes import (
    abstract_mesh,
    annotation,
    constraint_eqn,
    in_mesh_context,
    inside_mesh,
    on_mesh,
    run_inside_mesh,
    spec_dims,
)
from jaxscaler._compat.rewriting import (
    barrier_eqn,
    bind_where_it_stands,
    changes_nothing,
    closed_over_nothing,
    custom_jvp_rule,
    custom_vjp_rule,
    in_scope,
    is_dropped,
    is_float,
    is_literal,
    is_made_again,
    is_transposed,
    last_uses,
    on_host,
    planning,
    rebuilt_scan,
    where_it_stands,
    with_constants,
    without_dead_code,
    zero,
    zeros_eqn,
)
