"""Any model on disk as a `Checkpoint`: a GGUF file, its parts, or a Hugging Face folder.

Read `gguf.py` and `safetensors.py` next.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from martlet.errors import FormatError
from martlet.formats.files import read_json, size_of_file
from martlet.formats.gguf import GgufFile, read_gguf
from martlet.formats.safetensors import read_safetensors
from martlet.quant.table import RawTensor

SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")
MAX_TEMPLATE_BYTES = 16 << 20
# Not MADV_POPULATE_READ, which maps all pages on one thread: reading maps them as fast, on all
# threads.
ADVICE = {"willneed": getattr(mmap, "MADV_WILLNEED", 3), "dontneed": getattr(mmap, "MADV_DONTNEED", 4)}


@dataclass(slots=True)
class Checkpoint:
    """A model's files. `metadata` has GGUF's keys, or config.json's if `format` is "safetensors".

    Tensors are views on mappings of the files. `close` releases the mappings; memory is unmapped
    once the last view is gone too, so a view that outlives its checkpoint stays valid.
    """

    path: Path
    format: Literal["gguf", "safetensors"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    nbytes: int  # of all files
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_json: Mapping[str, Any] | None = None
    tokenizer_config: Mapping[str, Any] | None = None
    chat_template: str | None = None
    mappings: list[mmap.mmap] = field(default_factory=list)
    header_sizes: list[int] = field(default_factory=list)  # bytes before each mapping's data

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the files. Idempotent."""
        self.tensors = {}
        for mapping in self.mappings:
            with suppress(BufferError):  # views are alive: it closes with the last of them
                mapping.close()
        self.mappings, self.header_sizes = [], []

    def advise(self, tensor: RawTensor, advice: str) -> None:
        """Tell the system that a tensor is needed soon ("willneed") or no more ("dontneed")."""
        start = tensor.data.ctypes.data
        for mapping in self.mappings:
            base = np.frombuffer(mapping, np.uint8).ctypes.data
            if not base <= start < base + len(mapping):
                continue
            first = (start - base) // mmap.PAGESIZE * mmap.PAGESIZE
            size = min(start - base + tensor.data.nbytes, len(mapping)) - first
            with suppress(AttributeError, OSError, ValueError):
                mapping.madvise(ADVICE[advice], first, size)

    def fingerprint(self) -> str:
        """A SHA-256 of the files' size, the headers and the start of every tensor.

        Headers alone would not do: fine-tunes of a model have the same header.
        """
        digest = hashlib.sha256(str(self.nbytes).encode())
        if self.format == "safetensors":
            digest.update(json.dumps(self.metadata, sort_keys=True).encode())
        for mapping, size in zip(self.mappings, self.header_sizes, strict=True):
            digest.update(mapping[:size])
        for tensor in self.tensors.values():
            digest.update(tensor.data[:64].tobytes())
        return digest.hexdigest()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file, any part of a split one, a folder of parts, or a Hugging Face folder.

    Raises FormatError if files are missing or malformed, UnsupportedError for a tensor type that is
    not supported.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").exists():
            return _open_folder(path)
        files = sorted(path.glob("*.gguf"))
        if not files:
            raise FormatError(path, "holds neither a config.json nor a .gguf file: this is not a model's folder")
        if len(files) > 1 and not all(SPLIT.match(file.name) for file in files):
            names = ", ".join(file.name for file in files[:5])
            raise FormatError(path, f"holds {len(files)} models; name one of {names}")
        path = files[0]
    if path.name.endswith(".safetensors"):
        raise FormatError(
            path, "is one file of a model: name its folder, which also holds config.json and the tokenizer"
        )
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    match = SPLIT.match(path.name)
    if match is None:
        files = [read_gguf(path)]
        count = files[0].metadata.get("split.count", 1)
        if count not in (0, 1):
            raise FormatError(path, f"is one of {count} parts, but its name does not end in -0000N-of-{count:05}.gguf")
    else:
        files = _read_parts(path, match)
    tensors: dict[str, RawTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise FormatError(file.path, f"tensor {name!r} is in another part as well")
            tensors[name] = tensor
    metadata = files[0].metadata
    template = metadata.get("tokenizer.chat_template")
    return Checkpoint(
        path,
        "gguf",
        metadata,
        tensors,
        sum(file.path.stat().st_size for file in files),
        chat_template=template if isinstance(template, str) else None,
        mappings=[file.mapping for file in files],
        header_sizes=[file.data_start for file in files],
    )


def _read_parts(path: Path, match: re.Match[str]) -> list[GgufFile]:
    count = int(match["count"])
    if not 1 <= int(match["part"]) <= count:
        raise FormatError(path, f"is part {int(match['part'])} of {count}")
    files = []
    for i in range(1, count + 1):
        file = path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf")
        if not file.exists():
            raise FormatError(path, f"part {i} of {count} is missing: {file.name} is not in the folder")
        files.append(read_gguf(file))
        said, number = files[-1].metadata.get("split.count", count), files[-1].metadata.get("split.no", i - 1)
        if (said, number) != (count, i - 1):
            raise FormatError(
                file, f"says that it is part {number} of {said}, its name says {i - 1} of {count} (from 0)"
            )
    total = files[0].metadata.get("split.tensors.count")
    n_tensors = sum(len(part.tensors) for part in files)
    if total is not None and total != n_tensors:
        raise FormatError(path, f"the parts hold {n_tensors} tensors, the first part promises {total}")
    return files


def _open_folder(path: Path) -> Checkpoint:
    index = read_json(path / "model.safetensors.index.json")
    wanted: dict[str, set[str]] = {}  # file → tensors that the index says it holds
    if index:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(path / "model.safetensors.index.json", "has no weight_map")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                raise FormatError(path / "model.safetensors.index.json", f"points outside the folder: {name!r}")
            wanted.setdefault(name, set()).add(tensor)
    else:
        wanted = {p.name: set() for p in sorted(path.glob("*.safetensors"))}
        if not wanted:
            raise FormatError(
                path, "has a config.json but no .safetensors file: convert the weights or fetch them whole"
            )
    tensors: dict[str, RawTensor] = {}
    mappings, size = [], 0
    for name, promised in wanted.items():
        if not (path / name).exists():
            raise FormatError(path, f"the index names {name}, which is not in the folder: fetch the model again")
        stored, mapping = read_safetensors(path / name)
        missing = promised - stored.keys()
        if missing:
            raise FormatError(path / name, f"does not hold {min(missing)!r}, which the index promises")
        for tensor, raw in stored.items():  # also unindexed ones: loading refuses unknown tensors
            if tensor in tensors:
                raise FormatError(path / name, f"tensor {tensor!r} is in another file as well")
            tensors[tensor] = raw
        mappings.append(mapping)
        size += (path / name).stat().st_size
    config = read_json(path / "tokenizer_config.json")
    return Checkpoint(
        path,
        "safetensors",
        read_json(path / "config.json"),
        tensors,
        size,
        generation_config=read_json(path / "generation_config.json"),
        tokenizer_json=read_json(path / "tokenizer.json") or None,
        tokenizer_config=config or None,
        chat_template=_folder_template(path, config),
        mappings=mappings,
        header_sizes=[8 + int.from_bytes(mapping[:8], "little") for mapping in mappings],
    )


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or tokenizer_config.json's: a text, or the "default" of several."""
    file = path / "chat_template.jinja"
    if file.exists():
        if size_of_file(file) > MAX_TEMPLATE_BYTES:
            raise FormatError(file, f"is larger than {MAX_TEMPLATE_BYTES:,} bytes")
        return file.read_text("utf-8", "replace")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
