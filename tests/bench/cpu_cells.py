"""The cells that `make bench-cpu` measures, and their targets.

Knows: shapes, formats, workloads, targets, medians. Must not know: MLX, llama.cpp, processes. A
cell is one workload of one shape in one format with a number of threads. Backends alternate in
rounds: figures are medians of the rounds, and the ratio is the median of the rounds' ratios,
because drift between rounds affects both.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

PROMPT, CACHED = 512, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    kind: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int


SHAPES: Mapping[str, ModelShape] = {
    "15M": ModelShape(
        kind="llama",
        width=288,
        layers=6,
        heads=6,
        kv_heads=6,
        head_dim=48,
        inner=768,
        vocab=32000,
    ),
    "110M": ModelShape(
        kind="llama",
        width=768,
        layers=12,
        heads=12,
        kv_heads=12,
        head_dim=64,
        inner=2048,
        vocab=32000,
    ),
    "Qwen3-0.6B": ModelShape(
        kind="qwen3",
        width=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        inner=3072,
        vocab=151936,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """bits: of a quantized weight, in groups of `group`. dtype: of a plain weight, or of scales.
    gguf: the nearest type in llama.cpp. has_target: whether a target names the format."""

    dtype: str
    gguf: str
    bits: int | None = None
    group: int = 64
    has_target: bool = True


FORMATS: Mapping[str, Format] = {
    "f32": Format(dtype="float32", gguf="F32"),
    "bf16": Format(dtype="bfloat16", gguf="BF16", has_target=False),
    "q8": Format(dtype="float32", gguf="Q8_0", bits=8),
    "q4": Format(dtype="float32", gguf="Q4_0", bits=4),
    "q4-bf16": Format(dtype="bfloat16", gguf="Q4_0", bits=4, has_target=False),
    # the group size of llama.cpp
    "q8-g32": Format(dtype="float32", gguf="Q8_0", bits=8, group=32, has_target=False),
    "q4-g32": Format(dtype="float32", gguf="Q4_0", bits=4, group=32, has_target=False),
}
# the format of published 4-bit models
PUBLISHED = "q4-bf16"


def get_group_size(shape: ModelShape, form: Format) -> int:
    """A group of 64 does not divide every width; 32 does."""
    return form.group if shape.width % form.group == 0 else 32


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """streams: number of streams that decode together after CACHED positions; 0 for a prefill of
    PROMPT tokens."""

    streams: int

    def __str__(self) -> str:
        return f"decode {self.streams}" if self.streams else f"prefill {PROMPT}"


PREFILL = Workload(0)
WORKLOADS = (Workload(1), Workload(4), Workload(8), PREFILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    size: str
    form: str
    threads: int
    workload: Workload

    def __str__(self) -> str:
        return f"{self.size} {self.form}, {self.threads} thr., {self.workload}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """rate: tokens per second of all streams. cores: processor time by wall time. count: measured
    steps or prompt tokens. seconds: duration of the measurement."""

    rate: float
    cores: float
    count: int
    seconds: float


@dataclass(slots=True)
class CellRounds:
    """Measurements of each backend by round. A slow backend is not measured again, and has fewer
    rounds."""

    by_backend: dict[str, list[Measurement]] = field(default_factory=dict[str, list[Measurement]])

    def add(self, backend: str, measured: Measurement) -> None:
        self.by_backend.setdefault(backend, []).append(measured)

    def rate(self, backend: str) -> float:
        return statistics.median(m.rate for m in self.by_backend[backend])

    def ratios(self, other: str, mine: str = "ours") -> list[float]:
        pairs = zip(self.by_backend.get(mine, []), self.by_backend.get(other, []), strict=False)
        return [ours.rate / theirs.rate for ours, theirs in pairs]

    def ratio(self, other: str) -> float | None:
        ratios = self.ratios(other)
        return statistics.median(ratios) if ratios else None


CellResults = Mapping[Cell, CellRounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """min_ratio: minimum ratio to the backend `other` in the cells that `applies_to` selects."""

    name: str
    other: str
    min_ratio: float
    applies_to: Callable[[Cell], bool]


def _has_target(cell: Cell) -> bool:
    return FORMATS[cell.form].has_target


TARGETS = (
    Target(
        name="decode, every format",
        other="stock",
        min_ratio=8,
        applies_to=lambda cell: cell.workload != PREFILL,
    ),
    Target(
        name="decode, 4 bit with bf16 scales",
        other="stock",
        min_ratio=100,
        applies_to=lambda cell: cell.workload != PREFILL and cell.form == PUBLISHED,
    ),
    Target(
        name="prefill",
        other="stock",
        min_ratio=25,
        applies_to=lambda cell: cell.workload == PREFILL,
    ),
    Target(
        name="decode, 1 stream; f32, q8, q4",
        other="llama",
        min_ratio=1.0,
        applies_to=lambda cell: cell.workload == Workload(1) and _has_target(cell),
    ),
    Target(
        name="decode, 4 and 8 streams; f32, q8, q4",
        other="llama",
        min_ratio=1.2,
        applies_to=lambda cell: cell.workload.streams > 1 and _has_target(cell),
    ),
    Target(
        name="prefill; f32, q8, q4",
        other="llama",
        min_ratio=1.0,
        applies_to=lambda cell: cell.workload == PREFILL and _has_target(cell),
    ),
)


def format_verdicts(found: CellResults, targets: Iterable[Target] = TARGETS) -> list[str]:
    """A line for each measured target: how many cells meet it, and which do not."""
    lines: list[str] = []
    for target in targets:
        ratios = {
            cell: ratio
            for cell, rounds in found.items()
            if target.applies_to(cell) and (ratio := rounds.ratio(target.other)) is not None
        }
        if not ratios:
            continue
        short = sorted(
            (ratio, str(cell)) for cell, ratio in ratios.items() if ratio < target.min_ratio
        )
        met = f"{len(ratios) - len(short)} of {len(ratios)} cells"
        missed = "; ".join(f"{cell} {ratio:.3g}" for ratio, cell in short)
        lines.append(
            f"- {target.name}, at least {target.min_ratio:g} times {target.other}: {met}"
            + (f". Short: {missed}" if short else "")
        )
    return lines


def format_table(found: CellResults, other: str) -> list[str]:
    """Ours, theirs, the ratio: a row for each shape, format and number of threads."""
    rows = {
        (cell.size, cell.form, cell.threads): None
        for cell, rounds in found.items()
        if rounds.ratios(other)
    }
    works = sorted({cell.workload for cell, rounds in found.items() if rounds.ratios(other)})
    # prefill after decode
    works = [work for work in WORKLOADS if work in works]
    if not rows:
        return []
    lines = [
        f"| shape | format | threads | {' | '.join(map(str, works))} |",
        "|---|---|---|" + "---|" * len(works),
    ]
    for size, form, threads in rows:
        cells = (Cell(size=size, form=form, threads=threads, workload=work) for work in works)
        row = " | ".join(_format_cell(found.get(cell), other) for cell in cells)
        lines.append(f"| {size} | {form} | {threads} | {row} |")
    return lines


def _format_cell(rounds: CellRounds | None, other: str) -> str:
    if rounds is None or not (ratios := rounds.ratios(other)):
        return ""
    figures = f"{_format_number(rounds.rate('ours'))} / {_format_number(rounds.rate(other))} = "
    ratio = f"**{_format_number(statistics.median(ratios))}**"
    if len(ratios) > 1:
        ratio += f" ({_format_number(min(ratios))} to {_format_number(max(ratios))})"
    # a note if theirs was measured on fewer steps or rounds
    mine, theirs = rounds.by_backend["ours"], rounds.by_backend[other]
    least = min(m.count for m in theirs)
    fewer = least < min(m.count for m in mine) or len(theirs) < len(mine)
    return figures + ratio + (f" [{least}, {len(theirs)}]" if fewer else "")


def median_cores(found: CellResults, backend: str, threads: int) -> float | None:
    """Cores that the backend kept busy, the median of cells."""
    values = [
        statistics.median(m.cores for m in rounds.by_backend[backend])
        for cell, rounds in found.items()
        if cell.threads == threads and backend in rounds.by_backend
    ]
    return statistics.median(values) if values else None


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
