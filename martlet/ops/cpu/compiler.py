"""Turns a kernel into object code, by Numba and LLVM (read `store.py` next: it keeps the result on disk).

Imported only when a kernel must be compiled: a warm start loads object code and never imports Numba.
"""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.binding as llvm
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock

from martlet.ops.cpu.emit import I64P
from martlet.ops.cpu.isa import Isa
from martlet.ops.cpu.simd import Verbs

__all__ = ["OPTIONS", "compile_kernel", "target_machine"]

# No bounds or division checks raise, nothing is reassociated, and no wrapper for the interpreter is made.
OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def target_machine() -> llvm.TargetMachine:
    """LLVM's code generator for this processor, as a loader of objects needs it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )


def compile_kernel(name: str, isa: Isa, build: Callable[[Verbs], Callable[..., None]]) -> bytes:
    """Object code in which `name` is the kernel that `build` makes from the verbs of `isa`.

    Its C signature is `int name(void *unused, void *unused, int64 *record, int64 *step, int64 thread, int64 threads)`.
    """
    with global_compiler_lock:
        signature = types.void(I64P, I64P, types.int64, types.int64)
        kernel = njit(signature, **OPTIONS)(build(Verbs(isa)))
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
        return target_machine().emit_object(module)
