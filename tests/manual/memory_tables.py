"""The tables of `docs/memory.md`: the memory that published models need.

Knows: the configs in tests/models/published.json, the engine's formulas. Must not know: this
machine. No weight is evaluated, so a model of any size takes no memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from app.engine.memory_policy import DeviceMemory, unified_budget
from app.engine.memory_profile import KVFootprint
from app.engine.weights import list_parameters
from models import architectures
from tests.manual.tables import format_table
from tests.models.published import Published, load_published

GB = 10**9
MIB, GIB = 1 << 20, 1 << 30

# As on a GPU (docs/configuration.md). It only changes the cache of a sliding window.
CHUNK = 512

CONTEXTS = (8192, 32768)

# machine memory in GiB
MACHINES = (8, 16, 24, 32, 64, 128)

# the share of the machine's memory that is the default budget on a CPU
BUDGET_SHARE = 0.7

# the share of the budget for the weights and one conversation, so that the rest is available for
# the working space of a step
USED_SHARE = 0.9

# the memory in GiB from which macOS recommends three quarters of it instead of two thirds
LARGE_MAC = 64

NAMES = (
    "Qwen3-0.6B",
    "Llama-3.2-1B",
    "Qwen3.5-2B",
    "SmolLM3-3B",
    "Ministral-3-3B-Base-2512",
    "Phi-4-mini-instruct",
    "gemma-3-4b-it",
    "Qwen3-4B",
    "Mistral-7B-v0.3",
    "Llama-3.1-8B",
    "LFM2-8B-A1B",
    "gpt-oss-20b",
    "gemma-3-27b-it",
    "GLM-4.7-Flash",
    "Qwen3-30B-A3B",
    "Qwen3.5-35B-A3B",
    "Mixtral-8x7B-v0.1",
    "Qwen3-Next-80B-A3B-Instruct",
)


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Bytes. weights: by bits per weight, without those that the model does not have. kv: by
    context. per_1024: the size of 1,024 more tokens of a long conversation."""

    name: str
    weights: dict[int, int]
    kv: dict[int, int]
    per_1024: int


def measure(checkpoint: Published) -> ModelMemory:
    quantized = any(kind.startswith("uint") for kind in checkpoint.other_types.values())
    weights: dict[int, int] = {}
    model: Any = None
    for bits in (None,) if quantized else (4, 8, None):
        model = architectures.build(
            checkpoint.config, checkpoint.weights(), bits=bits, vision=False
        )
        weights[bits or (4 if quantized else 16)] = sum(
            array.nbytes for array in list_parameters(model)
        )
    layers = model.make_kv()
    model(mx.array([[0]]), layers)
    footprint = KVFootprint(layers, CHUNK)
    longest = checkpoint.context
    return ModelMemory(
        name=checkpoint.name,
        weights=weights,
        kv={context: footprint(context) for context in CONTEXTS if context <= longest},
        per_1024=footprint(longest) - footprint(longest - 1024),
    )


def list_checkpoints() -> list[Published]:
    known = {checkpoint.name: checkpoint for checkpoint in load_published()}
    return [known[name] for name in NAMES]


def format_model_row(memory: ModelMemory) -> tuple[str, ...]:
    weights = [
        f"{memory.weights[bits] / GB:.1f} GB" if bits in memory.weights else "–"
        for bits in (4, 8, 16)
    ]
    kv = [
        f"{memory.kv[context] / GB:.2f} GB" if context in memory.kv else "–" for context in CONTEXTS
    ]
    return (memory.name, *weights, f"{memory.per_1024 / MIB:.0f} MiB", *kv)


def format_models(memories: Sequence[ModelMemory]) -> str:
    head = (
        "model",
        "4 bits",
        "8 bits",
        "16 bits",
        "KV cache per 1,024 tokens",
        *(f"KV cache of {context:,} tokens" for context in CONTEXTS),
    )
    return format_table(head, [format_model_row(memory) for memory in memories])


def compute_cpu_budget(machine: int) -> float:
    """machine: memory in GiB. Returns bytes."""
    return machine * GIB * BUDGET_SHARE


def compute_mac_budget(machine: int) -> float:
    """machine: memory in GiB. Returns bytes."""
    share = 3 / 4 if machine >= LARGE_MAC else 2 / 3
    physical = machine * GIB
    return unified_budget(DeviceMemory(physical=physical, recommended=int(share * physical)))


# the part of the page for each kind of machine
MACHINE_PARTS = {"machines": compute_cpu_budget, "macs": compute_mac_budget}


def format_machines(memories: Sequence[ModelMemory], compute_budget: Callable[[int], float]) -> str:
    rows: list[tuple[str, ...]] = []
    smaller: dict[int, set[str]] = {4: set(), 8: set()}
    for machine in MACHINES:
        budget = compute_budget(machine)
        cells: list[str] = []
        for bits, listed in smaller.items():
            new = [
                memory.name
                for memory in memories
                if bits in memory.weights
                and memory.name not in listed
                and memory.weights[bits] + memory.kv[CONTEXTS[0]] <= budget * USED_SHARE
            ]
            listed |= set(new)
            cells.append(", ".join(new))
        rows.append((f"{machine} GiB", f"{budget / GIB:.1f} GiB", *cells))
    return format_table(("machine", "budget", "also with 4 bits", "also with 8 bits"), rows)
