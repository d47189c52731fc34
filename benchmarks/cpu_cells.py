"""The cells that `make bench-cpu` measures.

Knows: shapes, formats, workloads, medians. Must not know: MLX, peers, processes, tables. A cell is
one workload of one shape in one format with a number of threads. Backends alternate in rounds:
figures are medians of the rounds, and the ratio is the median of the rounds' ratios, because drift
between rounds affects both.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

# tokens of a prompt and positions of a cache, for measurements that have one of each
PROMPT, CACHED = 512, 64
# a long context, which one stream has
LONG = 16384
# of models, in their configs
MAX_POSITIONS = 32768


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


# the format of a file that is measured as it is, whose size is its name
GGUF_FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """bits: the bits of a quantized weight, in groups of `group`. dtype: the type of a plain
    weight, or of scales. gguf: the nearest type in llama.cpp. is_file: whether both engines read a
    GGUF file of this file type; the other fields have no meaning then."""

    dtype: str
    gguf: str
    bits: int | None = None
    group: int = 64
    is_file: bool = False


FORMATS: Mapping[str, Format] = {
    "f32": Format(dtype="float32", gguf="F32"),
    "bf16": Format(dtype="bfloat16", gguf="BF16"),
    "q8": Format(dtype="float32", gguf="Q8_0", bits=8),
    "q4": Format(dtype="float32", gguf="Q4_0", bits=4),
    "q4-bf16": Format(dtype="bfloat16", gguf="Q4_0", bits=4),
    # the group size of llama.cpp
    "q8-g32": Format(dtype="float32", gguf="Q8_0", bits=8, group=32),
    "q4-g32": Format(dtype="float32", gguf="Q4_0", bits=4, group=32),
    **{
        kind: Format(dtype="float32", gguf=kind, is_file=True)
        for kind in ("Q4_0", "Q8_0", "Q6_K", "Q4_K_M", GGUF_FILE)
    },
}
# the format of published 4-bit models
PUBLISHED = "q4-bf16"


def get_group_size(shape: ModelShape, form: Format) -> int:
    """A group of 64 does not divide every width; 32 does."""
    return form.group if shape.width % form.group == 0 else 32


@dataclass(frozen=True, slots=True)
class Workload:
    """streams: number of streams that decode together after `tokens` cached positions; 0 for the
    prefill of a prompt of `tokens`."""

    streams: int
    tokens: int

    def __str__(self) -> str:
        if not self.streams:
            return f"prefill {self.tokens}"
        return f"decode {self.streams}" + (f" after {self.tokens}" if self.tokens != CACHED else "")


def decode(streams: int) -> Workload:
    return Workload(streams, CACHED)


def prefill(tokens: int) -> Workload:
    return Workload(0, tokens)


STREAMS, PROMPTS = (1, 4, 8, 16), (128, 512, 2048, 8192)
LONG_DECODE = Workload(1, LONG)
WORKLOADS: Mapping[str, Workload] = {
    str(work): work for work in (*map(decode, STREAMS), LONG_DECODE, *map(prefill, PROMPTS))
}


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
    """rate: tokens per second of all streams. cores: processor time by wall time; None if unknown.
    count: measured steps or prompt tokens. seconds: duration of the measurement."""

    rate: float
    cores: float | None
    count: int
    seconds: float


@dataclass(slots=True)
class CellRounds:
    """Measurements of each backend by round. A slow backend is not measured again, and has fewer
    rounds."""

    by_backend: dict[str, list[Measurement]] = field(default_factory=dict[str, list[Measurement]])

    def add(self, backend: str, measured: Measurement) -> None:
        self.by_backend.setdefault(backend, []).append(measured)

    def has(self, backend: str) -> bool:
        return backend in self.by_backend

    def rate(self, backend: str) -> float:
        return statistics.median(m.rate for m in self.by_backend[backend])

    def ratios(self, other: str, mine: str = "ours") -> list[float]:
        pairs = zip(self.by_backend.get(mine, []), self.by_backend.get(other, []), strict=False)
        return [ours.rate / theirs.rate for ours, theirs in pairs]

    def ratio(self, other: str, mine: str = "ours") -> float | None:
        ratios = self.ratios(other, mine)
        return statistics.median(ratios) if ratios else None


CellResults = Mapping[Cell, CellRounds]


def median_cores(found: CellResults, backend: str, threads: int) -> float | None:
    """Cores that the backend kept busy, the median of cells."""
    values = [
        statistics.median(cores)
        for cell, rounds in found.items()
        if cell.threads == threads
        and (cores := [m.cores for m in rounds.by_backend.get(backend, []) if m.cores is not None])
    ]
    return statistics.median(values) if values else None
