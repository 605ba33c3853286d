"""Draw a trace as a picture, for a page that cannot open one: docs/trace.svg is made with it.

    python bench/draw_trace.py run.json picture.svg [--from SECONDS] [--to SECONDS]

A trace is what `--trace FILE` writes; a viewer such as https://ui.perfetto.dev shows far more of
it.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import Any

from martlet.observe.trace import read_trace

WIDTH, LEFT, ROW, BAR, TOP = 1100, 110, 40, 15, 34
COLOURS = {"queue": "#d9d9d9", "prefill": "#f2b56b", "decode": "#8cc98c", "preempted": "#e07a7a"}
STEP, CHUNK, TOKEN = "#7a96ad", "#d98e2f", "#4fa04f"


def main() -> int:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from", dest="start", type=float, default=0.0)
    parser.add_argument("--to", dest="stop", type=float, default=None)
    args = parser.parse_args()
    args.picture.write_text(draw(read_trace(args.trace), args.start, args.stop), encoding="utf-8")
    return 0


def draw(events: list[dict[str, Any]], start_s: float = 0.0, stop_s: float | None = None) -> str:
    """The SVG: a row of steps and a row per sequence, phases above each step's work."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = slices(events)
    start = 1e6 * start_s
    stop = 1e6 * stop_s if stop_s is not None else max(end for _, _, _, end in bars)
    shown = {track for track, name, a, b in bars if b > start and a < stop}
    rows = [track for track in names if track in shown]

    def x(now: float) -> float:
        return LEFT + (min(max(now, start), stop) - start) / (stop - start) * (WIDTH - LEFT - 10)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{TOP + ROW * len(rows) + 4}"'
        ' font-family="DejaVu Sans, sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 110 * number}" y="8" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 110 * number + 17}" y="18">{name}</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="18" text-anchor="end">{(stop - start) / 1e3:,.0f} ms</text>')
    for number, track in enumerate(rows):
        y = TOP + ROW * number
        parts.append(f'<text x="4" y="{y + 18}">{escape(names[track])}</text>')
        for where, name, a, b in bars:
            if where != track or b <= start or a >= stop or name in ("plan", "run", "commit"):
                continue
            if name in COLOURS:
                parts.append(_bar(x(a), x(b), y, COLOURS[name]))
            else:
                colour = STEP if name.startswith("step") else TOKEN if name.startswith("token") else CHUNK
                parts.append(_bar(x(a), x(b), y + (0 if colour == STEP else BAR + 1), colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def slices(events: list[dict[str, Any]]) -> list[tuple[tuple[int, int], str, float, float]]:
    """(track, name, start, end) of all slices, in microseconds; one without an end lasts to the
    trace's.
    """
    found: list[tuple[tuple[int, int], str, float, float]] = []
    open_: dict[tuple[int, int], list[tuple[str, float]]] = {}
    last = max((e["ts"] + e.get("dur", 0.0) for e in events if "ts" in e), default=0.0)
    for event in events:
        track = event["pid"], event["tid"]
        if event["ph"] == "X":
            found.append((track, event["name"], event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "B":
            open_.setdefault(track, []).append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            name, start = open_[track].pop()
            found.append((track, name, start, event["ts"]))
    return found + [(track, name, start, last) for track, stack in open_.items() for name, start in stack]


def _bar(left: float, right: float, y: float, colour: str) -> str:
    return f'<rect x="{left:.1f}" y="{y}" width="{max(right - left - 0.3, 0.3):.1f}" height="{BAR}" fill="{colour}"/>'


if __name__ == "__main__":
    sys.exit(main())
