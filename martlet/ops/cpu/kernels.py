"""The table of kernels: which function builds each (read `linear.py` or `attention.py` next).

Imported only to compile: everything here needs Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from martlet.errors import UnsupportedError
from martlet.kv_types import KV_TYPES
from martlet.ops.cpu.attention import attention_kernel
from martlet.ops.cpu.embed import embed_float, embed_quant
from martlet.ops.cpu.fields import ROWS_PER_TILE
from martlet.ops.cpu.follow import follow_kernel, likeliest_kernel
from martlet.ops.cpu.kv_float import kv_write_kernel
from martlet.ops.cpu.kv_q4 import kv_write_q4_kernel, pack_q4_kernel
from martlet.ops.cpu.kv_q8 import kv_write_q8_kernel
from martlet.ops.cpu.layout import LAYOUTS, QuantLayout
from martlet.ops.cpu.linear import linear_float, linear_quant
from martlet.ops.cpu.lora import adapt_kernel
from martlet.ops.cpu.pack import pack_float, pack_quant
from martlet.ops.cpu.quantize import quantize_kernel
from martlet.ops.cpu.reading import read_kernel
from martlet.ops.cpu.rotate import rope_kernel, rope_table_kernel
from martlet.ops.cpu.rowwise import (
    act_mul_kernel,
    add_kernel,
    rms_norm_kernel,
    scale_cap_kernel,
    take_rows_kernel,
)
from martlet.ops.cpu.simd import Verbs
from martlet.ops.cpu.team import launch_kernel, serve_kernel
from martlet.ops.cpu.trie import mask_fill_kernel, trie_walk_kernel
from martlet.spec import Activation

__all__ = ["builder"]

Builder = Callable[[Verbs], Callable[..., None]]

BUILDERS: dict[str, Builder] = {
    "adapt": adapt_kernel,
    "launch": launch_kernel,
    "quantize": quantize_kernel,
    "read": read_kernel,
    "serve": serve_kernel,
    "rms_norm": rms_norm_kernel,
    "add": add_kernel,
    "scale_cap": scale_cap_kernel,
    "take_rows": take_rows_kernel,
    "likeliest": likeliest_kernel,
    "follow": follow_kernel,
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
    **{f"act_mul_{kind.value}": partial(act_mul_kernel, kind=kind) for kind in Activation},
}
for layout in LAYOUTS.values():
    make = linear_quant if isinstance(layout, QuantLayout) else linear_float
    BUILDERS[f"linear_{layout.name}"] = partial(make, layout=layout)  # type: ignore[arg-type, call-arg]
    make = embed_quant if isinstance(layout, QuantLayout) else embed_float
    BUILDERS[f"embed_{layout.name}"] = partial(make, layout=layout)  # type: ignore[arg-type, call-arg]
    make = pack_quant if isinstance(layout, QuantLayout) else pack_float
    BUILDERS[f"pack_{layout.name}"] = partial(make, layout=layout)  # type: ignore[arg-type, call-arg]


def builder(name: str) -> Builder:
    """The function that makes kernel `name` from a processor's verbs."""
    if name not in BUILDERS:
        raise UnsupportedError(f"no kernel is called {name!r}", sorted(BUILDERS))
    return BUILDERS[name]
