"""Show the tokens of a text: ids and pieces."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from martlet.commands.options import read_text, resolve_model
from martlet.config import resolve_config
from martlet.engine.build import load_tokenizer
from martlet.formats.checkpoint import open_checkpoint

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", help="a GGUF file, a Hugging Face folder, or a name from `martlet list`")
    parser.add_argument("text", nargs="?", help='the text; "-" or none reads stdin')
    parser.add_argument("--special", action="store_true", help="turn the texts of control tokens into those tokens")
    parser.add_argument("--no-bos", action="store_true", help="leave out the tokens that the model wants around a text")
    parser.add_argument("--ids", action="store_true", help="print the ids only, on one line")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokenizer-pre", metavar="NAME", help="override the model file's pre-tokenizer")
    parser.add_argument("--offline", action="store_true", default=None, help="forbid every network connection")


def execute(args: Namespace) -> int:
    """Run the command."""
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
            print(f"{token_id:>8}  {_shown(piece)}")
        print(f"{len(ids):,} tokens")
    return 0


def _shown(piece: bytes) -> str:
    """The text of a piece in quotes; a piece that is no whole character as bytes."""
    try:
        return repr(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(piece)
