"""Estimates whether a model fits in memory, before its weights are read.

Knows: the engine's settings, shapes and types of unevaluated arrays in models and layer caches.
Must not know: requests, what runs.

    budget  [ weights | working memory | layer caches: sequences x context ....... | free ]

Weights and layer caches are counted to the byte, with `--quantize` applied. The working memory is
an estimate, which a measurement replaces once the weights are loaded (`adjust_after_load`). So a
model that just fits by the estimate may not fit by the measurement, and vice versa.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.model_state import MemoryRequirement
from app.core.settings import Settings
from app.core.units import format_memory
from app.engine.device import device_budget
from app.engine.memory_profile import (
    ActivationMemory,
    KVFootprint,
    MemoryProfile,
    longest_fitting,
    num_query_heads,
)
from app.engine.weights import list_parameters, open_model
from models.base import Model, ModelError

# concurrent sequences if not configured
DEFAULT_MAX_PARALLEL = 8

# the context that each of several sequences should have if their number is not configured
TYPICAL_SEQUENCE_LENGTH = 4096

# activations that a step holds per token, in rows of the widest layer output and in rows of hidden
# states: measured on Llamas 288 to 2048 wide, and rounded up
_ACTIVATION_ROWS = 8

# config keys of the number of experts per token, and its default if the config has none
_EXPERTS_PER_TOKEN_KEYS, _DEFAULT_EXPERTS_PER_TOKEN = (
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    8,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How much memory a model needs, and whether that fits. All sizes are bytes.

    weights: of the model. kv_per_context: layer caches of one sequence of `context` positions.
    working: activations and logits of a step. budget: for everything.

    context: requested positions per sequence, else the context that the model is served with.
    sequences: how many must have that context at the same time. context_that_fits: the longest
    context that this many sequences can have, at most `context`; 0 if none fits. fits: whether the
    server will start: with the requested context, or with any if none was requested.
    """

    weights: int
    kv_per_context: int
    working: int
    budget: int
    context: int
    sequences: int
    context_that_fits: int
    fits: bool

    @property
    def needed(self) -> int:
        """Bytes for everything that was requested."""
        return self.weights + self.working + self.sequences * self.kv_per_context


def estimate_fit(files: ModelFiles, settings: Settings) -> Fit:
    """The fit of model files that `complete_config` returned. Reads headers only, and leaves
    nothing in memory. Creates arrays, so call it on a thread that does no other work with MLX.

    Raises AppError(MODEL_FILES) for files that cannot become a model.
    """
    return estimate_before_load(open_model(files, settings.quantize), files, settings)


def estimate_memory(
    files: ModelFiles, settings: Settings, loaded_bytes: int = 0
) -> MemoryRequirement:
    """The memory that a model needs if it shares the device with other models. Otherwise like
    `estimate_fit`. If the settings fix the memory, this is the requirement; whether the model fits
    in it is checked when it is loaded.

    loaded_bytes: bytes of the models that are loaded already.
    """
    if settings.memory is not None:
        return MemoryRequirement(
            min_bytes=settings.memory,
            preferred_bytes=settings.memory,
            device_budget=device_budget(loaded_bytes),
        )
    sizes = _ModelSizes(open_model(files, settings.quantize), files, settings)
    context = files.resolve_context_length(settings.context)
    usual = min(context, TYPICAL_SEQUENCE_LENGTH)
    many = settings.parallel or DEFAULT_MAX_PARALLEL
    asked = sizes.total_bytes(many if settings.parallel else 1, context)
    least = asked if settings.context else sizes.total_bytes(1, usual)
    # as much again for cached prefixes of finished requests
    cached = many * sizes.kv_footprint(usual)
    return MemoryRequirement(
        min_bytes=least,
        preferred_bytes=max(asked, sizes.total_bytes(many, usual)) + cached,
        device_budget=device_budget(loaded_bytes),
    )


def estimate_before_load(model: Model, files: ModelFiles, settings: Settings) -> Fit:
    """Like `estimate_fit`, for a model whose weights may or may not be loaded."""
    sizes = _ModelSizes(model, files, settings)
    budget = settings.memory or device_budget()
    sequences = settings.parallel or 1
    context = files.resolve_context_length(settings.context)
    longest = longest_fitting(
        lambda length: sizes.total_bytes(sequences, length) <= budget, context
    )
    return Fit(
        weights=sizes.weights,
        kv_per_context=sizes.kv_footprint(context),
        working=sizes.activation_bytes(context),
        budget=budget,
        context=context,
        sequences=sequences,
        context_that_fits=longest,
        fits=longest >= (context if settings.context else 1),
    )


def adjust_after_load(estimate: Fit, memory: MemoryProfile, settings: Settings) -> Fit:
    """The estimate with the measured working memory in place of the estimated one."""

    def room(length: int) -> bool:
        return estimate.sequences * memory.kv_footprint(length) <= memory.kv_budget

    longest = longest_fitting(room, estimate.context_that_fits)
    return replace(
        estimate,
        working=memory.working,
        context_that_fits=longest,
        fits=longest >= (estimate.context if settings.context else 1),
    )


def choose_prefill_chunk(settings: Settings) -> int:
    """Prompt tokens per step: the smallest number that keeps the device busy
    (docs/decisions/engine.md)."""
    if settings.prefill_chunk:
        return settings.prefill_chunk
    return 128 if mx.default_device().type == mx.DeviceType.cpu else 512


def raise_unless_fits(estimate: Fit, files: ModelFiles) -> None:
    """Raises AppError(MODEL_FILES) for a model that does not fit, with a context that would."""
    if estimate.fits:
        return
    many = "a sequence" if estimate.sequences == 1 else f"{estimate.sequences} sequences"
    needs = (
        f"{files.path} does not fit in memory: weights {format_memory(estimate.weights)}, "
        "activations "
        f"{format_memory(estimate.working)}, KV cache for {many} of {estimate.context} tokens "
        f"{format_memory(estimate.sequences * estimate.kv_per_context)}, "
        f"{format_memory(estimate.needed)} "
        f"in total, but the budget is {format_memory(estimate.budget)}"
    )
    if estimate.context_that_fits:
        advice = f"the largest --context that fits is {estimate.context_that_fits}"
        if estimate.sequences > 1:
            advice += f", or set --parallel below {estimate.sequences}"
    else:
        advice = "no context length fits: raise --memory, or serve a smaller model"
    raise AppError(ErrorKind.MODEL_FILES, f"{needs}: {advice}")


class _ModelSizes:
    """Sizes of a model in bytes. activation_bytes, kv_footprint: functions of a sequence's
    length."""

    def __init__(self, model: Model, files: ModelFiles, settings: Settings) -> None:
        """Raises AppError(MODEL_FILES)."""
        kv = model.make_kv()
        try:
            hidden = model(mx.array([[0]]), kv)
            vocab = model.logits(hidden[:, -1]).size
        except ModelError as error:
            raise AppError(ErrorKind.MODEL_FILES, f"{files.path}: {error}") from error
        chunk = choose_prefill_chunk(settings)
        self.weights = sum(array.nbytes for array in list_parameters(model))
        self.kv_footprint = KVFootprint(kv, chunk)
        self.activation_bytes = ActivationMemory(
            bytes_per_token=_activation_bytes_per_token(model, files.config, hidden, vocab),
            chunk=chunk,
            max_batch_size=settings.parallel or DEFAULT_MAX_PARALLEL,
            vocab=vocab,
            heads=num_query_heads(files.config),
            layers=kv,
        )

    def total_bytes(self, sequences: int, length: int) -> int:
        return self.weights + self.activation_bytes(length) + sequences * self.kv_footprint(length)


def _activation_bytes_per_token(
    model: Model, config: Mapping[str, Any], hidden: mx.array, vocab: int
) -> int:
    """Estimated bytes of activations that a step holds per token."""
    assert isinstance(model, nn.Module)
    chosen = next(
        (config[name] for name in _EXPERTS_PER_TOKEN_KEYS if config.get(name)),
        _DEFAULT_EXPERTS_PER_TOKEN,
    )
    modules: Sequence[tuple[str, Any]] = model.named_modules()
    widths = {_output_width(module, chosen) for _, module in modules}
    # without the output layer: logits are computed for one row only
    widest = max(widths - {vocab}, default=0)
    last = hidden.shape[-1]
    # a model class that returns logits returns one row of them
    rows = _ACTIVATION_ROWS * (widest + last) if last < vocab else _ACTIVATION_ROWS * widest + last
    return rows * hidden.dtype.size


def _output_width(module: Any, chosen: int) -> int:
    """Output features of a linear layer per token; for stacked experts, those of the experts that a
    token passes through. 0 for other layers."""
    weight = module.get("weight")
    if (
        weight is None
        or weight.ndim < 2
        or isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ):
        return 0
    stacked = weight.shape[0] if weight.ndim == 3 else 1
    return min(stacked, chosen) * weight.shape[-2]
