"""A fingerprint differs wherever a page's bits may."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from martlet import toy
from martlet.engine.disk_pages import kv_fingerprint
from martlet.formats.checkpoint import open_checkpoint
from martlet.models.weights import load_model
from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.cpu.simd.isa import ISAS
from martlet.ops.null import NullBackend
from martlet.ops.oracle import OracleBackend
from martlet.ops.reference import ReferenceBackend


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("identity") / "tiny.gguf")


def test_whatever_changes_bits_changes_the_fingerprint(tiny_path: Path, tmp_path: Path) -> None:
    ops = ReferenceBackend()
    with (
        open_checkpoint(tiny_path) as checkpoint,
        open_checkpoint(toy.write_model(tmp_path / "f32", quantised=False)) as f32,
    ):
        spec = load_model(checkpoint, NullBackend()).spec
        turned = replace(
            spec, layers=(replace(spec.layers[0], mixer=replace(spec.layers[0].mixer, rope=None)), *spec.layers[1:])
        )
        cpus = [CpuBackend(1, None, isa=ISAS[-1].name), CpuBackend(1, None)]
        found = [
            kv_fingerprint(checkpoint, spec, ops, "f16", 32),
            kv_fingerprint(f32, spec, ops, "f16", 32),
            kv_fingerprint(checkpoint, turned, ops, "f16", 32),
            kv_fingerprint(checkpoint, replace(spec, embedding_scale=2.0), ops, "f16", 32),
            kv_fingerprint(checkpoint, spec, NullBackend(), "f16", 32),
            kv_fingerprint(checkpoint, spec, cpus[0], "f16", 32),
            kv_fingerprint(checkpoint, spec, OracleBackend(cpus[0], ops), "f16", 32),
            kv_fingerprint(checkpoint, spec, ops, "f32", 32),
            kv_fingerprint(checkpoint, spec, ops, "f16", 16),
        ]
        if cpus[0].isa != cpus[1].isa:
            found.append(kv_fingerprint(checkpoint, spec, cpus[1], "f16", 32))
        for cpu in cpus:
            cpu.close()
    assert len(set(found)) == len(found)
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in found)


def test_the_same_model_has_the_same_fingerprint(tiny_path: Path, tmp_path: Path) -> None:
    """In another place, with another number of threads."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_path.read_bytes())
    found = set()
    for path, threads in ((tiny_path, 1), (copy, 2)):
        ops = CpuBackend(threads, None)
        with open_checkpoint(path) as checkpoint:
            found.add(kv_fingerprint(checkpoint, load_model(checkpoint, NullBackend()).spec, ops, "f16", 32))
        ops.close()
    assert len(found) == 1
