"""The limits of the machine, and of each cell on it.

Knows: the compiler, cpu_limits.cpp, the bytes and operations of a workload. Must not know:
backends.

The limit of a cell is the longer of two times: to read the weights and the caches once, and to
compute. Operations run at the peak of the fastest instructions for the format: tiles where the
processor has them, otherwise VNNI for 4 and 8 bits, and float32 FMA for the rest. Bytes are counted
in our formats.
"""

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.core.units import pluralize
from benchmarks.cpu_cells import FORMATS, SHAPES, Cell, Format, ModelShape, get_group_size
from models import kernels

SOURCE = Path(__file__).with_name("cpu_limits.cpp")
READ, FLOAT32, INT8 = "read", "float32", "int8"
INT8_TILES, BFLOAT16_TILES = "int8 tiles", "bfloat16 tiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """rate: GB or billions of operations per second, the most of the rounds. A multiplication and
    an addition are two operations."""

    name: str
    instruction: str
    unit: str
    rate: float


# by number of threads and name
Limits = Mapping[tuple[int, str], Limit]


def measure_limits(threads: Sequence[int]) -> Limits:
    """Compile the program and run it. Returns nothing if there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as place:
        program = str(Path(place) / "limits")
        flags = ["-std=c++20", "-O3", "-march=native", "-pthread"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", program], check=True)
        command = [program, *map(str, threads)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return parse_limits(printed)


def take_most(first: Limits, second: Limits) -> Limits:
    """The larger rate of each limit, of two measurements at different times."""
    return {
        key: max(limit, second.get(key, limit), key=lambda one: one.rate)
        for key, limit in first.items()
    }


def parse_limits(printed: str) -> Limits:
    found: dict[tuple[int, str], Limit] = {}
    for line in map(json.loads, printed.splitlines()):
        found[line["threads"], line["name"]] = Limit(
            name=line["name"],
            instruction=line["instruction"],
            unit=line["unit"],
            rate=line["most"],
        )
    return found


def format_limits(limits: Limits) -> list[str]:
    """A table: a row for each limit, a column for each number of threads."""
    if not limits:
        return ["The limits were not measured: there is no C++ compiler."]
    threads = sorted({count for count, _ in limits})
    lines = [
        f"| limit | {' | '.join(pluralize(count, 'thread') for count in threads)} |",
        "|---|" + "---|" * len(threads),
    ]
    for name in dict.fromkeys(name for _, name in limits):
        found = [limits[count, name] for count in threads]
        title = f"{name} ({found[0].instruction}), {found[0].unit}"
        lines.append(f"| {title} | {' | '.join(f'{one.rate:.0f}' for one in found)} |")
    absent = [name for name in (INT8, INT8_TILES) if (threads[0], name) not in limits]
    if absent:
        lines += ["", f"This processor has no instructions for: {', '.join(absent)}."]
    return lines


def compute_limit(cell: Cell, limits: Limits) -> float | None:
    """The most tokens per second of a cell. None without limits, and for GGUF files."""
    if not limits or FORMATS[cell.form].is_file:
        return None

    def rate(*names: str) -> float:
        known = (limits.get((cell.threads, name)) for name in names)
        return next(1e9 * limit.rate for limit in known if limit is not None)

    shape, form, work = SHAPES[cell.size], FORMATS[cell.form], cell.workload
    if form.bits is not None:
        products = rate(INT8_TILES, INT8, FLOAT32)
    elif form.dtype == "bfloat16":
        products = rate(BFLOAT16_TILES, FLOAT32)
    else:
        products = rate(FLOAT32)
    attention = rate(BFLOAT16_TILES, FLOAT32) if form.dtype == "bfloat16" else rate(FLOAT32)
    body, head = count_weights(shape)
    heads = shape.layers * shape.heads * shape.head_dim
    read = (body + head) * bytes_per_weight(shape, form)
    if work.streams == 0:
        # each position attends to half of the prompt on average
        seconds = 2 * (body * work.tokens + head) / products
        seconds += 4 * heads * work.tokens**2 / 2 / attention
        return work.tokens / max(seconds, read / rate(READ))
    caches = work.streams * work.tokens * bytes_per_position(shape, form)
    seconds = 2 * work.streams * (body + head) / products
    seconds += 4 * work.streams * heads * work.tokens / attention
    return work.streams / max(seconds, (read + caches) / rate(READ))


def count_weights(shape: ModelShape) -> tuple[int, int]:
    """The weights of the matrices of all layers, and of the head."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * shape.width * (queries + keys)
    return shape.layers * (attention + 3 * shape.width * shape.inner), shape.vocab * shape.width


def bytes_per_weight(shape: ModelShape, form: Format) -> float:
    size = 2 if form.dtype == "bfloat16" else 4
    if form.bits is None:
        return size
    # a scale and a bias per group
    return form.bits / 8 + 2 * size / get_group_size(shape, form)


def bytes_per_position(shape: ModelShape, form: Format) -> int:
    """Bytes of the keys and values of one position, in the precision of the checkpoint."""
    size = 2 if form.dtype == "bfloat16" else 4
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * size


def find_processor_kind() -> str:
    """The kind of the processor by the instructions of our kernels for 4- and 8-bit weights. The
    page has a section for each: tiles, vnni, avx2 (or older), arm."""
    isa = kernels.describe().isa or ""
    if isa.startswith("neon"):
        return "arm"
    kinds = {"avx512-amx-bf16": "tiles", "avx512-amx": "tiles", "avx512-vnni": "vnni"}
    return kinds.get(isa, "avx2")


def describe_processor() -> str:
    """The name of the processor, and its instructions for matrix products."""
    cpuinfo = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", fields.get("Features", "")).split()
    known = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    known += ("asimddp", "i8mm", "bf16")
    present = [flag for flag in known if flag in flags]
    tiles = "" if "amx_int8" in flags else "; no AMX"
    model = "".join(
        f", {title} {fields[key]}"
        for key, title in (("cpu family", "family"), ("model", "model"))
        if key in fields
    )
    return f"{name}{model} ({', '.join(present)}{tiles})"
