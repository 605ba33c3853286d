"""The CPU backend: the operations of `ops/interface.py` as records of compiled kernels.

Read `program.py` next.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import UnsupportedError
from martlet.ops import kv_pages
from martlet.ops.cpu.abilities import CPU_ABILITIES
from martlet.ops.cpu.kernels import fields
from martlet.ops.cpu.kernels.fields import (
    AHEAD,
    AHEAD_STRIDE,
    MAX_RANK,
    PAGE,
    ROWS_PER_TILE,
    SCRATCH_FLOATS,
    STEP_FIELDS,
    float_bits,
)
from martlet.ops.cpu.kernels.layout import BLOCK, GROUP, Layout, QuantLayout, group_bytes, unpacked_bytes
from martlet.ops.cpu.packed_file import ENDING, PackedFile, open_packed
from martlet.ops.cpu.packed_weights import Arena, CpuCache, CpuWeight, LoraTable, PackJob, Part, pack_weight
from martlet.ops.cpu.program import ROW_FIELDS, CpuArray, CpuProgram, Recorder
from martlet.ops.cpu.simd.isa import Isa, chosen_isa, isa_named
from martlet.ops.cpu.store import KernelStore, environment_digest
from martlet.ops.cpu.threads import Team, aligned
from martlet.ops.interface import RecentPages, Rows, StepLimits
from martlet.quant.table import RawTensor
from martlet.spec import Activation, Attention, Rope, Routing, Scoring

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class CpuBackend:
    """Kernels on `threads` threads. `kernels` is the folder for compiled code, None to keep none.

    `isa` names an instruction set; without it MARTLET_ISA does, else it is this processor's best.
    """

    name = "cpu"
    abilities = CPU_ABILITIES

    def __init__(
        self,
        threads: int = 1,
        kernels: Path | None = None,
        isa: str | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.isa: Isa = chosen_isa() if isa is None else isa_named(isa)
        self.store = KernelStore(self.isa, kernels, progress)
        self.threads = threads
        self._team = Team(self.store, threads)
        # The header of the step that runs, or ran last.
        self._step: NDArray[np.int64] = aligned(STEP_FIELDS * 8, np.int64)
        self._arena, self._pages = Arena(huge=True), Arena(huge=False)
        self._recorder: Recorder | None = None
        self._keep: list[Any] = []  # what records point to and nobody else holds
        self._scratch: F32 | None = None  # of attention, for each thread
        self._ranks: F32 | None = None  # of `lora`, for each thread
        # Recent pages that all layers of a shape share, by shape.
        self._passing: dict[tuple[int, int, int], CpuCache] = {}
        self._packed: PackedFile | None = None  # that weights are taken from, or written to
        self._unpacked: dict[int, U8] = {}  # of all threads, by bytes a thread
        self._codebooks: dict[tuple[int, ...], NDArray[np.int8]] = {}

    def fingerprint(self) -> str:
        """What the kernels' object code depends on, and this package.

        The number of threads changes no bit.
        """
        return f"cpu {environment_digest(self.isa, '.')}"

    # -- memory ------------------------------------------------------------------------------------
    def upload(self, values: NDArray[Any]) -> F32:
        """A constant, float32 [n], padded to whole registers."""
        flat = np.asarray(values, np.float32).reshape(-1)
        array: F32 = aligned((flat.size + 15) // 16 * 64, np.float32)
        array[: flat.size] = flat
        self._keep.append(array)
        return array[: flat.size]

    def download(self, array: CpuArray) -> F32:
        return self.view(array).copy()

    def view(self, array: CpuArray) -> F32:
        n_rows = int(self._step[ROW_FIELDS[array.rows]])
        return array.buffer.reshape(-1, array.stride)[:n_rows, array.start : array.start + array.width]

    def empty(self, rows: Rows, width: int) -> CpuArray:
        return self._recording.empty(rows, width)

    def columns(self, array: CpuArray, start: int, stop: int) -> CpuArray:
        assert 0 <= start < stop <= array.width
        return CpuArray(array.rows, stop - start, array.stride, array.buffer, array.start + start)

    def pack(self, tensors: Sequence[RawTensor]) -> CpuWeight:
        weight = None if self._packed is None else self._packed.take(tensors)
        if weight is None:
            weight = pack_weight(tensors, self._arena, self._run_jobs)
            if self._packed is not None:
                self._packed.add(tensors, weight)
        return weight

    @contextmanager
    def packed_file(self, folder: Path, name: str) -> Iterator[None]:
        try:
            with open_packed(folder / f"{name}{ENDING}") as self._packed:
                yield
        finally:
            self._packed = None

    def weight_bytes(self, weight: CpuWeight) -> int:
        return weight.nbytes

    def read_bandwidth(self, seconds: float = 0.5, mebibytes: int = 256) -> float:
        """Bytes per second that the team reads from memory that no cache holds.

        The best of as many rounds as fit.
        """
        buffer, result = Arena(huge=True).take(mebibytes << 20), np.zeros(1, np.int64)
        buffer.fill(1)
        recorder = Recorder(self.store, StepLimits(1, 1, 1, 1))
        args = fields.READ(BUFFER=buffer.ctypes.data, N_CHUNKS=mebibytes, RESULT=result.ctypes.data)
        recorder.emit("read", Rows.TOKENS, args, [], [])
        program, best, stop = recorder.finish(self._team, self._step, None), 0.0, time.perf_counter() + seconds
        while best == 0.0 or time.perf_counter() < stop:
            start = time.perf_counter()
            program.replay()
            best = max(best, buffer.size / (time.perf_counter() - start))
        return best

    def close(self) -> None:
        self._team.close()
        self._keep.clear()
        self._arena, self._pages = Arena(huge=True), Arena(huge=False)

    def _run_jobs(self, jobs: list[PackJob]) -> None:
        """Run packing kernels, one after the other, with all threads."""
        recorder = Recorder(self.store, StepLimits(1, 1, 1, 1))
        self.store.ensure(sorted({name for name, _ in jobs}))
        for name, args in jobs:
            recorder.emit(name, Rows.TOKENS, args, [], [])
        recorder.finish(self._team, self._step, None).replay()

    # -- capture -----------------------------------------------------------------------------------
    @property
    def _recording(self) -> Recorder:
        assert self._recorder is not None, "operations are called inside capture's function"
        return self._recorder

    def capture(self, step: Callable[[], Any], limits: StepLimits) -> CpuProgram:
        assert self._recorder is None, "one capture at a time"
        self._recorder = Recorder(self.store, limits)
        try:
            outputs = step()
            return self._recorder.finish(self._team, self._step, outputs)
        finally:
            self._recorder = None

    def section(self) -> None:
        self._recording.section()

    # -- operations (each is defined in ops/reference.py) ------------------------------------------
    def embed(self, table: CpuWeight, scale: float, out: CpuArray) -> None:
        part, *others = table.parts
        assert not others, "a table is one tensor"
        args = fields.EMBED(
            TABLE=part.address,
            N_COLUMNS=table.k,
            GROUP_BYTES=group_bytes(part.layout, table.k),
            CODEBOOK=self._codebook(part),
            SCALE=float_bits(scale),
            OUT=out.address,
            OUT_STRIDE=out.stride,
        )
        self._recording.emit(f"embed_{part.layout.name}", out.rows, args, [], [out.region])

    def feed(self, out: CpuArray) -> None:
        assert self._recording.feed is None, "a program has one feed"
        self._recording.feed = out

    def linear(
        self, x: CpuArray, weight: CpuWeight, out: CpuArray, bias: F32 | None = None, residual: CpuArray | None = None
    ) -> None:
        recorder, row = self._recording, 0
        for part in weight.parts:
            to = self.columns(out, row, row + part.n)
            if isinstance(part.layout, QuantLayout):
                form = recorder.as_bytes(x)
                source, reads = {**form.fields, "X_STRIDE": 0}, [form.region]
            else:
                source = {"X": x.address, "X_SCALES": 0, "X_SUMS": 0, "X_MINS": 0, "X_STRIDE": x.stride}
                reads = [x.region]
            add = None if residual is None else self.columns(residual, row, row + part.n)
            if add is not None:
                reads.append(add.region)
            size = group_bytes(part.layout, weight.k)
            args = fields.LINEAR(
                WEIGHT=part.address,
                N_ROWS=part.n,
                N_COLUMNS=weight.k,
                GROUP_BYTES=size,
                CODEBOOK=self._codebook(part, 128),  # a byte product takes 8-bit codes 128 too high
                **source,
                OUT=to.address,
                OUT_STRIDE=to.stride,
                BIAS=0 if bias is None else bias.ctypes.data + 4 * row,
                RESIDUAL=0 if add is None else add.address,
                RESIDUAL_STRIDE=0 if add is None else add.stride,
                **self._room_to_unpack(part.layout, weight.k),
            )
            record = recorder.emit(f"linear_{part.layout.name}", x.rows, args, reads, [to.region])
            n_groups = -(-part.n // GROUP)
            record[AHEAD], record[AHEAD_STRIDE] = part.address, n_groups * 3 // (4 * self.threads) * size
            row += part.n

    def _room_to_unpack(self, layout: Layout, k: int) -> dict[str, int]:
        """The fields of a product that say where threads unpack weights: products take turns."""
        if not isinstance(layout, QuantLayout):
            return {"UNPACKED": 0, "UNPACKED_BYTES": 0}
        nbytes = unpacked_bytes(layout, k)
        if nbytes not in self._unpacked:
            self._unpacked[nbytes] = self._arena.take(self.threads * nbytes)
        return {"UNPACKED": self._unpacked[nbytes].ctypes.data, "UNPACKED_BYTES": nbytes}

    def lora_table(self, n_slots: int, k: int, n: int) -> LoraTable:
        return LoraTable.empty(n_slots, k, n)

    def set_lora(self, table: LoraTable, slot: int, a: F32 | None, b: F32 | None) -> None:
        table.put(slot, a, b)

    def lora(self, x: CpuArray, table: LoraTable, out: CpuArray) -> None:
        if self._ranks is None:
            self._ranks = aligned(self.threads * MAX_RANK * 4, np.float32)
        self._recording.keep(table)
        args = fields.LORA(
            **_from_to(x, out),
            K=table.k,
            N=table.n,
            TABLE=table.address,
            SCRATCH=self._ranks.ctypes.data,
            BY_LOGIT_ROW=int(x.rows is Rows.LOGITS),
        )
        self._recording.emit("lora", x.rows, args, [x.region, out.region], [out.region])

    def rms_norm(self, x: CpuArray, weight: F32, eps: float, out: CpuArray) -> None:
        groups = x.width // weight.size
        assert groups * weight.size == x.width == out.width
        norm = {"NORM_WEIGHT": weight.ctypes.data, "EPS": float_bits(eps), "GROUPS": groups}
        args = fields.RMS_NORM(**_from_to(x, out), WIDTH=weight.size, **norm)
        self._recording.emit("rms_norm", x.rows, args, [x.region], [out.region], makes_bytes=groups == 1)

    def rope(self, x: CpuArray, head_dim: int, rope: Rope, out: CpuArray) -> None:
        recorder, half = self._recording, rope.dims // 2
        if rope not in recorder.angles:
            frequencies = np.array(rope.inverse_frequencies, np.float64)
            assert frequencies.size == half
            table = recorder.empty(Rows.TOKENS, 2 * half, filled=False)
            recorder.angles[rope] = table
            recorder.keep(frequencies)
            args = fields.ROPE_TABLE(
                FREQUENCIES=frequencies.ctypes.data,
                HALF=half,
                MAGNITUDE=float_bits(rope.magnitude),
                TABLE=table.address,
            )
            recorder.emit("rope_table", Rows.TOKENS, args, [], [table.region])
        table, heads = recorder.angles[rope], x.width // head_dim
        heads_of = {"HEADS": heads, "HEAD_DIM": head_dim, "ANGLES": table.address, "ROPE_HALF": half}
        args = fields.ROPE(**_from_to(x, out), **heads_of)
        recorder.emit("rope", x.rows, args, [x.region, table.region], [out.region])

    def kv_cache(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: str,
        recent: RecentPages | None = None,
    ) -> CpuCache:
        self.abilities.require_kv_type(dtype)
        if page_size != PAGE:
            raise UnsupportedError(f"the cpu backend's pages hold {PAGE} tokens, not {page_size}")
        cache = CpuCache.zeros(self._pages, n_pages, n_kv_heads, head_dim, dtype)
        if dtype != "q4":
            return cache
        assert recent is not None
        shape = (recent.passing, n_kv_heads, head_dim)
        if shape not in self._passing:
            self._passing[shape] = CpuCache.zeros(self._pages, *shape, "f16")
        kept = CpuCache.zeros(self._pages, recent.kept, n_kv_heads, head_dim, "f16")
        return cache.with_recent(kept, self._passing[shape])

    def page_bytes(self, cache: CpuCache) -> int:
        return kv_pages.page_bytes(cache.parts)

    def copy_page(self, cache: CpuCache, source: int, target: int) -> None:
        kv_pages.copy_page(cache.parts, source, target)

    def read_page(self, cache: CpuCache, page: int, out: U8) -> None:
        kv_pages.read_page(cache.parts, page, out)

    def write_page(self, cache: CpuCache, page: int, data: U8) -> None:
        kv_pages.write_page(cache.parts, page, data)

    def kv_write(self, k: CpuArray, v: CpuArray, cache: CpuCache) -> None:
        recorder, (to_keys, to_values) = self._recording, cache.addresses
        args = fields.KV_WRITE(
            K=k.address,
            K_STRIDE=k.stride,
            V=v.address,
            V_STRIDE=v.stride,
            TO_KEYS=to_keys,
            TO_VALUES=to_values,
            KV_HEADS=cache.n_kv_heads,
            KV_DIM=cache.head_dim,
            RECENT=cache.recent_address,
            N_PAGES=cache.n_pages,
        )
        recorder.keep(cache)
        writes = cache.recent_regions or [cache.region]
        recorder.emit(f"kv_write_{cache.dtype}", k.rows, args, [k.region, v.region], writes)
        if cache.recent:
            recorder.emit("pack_q4", k.rows, args, cache.recent_regions, [cache.region])

    def attention(self, q: CpuArray, cache: CpuCache, spec: Attention, out: CpuArray, sinks: F32 | None = None) -> None:
        if self._scratch is None:
            self._scratch = aligned(self.threads * SCRATCH_FLOATS * 4, np.float32)
        (keys, values), (key_bytes, value_bytes) = cache.addresses, cache.page_bytes
        partials, n_partials = self._recording.attention_states(spec.n_kv_heads, spec.head_dim)
        args = fields.ATTENTION(
            Q=q.address,
            Q_STRIDE=q.stride,
            OUT=out.address,
            OUT_STRIDE=out.stride,
            KEYS=keys,
            VALUES=values,
            KEY_BYTES=key_bytes,
            VALUE_BYTES=value_bytes,
            N_KV_HEADS=spec.n_kv_heads,
            HEADS_PER_KV=spec.n_heads // spec.n_kv_heads,
            HEAD_DIM=spec.head_dim,
            SCALE=float_bits(spec.scale),
            SOFTCAP=float_bits(spec.softcap or 0.0),
            WINDOW=spec.window or 0,
            SCRATCH=self._scratch.ctypes.data,
            PARTIALS=partials,
            N_PARTIALS=n_partials,
            RECENT=cache.recent_address,
            N_PAGES=cache.n_pages,
            SINKS=0 if sinks is None else sinks.ctypes.data,
        )
        heads = min(spec.n_heads // spec.n_kv_heads, ROWS_PER_TILE)
        kernel, reads = f"attention_{cache.dtype}_{heads}", [q.region, cache.region, *cache.recent_regions]
        whole = spec.head_dim % BLOCK == 0
        self._recording.emit(kernel, q.rows, args, reads, [out.region], makes_bytes=whole)

    def act_mul(self, gate_up: CpuArray, activation: Activation, out: CpuArray, groups: int = 1) -> None:
        args = fields.ACT_MUL(**_from_to(gate_up, out), WIDTH=out.width // groups, N_GATES=groups)
        kernel = f"act_mul_{activation.value}"
        self._recording.emit(kernel, out.rows, args, [gate_up.region], [out.region], makes_bytes=True)

    def route(self, scores: CpuArray, routing: Routing, bias: F32 | None, out: CpuArray) -> None:
        scratch = aligned(self.threads * 3 * (scores.width + GROUP) * 4, np.float32)
        self._recording.keep(scratch)
        args = fields.ROUTE(
            **_from_to(scores, out),
            WIDTH=scores.width,
            CHOSEN=routing.n_chosen,
            SIGMOID=int(routing.scoring is Scoring.SIGMOID),
            NORMALISED=int(routing.normalised),
            FACTOR=float_bits(routing.scale),
            BIAS=0 if bias is None else bias.ctypes.data,
            N_GROUPS=routing.n_groups,
            GROUPS_CHOSEN=routing.n_groups_chosen,
            N_RANKING=routing.n_ranking,
            SCRATCH=scratch.ctypes.data,
        )
        self._recording.emit("route", out.rows, args, [scores.region], [out.region])

    def expert_linear(
        self, x: CpuArray, choice: CpuArray, weights: Sequence[CpuWeight], out: CpuArray, bias: F32 | None = None
    ) -> None:
        recorder, row, k = self._recording, 0, weights[0].k
        order = recorder.order_of(choice, len(weights))
        for parts in zip(*(weight.parts for weight in weights), strict=True):
            part = parts[0]
            assert {(other.layout, other.n) for other in parts} == {(part.layout, part.n)}, "experts differ"
            quantised = isinstance(part.layout, QuantLayout)
            source, region = recorder.gathered(x, order, k, quantised)
            addresses = np.array([part.address for part in parts], np.int64)
            recorder.keep(addresses)
            args = fields.EXPERT_LINEAR(
                WEIGHT=addresses.ctypes.data,
                N_ROWS=part.n,
                N_COLUMNS=k,
                GROUP_BYTES=group_bytes(part.layout, k),
                CODEBOOK=self._codebook(part, 128),
                **source,
                X_STRIDE=0 if quantised else k,
                OUT=out.address + 4 * row,
                OUT_STRIDE=out.stride,
                SLOT_STRIDE=weights[0].n,
                BIAS=0 if bias is None else bias.ctypes.data + 4 * row,
                **self._room_to_unpack(part.layout, k),
                **order.fields,
            )
            kernel = f"expert_linear_{part.layout.name}"
            recorder.emit(kernel, x.rows, args, [region, order.region], [out.region])
            row += part.n

    def combine(self, y: CpuArray, choice: CpuArray, out: CpuArray) -> None:
        weights = {"CHOICE": choice.address, "CHOICE_STRIDE": choice.stride, "CHOSEN": choice.width // 2}
        args = fields.COMBINE(**_from_to(y, out), WIDTH=out.width, **weights)
        self._recording.emit("combine", out.rows, args, [y.region, choice.region], [out.region])

    def gate(self, x: CpuArray, scores: CpuArray, out: CpuArray) -> None:
        shares = {"SCORES": scores.address, "SCORES_STRIDE": scores.stride, "GROUPS": scores.width}
        args = fields.GATE(**_from_to(x, out), WIDTH=out.width, **shares)
        self._recording.emit("gate", out.rows, args, [x.region, scores.region], [out.region])

    def add(self, x: CpuArray, y: CpuArray, scale: float, out: CpuArray) -> None:
        other = {"OTHER": y.address, "OTHER_STRIDE": y.stride, "SCALE": float_bits(scale)}
        args = fields.ADD(**_from_to(x, out), WIDTH=out.width, **other)
        self._recording.emit("add", out.rows, args, [x.region, y.region], [out.region])

    def take_logit_rows(self, x: CpuArray, out: CpuArray) -> None:
        args = fields.TAKE_ROWS(**_from_to(x, out), WIDTH=out.width)
        self._recording.emit("take_rows", out.rows, args, [x.region], [out.region])

    def argmax(self, logits: CpuArray, ids: F32, before: CpuArray | None, out: CpuArray) -> None:
        args = fields.ARGMAX(
            **_from_to(logits, out),
            WIDTH=logits.width,
            TOKENS=ids.ctypes.data,
            BEFORE=0 if before is None else before.address,
            BEFORE_STRIDE=0 if before is None else before.stride,
        )
        reads = [logits.region] if before is None else [logits.region, before.region]
        self._recording.emit("argmax", out.rows, args, reads, [out.region])

    def choose(self, logits: CpuArray, out: CpuArray) -> None:
        args = fields.CHOOSE(**_from_to(logits, out), WIDTH=logits.width)
        self._recording.emit("choose", out.rows, args, [logits.region], [out.region])

    def advance(self, guesses: CpuArray, x: CpuArray, page_size: int) -> CpuArray:
        """Change the step's header and what it points to; `rope` makes its tables anew."""
        assert page_size == PAGE
        recorder = self._recording
        recorder.meet()
        args = fields.ADVANCE(GUESSES=guesses.address, GUESSES_STRIDE=guesses.stride)
        recorder.emit("advance", x.rows, args, [guesses.region], [])
        recorder.meet(may_end=True)
        recorder.angles.clear()
        return CpuArray(Rows.TOKENS, x.width, x.stride, x.buffer, x.start)

    def scale_cap(self, x: CpuArray, scale: float, cap: float | None, out: CpuArray) -> None:
        args = fields.SCALE_CAP(
            **_from_to(x, out), WIDTH=out.width, FACTOR=float_bits(scale), CAP=float_bits(cap or 0.0)
        )
        self._recording.emit("scale_cap", out.rows, args, [x.region], [out.region])

    def _codebook(self, part: Part, too_high: int = 0) -> int:
        """Address of the values that a part's codes select, 0 if they are the values themselves."""
        book: tuple[int, ...] | None = getattr(part.layout, "codebook", None)
        if book is None:
            return 0
        values = tuple(value + too_high for value in book)
        if values not in self._codebooks:
            self._codebooks[values] = np.array(values, np.int16).astype(np.int8)
        return int(self._codebooks[values].ctypes.data)


def _from_to(x: CpuArray, out: CpuArray) -> dict[str, int]:
    """The fields of an input and an output."""
    return {"IN": x.address, "IN_STRIDE": x.stride, "OUT": out.address, "OUT_STRIDE": out.stride}
