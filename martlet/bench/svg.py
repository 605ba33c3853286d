"""Draws a line chart as SVG text, without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
COLOURS = ("#0b6fb8", "#d1495b", "#2e933c", "#8d6a9f", "#edae49", "#30638e")

Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Points], *, dots: bool = False) -> str:
    """An SVG with every series as a line or as dots; y starts at 0, and ticks are round numbers."""
    points = [point for line in series.values() for point in line] or [(0.0, 0.0)]
    x_ticks = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = _ticks(0.0, max(y for _, y in points))

    def pixel(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle", 'font-size="15"'),
        _text(WIDTH / 2, HEIGHT - 10, x_label, "middle"),
        _text(16, HEIGHT / 2, y_label, "middle", f'transform="rotate(-90 16 {HEIGHT / 2})"'),
    ]
    for tick in x_ticks:
        x, y = pixel(tick, y_ticks[0])
        elements.append(f'<path d="M{x:.1f} {y:.1f}V{TOP}" stroke="#e4e4e4"/>')
        elements.append(_text(x, y + 18, f"{tick:g}", "middle"))
    for tick in y_ticks:
        x, y = pixel(x_ticks[0], tick)
        elements.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        elements.append(_text(x - 8, y + 4, f"{tick:g}", "end"))
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        pixels = [pixel(x, y) for x, y in line]
        if dots:
            elements += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in pixels]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
            elements.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        elements.append(_text(LEFT + 10, TOP + 16 * (number + 1), name, "start", f'fill="{colour}"'))
    return "\n".join([*elements, "</svg>"]) + "\n"


def _ticks(least: float, most: float) -> list[float]:
    """About six round numbers that enclose least … most."""
    span = most - least or 1.0
    step = 10.0 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first = math.floor(least / step)
    return [step * n for n in range(first, max(first + 1, math.ceil(most / step)) + 1)]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
