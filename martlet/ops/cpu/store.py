"""Compiled kernels: found on disk or compiled once, loaded without Numba.

Read `kernel_table.py` next: the table of them.

Object code lies in one folder for each digest of everything that it depends on: the kernels'
source, the versions of Numba and LLVM, and the processor. A file carries the SHA-256 of its content
and appears by renaming, so half-written, foreign or damaged files are never loaded; two processes
compile behind a lock, the second finds the first's work. A folder that cannot be written only means
that the next start compiles again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from martlet.config import cache_dir
from martlet.ops.cpu.simd.isa import Isa, chosen_isa

KERNEL_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)
Progress = Callable[[str, int, int], None]


def source_digest(*folders: str) -> str:
    """Hash of the Python text in `folders` of this package, and below them."""
    digest, root = hashlib.sha256(), Path(__file__).parent
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def environment_digest(isa: Isa, *folders: str) -> str:
    """Hash of all that object code depends on, and of the text in `folders`.

    By default of what kernels are made from.
    """
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    cpu = [platform.machine(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), isa.name]
    source = source_digest(*(folders or ("kernels", "simd")))
    return hashlib.sha256("\0".join([source, *versions, *cpu]).encode()).hexdigest()[:24]


class KernelStore:
    """Addresses of compiled kernels by name, each loaded or compiled when it is first asked for.

    `folder` None keeps nothing on disk. `progress(name, done, total)` is called before each kernel
    that is compiled.
    """

    def __init__(self, isa: Isa, folder: Path | None, progress: Progress | None = None) -> None:
        self.isa = isa
        self.folder = None if folder is None else folder / environment_digest(isa)
        self.compiled: dict[str, float] = {}  # name → seconds
        self._progress = progress
        self._addresses: dict[str, int] = {}
        self._engine: Any = None

    @classmethod
    def open(cls) -> KernelStore:
        """The store that processes of this machine share, in the cache folder."""
        return cls(chosen_isa(), cache_dir() / "kernels")

    def ensure(self, names: list[str]) -> None:
        """Load the kernels `names`, compiling those that are not on disk."""
        missing = [name for name in names if name not in self._addresses]
        objects = {name: self._read(name) for name in missing}
        to_compile = [name for name, code in objects.items() if code is None]
        if to_compile:
            with self._locked():
                for done, name in enumerate(to_compile):
                    objects[name] = self._read(name) or self._compile(name, done, len(to_compile))
        for name, code in objects.items():
            assert code is not None
            self._load(name, code)

    def address(self, name: str) -> int:
        if name not in self._addresses:
            self.ensure([name])
        return self._addresses[name]

    def function(self, name: str) -> Any:
        """The kernel as a ctypes function; a call releases the interpreter's lock."""
        return KERNEL_TYPE(self.address(name))

    def _read(self, name: str) -> bytes | None:
        """The object code on disk, None if there is none that is whole."""
        if self.folder is None:
            return None
        try:
            content = (self.folder / f"{name}.o").read_bytes()
        except OSError:
            return None
        code = content[32:]
        return code if hashlib.sha256(code).digest() == content[:32] else None

    def _compile(self, name: str, done: int, total: int) -> bytes:
        if self._progress is not None:
            self._progress(name, done, total)
        from martlet.ops.cpu.kernels.kernel_table import compile_kernel

        start = time.perf_counter()
        code = compile_kernel(name, self.isa)
        self.compiled[name] = time.perf_counter() - start
        self._write(name, code)
        return code

    def _write(self, name: str, code: bytes) -> None:
        if self.folder is None:
            return
        with contextlib.suppress(OSError):  # read-only, or full: the next start compiles again
            # It outlives its `with`.
            file = tempfile.NamedTemporaryFile(dir=self.folder, delete=False)  # noqa: SIM115
            try:
                with file:
                    file.write(hashlib.sha256(code).digest() + code)
                os.replace(file.name, self.folder / f"{name}.o")
            except OSError:
                os.unlink(file.name)
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, so that two processes do not compile the same kernels.

        None where it can't be had.
        """
        if self.folder is None:
            yield
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.folder / "lock", "a")  # noqa: SIM115
        except OSError:
            yield
            return
        with file:
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _load(self, name: str, code: bytes) -> None:
        if self._engine is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._addresses[name] = self._engine.get_function_address(name)
