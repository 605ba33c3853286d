"""The table of kernels, and their compilation by Numba and LLVM.

Read `linear.py` or `attention.py` next.

Imported only to compile: everything here needs Numba. `store.py` keeps the object code on disk, and
a warm start loads it.
"""

from collections.abc import Callable
from functools import partial

import llvmlite.binding as llvm
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock

from martlet.errors import UnsupportedError
from martlet.kv_types import KV_TYPES
from martlet.ops.cpu.kernels.advance import advance_kernel, argmax_kernel, choose_kernel
from martlet.ops.cpu.kernels.attention import attention_kernel
from martlet.ops.cpu.kernels.embed import embed_float, embed_quant
from martlet.ops.cpu.kernels.experts import expert_linear_kernel
from martlet.ops.cpu.kernels.fields import ROWS_PER_TILE
from martlet.ops.cpu.kernels.kv_float import kv_write_kernel
from martlet.ops.cpu.kernels.kv_q4 import kv_write_q4_kernel, pack_q4_kernel
from martlet.ops.cpu.kernels.kv_q8 import kv_write_q8_kernel
from martlet.ops.cpu.kernels.layout import LAYOUTS, QuantLayout
from martlet.ops.cpu.kernels.linear import OPTIONS, linear_float, linear_quant
from martlet.ops.cpu.kernels.lora import lora_kernel
from martlet.ops.cpu.kernels.pack import pack_float, pack_quant
from martlet.ops.cpu.kernels.quantize import quantize_kernel
from martlet.ops.cpu.kernels.rotate import rope_kernel, rope_table_kernel
from martlet.ops.cpu.kernels.route import gather_rows_kernel, route_kernel, sort_choices_kernel
from martlet.ops.cpu.kernels.rowwise import (
    act_mul_kernel,
    add_kernel,
    combine_kernel,
    gate_kernel,
    rms_norm_kernel,
    scale_cap_kernel,
    take_rows_kernel,
)
from martlet.ops.cpu.kernels.team import launch_kernel, read_kernel, serve_kernel
from martlet.ops.cpu.kernels.trie import mask_fill_kernel, trie_walk_kernel
from martlet.ops.cpu.simd.emit import I64P
from martlet.ops.cpu.simd.isa import Isa, target_features
from martlet.ops.cpu.simd.verbs import Verbs
from martlet.spec import Activation

Builder = Callable[[Verbs], Callable[..., None]]

BUILDERS: dict[str, Builder] = {
    "lora": lora_kernel,
    "launch": launch_kernel,
    "quantize": quantize_kernel,
    "read": read_kernel,
    "serve": serve_kernel,
    "rms_norm": rms_norm_kernel,
    "add": add_kernel,
    "scale_cap": scale_cap_kernel,
    "take_rows": take_rows_kernel,
    "argmax": argmax_kernel,
    "choose": choose_kernel,
    "advance": advance_kernel,
    "route": route_kernel,
    "sort_choices": sort_choices_kernel,
    "gather_bytes": partial(gather_rows_kernel, as_bytes=True),
    "gather_floats": partial(gather_rows_kernel, as_bytes=False),
    "combine": combine_kernel,
    "gate": gate_kernel,
    "trie_walk": trie_walk_kernel,
    "mask_fill": mask_fill_kernel,
    "rope_table": rope_table_kernel,
    "rope": rope_kernel,
    "kv_write_f16": partial(kv_write_kernel, half=True),
    "kv_write_f32": partial(kv_write_kernel, half=False),
    "kv_write_q8": kv_write_q8_kernel,
    "kv_write_q4": kv_write_q4_kernel,
    "pack_q4": pack_q4_kernel,
    **{
        f"attention_{dtype}_{n}": partial(attention_kernel, dtype=dtype, heads=n)
        for dtype in KV_TYPES
        for n in range(1, ROWS_PER_TILE + 1)
    },
    **{f"act_mul_{function.value}": partial(act_mul_kernel, function=function) for function in Activation},
}
for layout in LAYOUTS.values():
    make = linear_quant if isinstance(layout, QuantLayout) else linear_float
    BUILDERS[f"linear_{layout.name}"] = partial(make, layout=layout)  # type: ignore[arg-type, call-arg]
    BUILDERS[f"expert_linear_{layout.name}"] = partial(expert_linear_kernel, layout=layout)
    make = embed_quant if isinstance(layout, QuantLayout) else embed_float
    BUILDERS[f"embed_{layout.name}"] = partial(make, layout=layout)  # type: ignore[arg-type, call-arg]
    make = pack_quant if isinstance(layout, QuantLayout) else pack_float
    BUILDERS[f"pack_{layout.name}"] = partial(make, layout=layout)  # type: ignore[arg-type, call-arg]


def _target_machine(isa: Isa) -> llvm.TargetMachine:
    """LLVM's code generator for this processor held to `isa`, as a loader of objects needs it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=target_features(isa), opt=3, jit=True
    )


def compile_kernel(name: str, isa: Isa) -> bytes:
    """Object code in which `name` is that kernel, made from the verbs of `isa`; UnsupportedError
    for an unknown name.

    Its C signature is `int name(void *unused, void *unused, int64 *record, int64 *step, int64
    thread, int64 threads)`.
    """
    if name not in BUILDERS:
        raise UnsupportedError(f"no kernel is called {name!r}", sorted(BUILDERS))
    with global_compiler_lock:
        signature = types.void(I64P, I64P, types.int64, types.int64)
        kernel = njit(signature, **OPTIONS)(BUILDERS[name](Verbs(isa)))
        overload = kernel.overloads[signature.args]
        module = llvm.parse_assembly(overload.library.get_llvm_str())
        for function in module.functions:
            if function.name == overload.fndesc.llvm_func_name:
                function.name = name
            elif not function.is_declaration:
                function.linkage = "internal"
        for variable in module.global_variables:
            if not variable.is_declaration or variable.linkage == llvm.Linkage.common:
                variable.linkage = "internal"
        module.verify()
        return _target_machine(isa).emit_object(module)
