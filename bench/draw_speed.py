"""The README's chart: decode and prefill against llama.cpp, from the report of a comparison.

    python bench/compare_llamacpp.py --llama-cpp BUILD/bin --out comparison
    python bench/draw_speed.py comparison.json docs/img/speed.svg --isa "AVX-512 VNNI"
                               [--second comparison-avx2.json --second-isa AVX2]

A bar is llama.cpp's speed = 1; Martlet's bars beside it are the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

NAMES = {
    "smollm2-q4_1": "SmolLM2-135M Q4_1",
    "smollm2-q4_0": "SmolLM2-135M Q4_0",
    "gemma3-270m": "Gemma-3-270M Q4_K_M",
    "qwen-1.5b": "Qwen2.5-Coder-1.5B Q4_K_M",
}
WIDTH, LEFT, BAR, GAP, TOP = 760, 215, 17, 12, 62
PEER, COLOURS = "#c9ced6", ("#0b6fb8", "#7fb8e0")
INK, FAINT = "#24292f", "#6e7781"


def main() -> int:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--isa", required=True, help="the instruction set of the report's runs")
    parser.add_argument("--second", type=Path, help="a report of another instruction set")
    parser.add_argument("--second-isa", help="its name")
    args = parser.parse_args()
    reports = {args.isa: json.loads(args.report.read_text(encoding="utf-8"))}
    if args.second is not None:
        reports[args.second_isa] = json.loads(args.second.read_text(encoding="utf-8"))
    args.picture.write_text(draw(reports), encoding="utf-8")
    return 0


def draw(reports: dict[str, dict[str, Any]]) -> str:
    """The SVG: for decode and for prefill a group of bars for each model."""
    models = list(next(iter(reports.values()))["models"])
    ratios = [r["models"][m][key]["ratio"] for r in reports.values() for m in models for key in ("decode", "prefill")]
    scale = (WIDTH - LEFT - 120) / max(1.0, *ratios)
    shapes, y = [], TOP
    for key, title in (("decode", "Decode, one stream"), ("prefill", "Prefill, 512 tokens")):
        shapes.append(_text(LEFT, y, title, "start", INK, 'font-weight="600" font-size="14"'))
        y += 12
        for model in models:
            height = BAR * len(reports)
            shapes.append(_text(LEFT - 10, y + height / 2 + 4, NAMES.get(model, model), "end", INK))
            for colour, report in zip(COLOURS, reports.values(), strict=False):
                row = report["models"][model][key]
                length = scale * row["ratio"]
                shapes.append(_bar(y, length, colour))
                label = f"{row['ratio']:.2f} ×, {row['ours']:,.0f} tok/s"
                shapes.append(_text(LEFT + length + 6, y + BAR - 5, label, "start", FAINT, 'font-size="11"'))
                y += BAR
            y += GAP
        y += 22
    line = LEFT + scale
    shapes.append(f'<path d="M{line:.1f} {TOP + 4}V{y - 24}" stroke="{INK}" stroke-dasharray="4 3"/>')
    shapes.append(_text(line, y - 8, "llama.cpp = 1", "middle", INK))
    legend = "   ".join(reports)
    heading = [
        _text(LEFT, 22, "Martlet ÷ llama.cpp, same files, same two threads", "start", INK, 'font-size="16"'),
        _text(WIDTH - 10, 40, legend, "end", FAINT) if len(reports) == 1 else _legend(list(reports)),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 6:.0f}"'
        ' font-family="system-ui, sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *heading, *shapes, "</svg>"]) + "\n"


def _legend(names: list[str]) -> str:
    shapes, x = [], LEFT
    for colour, name in zip(COLOURS, names, strict=False):
        shapes.append(f'<rect x="{x}" y="31" width="11" height="11" fill="{colour}"/>')
        shapes.append(_text(x + 16, 41, name, "start", FAINT))
        x += 30 + 7 * len(name)
    return "\n".join(shapes)


def _bar(y: float, length: float, colour: str) -> str:
    return f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" rx="2" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {more}>{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())
