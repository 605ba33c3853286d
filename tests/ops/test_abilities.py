"""What backends say of themselves: it is true, and what they lack is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import random_tensor

from martlet import config
from martlet.config import resolve_config
from martlet.errors import UnsupportedError
from martlet.ops.backends import BACKENDS, abilities_of
from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.interface import Ability, Backend
from martlet.ops.null import NullBackend
from martlet.ops.oracle import OracleBackend
from martlet.ops.reference import ReferenceBackend
from martlet.quant.table import BlockType


def test_every_backend_of_the_settings_has_an_entry() -> None:
    assert tuple(BACKENDS) == config.BACKENDS
    assert [abilities_of(resolve_config({"model": "m", "backend": name})).name for name in BACKENDS] == list(BACKENDS)


@pytest.mark.parametrize("block", [BlockType.Q4_0, BlockType.Q6_K, BlockType.F16, BlockType.Q2_K])
def test_packed_bytes_are_those_of_the_packed_weight(block: BlockType, kernel_folder: Path) -> None:
    tensors = [random_tensor(block, 24, 256), random_tensor(block, 16, 256)]
    cpu = CpuBackend(1, kernel_folder)
    for ops in (cpu, ReferenceBackend()):
        assert ops.abilities.packed_bytes(tensors[1:]) == ops.weight_bytes(ops.pack(tensors[1:]))
    assert cpu.abilities.packed_bytes(tensors) == cpu.weight_bytes(cpu.pack(tensors))
    null = NullBackend()
    assert null.abilities.packed_bytes(tensors) == sum(tensor.data.nbytes for tensor in tensors)
    cpu.close()


def test_the_oracle_has_what_both_have_and_takes_the_memory_of_both() -> None:
    null, reference = NullBackend(), ReferenceBackend()
    both = OracleBackend(null, reference).abilities
    assert both.features == {Ability.SECTIONS}
    assert both.value_bytes == 8.0
    tensor = random_tensor(BlockType.Q4_0, 16, 32)
    assert both.packed_bytes([tensor]) == tensor.data.nbytes + 4 * 16 * 32
    config = resolve_config({"model": "m", "backend": "null", "oracle": True})
    assert (abilities_of(config).name, abilities_of(config).features) == (both.name, both.features)


def test_a_missing_ability_is_named() -> None:
    abilities = OracleBackend(NullBackend(), ReferenceBackend()).abilities
    abilities.require(Ability.SECTIONS)
    with pytest.raises(UnsupportedError, match=r"oracle\(null\) backend lacks low-rank adapters"):
        abilities.require(Ability.LORA)
    with pytest.raises(UnsupportedError, match="lacks draft heads"):
        abilities.require(Ability.HEADS)


@pytest.mark.parametrize("make", [ReferenceBackend, lambda: CpuBackend(1, None)])
def test_an_unknown_kv_type_is_refused_with_the_types(make: type[Backend]) -> None:
    ops = make()
    with pytest.raises(UnsupportedError, match=r"backend has no KV type 'int3'.*f16, f32, q4, q8"):
        ops.kv_cache(1, 32, 1, 16, "int3")
    ops.close()
