"""A bar chart as SVG: groups of bars, one color per series, a number at each bar.

Knows: numbers, names. Must not know: their meaning. The chart has no background, and its colors
are readable on white and on dark ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.bench.report import COLORS, draw_document, draw_text

WIDTH, LABELS, FIGURES, BAR, GAP, HEAD = 720, 190, 110, 18, 16, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """values: by series, in order; a series can be missing."""

    title: str
    values: Mapping[str, float]


def draw_bars(title: str, panels: Sequence[Panel]) -> str:
    """Each panel has its own scale, in which the longest bar has the full width."""
    series = list(dict.fromkeys(name for panel in panels for name in panel.values))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(series)}
    elements = [draw_text(0, 20, title, size=16, weight="bold")]
    top = 20 + GAP
    for panel in panels:
        elements += _draw_panel(panel, top, colors)
        top += HEAD + len(panel.values) * BAR + GAP
    return draw_document(title, WIDTH, top, elements)


def _draw_panel(panel: Panel, top: int, colors: Mapping[str, str]) -> list[str]:
    elements = [draw_text(0, top + 18, panel.title, size=13, weight="bold")]
    room, most = WIDTH - LABELS - FIGURES, max(panel.values.values(), default=0.0) or 1.0
    for i, (name, value) in enumerate(panel.values.items()):
        y = top + HEAD + i * BAR
        # minimum length, so that small values are visible
        length = max(1.0, room * value / most)
        elements.append(draw_text(0, y + 13, name))
        elements.append(
            f'<rect x="{LABELS}" y="{y + 2}" width="{length:.1f}" height="{BAR - 4}" '
            f'fill="{colors[name]}"/>'
        )
        elements.append(draw_text(LABELS + length + 6, y + 13, f"{value:.3g}"))
    return elements
