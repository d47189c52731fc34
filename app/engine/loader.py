"""Loads model files into an engine loop that is ready to run jobs.

Knows: the steps of a load, the memory rules of the device, the prefix cache policies. Must not
know: the model store, requests. Runs on the engine thread, like all code that uses tensors.
"""

import gc
import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.core.units import format_bytes
from app.engine.adapters import Adapters
from app.engine.decode_slab import SlabPolicy
from app.engine.device import read_device_memory
from app.engine.distributed import DistributedGroup
from app.engine.encoder_loop import EncoderLoop
from app.engine.fit import (
    TYPICAL_SEQUENCE_LENGTH,
    Fit,
    adjust_after_load,
    choose_prefill_chunk,
    estimate_before_load,
    raise_unless_fits,
)
from app.engine.known_answers import check_model_on_gpu
from app.engine.loop import Loop
from app.engine.memory_policy import choose_pool_limit, choose_rules
from app.engine.memory_profile import (
    MemoryProfile,
    clear_allocator_cache,
    profile_memory,
)
from app.engine.policy import SchedulerLimits, count_slots
from app.engine.pooler import load_embedding_head, load_gguf_embedding_head
from app.engine.precision import avoid_float16, widen_if_too_large
from app.engine.prefix.cache import PrefixCache, PrefixCacheConfig, create_prefix_cache
from app.engine.sampling.sampler import local_tokens
from app.engine.thread import EngineLoop
from app.engine.weights import ProgressCallback, list_parameters, open_model, read_weights
from models import architectures
from models.base import Model
from models.checkpoint_config import is_encoder, num_query_heads
from models.cpu_layout import is_batch_invariant
from models.encoder import Encoder
from models.gguf.reader import has_magic
from models.gpu_layout import apply_gpu_layout
from models.kv import LayerCache, dispatch_caches, evaluate_caches

# A step takes several rounds of prompt chunks only if they fit in this time. If it were longer, the
# pauses of a running stream would be noticeable. If it were shorter, prompts would take longer,
# because each step also decodes.
_STEP_SECONDS = 0.1

# With the default number of slots, no further sequence starts if a decode step would take longer.
_DECODE_SECONDS = 0.25

log = logging.getLogger(__name__)


def load_engine(files: ModelFiles, settings: Settings, report: ProgressCallback) -> EngineLoop:
    """Loads a model in a single process: an encoder into an `EncoderLoop`, any other model into a
    `Loop`. Raises the same errors as `load`."""
    if not is_encoder(files.config):
        return load(files, settings, report)
    with _freeing_memory():
        return _load_encoder(files, settings, report)


def load(
    files: ModelFiles,
    settings: Settings,
    report: ProgressCallback,
    ranks: DistributedGroup | None = None,
    kv_bytes: int | None = None,
) -> Loop:
    """Loads a model that generates text.

    ranks: the group of ranks that share the model; None if a single process runs the model.
    kv_bytes: the memory for layer caches, instead of the memory that the weights and activations
        leave. The measured size of activations varies by a few percent, so only this makes
        preemptions repeatable.

    Raises AppError(MODEL_FILES) if the files are unusable or no memory is left for a sequence.
    After any exception, all tensors are freed, including tensors referenced by the frames of the
    traceback.
    """
    if is_encoder(files.config):
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"{files.path} is an encoder, which generates no text and runs in a single process: "
            "use it for embeddings, without --ranks",
        )
    with _freeing_memory():
        return _load(files, settings, report, ranks, kv_bytes)


@contextmanager
def _freeing_memory() -> Generator[None]:
    """Frees the source of a weight as soon as it is converted, and all tensors after an error."""
    kept = mx.set_cache_limit(0)
    try:
        yield
    except Exception as error:
        _release_tensors(error)
        mx.set_cache_limit(kept)
        raise


def _load_encoder(files: ModelFiles, settings: Settings, report: ProgressCallback) -> EncoderLoop:
    model = open_model(files, settings.quantize, activations=settings.activations)
    assert isinstance(model, Encoder)
    fit = estimate_before_load(model, files, settings)
    raise_unless_fits(fit, files)
    read_weights(model, files.path, report)
    _check_device(model, files)
    width = int(files.config["hidden_size"])
    if has_magic(files.shards[0]):
        head = load_gguf_embedding_head(files.shards[0], width)
    else:
        head = load_embedding_head(files.path, width)
    return EncoderLoop(
        model,
        head,
        context=fit.context_that_fits,
        budget=fit.budget,
        weights=fit.weights,
        working=fit.working,
        limited_by_memory=fit.context_that_fits < fit.context,
    )


def _load(
    files: ModelFiles,
    settings: Settings,
    report: ProgressCallback,
    ranks: DistributedGroup | None,
    kv_bytes: int | None,
) -> Loop:
    model = open_model(
        files,
        settings.quantize,
        ranks,
        kv=settings.kv,
        activations=settings.activations,
        vision=settings.vision,
    )
    _report_conversion(model, files)
    has_limit = settings.memory is not None or kv_bytes is not None
    if ranks is not None:
        settings = ranks.reconcile_settings(
            settings, lambda agreed: choose_prefill_chunk(model, files, agreed)
        )
        avoid_float16(model, settings.kv)
    elif settings.exact and is_batch_invariant(model) and settings.kv_layout != "slab":
        # The CPU kernels are batch-invariant, so the results are bit-identical even without the
        # restrictions of `exact`.
        settings = replace(settings, exact=False)
    fit = estimate_before_load(model, files, settings)
    raise_unless_fits(fit, files)
    read_weights(model, files.path, report)
    _check_device(model, files)
    if settings.experimental_metal:
        for reason in apply_gpu_layout(model):
            log.warning("%s", reason)
    # they copy the modules in their final layout
    adapters = Adapters(model, settings.adapters, config=files.config, default=files.adapter_path)
    if not getattr(model, "may_share_pass", True):
        log.info("%s: sequences are computed one by one, because its class is mlx-lm's", files.name)
    memory = _profile_memory(model, fit, files, settings)
    memory = replace(memory, weights=memory.weights + adapters.nbytes)
    if kv_bytes is not None:
        memory = replace(memory, budget=memory.weights + memory.working + kv_bytes)
    if ranks is not None:
        memory = ranks.reconcile_memory(memory)
    raise_unless_fits(adjust_after_load(fit, memory, settings), files)
    mx.set_cache_limit(choose_pool_limit(memory.budget, memory.working))
    context = fit.context
    limits = _choose_limits(model, fit, settings, memory, ranks)
    return Loop(
        model,
        _make_prefix_cache(model, settings, limits, context),
        vocab=files.sampleable_vocab_size,
        limits=limits,
        memory=memory,
        context=context,
        exact=settings.exact,
        shift=model.shift if settings.context_shift else None,
        broadcast_tokens=local_tokens if ranks is None else ranks.broadcast_tokens,
        rules=choose_rules(
            read_device_memory(),
            kv_budget=memory.kv_budget,
            conversation=memory.kv_footprint(memory.max_context(context)),
            has_limit=has_limit,
            may_shrink=ranks is None,
            experimental_metal=settings.experimental_metal,
            weight_buffers=len(list_parameters(model)),
            running_layers=limits.max_running * memory.num_layers,
            buffers_per_layer=memory.buffers_per_layer,
        ),
        slab_policy=SlabPolicy(layout=settings.kv_layout),
        adapters=adapters,
        min_kv_budget=_find_min_kv_budget(fit, memory, settings),
    )


def _find_min_kv_budget(fit: Fit, memory: MemoryProfile, settings: Settings) -> int:
    """Returns the memory that a later adapter must leave for layer caches: with a configured
    context, the amount that it needs, so that the model can be loaded again with the adapter."""
    length = fit.context if settings.context else min(fit.context, TYPICAL_SEQUENCE_LENGTH)
    return min(memory.kv_budget, fit.sequences * memory.kv_footprint(length))


def _report_conversion(model: Model, files: ModelFiles) -> None:
    """Logs a line if weights need more memory than in the files."""
    conversion = architectures.get_conversion(model)
    if conversion is not None and conversion.is_larger:
        log.warning(
            "%s: converting %s, because MLX has no packing with the same numbers: %s in the files, "
            "%s in memory",
            files.name,
            conversion.describe(),
            format_bytes(files.weight_bytes),
            format_bytes(sum(array.nbytes for array in list_parameters(model))),
        )


def _choose_limits(
    model: Model,
    fit: Fit,
    settings: Settings,
    memory: MemoryProfile,
    ranks: DistributedGroup | None,
) -> SchedulerLimits:
    return SchedulerLimits(
        max_running=_count_slots(fit, settings, memory, fit.context),
        max_prefill_tokens=fit.prefill_chunk,
        align_chunks=settings.exact or not is_batch_invariant(model),
        # The clocks of ranks differ, so a step always takes one round there.
        step_seconds=_STEP_SECONDS if ranks is None else None,
        decode_seconds=_DECODE_SECONDS if ranks is None and not settings.parallel else None,
    )


def _check_device(model: Model, files: ModelFiles) -> None:
    """Raises AppError(MODEL_FILES) if the GPU computes wrong results."""
    found = check_model_on_gpu(model)
    for warning in found.warnings:
        log.warning("%s; `mlxrunner doctor` may show the reason", warning)
    if found.wrong:
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"{files.path} was not loaded, because the GPU computes wrong results: "
            f"{'; '.join(found.wrong)}. Update the operating system or the driver, and reinstall "
            "MLX; `mlxrunner doctor` shows their versions",
        )


def _profile_memory(model: Model, fit: Fit, files: ModelFiles, settings: Settings) -> MemoryProfile:
    """Measures the working memory with a trial forward pass, after the type of the layer caches is
    final."""
    try:
        widen_if_too_large(
            model, settings.kv, vocab=files.sampleable_vocab_size, name=str(files.path)
        )
        return profile_memory(
            model,
            budget=fit.budget,
            weights=fit.weights,
            chunk=fit.pass_length,
            max_batch_size=fit.slots,
            heads=num_query_heads(files.config),
            context=fit.context_that_fits,
        )
    except (MemoryError, RuntimeError) as error:  # an unsupported operation, or out of memory
        raise AppError(
            ErrorKind.MODEL_FILES, f"{files.path}: a trial forward pass failed: {error}"
        ) from error


def _release_tensors(error: BaseException | None) -> None:
    """Frees the tensors that an error references. The error outlives the load, and its traceback
    references the local variables of every frame."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    clear_allocator_cache()


def _count_slots(fit: Fit, settings: Settings, memory: MemoryProfile, context: int) -> int:
    """Returns the estimated number of slots, or less if the measured memory does not suffice."""
    if settings.parallel is not None:
        return settings.parallel
    usual = memory.kv_footprint(min(context, TYPICAL_SEQUENCE_LENGTH))
    return min(fit.slots, count_slots(free_bytes=memory.kv_budget, bytes_per_sequence=usual))


def _make_prefix_cache(
    model: Model, settings: Settings, limits: SchedulerLimits, context: int
) -> PrefixCache[LayerCache]:
    """Creates the configured prefix cache. The default is a radix tree for several sequences, and a
    single entry for one sequence."""
    grid = limits.max_prefill_tokens if settings.exact else 1
    policy = settings.cache or ("single" if limits.max_running == 1 else "radix")
    config = PrefixCacheConfig(
        make_kv=model.make_kv,
        evaluate=evaluate_caches,
        dispatch=dispatch_caches,
        alignment=grid,
        num_slots=limits.max_running,
        context=context,
        multi_user=settings.multi_user,
    )
    return create_prefix_cache(policy, config)
