"""List or remove the files of KV pages that --kv-disk keeps."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

from martlet.config import resolve_config
from martlet.errors import RequestError
from martlet.runtime.disk_file import StoredFile, remove_file, stored_files


@dataclass(frozen=True, slots=True)
class _Row:
    """A file, for people."""

    name: str  # the file's, without its ending
    model: str | None  # None: damaged, or of another version
    kv_dtype: str | None
    tokens: int
    disk_bytes: int
    last_use_s: float
    in_use: bool


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "rm"), help="ls: list the files; rm: remove some")
    parser.add_argument(
        "name", nargs="*", help="files to remove: their names as listed, the start of one, or a model's"
    )
    parser.add_argument("--all", action="store_true", help="remove all files")
    parser.add_argument("--kv-disk", metavar="DIR", help="the folder (default: MARTLET_KV_DISK)")
    parser.add_argument("--json", action="store_true", help="list as JSON")


def execute(args: Namespace) -> int:
    folder = resolve_config({"model": "none", "kv_disk": args.kv_disk}).kv_disk
    if folder is None:
        raise RequestError("No folder: give --kv-disk DIR, or set MARTLET_KV_DISK.", param="kv_disk")
    files = stored_files(Path(folder))
    rows = [_row(file) for file in files]
    if args.action == "ls":
        if args.name or args.all:
            raise RequestError("ls takes no names; it lists all files.", param="name")
        return _list(rows, folder, as_json=args.json)
    if bool(args.name) == args.all:
        raise RequestError("Name the files to remove, or give --all (not both).", param="name")
    chosen = [file for file, row in zip(files, rows, strict=True) if args.all or any(_means(n, row) for n in args.name)]
    unknown = [name for name in args.name if not any(_means(name, row) for row in rows)]
    if unknown:
        raise RequestError(f"There is no file {unknown[0]!r} in {folder}; see martlet cache ls.", param="name")
    return _remove(chosen)


def _row(file: StoredFile) -> _Row:
    owner, records = file.read()
    return _Row(
        file.path.stem,
        None if owner is None else _printable(owner.model),
        None if owner is None else _printable(owner.kv_dtype),
        sum(len(record.ids) for record in records),
        file.disk_bytes,
        file.last_use_s,
        file.in_use,
    )


def _means(name: str, row: _Row) -> bool:
    return bool(name) and (row.name.startswith(name) or name == row.model)


def _printable(text: str) -> str:
    """Of a file that may be anyone's: nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _list(rows: list[_Row], folder: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    for row in rows:
        last_use = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.last_use_s))
        model = "damaged, or of another version" if row.model is None else f"{row.model}, {row.kv_dtype}"
        used = ", in use" if row.in_use else ""
        print(f"{row.name:<34} {row.tokens:>9,} tokens {row.disk_bytes / 1e6:>9,.1f} MB  {last_use}  {model}{used}")
    total = sum(row.disk_bytes for row in rows)
    print(f"{len(rows)} files, {total / 1e6:,.1f} MB in {folder}" if rows else f"No KV pages are kept in {folder}.")
    return 0


def _remove(files: list[StoredFile]) -> int:
    kept = [file for file in files if not remove_file(file.path)]
    freed = sum(file.disk_bytes for file in files if file not in kept)
    print(f"Removed {len(files) - len(kept)} files, {freed / 1e6:,.1f} MB.")
    for file in kept:
        print(f"martlet: {file.path} is in use by a running process and was left.", file=sys.stderr)
    return 1 if kept else 0
