"""Show a model file: metadata, tensors, sizes, and the memory it will need."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping
from typing import Any

from martlet.commands.options import resolve_model
from martlet.config import EngineConfig, resolve_config
from martlet.engine.build import load_template, load_tokenizer, plan_for
from martlet.errors import MartletError
from martlet.formats.checkpoint import Checkpoint, open_checkpoint

__all__ = ["add_arguments", "execute"]

SHOWN_CHARACTERS = 80
SHOWN_ITEMS = 5


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", help="a GGUF file, a Hugging Face folder, or a name from `martlet list`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--offline", action="store_true", default=None, help="forbid every network connection")


def execute(args: Namespace) -> int:
    """Run the command."""
    path = resolve_model(args.model, args.offline)
    with open_checkpoint(path) as checkpoint:
        config = resolve_config({"model": path})
        memory, warnings = _memory(config, checkpoint), _warnings(config, checkpoint)
        if args.json:
            print(json.dumps(_as_json(checkpoint, memory, warnings), ensure_ascii=False))
            return 0
        print(f"{checkpoint.path}: {checkpoint.kind}, {checkpoint.nbytes:,} bytes, {len(checkpoint.tensors)} tensors")
        print("\nmetadata")
        for key, value in checkpoint.metadata.items():
            print(f"  {key} = {_short(value)}")
        print("\ntensors by type")
        for kind, (count, nbytes) in _by_type(checkpoint).items():
            print(f"  {kind:<8} {count:>5} tensors {nbytes:>15,} bytes")
        if args.tensors:
            print()
            for name, tensor in checkpoint.tensors.items():
                print(f"  {name:<40} {tensor.type.name:<8} {list(tensor.shape)!s:<20} {tensor.data.nbytes:,} bytes")
        print(f"\nmemory: {memory}")
        for warning in warnings:
            print(f"warning: {warning}")
    return 0


def _memory(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """The plan in words; for a model that cannot run, why."""
    try:
        return plan_for(checkpoint, config).explain()
    except MartletError as error:
        return f"cannot run here: {error}"


def _warnings(config: EngineConfig, checkpoint: Checkpoint) -> list[str]:
    """What is odd about the tokenizer and the chat template."""
    try:
        tokenizer = load_tokenizer(checkpoint, config)
        return [*tokenizer.warnings, *load_template(checkpoint, tokenizer, config).warnings]
    except MartletError as error:
        return [str(error)]


def _by_type(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        counts[tensor.type.name] += 1
        sizes[tensor.type.name] += tensor.data.nbytes
    return {kind: (counts[kind], nbytes) for kind, nbytes in sizes.most_common()}


def _as_json(checkpoint: Checkpoint, memory: str, warnings: list[str]) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "bytes": checkpoint.nbytes,
        "metadata": {key: _plain(value) for key, value in checkpoint.metadata.items()},
        "tensors": [
            {"name": n, "type": t.type.name, "shape": list(t.shape), "bytes": t.data.nbytes}
            for n, t in checkpoint.tensors.items()
        ],
        "memory": memory,
        "warnings": warnings,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None | list | Mapping):
        return value
    return list(value)


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN_CHARACTERS else value[:SHOWN_CHARACTERS] + "…")
    if hasattr(value, "__len__") and not isinstance(value, Mapping) and len(value) > SHOWN_ITEMS:
        start = ", ".join(repr(item) for item in value[:SHOWN_ITEMS])
        return f"[{start}, … {len(value):,} in all]"
    return repr(_plain(value))
