"""Model files -> a loop that is ready to generate.

Knows: safetensors, `models.build`, the device's memory settings. Must not know: where models come
from, requests. Runs on the engine thread, like everything that touches a tensor.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

import models
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.settings import Settings
from app.engine.loop import Loop
from app.engine.prefix.single import SinglePrefixCache
from app.engine.scheduler import Limits
from models.base import Model, ModelError
from models.kv import LayerCache

# bytes evaluated between two reports of progress
_GROUP = 64 << 20

# called with 0..100 and the bytes in memory
Report = Callable[[int, int], None]


def load(files: ModelFiles, settings: Settings, report: Report) -> Loop:
    """Raises AppError(MODEL_FILES)."""
    model = load_model(files, report)
    chunk = settings.prefill_chunk or _suitable_chunk()
    return Loop(
        model,
        SinglePrefixCache[LayerCache](model.make_kv, grid=chunk if settings.exact else 1),
        vocab=files.vocab_size,
        limits=Limits(running=1, prefill=chunk),
        exact=settings.exact,
    )


def _suitable_chunk() -> int:
    """Prompt tokens per step: as few as keep the device busy (DECISIONS.md, 2026-11-21)."""
    return 128 if mx.default_device().type == mx.DeviceType.cpu else 512


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
    _wire()
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


def _wire() -> None:
    """Keep the weights resident on Metal: without it the system may page them out between
    requests, and large models then decode an order of magnitude slower (mlx-lm#652)."""
    if not mx.metal.is_available():
        return
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    mx.set_wired_limit(min(mx.get_active_memory(), recommended))
