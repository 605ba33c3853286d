"""The memory of the KV pages: one array a layer, indexed by `cache/pages.py`'s numbers (read `runner.py` next)."""

from __future__ import annotations

from martlet.ops.interface import Array, Backend
from martlet.spec import ModelSpec

__all__ = ["KV_BYTES", "allocate_caches", "kv_bytes_per_token"]

KV_BYTES = {"f16": 2, "f32": 4}  # bytes of one value


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the keys and values of one position, over all layers."""
    return sum(2 * layer.mixer.n_kv_heads * layer.mixer.head_dim * KV_BYTES[dtype] for layer in spec.layers)


def allocate_caches(ops: Backend, spec: ModelSpec, n_pages: int, page_size: int, dtype: str) -> list[Array]:
    """Allocate the pages of every layer."""
    return [
        ops.kv_cache(n_pages, page_size, layer.mixer.n_kv_heads, layer.mixer.head_dim, dtype) for layer in spec.layers
    ]
