"""The precision of keys and values: KV types, bytes of pages (read `ops/kv_codes.py` next).

    f32, f16   as they are
    q8         8-bit codes with a scale for each position and 32 channels, as ggml's Q8_0; a layer
               whose keys have channels beyond LARGEST_KEY_BIAS stays f16: their step of a code
               would hide the other channels' values
    q4         4-bit codes: keys per channel over the positions of a page (a scale and a minimum
               for each channel), values per position over 32 channels; the newest positions of a
               sequence stay f16 (KIVI, arXiv:2402.02750)

A page holds keys and values of 32 positions of a layer. Each (page, KV head) is a run of bytes:
codes, then scales. Types by layer are written "q4,q8:3,q8:17": q4, but q8 in layers 3 and 17,
counted from 0; a named layer has the named type.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from martlet.errors import RequestError, nearest

KV_BLOCK = 32  # codes that share a scale (and, in q4, a minimum)
GUARDED = "q8"
# For q8: at a larger one, a step of the 8-bit codes equals the keys of most channels.
LARGEST_KEY_BIAS = 127.0
RECENT_TOKENS = 64  # q4: positions p and p // RECENT_TOKENS * RECENT_TOKENS … p are seen in f16


@dataclass(frozen=True, slots=True)
class KvType:
    """One precision. Sequences may share, resume and fork at multiples of `share_granularity`."""

    name: str
    bits: int  # of a code
    key_scale_bytes: int = 0  # of each position, for KV_BLOCK channels of its key
    channel_bytes: int = 0  # of each channel, for a page of keys
    value_scale_bytes: int = 0  # of each position, for KV_BLOCK channels of its value
    fill: int = 16  # values are filled up to a multiple of so many channels
    share_granularity: int = 1

    def key_bytes(self, page_size: int, head_dim: int) -> int:
        """Keys of a page for one KV head."""
        of_position = head_dim * self.bits // 8 + -(-head_dim // KV_BLOCK) * self.key_scale_bytes
        return page_size * of_position + head_dim * self.channel_bytes

    def value_bytes(self, page_size: int, head_dim: int) -> int:
        """Values of a page for one KV head."""
        filled = -(-head_dim // self.fill) * self.fill
        return page_size * (filled * self.bits // 8 + -(-head_dim // KV_BLOCK) * self.value_scale_bytes)

    def page_bytes(self, page_size: int, n_kv_heads: int, head_dim: int) -> int:
        """Keys and values of a page, all KV heads of a layer."""
        return n_kv_heads * (self.key_bytes(page_size, head_dim) + self.value_bytes(page_size, head_dim))


KV_TYPES = {
    type_.name: type_
    for type_ in (
        KvType("f16", 16),
        KvType("f32", 32),
        KvType("q8", 8, key_scale_bytes=2, value_scale_bytes=2),
        KvType("q4", 4, channel_bytes=4, value_scale_bytes=4, fill=32, share_granularity=RECENT_TOKENS),
    )
}
ALIASES = {"q8_0": "q8", "q4_0": "q4"}  # llama.cpp's names for types of as many bits


@dataclass(frozen=True, slots=True)
class KvTypes:
    """The types of all layers: the usual type, and exceptions by layer number."""

    usual: str
    layers: dict[int, str] = field(default_factory=dict)

    def of(self, layer: int) -> KvType:
        """The type of a layer."""
        return KV_TYPES[self.layers.get(layer, self.usual)]

    def simplest(self, n_layers: int, outliers: Iterable[int] = ()) -> KvTypes:
        """The same types with the fewest exceptions; `outliers` are named if they stay q8."""
        names = [self.of(layer).name for layer in range(n_layers)]
        usual = max(KV_TYPES, key=names.count)
        named = {layer: name for layer, name in enumerate(names) if name != usual}
        return KvTypes(usual, {**named, **{layer: usual for layer in outliers if usual == names[layer] == GUARDED}})

    def guarded(self, outliers: Iterable[int]) -> KvTypes:
        """The types with f16 in the layers `outliers`, for which q8 is too coarse, unless named."""
        coarse = {layer: "f16" for layer in outliers if layer not in self.layers and self.usual == GUARDED}
        return KvTypes(self.usual, {**self.layers, **coarse})

    def __str__(self) -> str:
        return ",".join([self.usual, *(f"{name}:{layer}" for layer, name in sorted(self.layers.items()))])


def parse_kv_types(text: object) -> KvTypes:
    """Read "q4" or "q4,q8:3,q8:17". RequestError, with the allowed types, for anything else."""
    if not isinstance(text, str) or not text:
        raise _unknown(text)
    usual, *exceptions = text.replace(" ", "").split(",")
    layers: dict[int, str] = {}
    for exception in exceptions:
        name, colon, layer = exception.partition(":")
        if not colon or not (layer.isascii() and layer.isdigit()):
            raise RequestError(
                f"kv_dtype has the part {exception!r}; after the first, each is TYPE:LAYER, as in q4,q8:3.",
                param="kv_dtype",
            )
        layers[int(layer)] = _known(name)
    usual = _known(usual)
    named = {layer: other for layer, other in sorted(layers.items()) if other != usual or usual == GUARDED}
    return KvTypes(usual, named)


def share_granularity(text: str) -> int:
    """Sequences may share pages at multiples of this many tokens, with these KV types."""
    types = parse_kv_types(text)
    return max(KV_TYPES[name].share_granularity for name in (types.usual, *types.layers.values()))


def _known(name: str) -> str:
    own = ALIASES.get(name.lower(), name.lower())
    if own not in KV_TYPES:
        raise _unknown(name)
    return own


def _unknown(name: object) -> RequestError:
    allowed = ", ".join(KV_TYPES)
    return RequestError(
        f"kv_dtype is {name!r}; expected one of {allowed} (or, by layer, as in q4,q8:3).{nearest(str(name), KV_TYPES)}",
        param="kv_dtype",
    )
