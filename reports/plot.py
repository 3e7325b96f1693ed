"""A line chart as SVG, of nothing but text: no library is needed, and a change of a number is a change of a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 40, 40
COLOURS = ("#222222", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")  # told apart by the colour-blind too


def line_chart(curves: Mapping[str, Sequence[float | None]], last: float, title: str) -> str:
    """Draw curves over the same range, on a logarithmic scale.

    Args:
        curves: Numbers greater than 0 at equal distances, by name; at None a curve has a gap.
        last: What the right end of the range stands for; the left one is 0.
        title: Shown above.
    """
    values = [v for curve in curves.values() for v in curve if v is not None and v > 0]
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    if low == high:
        low, high = low / 2, high * 2
    floor, ceiling = math.log(low), math.log(high)

    def place(index: int, count: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * index / max(count - 1, 1)
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (math.log(value) - floor) / (ceiling - floor))
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<path d="M{LEFT},{TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}" fill="none" stroke="#888888"/>',
        f'<text x="{LEFT}" y="{HEIGHT - 18}">0</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 18}" text-anchor="end">step {last:g}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        value = math.exp(floor + share * (ceiling - floor))
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        for part in _parts(curve):
            points = " ".join(place(i, len(curve), v) for i, v in part)
            lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(
            f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 16 * number + 8}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _parts(curve: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Cut a curve where there is no number to draw."""
    parts: list[list[tuple[int, float]]] = [[]]
    for index, value in enumerate(curve):
        if value is None or value <= 0:
            parts.append([])
        else:
            parts[-1].append((index, value))
    return [part for part in parts if part]


def scatter(points: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> str:
    """Draw points on equal logarithmic scales, with the diagonal, and lines at a third and three times of it.

    Args:
        points: Pairs (x, y) greater than 0, by name; others are left out.
        x: What the horizontal axis shows.
        y: What the vertical axis shows.
    """
    kept = {name: [p for p in pairs if min(p) > 0 and math.isfinite(max(p))] for name, pairs in points.items()}
    values = [v for pairs in kept.values() for pair in pairs for v in pair] or [1.0, 10.0]
    floor, ceiling = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    side, right = HEIGHT - TOP - BOTTOM, LEFT + HEIGHT - TOP - BOTTOM

    def place(a: float, b: float) -> tuple[float, float]:
        across, up = ((math.log10(v) - floor) / max(ceiling - floor, 1) for v in (a, b))
        return LEFT + side * across, TOP + side * (1 - up)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<clipPath id="frame"><rect x="{LEFT}" y="{TOP}" width="{side}" height="{side}"/></clipPath>',
        f'<path d="M{LEFT},{TOP} V{TOP + side} H{right}" fill="none" stroke="#888888"/>',
        f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">{escape(x)}</text>',
        f'<text x="{LEFT}" y="{TOP - 10}">{escape(y)}</text>',
    ]
    for factor in (1 / 3, 1.0, 3.0):
        (x1, y1), (x2, y2) = place(10.0**floor, factor * 10.0**floor), place(10.0**ceiling, factor * 10.0**ceiling)
        dashes = "" if factor == 1 else ' stroke-dasharray="4"'
        lines.append(
            f'<path d="M{x1:.1f},{y1:.1f} L{x2:.1f},{y2:.1f}" stroke="#888888"{dashes} clip-path="url(#frame)"/>'
        )
    for power in range(floor, ceiling + 1, max((ceiling - floor) // 4, 1)):
        across, up = place(10.0**power, 10.0**power)
        lines.append(f'<text x="{LEFT - 6}" y="{up + 4:.1f}" text-anchor="end">1e{power}</text>')
        lines.append(f'<text x="{across:.1f}" y="{TOP + side + 16}" text-anchor="middle">1e{power}</text>')
    for number, (name, pairs) in enumerate(kept.items()):
        colour = COLOURS[number % len(COLOURS)]
        for pair in pairs:
            across, up = place(*pair)
            lines.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="2.5" fill="{colour}" fill-opacity="0.7"/>')
        lines.append(f'<text x="{right + 24}" y="{TOP + 16 * number + 8}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
