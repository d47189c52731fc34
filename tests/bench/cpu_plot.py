"""A bar chart as SVG: groups of bars, one colour a series, each bar with its figure.

Knows: numbers, names. Must not know: what they are of. Colours are readable on white and on dark
ground; the chart brings no ground of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f7d4f", "#d08a1d", "#4f7fc4", "#a05bb0", "#808080")
INK = "#7a7f87"
WIDTH, LABELS, FIGURES, BAR, GAP, HEAD = 720, 190, 110, 18, 16, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """values: by series, in its order; a series may be missing."""

    title: str
    values: Mapping[str, float]


def draw_bars(title: str, panels: Sequence[Panel]) -> str:
    """Each panel has a scale of its own: its longest bar is as long as there is room."""
    series = list(dict.fromkeys(name for panel in panels for name in panel.values))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    drawn = [_draw_text(0, 20, title, size=16, weight="bold")]
    top = 20 + GAP
    for panel in panels:
        drawn += _draw_panel(panel, top, colours)
        top += HEAD + len(panel.values) * BAR + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" '
        f'height="{top}" role="img" font-family="system-ui, sans-serif" fill="{INK}">\n'
        + "\n".join([f"<title>{escape(title)}</title>", *drawn])
        + "\n</svg>\n"
    )


def _draw_panel(panel: Panel, top: int, colours: Mapping[str, str]) -> list[str]:
    drawn = [_draw_text(0, top + 18, panel.title, size=13, weight="bold")]
    room, most = WIDTH - LABELS - FIGURES, max(panel.values.values(), default=0.0) or 1.0
    for i, (name, value) in enumerate(panel.values.items()):
        y = top + HEAD + i * BAR
        # what is next to nothing is still seen
        length = max(1.0, room * value / most)
        drawn.append(_draw_text(0, y + 13, name))
        drawn.append(
            f'<rect x="{LABELS}" y="{y + 2}" width="{length:.1f}" height="{BAR - 4}" '
            f'fill="{colours[name]}"/>'
        )
        drawn.append(_draw_text(LABELS + length + 6, y + 13, f"{value:.3g}"))
    return drawn


def _draw_text(x: float, y: float, text: str, *, size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
    )
