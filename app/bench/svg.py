"""Line charts as SVG.

Knows: numbers, names. Must not know: their meaning. A chart has no background, and its colours are
readable on white and on dark backgrounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f7d4f", "#d08a1d", "#4f7fc4", "#a05bb0", "#808080")
INK = "#7a7f87"

_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT, _MARGIN, _HEAD = 2, 360, 220, 44, 56


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePanel:
    """labels: of the horizontal axis, at equal distances. lines: the values of each line at the
    labels; None leaves a gap."""

    title: str
    labels: Sequence[str]
    lines: Mapping[str, Sequence[float | None]]


def draw_lines(title: str, panels: Sequence[LinePanel]) -> str:
    """Each panel has its own scale, which begins at 0."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    elements = [draw_text(0, 20, title, size=16, weight="bold"), *_draw_legend(colours)]
    for index, panel in enumerate(panels):
        row, column = divmod(index, _COLUMNS)
        elements += _draw_panel(panel, column * _PANEL_WIDTH, _HEAD + row * _PANEL_HEIGHT, colours)
    rows = -(-len(panels) // _COLUMNS)
    return draw_document(title, _COLUMNS * _PANEL_WIDTH, _HEAD + rows * _PANEL_HEIGHT, elements)


def draw_document(title: str, width: float, height: float, elements: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" fill="{INK}">\n'
        + "\n".join([f"<title>{escape(title)}</title>", *elements])
        + "\n</svg>\n"
    )


def draw_text(
    x: float, y: float, text: str, *, size: int = 12, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _draw_legend(colours: Mapping[str, str]) -> list[str]:
    elements: list[str] = []
    for index, (name, colour) in enumerate(colours.items()):
        x = index * _PANEL_WIDTH / 2
        elements.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}"/>')
        elements.append(draw_text(x + 18, 41, name))
    return elements


def _draw_panel(panel: LinePanel, left: float, top: float, colours: Mapping[str, str]) -> list[str]:
    most = max((v for line in panel.lines.values() for v in line if v is not None), default=0.0)
    width, height = _PANEL_WIDTH - 2 * _MARGIN, _PANEL_HEIGHT - 2 * _MARGIN
    step = width / max(1, len(panel.labels) - 1)
    shown = f"{most:.0f}" if most >= 1000 else f"{most:.3g}"
    x0, y0 = left + _MARGIN, top + _MARGIN + height
    elements = [
        draw_text(left, top + 20, panel.title, size=13, weight="bold"),
        f'<path d="M{x0:.1f} {y0 - height:.1f}V{y0:.1f}H{x0 + width:.1f}" fill="none" '
        f'stroke="{INK}"/>',
        draw_text(x0 - 6, y0 - height + 4, shown, anchor="end"),
        draw_text(x0 - 6, y0 + 4, "0", anchor="end"),
    ]
    for index, label in enumerate(panel.labels):
        elements.append(draw_text(x0 + index * step, y0 + 18, label, anchor="middle"))
    for name, values in panel.lines.items():
        points = [
            (x0 + index * step, y0 - height * value / (most or 1.0))
            for index, value in enumerate(values)
            if value is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        elements.append(
            f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>'
        )
        elements += (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[name]}"/>' for x, y in points
        )
    return elements
