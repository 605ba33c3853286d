"""The memory of the KV pages: one array a layer, indexed by `cache/pages.py`'s numbers (read
`rank.py` next).
"""

from dataclasses import dataclass

from martlet.config import PAGE_SIZE
from martlet.errors import RequestError
from martlet.kv_types import KV_TYPES, KvType, KvTypes, parse_kv_types
from martlet.ops.interface import Array, Backend, RecentPages, StepLimits
from martlet.runtime.f16_window import recent_pages
from martlet.spec import Attention, ModelSpec


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A cache for each layer, and how many recent pages those of type q4 have; None: no q4.

    A draft head's cache has pages by the same numbers, and more of its own.
    """

    caches: tuple[Array, ...]
    recent: RecentPages | None = None
    head: Array | None = None
    head_fingerprint: str = ""

    @property
    def all(self) -> tuple[Array, ...]:
        """The caches [n_layers] that share page numbers, a draft head's too."""
        return self.caches if self.head is None else (*self.caches, self.head)


def layer_types(spec: ModelSpec, types: KvTypes) -> list[tuple[Attention, KvType]]:
    """Each layer's attention and KV type. Raises RequestError for an exception beyond the last."""
    beyond = [layer for layer in types.layers if layer >= len(spec.layers)]
    if beyond:
        raise RequestError(
            f"kv_dtype names layer {beyond[0]}, but the model has {len(spec.layers)}: 0 to {len(spec.layers) - 1}.",
            param="kv_dtype",
        )
    return [(layer.mixer, types.of(number)) for number, layer in enumerate(spec.layers)]


def kv_bytes_per_token(spec: ModelSpec, types: KvTypes, page_size: int = PAGE_SIZE) -> int:
    """Bytes of the keys and values of one position, over all layers, a page's scales shared among
    its positions.
    """
    pages = [kind.page_bytes(page_size, x.n_kv_heads, x.head_dim) for x, kind in layer_types(spec, types)]
    return -(-sum(pages) // page_size)


def recent_bytes(spec: ModelSpec, types: KvTypes, limits: StepLimits, page_size: int = PAGE_SIZE) -> int:
    """Bytes of the float16 pages beside those of type q4: kept by each layer, passing once for
    layers of one shape.
    """
    pages, f16 = recent_pages(limits, page_size), KV_TYPES["f16"]
    shapes = [(x.n_kv_heads, x.head_dim) for x, kind in layer_types(spec, types) if kind.name == "q4"]
    kept = sum(pages.kept * f16.page_bytes(page_size, *shape) for shape in shapes)
    return kept + sum(pages.passing * f16.page_bytes(page_size, *shape) for shape in set(shapes))


def allocate_caches(
    ops: Backend, spec: ModelSpec, n_pages: int, page_size: int, dtype: str, limits: StepLimits
) -> KvMemory:
    """Allocate the pages of every layer; `dtype` as `parse_kv_types` reads it."""
    of_layers = layer_types(spec, parse_kv_types(dtype))
    recent = recent_pages(limits, page_size) if any(kind.name == "q4" for _, kind in of_layers) else None
    caches = tuple(
        ops.kv_cache(n_pages, page_size, x.n_kv_heads, x.head_dim, kind.name, recent if kind.name == "q4" else None)
        for x, kind in of_layers
    )
    return KvMemory(caches, recent)
