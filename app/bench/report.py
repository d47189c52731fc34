"""The report of a benchmark: a table, JSON, a chart.

Knows: the results of a benchmark, the layout of reports. Must not know: HTTP, how loads run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isinf
from typing import Any

from app.bench.benchmark import BenchConfig, LoadLevel, TargetResult
from app.bench.metrics import (
    MetricOptions,
    Values,
    combine_rounds,
    compute_metrics,
    compute_ratios,
    count_errors,
    format_percent,
)
from app.core.units import pluralize

# of the JSON report; changes with an incompatible change
SCHEMA = 1

# a client that uses a larger share of a core, or whose event loop is delayed for longer than these
# milliseconds and this share of the median TTFT, may affect the results
_MAX_CLIENT_CPU = 0.5
_MAX_CLIENT_LAG_MS = 10.0
_MAX_CLIENT_LAG_SHARE = 0.1

_LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}

_RATIO_METRICS = (
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelReport:
    """The metrics of one server at one level. rounds: the metrics of each round. combined: the
    medians over the rounds, or the sums for counts. errors: the number and the first message of
    each kind."""

    rounds: tuple[Values, ...]
    combined: Values
    errors: Mapping[str, tuple[int, str]]


class BenchReport:
    """A report. results: the results of server A, and of server B if there are two. latencies: the
    names of the latencies in the table. interrupted: whether the benchmark was cancelled."""

    def __init__(
        self,
        config: BenchConfig,
        results: Sequence[TargetResult],
        options: MetricOptions,
        latencies: Sequence[str],
        *,
        interrupted: bool = False,
    ) -> None:
        self._config = config
        self._results = results
        self._options = options
        self._latencies = latencies
        self._interrupted = interrupted
        self._levels: list[dict[LoadLevel, LevelReport]] = [
            {level: self._make_level_report(result, level) for level in result.loads}
            for result in results
        ]

    @property
    def completed(self) -> float:
        """The number of completed requests."""
        return sum(
            report.combined["completed"] or 0
            for levels in self._levels
            for report in levels.values()
        )

    def render_table(self) -> str:
        """The report as text: one table, or for two servers one table per level."""
        lines = list(self._describe())
        if len(self._results) == 1:
            [levels] = self._levels
            head = [self._level_title, *(level.label for level in levels)]
            lines += _align([head, *self._make_rows([r.combined for r in levels.values()])])
        else:
            for level in self._levels[0]:
                lines += self._render_comparison(level)
        lines += self._list_problems()
        return "\n".join(lines) + "\n"

    def make_json(self) -> dict[str, Any]:
        """The report as JSON. docs/benchmarks.md describes it."""
        config = self._config
        return {
            "schema": SCHEMA,
            "interrupted": self._interrupted,
            "config": {
                "endpoint": config.path,
                "dataset": config.dataset.description,
                "output_len": config.output_len,
                "rounds": config.rounds,
                "temperature": config.temperature,
                "extra_body": dict(config.extra_body),
                "seed": config.seed,
                "goodput_ms": {n: 1000 * s for n, s in self._options.goodput.items()},
            },
            "servers": [
                {
                    "base_url": result.target.address.url,
                    "model": result.target.model,
                    "ignore_eos": result.target.ignore_eos,
                    "tokens_per_word": result.target.length.tokens_per_word,
                    "levels": [
                        {**_describe_level(level), **_make_level_json(report)}
                        for level, report in levels.items()
                    ],
                }
                for result, levels in zip(self._results, self._levels, strict=True)
            ],
            "ratios": [
                {**_describe_level(level), **self._compute_ratios(level)}
                for level in (self._levels[0] if len(self._levels) > 1 else ())
            ],
        }

    def draw_chart(self) -> str:
        """The report as SVG: the main metrics by level, one line per server."""
        levels = list(dict.fromkeys(level for levels in self._levels for level in levels))
        metrics = {"output_throughput": "output tokens/s"}
        for name in self._latencies:
            metrics[f"median_{name}_ms"] = f"median {_LATENCY_NAMES[name]}, ms"
        panels = [
            LinePanel(
                title=f"{title} by {self._level_title}",
                labels=[level.label for level in levels],
                lines={
                    label: [
                        reports[level].combined.get(metric) if level in reports else None
                        for level in levels
                    ]
                    for label, reports in zip(self._labels, self._levels, strict=True)
                },
            )
            for metric, title in metrics.items()
        ]
        return draw_lines("mlxrunner bench", panels)

    @property
    def _labels(self) -> list[str]:
        """The name of each server in tables and charts."""
        models = [result.target.model for result in self._results]
        return models if len(models) == 1 else ["A", "B"]

    @property
    def _level_title(self) -> str:
        limits = {level.max_concurrency for level in self._config.levels}
        return "request rate" if limits == {None} else "concurrency"

    def _make_level_report(self, result: TargetResult, level: LoadLevel) -> LevelReport:
        loads = result.loads[level]
        rounds = tuple(compute_metrics(load, self._options) for load in loads)
        errors = count_errors([record for load in loads for record in load.requests])
        return LevelReport(rounds=rounds, combined=combine_rounds(rounds), errors=errors)

    def _compute_ratios(self, level: LoadLevel) -> dict[str, float | None]:
        a, b = (levels[level].rounds if level in levels else () for levels in self._levels)
        ratios = compute_ratios(a, b)
        wanted = [*_RATIO_METRICS, *self._list_latency_metrics()]
        return {name: ratios[name] for name in wanted if ratios.get(name) is not None}

    def _list_latency_metrics(self) -> list[str]:
        statistics = ["mean", "median"]
        statistics += [f"p{format_percent(p)}" for p in self._options.percentiles if p != 50]
        return [f"{statistic}_{name}_ms" for name in self._latencies for statistic in statistics]

    def _describe(self) -> Iterator[str]:
        config = self._config
        for label, result in zip(self._labels, self._results, strict=True):
            name = "" if len(self._results) == 1 else f"{label}: "
            yield f"{name}{result.target.model} at {result.target.address.url}{config.path}"
        rounds = "" if config.rounds == 1 else f", median of {config.rounds} rounds"
        yield f"{config.dataset.description}, {config.output_len} output tokens{rounds}"
        if self._interrupted:
            yield "interrupted: these are the results so far"
        yield ""

    def _render_comparison(self, level: LoadLevel) -> Iterator[str]:
        reports: list[Values] = [
            levels[level].combined if level in levels else {} for levels in self._levels
        ]
        ratios = self._compute_ratios(level)
        metrics = ["", *self._list_metrics()]
        rows = [[f"{self._level_title} {level.label}", "A", "B"], *self._make_rows(reports)]
        rows = [
            [*row, "A / B" if not metric else format_value(ratios.get(metric))]
            for metric, row in zip(metrics, rows, strict=True)
        ]
        yield from _align(rows)
        yield ""

    def _list_metrics(self) -> dict[str, str]:
        """The title of each row by metric."""
        metrics = {
            "completed": "completed requests",
            "failed": "failed requests",
            "duration": "duration, s",
            "total_input_tokens": "input tokens",
            "total_cached_tokens": "of which cached",
            "total_output_tokens": "output tokens",
            "request_throughput": "requests/s",
            "request_goodput": "good requests/s",
            "output_throughput": "output tokens/s",
            "total_token_throughput": "total tokens/s",
        }
        if not self._options.goodput:
            del metrics["request_goodput"]
        for name in self._list_latency_metrics():
            statistic, latency, _ = name.split("_")
            metrics[name] = f"{_LATENCY_NAMES[latency]} {statistic}, ms"
        return metrics

    def _make_rows(self, columns: Sequence[Values]) -> list[list[str]]:
        return [
            [title, *(format_value(values.get(metric)) for values in columns)]
            for metric, title in self._list_metrics().items()
        ]

    def _list_problems(self) -> Iterator[str]:
        for label, levels in zip(self._labels, self._levels, strict=True):
            for level, report in levels.items():
                where = f"{label}, {self._level_title} {level.label}"
                for kind, (count, message) in report.errors.items():
                    yield f"{where}: {pluralize(count, 'request')} failed: {kind}: {message}"
                yield from (f"{where}: {note}" for note in _find_problems(report.combined))


def _find_problems(values: Values) -> Iterator[str]:
    if cancelled := values["cancelled"]:
        yield f"{pluralize(round(cancelled), 'request')} cancelled"
    if early := values["ended_early"]:
        yield (
            f"{pluralize(round(early), 'response')} ended before the output length, because the "
            "model ended them"
        )
    cpu, lag = values["client_cpu_share"] or 0.0, values["client_lag_p99_ms"] or 0.0
    ttft = values["median_ttft_ms"] or 0.0
    if cpu > _MAX_CLIENT_CPU:
        yield f"this client used {cpu:.0%} of a core, which may affect the results"
    if lag > max(_MAX_CLIENT_LAG_MS, _MAX_CLIENT_LAG_SHARE * ttft):
        yield (
            f"this client was delayed by {lag:.0f} ms (99th percentile), which may affect the "
            "results"
        )


def _describe_level(level: LoadLevel) -> dict[str, Any]:
    rate = None if isinf(level.request_rate) else level.request_rate
    return {
        "max_concurrency": level.max_concurrency,
        "request_rate": rate,
        "burstiness": level.burstiness,
    }


def _make_level_json(report: LevelReport) -> dict[str, Any]:
    return {
        **report.combined,
        "errors": {
            kind: {"count": count, "message": message}
            for kind, (count, message) in report.errors.items()
        },
        "rounds": [dict(values) for values in report.rounds],
    }


def format_value(value: float | None) -> str:
    """Formats a value with at least three digits."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column is left-aligned, all others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


# line charts as SVG, without a background: the colors are readable on white and on black

COLORS = ("#2f7d4f", "#d08a1d", "#4f7fc4", "#a05bb0", "#808080")
INK = "#7a7f87"

_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT, _MARGIN, _HEAD = 2, 360, 220, 44, 56


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePanel:
    """labels: the labels of the horizontal axis, at equal distances. lines: the values of each line
    at the labels; None leaves a gap."""

    title: str
    labels: Sequence[str]
    lines: Mapping[str, Sequence[float | None]]


def draw_lines(title: str, panels: Sequence[LinePanel]) -> str:
    """Each panel has its own scale, which begins at 0."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    elements = [draw_text(0, 20, title, size=16, weight="bold"), *_draw_legend(colors)]
    for index, panel in enumerate(panels):
        row, column = divmod(index, _COLUMNS)
        elements += _draw_panel(panel, column * _PANEL_WIDTH, _HEAD + row * _PANEL_HEIGHT, colors)
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


def _draw_legend(colors: Mapping[str, str]) -> list[str]:
    elements: list[str] = []
    for index, (name, color) in enumerate(colors.items()):
        x = index * _PANEL_WIDTH / 2
        elements.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{color}"/>')
        elements.append(draw_text(x + 18, 41, name))
    return elements


def _draw_panel(panel: LinePanel, left: float, top: float, colors: Mapping[str, str]) -> list[str]:
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
            f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="2"/>'
        )
        elements += (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colors[name]}"/>' for x, y in points
        )
    return elements
