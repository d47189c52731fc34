"""Estimates whether a model fits in memory, before its weights are read.

Knows: the engine's settings, the shapes and dtypes of unevaluated arrays in models and layer
caches.
Must not know: requests, running jobs.

    budget  [ weights | working memory | layer caches: sequences x context ....... | free ]

The sizes of the weights and the layer caches are exact and account for `--quantize`. The working
memory is an estimate, which is replaced by a measurement after the weights are loaded
(`adjust_after_load`). In borderline cases, the estimate and the measurement may therefore disagree
on whether a model fits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from app.core.distributions import has_accelerator_hardware
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.models import MemoryRequirement
from app.core.settings import Settings
from app.core.units import format_memory
from app.engine.device import device_budget, read_device_info
from app.engine.memory_profile import (
    ActivationMemory,
    KVFootprint,
    MemoryProfile,
    attention_shapes,
    longest_fitting,
)
from app.engine.policy import choose_chunk_length, count_slots
from app.engine.weights import list_parameters, open_model
from models import architectures
from models.base import Model, ModelError
from models.checkpoint_config import get_text_config, num_query_heads
from models.encoder import Encoder

# The number of typical sequences in the preferred memory of a model that shares the device.
PREFERRED_SEQUENCES = 8

# The minimum context length per sequence when the number of sequences is chosen automatically.
TYPICAL_SEQUENCE_LENGTH = 4096

# The activations of a step per token, as multiples of the widest layer output and of the hidden
# size. Measured on Llama models with hidden sizes from 288 to 2048, and rounded up. Includes the
# margin of the measurement after the load (memory_profile.py).
_ACTIVATION_ROWS = 12

# On a GPU, the default prefill chunk is so short that the activations and scores of a step need at
# most this fraction of the memory that the weights leave.
_ACTIVATION_SHARE = 1 / 4

# The config keys for the number of experts per token, and the default if all of them are missing.
_EXPERTS_PER_TOKEN_KEYS, _DEFAULT_EXPERTS_PER_TOKEN = (
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"),
    8,
)


# The number of image rows of Gemma 3 in config.json, the largest number of those of Gemma 4 in the
# settings of its image processor, and the default of both.
_ROWS_KEY, _MAX_ROWS_KEY, _DEFAULT_ATOMIC_ROWS = "mm_tokens_per_image", "max_soft_tokens", 280


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The memory requirement of a model, and whether the model fits. All sizes are in bytes.

    weights: the size of the weights.
    kv_per_context: the size of the layer caches of one sequence with `context` positions.
    working: the size of the activations and logits of a step.
    budget: the memory budget of the engine.
    context: the requested context length, or the default context length of the model if none is
        requested.
    sequences: the number of concurrent sequences that must fit with this context.
    slots: the maximum number of running sequences. This many are decoded together, but their full
        contexts do not have to fit.
    prefill_chunk: the number of prompt tokens per step.
    pass_length: the number of prompt tokens for which a step reserves memory. It is larger than
        `prefill_chunk` if an image has more rows, and all of them must be computed together.
    context_that_fits: the maximum context length, up to `context`, for this many sequences; 0 if no
        context length fits.
    fits: whether the server will start, because the requested context length fits or, if none was
        requested, any context length fits.
    """

    weights: int
    kv_per_context: int
    working: int
    budget: int
    context: int
    sequences: int
    slots: int
    prefill_chunk: int
    pass_length: int
    context_that_fits: int
    fits: bool

    @property
    def needed(self) -> int:
        """The number of bytes needed for the weights, the working memory and the requested
        sequences."""
        return self.weights + self.working + self.sequences * self.kv_per_context


def estimate_fit(files: ModelFiles, settings: Settings) -> Fit:
    """Estimates the fit of model files returned by `complete_config`. Reads only headers and leaves
    nothing in memory. Creates arrays, so call it on a thread that does not use MLX otherwise.

    Raises AppError(MODEL_FILES) if no model can be built from the files.
    """
    return estimate_before_load(open_with_settings(files, settings), files, settings)


def open_with_settings(files: ModelFiles, settings: Settings) -> Model:
    """Opens a model as the engine does, without reading its weights. See `open_model`."""
    return open_model(
        files,
        settings.quantize,
        kv=settings.kv,
        activations=settings.activations,
        vision=settings.vision,
    )


def estimate_memory(
    files: ModelFiles, settings: Settings, loaded_bytes: int = 0
) -> MemoryRequirement:
    """Estimates the memory requirement of a model that shares the device with other models. The
    preconditions are the same as for `estimate_fit`. If the memory is fixed by the settings,
    returns that amount; the loader then checks whether the model fits.

    loaded_bytes: the number of bytes used by the models that are already loaded.
    """
    if settings.memory is not None:
        return MemoryRequirement(
            min_bytes=settings.memory,
            preferred_bytes=settings.memory,
            device_budget=device_budget(loaded_bytes),
        )
    sizes = _ModelSizes(open_with_settings(files, settings), files, settings)
    context = files.resolve_context_length(settings.context)
    usual = min(context, TYPICAL_SEQUENCE_LENGTH)
    many = settings.parallel or PREFERRED_SEQUENCES
    requested = sizes.total_bytes(settings.parallel or 1, context)
    least = requested if settings.context else sizes.total_bytes(1, usual)
    # Adds the same amount for the cached prefixes of finished requests.
    cached = many * sizes.kv_footprint(usual)
    return MemoryRequirement(
        min_bytes=least,
        preferred_bytes=max(requested, sizes.total_bytes(many, usual)) + cached,
        device_budget=device_budget(loaded_bytes),
    )


def estimate_before_load(model: Model, files: ModelFiles, settings: Settings) -> Fit:
    """Estimates the fit of an opened model like `estimate_fit`. The weights do not have to be
    loaded."""
    sizes = _ModelSizes(model, files, settings)
    budget = settings.memory or device_budget()
    sequences = settings.parallel or 1
    context = files.resolve_context_length(settings.context)
    slots = sizes.count_slots(budget, context, settings)
    longest = longest_fitting(
        lambda length: sizes.total_bytes(sequences, length, slots=slots) <= budget, context
    )
    return Fit(
        weights=sizes.weights,
        kv_per_context=sizes.kv_footprint(context),
        working=sizes.working_bytes(context, slots=slots),
        budget=budget,
        context=context,
        sequences=sequences,
        slots=slots,
        prefill_chunk=sizes.prefill_chunk,
        pass_length=sizes.pass_length,
        context_that_fits=longest,
        fits=longest >= (context if settings.context else 1),
    )


def adjust_after_load(estimate: Fit, memory: MemoryProfile, settings: Settings) -> Fit:
    """Returns the estimate with the measured working memory and the budget that was chosen after
    the load."""

    def room(length: int) -> bool:
        return estimate.sequences * memory.kv_footprint(length) <= memory.kv_budget

    longest = longest_fitting(room, estimate.context_that_fits)
    return replace(
        estimate,
        budget=memory.budget,
        working=memory.working,
        context_that_fits=longest,
        fits=longest >= (estimate.context if settings.context else 1),
    )


def choose_prefill_chunk(model: Model, files: ModelFiles, settings: Settings) -> int:
    """Returns the number of prompt tokens per step. The preconditions are the same as for
    `estimate_before_load`."""
    return settings.prefill_chunk or _ModelSizes(model, files, settings).prefill_chunk


def raise_unless_fits(estimate: Fit, files: ModelFiles) -> None:
    """Raises AppError(MODEL_FILES) if the model does not fit. The message suggests a context that
    fits."""
    if estimate.fits:
        return
    many = "a sequence" if estimate.sequences == 1 else f"{estimate.sequences} sequences"
    needs = (
        f"{files.path} does not fit in memory: it needs {format_memory(estimate.needed)} "
        f"({format_memory(estimate.weights)} for weights, "
        f"{format_memory(estimate.working)} for activations, "
        f"{format_memory(estimate.sequences * estimate.kv_per_context)} for the KV cache of {many} "
        f"of {estimate.context} tokens), but the budget is {format_memory(estimate.budget)}"
    )
    if estimate.context_that_fits:
        advice = f"set --context to at most {estimate.context_that_fits}"
        if estimate.sequences > 1:
            advice += f", or --parallel below {estimate.sequences}"
    else:
        advice = "no context length fits, so raise --memory or serve a smaller model"
    raise AppError(ErrorKind.MODEL_FILES, f"{needs}; {advice}")


class _ModelSizes:
    """The sizes of a model in bytes. `kv_footprint` is a function of the sequence length."""

    def __init__(self, model: Model, files: ModelFiles, settings: Settings) -> None:
        """Computes the sizes. Raises AppError(MODEL_FILES) if the model cannot be evaluated."""
        kv = model.make_kv()
        try:
            # two tokens, because one is computed like a decode step
            hidden = model(mx.array([[0, 0]]), kv)
            vocab = model.logits(hidden[:, -1]).size
        except ModelError as error:
            raise AppError(ErrorKind.MODEL_FILES, f"{files.path}: {error}") from error
        self.weights = sum(array.nbytes for array in list_parameters(model))
        activations = ActivationMemory(
            bytes_per_token=_activation_bytes_per_token(model, files.config, hidden, vocab),
            chunk=settings.prefill_chunk or 1,
            max_batch_size=1,
            vocab=vocab,
            heads=num_query_heads(files.config),
            layers=kv,
            attention=attention_shapes(kv),
        )
        self.prefill_chunk = (
            files.resolve_context_length(settings.context)
            if isinstance(model, Encoder)  # computes each input as a whole
            else settings.prefill_chunk or self._default_chunk(activations, files, settings)
        )
        self.pass_length = max(self.prefill_chunk, _count_atomic_rows(model, files))
        self._activations = replace(activations, chunk=self.pass_length)
        self.kv_footprint = KVFootprint(kv, self.pass_length)

    def _default_chunk(
        self, activations: ActivationMemory, files: ModelFiles, settings: Settings
    ) -> int:
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        if not on_gpu:
            budget, architecture = 0, ""
        else:
            budget = settings.memory or device_budget()
            architecture = str(read_device_info().get("architecture", ""))
        context = files.resolve_context_length(settings.context)
        return choose_chunk_length(
            on_gpu=on_gpu,
            experts=_has_experts(files.config),
            accelerators=has_accelerator_hardware(architecture),
            working=lambda chunk: replace(activations, chunk=chunk)(context),
            limit=int(_ACTIVATION_SHARE * max(0, budget - self.weights)),
        )

    def count_slots(self, budget: int, context: int, settings: Settings) -> int:
        """Returns `--parallel`, or the number of typical sequences that fit in memory. One sequence
        runs with `exact`, because batched kernels round differently, and with a prefix cache of a
        single entry."""
        if settings.parallel is not None:
            return settings.parallel
        if settings.exact or settings.cache == "single":
            return 1
        usual = min(context, TYPICAL_SEQUENCE_LENGTH)
        return count_slots(
            free_bytes=budget - self.weights - self.working_bytes(usual, slots=0),
            bytes_per_sequence=self.kv_footprint(usual) + self._activations.bytes_per_row,
        )

    def working_bytes(self, length: int, *, slots: int) -> int:
        return replace(self._activations, max_batch_size=slots)(length)

    def total_bytes(self, sequences: int, length: int, *, slots: int | None = None) -> int:
        """slots: the number of sequences that are decoded together; None for `sequences`."""
        working = self.working_bytes(length, slots=sequences if slots is None else slots)
        return self.weights + working + sequences * self.kv_footprint(length)


def _count_atomic_rows(model: Model, files: ModelFiles) -> int:
    """Returns the largest number of image rows that must be computed in one chunk; 0 if an image
    may be split."""
    rules = model.image_rules
    if rules is None or not rules.atomic or architectures.get_tower(model) is None:
        return 0
    given = (files.config.get(_ROWS_KEY), files.processor_config.get(_MAX_ROWS_KEY))
    return max((count for count in given if isinstance(count, int)), default=_DEFAULT_ATOMIC_ROWS)


def _has_experts(config: Mapping[str, Any]) -> bool:
    text = get_text_config(config)
    return any(text.get(name) for name in _EXPERTS_PER_TOKEN_KEYS)


def _activation_bytes_per_token(
    model: Model, config: Mapping[str, Any], hidden: mx.array, vocab: int
) -> int:
    """Returns the estimated size of the activations that a step holds per token."""
    assert isinstance(model, nn.Module)
    chosen = next(
        (config[name] for name in _EXPERTS_PER_TOKEN_KEYS if config.get(name)),
        _DEFAULT_EXPERTS_PER_TOKEN,
    )
    modules: Sequence[tuple[str, Any]] = model.named_modules()
    widths = {
        _output_width(module, chosen) for name, module in modules if not name.startswith("vision.")
    }
    # The output layer is excluded, because logits are computed for one row only. The memory of the
    # vision tower is reserved for each image.
    widest = max(widths - {vocab}, default=0)
    last = hidden.shape[-1]
    # Model classes that return logits return only one row.
    rows = _ACTIVATION_ROWS * (widest + last) if last < vocab else _ACTIVATION_ROWS * widest + last
    return rows * hidden.dtype.size


def _output_width(module: Any, chosen: int) -> int:
    """Returns the number of output features per token of a linear layer. For stacked experts,
    counts only the active experts of a token. Returns 0 for other layers."""
    weight = module.get("weight")
    if (
        weight is None
        or weight.ndim < 2
        or isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ):
        return 0
    stacked = weight.shape[0] if weight.ndim == 3 else 1
    return min(stacked, chosen) * weight.shape[-2]
