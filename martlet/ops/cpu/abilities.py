"""What the CPU backend can do, and how much its packed weights occupy (read `backend.py` next)."""

from collections.abc import Sequence

from martlet.kv_types import KV_TYPES
from martlet.ops.cpu.kernels.layout import packed_bytes
from martlet.ops.interface import Abilities, Ability
from martlet.quant.table import RawTensor


def _packed_bytes(tensors: Sequence[RawTensor]) -> int:
    return sum(packed_bytes(tensor.type, *tensor.shape) for tensor in tensors)


CPU_ABILITIES = Abilities(
    "cpu",
    frozenset(KV_TYPES),
    _packed_bytes,
    frozenset({Ability.SECTIONS, Ability.LORA, Ability.HEADS, Ability.PACKED}),
    value_bytes=5.0,  # float32, and bytes with their scales and sums
    row_tile=4,
)
