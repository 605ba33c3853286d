"""`martlet inspect`, `tokenize` and `schema`: look at files (read `formats/checkpoint.py` next)."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from martlet.commands.arguments import MODEL_HELP, add_offline_option
from martlet.commands.common import read_text, resolve_model
from martlet.config import EngineConfig, resolve_config
from martlet.engine.build import load_template, load_tokenizer, plan_for
from martlet.errors import FormatError, MartletError
from martlet.formats.checkpoint import Checkpoint, open_checkpoint
from martlet.options import options_of

SHOWN_CHARACTERS = 80
SHOWN_ITEMS = 5
PRE_HELP = options_of(EngineConfig)["tokenizer_pre"].help


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    add_offline_option(parser)


def execute(args: Namespace) -> int:
    path = resolve_model(args.model, args.offline)
    with open_checkpoint(path) as checkpoint:
        config = resolve_config({"model": path})
        memory, warnings = _memory(config, checkpoint), _warnings(config, checkpoint)
        if args.json:
            print(json.dumps(_as_json(checkpoint, memory, warnings), ensure_ascii=False))
            return 0
        print(f"{checkpoint.path}: {checkpoint.format}, {checkpoint.nbytes:,} bytes, {len(checkpoint.tensors)} tensors")
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
        "kind": checkpoint.format,
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


def add_tokenize_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("text", nargs="?", help='the text; "-" or none reads stdin')
    parser.add_argument("--special", action="store_true", help="turn the texts of control tokens into those tokens")
    parser.add_argument("--no-bos", action="store_true", help="leave out the tokens that the model wants around a text")
    parser.add_argument("--ids", action="store_true", help="print the ids only, on one line")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokenizer-pre", metavar="NAME", help=PRE_HELP)
    add_offline_option(parser)


def execute_tokenize(args: Namespace) -> int:
    """Print the tokens of a text: ids and pieces."""
    text = read_text(args.text, "text")
    path = resolve_model(args.model, args.offline)
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint, resolve_config({"model": path, "tokenizer_pre": args.tokenizer_pre}))
    ids = tokenizer.encode(text, add_special=not args.no_bos, parse_special=args.special)
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    if args.json:
        shown = [piece.decode("utf-8", "replace") for piece in pieces]
        print(json.dumps({"ids": ids, "pieces": shown}, ensure_ascii=False))
    elif args.ids:
        print(*ids)
    else:
        for token_id, piece in zip(ids, pieces, strict=True):
            print(f"{token_id:>8}  {_quoted(piece)}")
        print(f"{len(ids):,} tokens")
    return 0


def _quoted(piece: bytes) -> str:
    """The text of a piece in quotes; a piece that is no whole character as bytes."""
    try:
        return repr(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(piece)


def add_schema_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("check",), help="what to do")
    parser.add_argument("file", help="a JSON Schema; - reads standard input")


def execute_schema(args: Namespace) -> int:
    """Print what of a JSON Schema is enforced, and return 1 if it would be refused.

    Every keyword that cannot be enforced has its JSON pointer; unknown keywords and formats are
    ignored.
    """
    from martlet.grammar.json_schema import coverage

    try:
        text = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    except OSError as error:
        raise FormatError(args.file, f"can't be read: {error.strerror}.") from None
    result = coverage(text)
    for problem in result.problems:
        print(f"refused   {problem}")
    for problem in result.ignored:
        print(f"ignored   {problem}")
    for keyword, count in result.enforced.items():
        print(f"{'read' if result.problems else 'enforced':9} {keyword}: {count:,}")
    print("The schema is refused." if result.problems else "All of it is enforced.")
    return 1 if result.problems else 0
