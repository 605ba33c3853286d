"""Helpers of the commands: models by name, texts, files, lines on stderr (read `run.py` next)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from martlet.config import Setting, resolve_config
from martlet.errors import RequestError

if TYPE_CHECKING:
    from martlet.llm import LLM

BAR = 30  # characters
MAX_TEMPLATE = 4 << 20  # bytes


def read_template(path: Path) -> str:
    """A chat template in a file; RequestError if the file is empty, too large or not UTF-8."""
    with path.open("rb") as file:
        data = file.read(MAX_TEMPLATE + 1)  # not more: it may be a device, or the wrong file
    if not data or len(data) > MAX_TEMPLATE:
        size = f"more than {MAX_TEMPLATE:,} bytes" if data else "nothing"
        raise RequestError(f"{path} holds {size}; expected a chat template.", param="chat_template")
    return _utf8(data, str(path), "chat_template")


def _utf8(data: bytes, source: str, param: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8: byte {error.start:,} is 0x{data[error.start]:02x}; convert it first, with iconv for"
            " example.",
            param=param,
        ) from None


def heed_offline(offline: bool | None) -> bool:
    """Whether option or environment forbid the network; if so, connections fail from now on."""
    forbidden = resolve_config({"model": "none", "offline": offline}).offline
    if forbidden:
        from martlet.offline import forbid_network

        forbid_network()
    return forbidden


def resolve_model(name: str, offline: bool | None) -> str:
    """The path of a model given as a path or by its name in the catalogue."""
    offline = heed_offline(offline)
    if Path(name).exists():
        return name
    from martlet.hub import resolve  # only where there is a name to look up

    return str(resolve(name, offline=offline, progress=show_download if sys.stderr.isatty() else None))


def resolve_draft(draft: str, offline: bool | None) -> str:
    """The option `draft`, with the path of the model that model=NAME means."""
    method, _, name = draft.partition("=")
    return f"model={resolve_model(name, offline)}" if method == "model" and name else draft


def show_download(done: int, total: int) -> None:
    """A bar on stderr for a model that is fetched."""
    filled = BAR * done // max(1, total)
    line = f"\r[{'#' * filled}{' ' * (BAR - filled)}] {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    print(line, end="\n" if done >= total else "", file=sys.stderr, flush=True)


def show_progress(phase: str, done: int, total: int) -> None:
    """A line on stderr while kernels compile for the first time."""
    if phase != "map" and sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r{phase}: {done} of {total}\x1b[K", end=end, file=sys.stderr, flush=True)


def show_warnings(llm: LLM, *, chat: bool = True, notes: bool = False) -> None:
    """Print warnings on stderr; `chat`: also those of the template, `notes`: also small ones."""
    hidden = set() if notes else set(llm.get_tokenizer().notes)
    if not chat and llm.chat_template_note is not None:
        hidden.add(llm.chat_template_note)
    for warning in llm.warnings:
        if warning not in hidden:
            print(f"martlet: {warning}", file=sys.stderr)


def read_text(text: str | None, param: str = "prompt") -> str:
    """An argument's text, or that of stdin if it is "-" or missing; RequestError if not UTF-8."""
    if text is not None and text != "-":
        try:
            # whatever the locale has made of its bytes
            return _utf8(os.fsencode(text), f"The {param}", param)
        except UnicodeEncodeError:  # it has never been bytes
            return text
    if text is None and sys.stdin.isatty():
        raise RequestError(f"There is no {param}: give it as an argument, or through stdin.", param=param)
    return _utf8(sys.stdin.buffer.read(), "stdin", param)


def read_file(name: str, param: str = "file") -> str:
    """The text of a file, or of stdin for "-"; RequestError if it is unreadable or not UTF-8."""
    if name == "-":
        return read_text("-", param)
    try:
        return _utf8(Path(name).read_bytes(), name, param)
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}.", param=param) from None


def print_settings(title: str, settings: tuple[Setting, ...]) -> None:
    """Effective settings with their origins, on stderr."""
    print(f"{title}:", file=sys.stderr)
    for setting in settings:
        origin = f"{setting.origin}: {setting.note}" if setting.note else str(setting.origin)
        print(f"  {setting.name:<26} {setting.value!s:<20} ({origin})", file=sys.stderr)
