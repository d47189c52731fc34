"""Model files -> a loop that is ready to generate.

Knows: safetensors, `models.build`, the device's memory settings. Must not know: where models come
from, requests. Runs on the engine thread, like everything that touches a tensor.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

import models
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.ports import PrefixCache
from app.core.settings import Settings
from app.engine.loop import Loop
from app.engine.memory import Memory, device_budget, measured
from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.single import SinglePrefixCache
from app.engine.prefix.slots import SlotPrefixCache
from app.engine.scheduler import Limits
from models.base import Model, ModelError
from models.kv import LayerCache
from models.layout import suit_device

# bytes evaluated between two reports of progress
_GROUP = 64 << 20

# sequences at once when nobody says how many, and the length that each is then given room for
MOST_PARALLEL, _USUAL_LENGTH = 8, 4096

# for the working space of a model whose config does not tell
_MANY_HEADS = 64

# called with 0..100 and the bytes in memory
Report = Callable[[int, int], None]


def load(files: ModelFiles, settings: Settings, report: Report) -> Loop:
    """Raises AppError(MODEL_FILES), also for a model that leaves no room for a sequence."""
    model = load_model(files, report)
    chunk = settings.prefill_chunk or _suitable_chunk()
    context = min(settings.context or files.context_length, files.context_length)
    memory = measured(
        model,
        budget=settings.memory or device_budget(),
        weights=_bytes(model),
        chunk=chunk,
        rows=settings.parallel or MOST_PARALLEL,
        heads=int(files.config.get("num_attention_heads", _MANY_HEADS)),
        context=context,
    )
    if not memory.positions(context):
        raise AppError(Kind.MODEL_FILES, _too_large(files, memory))
    _bound_allocator(memory)
    limits = Limits(
        running=settings.parallel or _suitable_parallel(settings, memory, context),
        prefill=chunk,
        whole=settings.exact,
    )
    return Loop(
        model,
        _prefix_cache(model, settings, limits, context),
        vocab=files.vocab_size,
        limits=limits,
        memory=memory,
        context=context,
        exact=settings.exact,
        shift=model.shift if settings.context_shift else None,
    )


def _suitable_parallel(settings: Settings, memory: Memory, context: int) -> int:
    """As many sequences as fit with a usual length each, at least one. One where the cache has only
    one entry, or where bits count: kernels round differently for a batch."""
    if settings.exact or settings.cache == "single":
        return 1
    usual = memory.footprint(min(context, _USUAL_LENGTH))
    return max(1, min(MOST_PARALLEL, memory.kv_budget // usual))


def _prefix_cache(
    model: Model, settings: Settings, limits: Limits, context: int
) -> PrefixCache[LayerCache]:
    """The policy that was asked for: one tree for many sequences, one entry for one."""
    grid = limits.prefill if limits.whole else 1
    match settings.cache or ("single" if limits.running == 1 else "radix"):
        case "single":
            return SinglePrefixCache(model.make_kv, grid=grid)
        case "slots":
            return SlotPrefixCache(
                model.make_kv,
                slots=limits.running,
                context=context,
                multi_user=settings.multi_user,
                settle=_evaluate_caches,
                grid=grid,
            )
        case "radix":
            return RadixPrefixCache(model.make_kv, settle=_evaluate_caches, grid=grid)


def _evaluate_caches(layers: Sequence[LayerCache]) -> None:
    mx.eval([layer.state() for layer in layers])


def _suitable_chunk() -> int:
    """Prompt tokens per step: as few as keep the device busy (DECISIONS.md, 2026-11-21)."""
    return 128 if mx.default_device().type == mx.DeviceType.cpu else 512


def _bytes(model: Model) -> int:
    assert isinstance(model, nn.Module)
    flat: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in flat)


def _too_large(files: ModelFiles, memory: Memory) -> str:
    gib = 1 << 30
    return (
        f"{files.path} does not fit: its weights take {memory.weights / gib:.2f} GiB, a step "
        f"{memory.working / gib:.2f} GiB and the shortest sequence "
        f"{memory.footprint(1) / gib:.2f} GiB, but the budget is {memory.budget / gib:.2f} GiB: "
        "raise --memory, or serve a smaller model"
    )


def _bound_allocator(memory: Memory) -> None:
    """Free buffers that the allocator keeps count as working space. On Metal, keep what we use
    resident: without it the system may page it out between requests, and large models then decode
    an order of magnitude slower (mlx-lm#652)."""
    mx.set_cache_limit(memory.working)
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(memory.budget, recommended))


def load_model(files: ModelFiles, report: Report) -> Model:
    """The model with all its weights in memory."""
    weights: dict[str, mx.array] = {}
    for shard in files.shards:
        _check_shard(shard)
        weights.update(_open(shard))
    try:
        model = models.build(files.config, weights)
    except ModelError as error:
        raise AppError(Kind.MODEL_FILES, f"{files.path}: {error}") from error
    # the dictionary must not keep what sanitize dropped, nor what quantisation replaced
    weights.clear()
    assert isinstance(model, nn.Module)
    _evaluate(model, report)
    suit_device(model)
    return model


def _check_shard(shard: Path) -> None:
    """MLX reads tensors when they are first used, too late for a clear word about a bad file."""
    try:
        with safe_open(shard, framework="mlx"):
            pass
    except (SafetensorError, OSError) as error:
        raise AppError(
            Kind.MODEL_FILES, f"{shard} is not a whole safetensors file: {error}"
        ) from error


def _open(shard: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(shard))
    assert isinstance(arrays, dict)
    return arrays


def _evaluate(model: nn.Module, report: Report) -> None:
    """Read the weights, a group at a time, so that progress can be told."""
    flat: Any = tree_flatten(model.parameters())
    arrays: list[mx.array] = [array for _, array in flat]
    total = sum(array.nbytes for array in arrays) or 1
    done, group, size = 0, list[mx.array](), 0
    report(0, mx.get_active_memory())
    for array in arrays:
        group.append(array)
        size += array.nbytes
        if size >= _GROUP:
            mx.eval(group)
            done += size
            group, size = [], 0
            report(100 * done // total, mx.get_active_memory())
    mx.eval(group)
