"""List or remove the files of packed weights that --packed keeps."""

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from martlet.config import resolve_config
from martlet.errors import RequestError
from martlet.ops.cpu.packed_file import ENDING


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "rm"), help="ls: list the files; rm: remove some")
    parser.add_argument("name", nargs="*", help="files to remove: their names as listed, or the start of one")
    parser.add_argument("--all", action="store_true", help="remove all files")
    parser.add_argument("--packed", metavar="DIR", help="the folder (default: MARTLET_PACKED)")


def execute(args: Namespace) -> int:
    folder = resolve_config({"model": "none", "packed": args.packed}).packed
    if folder is None:
        raise RequestError("No folder: give --packed DIR, or set MARTLET_PACKED.", param="packed")
    files = sorted(Path(folder).glob(f"*{ENDING}"))
    if args.action == "ls":
        if args.name or args.all:
            raise RequestError("ls takes no names; it lists all files.", param="name")
        return _list(files, folder)
    if bool(args.name) == args.all:
        raise RequestError("Name the files to remove, or give --all (not both).", param="name")
    named = {name: [file for file in files if name and file.name.startswith(name)] for name in args.name}
    for name, meant in named.items():
        if not meant:
            raise RequestError(f"There is no file {name!r} in {folder}; see martlet packed ls.", param="name")
    return _remove(files if args.all else [file for file in files if any(file in meant for meant in named.values())])


def _list(files: list[Path], folder: str) -> int:
    total = 0
    for file in files:
        stat = file.stat()
        total += stat.st_size
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(stat.st_mtime))
        print(f"{file.stem:<60} {stat.st_size / 1e6:>10,.1f} MB  made {made}")
    print(f"{len(files)} files, {total / 1e6:,.1f} MB in {folder}" if files else f"No packed weights are in {folder}.")
    return 0


def _remove(files: list[Path]) -> int:
    freed, failed = 0, 0
    for file in files:
        try:
            size = file.stat().st_size
            file.unlink()  # a process that has it mapped keeps it until it ends
            freed += size
        except OSError as error:
            failed += 1
            print(f"martlet: {file}: {error.strerror}.", file=sys.stderr)
    print(f"Removed {len(files) - failed} files, {freed / 1e6:,.1f} MB.")
    return 1 if failed else 0
