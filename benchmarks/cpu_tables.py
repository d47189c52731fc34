"""The tables of `make bench-cpu`, and the targets that its cells should meet.

Knows: cells, their limits, Markdown. Must not know: how cells are measured.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cpu_cells import (
    FORMATS,
    LONG_DECODE,
    PUBLISHED,
    WORKLOADS,
    Cell,
    CellResults,
    CellRounds,
    Workload,
    decode,
    prefill,
)

# the names of backends
OURS, OURS_8_BITS = "ours", "ours, 8-bit activations"
STOCK, LLAMA, OPENVINO = "stock MLX", "llama.cpp", "OpenVINO"

# the commit that some targets name
OLD_COMMIT = "8b51e97"

# by cell; a cell has none if the limits of the machine are unknown
CellLimits = Mapping[Cell, float]

_QUANTIZED, _PLAIN = ("q4", "q8"), ("f32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """min_ratio: minimum ratio of the backend `mine` to the backend `other` in the cells that
    `applies_to` selects."""

    name: str
    other: str
    min_ratio: float
    applies_to: Callable[[Cell], bool]
    mine: str = OURS


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitTarget:
    """min_share: minimum share of the limit."""

    name: str
    min_share: float
    applies_to: Callable[[Cell], bool]


def _is_cell(works: Iterable[Workload], forms: Iterable[str]) -> Callable[[Cell], bool]:
    works, forms = tuple(works), tuple(forms)
    return lambda cell: cell.workload in works and cell.form in forms


_SHORT_PROMPTS = tuple(map(prefill, (128, 512, 2048)))
_ONE, _SEVERAL = (decode(1),), tuple(map(decode, (4, 8, 16)))
_ALL_FORMS = (*_QUANTIZED, *_PLAIN)


def _target(
    name: str,
    works: Iterable[Workload],
    forms: Sequence[str],
    other: str,
    min_ratio: float,
    mine: str = OURS,
) -> Target:
    shown = "all formats" if set(forms) == set(FORMATS) else ", ".join(forms)
    name = f"{name}; {shown}"
    applies = _is_cell(works, forms)
    return Target(name=name, other=other, min_ratio=min_ratio, applies_to=applies, mine=mine)


TARGETS = (
    _target("prompts", _SHORT_PROMPTS, _QUANTIZED, LLAMA, 1.0),
    _target("prompts", _SHORT_PROMPTS, ("bf16",), LLAMA, 2.0),
    _target("prompts", _SHORT_PROMPTS, _QUANTIZED, OPENVINO, 0.8, mine=OURS_8_BITS),
    _target("prompts", _SHORT_PROMPTS, ("bf16",), OPENVINO, 0.6),
    _target("decode, 1 stream", _ONE, _ALL_FORMS, LLAMA, 1.0),
    _target("decode, 1 stream", _ONE, _ALL_FORMS, OPENVINO, 1.0),
    _target("decode, several streams", _SEVERAL, _QUANTIZED, LLAMA, 1.2),
    _target("decode, several streams", _SEVERAL, _QUANTIZED, OPENVINO, 1.1),
    _target("decode, several streams", _SEVERAL, ("bf16",), LLAMA, 1.5),
    _target("decode, several streams", _SEVERAL, ("bf16",), OPENVINO, 0.8),
    _target("decode", (*_ONE, *_SEVERAL), _ALL_FORMS, STOCK, 8),
    _target("decode", (*_ONE, *_SEVERAL), (PUBLISHED,), STOCK, 100),
    _target("prompts", _SHORT_PROMPTS, (*_ALL_FORMS, PUBLISHED), STOCK, 25),
)
LIMIT_TARGETS = (
    LimitTarget(
        name="decode, 1 stream; q8, f32 and Qwen3-0.6B",
        min_share=0.85,
        applies_to=lambda cell: (
            cell.workload == decode(1) and (cell.form in ("q8", "f32") or cell.size == "Qwen3-0.6B")
        ),
    ),
    LimitTarget(
        name="decode, 1 stream; 110M q4 and bf16",
        min_share=0.75,
        applies_to=lambda cell: (
            cell.workload == decode(1) and cell.form in ("q4", "bf16") and cell.size == "110M"
        ),
    ),
)


def make_baseline_targets(commit: str) -> Sequence[Target]:
    if commit != OLD_COMMIT:
        return (_target("all cells", WORKLOADS.values(), tuple(FORMATS), commit, 1.0),)
    return (
        _target("prompts of 8192", [prefill(8192)], _ALL_FORMS, commit, 2.5),
        _target("decode after 16384", [LONG_DECODE], _ALL_FORMS, commit, 1.8),
        _target("decode, several streams", _SEVERAL, ("f32",), commit, 1.0),
    )


def format_verdicts(
    found: CellResults, limits: CellLimits, targets: Iterable[Target] = TARGETS
) -> list[str]:
    """A line for each measured target: how many cells meet it, and which do not."""
    lines: list[str] = []
    for target in targets:
        ratios = {
            cell: ratio
            for cell, rounds in found.items()
            if target.applies_to(cell)
            and (ratio := rounds.ratio(target.other, target.mine)) is not None
        }
        mine = "" if target.mine == OURS else f"{target.mine}, "
        title = f"{target.name}: {mine}at least {target.min_ratio:g} times {target.other}"
        lines += _format_verdict(title, ratios, target.min_ratio)
    for target in LIMIT_TARGETS:
        shares = {
            cell: found[cell].rate(OURS) / limit
            for cell, limit in limits.items()
            if target.applies_to(cell) and found[cell].has(OURS)
        }
        title = f"{target.name}: at least {target.min_share:.0%} of the limit"
        lines += _format_verdict(title, shares, target.min_share)
    return lines


def _format_verdict(title: str, values: Mapping[Cell, float], least: float) -> list[str]:
    if not values:
        return []
    short = sorted((value, str(cell)) for cell, value in values.items() if value < least)
    met = f"{len(values) - len(short)} of {len(values)} cells"
    missed = "; ".join(f"{cell} {value:.3g}" for value, cell in short)
    return [f"- {title}: {met}" + (f". Short: {missed}" if short else "")]


def format_table(found: CellResults, other: str, mine: str = OURS) -> list[str]:
    """Ours, theirs, the ratio: a row for each shape, format and number of threads."""
    compared = {cell: rounds for cell, rounds in found.items() if rounds.ratios(other, mine)}
    return _format_rows(compared, lambda _, rounds: _format_ratio(rounds, other, mine))


def format_limit_table(found: CellResults, limits: CellLimits) -> list[str]:
    """Our tokens per second, and the percentage of the limit."""

    def show(cell: Cell, rounds: CellRounds) -> str:
        rate = rounds.rate(OURS)
        share = f" ({rate / limits[cell]:.0%})" if cell in limits else ""
        return format_number(rate) + share

    return _format_rows({cell: rounds for cell, rounds in found.items() if rounds.has(OURS)}, show)


def _format_rows(found: CellResults, show: Callable[[Cell, CellRounds], str]) -> list[str]:
    if not found:
        return []
    measured = {cell.workload for cell in found}
    works = [work for work in WORKLOADS.values() if work in measured]
    lines = [
        f"| shape | format | threads | {' | '.join(map(str, works))} |",
        "|---|---|---|" + "---|" * len(works),
    ]
    for size, form, threads in dict.fromkeys((c.size, c.form, c.threads) for c in found):
        cells = [Cell(size=size, form=form, threads=threads, workload=work) for work in works]
        shown = [show(cell, found[cell]) if cell in found else "" for cell in cells]
        lines.append(f"| {size} | {form} | {threads} | {' | '.join(shown)} |")
    return lines


def _format_ratio(rounds: CellRounds, other: str, mine: str) -> str:
    ratios = rounds.ratios(other, mine)
    figures = f"{format_number(rounds.rate(mine))} / {format_number(rounds.rate(other))} = "
    ratio = f"**{format_number(statistics.median(ratios))}**"
    if len(ratios) > 1:
        ratio += f" ({format_number(min(ratios))} to {format_number(max(ratios))})"
    # a note if theirs was measured on fewer steps or rounds
    ours, theirs = rounds.by_backend[mine], rounds.by_backend[other]
    least = min(m.count for m in theirs)
    fewer = least < min(m.count for m in ours) or len(theirs) < len(ours)
    return figures + ratio + (f" [{least}, {len(theirs)}]" if fewer else "")


def format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
