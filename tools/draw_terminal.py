"""A recording of commands at work in a terminal, as an animated SVG: docs/img/run.svg is made by
it.

    python tools/draw_terminal.py docs/img/run.svg 'martlet run MODEL "Why is the sky blue?"' …

Every command runs in a pseudo-terminal. The picture shows its output as it came: each piece of text
appears at the moment at which the program wrote it. Programs that move the cursor are not drawn
rightly; plain output is.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import sys
import textwrap
import time
from html import escape
from pathlib import Path

COLUMNS, LINE, CHARACTER, MARGIN, BAR = 92, 19, 8.43, 16, 34
INK, DIM, PROMPT, BACK, TITLE = "#e6edf3", "#8b949e", "#7ee787", "#0d1117", "#161b22"
PAUSE_S, TYPING_S = 0.9, 0.02  # after a command's end; per typed character
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")

Piece = tuple[float, str]  # when, and what was written


def main() -> int:
    """Run every command, draw what it wrote."""
    if len(sys.argv) < 3:
        print(__doc__)
        return 2
    lines: list[list[tuple[float, str, str]]] = []  # of pieces: when, text, colour
    clock = 0.4
    for command in sys.argv[2:]:
        lines.append([(clock, "$ ", PROMPT)])
        for character in command:
            lines[-1].append((clock, character, INK))
            clock += TYPING_S
        clock += 0.3
        pieces = record(command)
        lines += laid_out(pieces, clock)
        clock += pieces[-1][0] + PAUSE_S if pieces else PAUSE_S
    Path(sys.argv[1]).write_text(draw(lines), encoding="utf-8")
    return 0


def record(command: str) -> list[Piece]:
    """Run a shell command in a pseudo-terminal; return the pieces of its output with their times in
    seconds.
    """
    pieces: list[Piece] = []
    start = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "dumb"}
        shell = shutil.which("sh") or "/bin/sh"
        os.execve(shell, [shell, "-c", command], environment)
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not data:
            break
        pieces.append((time.monotonic() - start, ESCAPES.sub("", data.decode("utf-8", "replace"))))
    os.waitpid(pid, 0)
    return pieces


def laid_out(pieces: list[Piece], start: float) -> list[list[tuple[float, str, str]]]:
    """Lines of (when, text, colour), wrapped at words; a last line in brackets or of figures is
    dim.
    """
    text = "".join(piece for _, piece in pieces).replace("\r\n", "\n").rstrip("\n")
    times: list[float] = []
    for when, piece in pieces:
        times += [start + when] * len(piece.replace("\r\n", "\n"))
    lines: list[list[tuple[float, str, str]]] = []
    position = 0
    for paragraph in text.split("\n"):
        begin = position
        colour = DIM if "tok/s" in paragraph else INK
        for row in textwrap.wrap(paragraph, COLUMNS, drop_whitespace=False) or [""]:
            line: list[tuple[float, str, str]] = []
            for character in row:
                when = times[min(begin, len(times) - 1)]
                if line and line[-1][0] == when:
                    line[-1] = (when, line[-1][1] + character, colour)
                else:
                    line.append((when, character, colour))
                begin += 1
            lines.append(line)
        position += len(paragraph) + 1
    return lines


def draw(lines: list[list[tuple[float, str, str]]]) -> str:
    """The SVG: a terminal's window; every piece of text becomes visible at its time, and stays."""
    width, height = 2 * MARGIN + COLUMNS * CHARACTER, BAR + 2 * MARGIN + LINE * len(lines)
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}">',
        "<style>text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        "tspan{animation:a .01s both}@keyframes a{from{opacity:0}to{opacity:1}}</style>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>',
        f'<path d="M0 8a8 8 0 0 1 8-8h{width - 16:.0f}a8 8 0 0 1 8 8v{BAR - 8}H0z" fill="{TITLE}"/>',
    ]
    shapes += [
        f'<circle cx="{20 + 20 * i}" cy="{BAR / 2}" r="6" fill="{colour}"/>'
        for i, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    ]
    for number, line in enumerate(lines):
        spans = "".join(
            f'<tspan fill="{colour}" style="animation-delay:{when:.2f}s">{escape(text)}</tspan>'
            for when, text, colour in line
        )
        shapes.append(f'<text x="{MARGIN}" y="{BAR + MARGIN + LINE * (number + 0.7):.0f}">{spans}</text>')
    return "\n".join([*shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
