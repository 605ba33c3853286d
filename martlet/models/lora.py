"""Low-rank adapters (LoRA, arXiv:2106.09685): read from files and attached to a model.

    y = W x + s · B (A x)          A [r, k], B [n, r]; s = alpha / r or alpha / √r, taken into B

An adapter updates some of a layer's products (`tensors.py`); each product has a table with a slot
for every loaded adapter (`ops/interface.py`, `adapt`). Formats: PEFT's adapter_config.json and
adapter_model.safetensors; llama.cpp's convert_lora_to_gguf.py, which appends `.lora_a` and
`.lora_b` to names. The files are untrusted. A feature that is not supported (DoRA, embeddings,
whole modules) is refused by name: half an adapter is another model. Read `engine/lora.py` next.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.files import read_json
from martlet.formats.gguf import read_gguf
from martlet.formats.safetensors import read_safetensors
from martlet.models.families import FAMILIES
from martlet.models.tensors import canonical_name, layer_fields, lora_shapes
from martlet.models.weights import Model, half_split_rows
from martlet.ops.interface import Array, Backend
from martlet.quant.ggml import decode
from martlet.quant.table import RawTensor
from martlet.spec import ModelSpec

F32 = NDArray[np.float32]
MAX_RANK = 512
MOST_ALPHA = 1e30
_PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_GGUF_NAME = re.compile(r"(.+)\.weight\.lora_([ab])")
_REFUSED = {  # PEFT's settings that change the computation, and their harmless values
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "target_parameters": (None, []),
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: for some products (`blk.3.attn_q`), A float32 [r, k] and B float32 [n, r]."""

    path: str
    digest: str  # of its numbers, which make it the same adapter in every process
    rank: int  # the largest of its updates
    nbytes: int  # of memory while it is loaded
    updates: Mapping[str, tuple[F32, F32]] = field(repr=False)

    def without_numbers(self) -> Adapter:
        """The adapter without its updates, for when a backend has them."""
        return replace(self, updates={})


def read_adapter(path: str | Path, spec: ModelSpec) -> Adapter:
    """Read a PEFT folder or a GGUF file for this model.

    FormatError or UnsupportedError says why it does not fit.
    """
    path = Path(path)
    pairs, permuted = _read_gguf(path) if path.suffix == ".gguf" else (_read_peft(path, spec), False)
    permuted = permuted or FAMILIES[spec.family].interleaved
    updates: dict[str, tuple[F32, F32]] = {}
    for name, (a, b) in sorted(pairs.items()):
        for product, rows in _unfused(path, name, b, spec, permuted):
            updates[product] = (a, rows)
    if not updates:
        raise FormatError(path, "holds no low-rank matrices: this is not an adapter")
    for name, (a, b) in updates.items():
        n, k = _shape(spec, name)
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != k or b.shape != (n, len(a)):
            shapes = f"A {list(a.shape)} and B {list(b.shape)}"
            raise FormatError(path, f"{name} has {shapes}; this model's product takes A [r, {k}] and B [{n}, r]")
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise FormatError(path, f"{name} has values that are not finite numbers")
    digest = hashlib.sha256()
    for name, (a, b) in updates.items():
        digest.update(f"{name} {a.shape} {b.shape}".encode() + a.tobytes() + b.tobytes())
    nbytes = sum(4 * _padded_rank(a) * (a.shape[1] + len(b)) for a, b in updates.values())
    return Adapter(str(path), digest.hexdigest()[:32], max(len(a) for a, _ in updates.values()), nbytes, updates)


def _padded_rank(a: F32) -> int:
    return -(-len(a) // 4) * 4  # as the kernel has it: `ops/cpu/packed_weights.py`


def with_adapters(ops: Backend, model: Model, n_slots: int) -> tuple[Model, dict[str, Array]]:
    """The same weights with a table of updates per product, and the tables by product.

    A table has [n_slots] low-rank updates (`Backend.lora_table`).
    """
    tables: dict[str, Array] = {}
    layers = []
    for i, weights in enumerate(model.layers):
        shapes = lora_shapes(model.spec, model.spec.layers[i])
        own = {name: ops.lora_table(n_slots, k, n) for name, (n, k) in shapes.items()}
        tables.update((f"blk.{i}.{name}", table) for name, table in own.items())
        layers.append(replace(weights, adapters=own))
    return replace(model, layers=tuple(layers)), tables


def _shape(spec: ModelSpec, name: str) -> tuple[int, int]:
    """Rows and columns of the product blk.N.`name`."""
    _, number, row = name.split(".")
    return lora_shapes(spec, spec.layers[int(number)])[row]


def _unfused(path: Path, name: str, b: F32, spec: ModelSpec, permuted: bool) -> list[tuple[str, F32]]:
    """(product, B) of an update, or of each product that the file has fused in it.

    `permuted` says that rows of q and k are in RoPE's order of neighbouring pairs.
    """
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
    if match is None or int(match[1]) >= len(spec.layers):
        raise UnsupportedError(f"{path} updates {name}, which is no product of a layer of this model")
    layer, prefix = spec.layers[int(match[1])], f"blk.{match[1]}."
    fields = [field for fields in layer_fields(spec, layer, prefix, {f"{name}.weight"}) for field in fields.values()]
    stored = next((tensor for field in fields for tensor in field if tensor.name == name), None)
    shapes = lora_shapes(spec, layer)
    if stored is None or not all(row.lora for row, _ in stored.rows):
        raise UnsupportedError(f"{path} updates {name}, which is no product of a layer", sorted(shapes))
    if len(b) != stored.shape[0]:
        if match[2] in shapes:  # the single product of this name; `read_adapter` checks its shape
            return [(name, b)]
        raise FormatError(path, f"{name} has B with {len(b)} rows; expected {stored.shape[0]}")
    products = []
    for row, _ in stored.rows:
        rows = b[stored.rows_of(row.name)]
        if permuted and row.rotates:
            head_dim, rope = layer.mixer.head_dim, layer.mixer.rope
            dims = head_dim if rope is None else rope.dims
            rows = rows[half_split_rows(len(rows) // head_dim, head_dim, dims)]
        products.append((prefix + row.name, np.ascontiguousarray(rows)))
    return products


def _read_peft(path: Path, spec: ModelSpec) -> dict[str, tuple[F32, F32]]:
    folder = path.parent if path.name.endswith(".safetensors") else path
    config = read_json(folder / "adapter_config.json")
    file = path if path.name.endswith(".safetensors") else folder / "adapter_model.safetensors"
    if not config or not file.exists():
        raise FormatError(
            path, "is no adapter; expected a folder with adapter_config.json and adapter_model.safetensors"
        )
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise UnsupportedError(f"{path} is a PEFT adapter of type {config['peft_type']!r:.40}", ["LORA"])
    for setting, harmless in _REFUSED.items():
        if config.get(setting) not in harmless:
            raise UnsupportedError(f"{path} has {setting} = {config[setting]!r:.80}, which is not supported here")
    tensors, mapping = read_safetensors(file)
    matrices: dict[str, dict[str, F32]] = {}
    scales: dict[str, float] = {}
    for name, tensor in tensors.items():
        match = _PEFT_NAME.fullmatch(name)
        target = None if match is None else canonical_name(f"{match[1]}.weight", FAMILIES[spec.family].renamed)
        if match is None or target is None or not target.startswith("blk."):
            raise UnsupportedError(f"{file} holds {name!r:.120}, which is not a low-rank update of a layer's product")
        target = target.removesuffix(".weight")
        matrices.setdefault(target, {})[match[2].lower()] = _values(file, tensor, match[2].lower())
        scales[target] = _alpha(path, config, match[1])
        _check_rank(file, tensor, match[2], _of_module(path, config, match[1], "r", "rank_pattern"))
    pairs = _pairs(file, matrices)
    root = bool(config.get("use_rslora"))
    del tensors, mapping
    return {
        name: (a, (b * np.float32(scales[name] / (math.sqrt(len(a)) if root else max(1, len(a))))))
        for name, (a, b) in pairs.items()
    }


def _of_module(path: Path, config: Mapping[str, Any], module: str, name: str, pattern: str) -> Any:
    """A setting's value for a module: the value in `pattern` where that names the module."""
    value, patterns = config.get(name), config.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise FormatError(path, f"{pattern} is {patterns!r:.40}, expected an object")
    for key, own in patterns.items():
        if not re.fullmatch(r"[\w.]+", key):
            raise UnsupportedError(f"{path} has {pattern} {key!r:.60} that is more than a module's name")
        if module == key or module.endswith(f".{key}"):
            value = own
    return value


def _alpha(path: Path, config: Mapping[str, Any], module: str) -> float:
    """A module's alpha, by which its update is scaled; PEFT's default is 8."""
    value = _of_module(path, {"lora_alpha": 8, **config}, module, "lora_alpha", "alpha_pattern")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_ALPHA:
        raise FormatError(path, f"lora_alpha is {str(value)[:40]!r}, expected a number below {MOST_ALPHA:.0e}")
    return float(value)


def _check_rank(file: Path, tensor: RawTensor, which: str, rank: Any) -> None:
    """Raise FormatError unless the tensor has the configured rank, from which the scale comes."""
    stored = tensor.shape[0 if which == "A" else 1]
    if rank is not None and rank != stored:
        raise FormatError(
            file, f"{tensor.name} has the rank {stored:,}, and adapter_config.json says r = {str(rank)[:40]}"
        )


def _read_gguf(path: Path) -> tuple[dict[str, tuple[F32, F32]], bool]:
    """The pairs, and whether rows of q and k are in RoPE's order of neighbouring pairs."""
    file = read_gguf(path)
    file_type, adapter_type = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if file_type != "adapter" or adapter_type != "lora":
        types = f"general.type {file_type!r} and adapter.type {adapter_type!r}"
        raise FormatError(path, f"has {types}, expected 'adapter' and 'lora'")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise FormatError(path, f"adapter.lora.alpha is {alpha!r:.40}, expected a number")
    matrices: dict[str, dict[str, F32]] = {}
    for name, tensor in file.tensors.items():
        match = _GGUF_NAME.fullmatch(name)
        if match is None or not match[1].startswith("blk."):
            raise UnsupportedError(f"{path} holds {name!r:.120}, which is not a low-rank update of a layer's product")
        matrices.setdefault(match[1], {})[match[2]] = _values(path, tensor, match[2])
    pairs = _pairs(path, matrices)
    scaled = {name: (a, b * np.float32(alpha / max(1, len(a)) if alpha else 1.0)) for name, (a, b) in pairs.items()}
    family = FAMILIES.get(str(file.metadata.get("general.architecture")))
    return scaled, family is not None and family.gguf_permuted


def _values(path: Path, tensor: RawTensor, which: str) -> F32:
    if len(tensor.shape) != 2:
        raise FormatError(path, f"{tensor.name} has {len(tensor.shape)} dimensions; expected a matrix")
    rank = tensor.shape[0 if which == "a" else 1]
    if not 1 <= rank <= MAX_RANK:  # before decoding, whose cost it bounds
        raise UnsupportedError(f"{path}: {tensor.name} has the rank {rank:,}; 1 to {MAX_RANK} is supported")
    return np.array(decode(tensor), np.float32)


def _pairs(path: Path, matrices: Mapping[str, Mapping[str, F32]]) -> dict[str, tuple[F32, F32]]:
    for name, both in matrices.items():
        if set(both) != {"a", "b"}:
            raise FormatError(path, f"{name} has only one of its two matrices")
    return {name: (both["a"], both["b"]) for name, both in matrices.items()}
