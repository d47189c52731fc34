"""Loads model files into a `Loop` that is ready to generate.

Knows: the steps of a load, the memory settings of the device, the prefix cache policies. Must not
know: the model store, requests. Runs on the engine thread, like all code that uses tensors.
"""

import gc
import traceback
from dataclasses import replace

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.ports import PrefixCache
from app.core.settings import Settings
from app.engine.distributed import DistributedGroup
from app.engine.fit import (
    DEFAULT_MAX_PARALLEL,
    TYPICAL_SEQUENCE_LENGTH,
    Fit,
    adjust_after_load,
    choose_prefill_chunk,
    estimate_before_load,
    raise_unless_fits,
)
from app.engine.loop import Loop
from app.engine.memory_profile import (
    MemoryProfile,
    clear_allocator_cache,
    num_query_heads,
    profile_memory,
)
from app.engine.policy import SchedulerLimits
from app.engine.prefix.policy import PrefixCacheConfig, create_prefix_cache
from app.engine.sampling.sampler import local_tokens
from app.engine.weights import ProgressCallback, open_model, read_weights
from models.base import Model
from models.cpu_layout import is_batch_invariant
from models.kv import LayerCache, evaluate_caches


def load(
    files: ModelFiles,
    settings: Settings,
    report: ProgressCallback,
    ranks: DistributedGroup | None = None,
) -> Loop:
    """Loads a model.

    ranks: the group of ranks that share the model; None if a single process runs the model.

    Raises AppError(MODEL_FILES) if the files are unusable or no memory is left for a sequence.
    After any exception, all tensors are freed, including tensors referenced by the frames of the
    traceback.
    """
    kept = mx.set_cache_limit(0)  # free the sources of a weight immediately
    try:
        return _load(files, settings, report, ranks)
    except Exception as error:
        _release_tensors(error)
        mx.set_cache_limit(kept)
        raise


def _load(
    files: ModelFiles, settings: Settings, report: ProgressCallback, ranks: DistributedGroup | None
) -> Loop:
    model = open_model(files, settings.quantize, ranks)
    if ranks is not None:
        settings = ranks.reconcile_settings(settings)
    elif settings.exact and is_batch_invariant(model):
        # The CPU kernels are batch-invariant, so the results are bit-identical even without the
        # restrictions of `exact`.
        settings = replace(settings, exact=False)
    fit = estimate_before_load(model, files, settings)
    raise_unless_fits(fit, files)
    read_weights(model, files.path, report)
    memory = _profile_memory(model, fit, files, settings)
    if ranks is not None:
        memory = ranks.reconcile_memory(memory)
    raise_unless_fits(adjust_after_load(fit, memory, settings), files)
    _limit_allocator(memory)
    context = fit.context
    limits = SchedulerLimits(
        max_running=settings.parallel or _auto_parallel(settings, memory, context),
        max_prefill_tokens=choose_prefill_chunk(settings),
        align_chunks=settings.exact,
    )
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
    )


def _profile_memory(model: Model, fit: Fit, files: ModelFiles, settings: Settings) -> MemoryProfile:
    """Measures the working memory with a trial forward pass."""
    try:
        return profile_memory(
            model,
            budget=fit.budget,
            weights=fit.weights,
            chunk=choose_prefill_chunk(settings),
            max_batch_size=settings.parallel or DEFAULT_MAX_PARALLEL,
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


def _auto_parallel(settings: Settings, memory: MemoryProfile, context: int) -> int:
    """Returns the number of typical sequences that fit in memory, at least one. Returns one if the
    prefix cache has a single entry, or with `exact`, because batched kernels round differently."""
    if settings.exact or settings.cache == "single":
        return 1
    usual = memory.kv_footprint(min(context, TYPICAL_SEQUENCE_LENGTH))
    return max(1, min(DEFAULT_MAX_PARALLEL, memory.kv_budget // usual))


def _make_prefix_cache(
    model: Model, settings: Settings, limits: SchedulerLimits, context: int
) -> PrefixCache[LayerCache]:
    """Creates the configured prefix cache. The default is a radix tree for several sequences, and a
    single entry for one sequence."""
    grid = limits.max_prefill_tokens if limits.align_chunks else 1
    policy = settings.cache or ("single" if limits.max_running == 1 else "radix")
    config = PrefixCacheConfig(
        make_kv=model.make_kv,
        evaluate=evaluate_caches,
        alignment=grid,
        num_slots=limits.max_running,
        context=context,
        multi_user=settings.multi_user,
    )
    return create_prefix_cache(policy, config)


def _limit_allocator(memory: MemoryProfile) -> None:
    """Limits the allocator's cache of free buffers to the working memory. On Metal, also wires the
    memory of this process, because otherwise the system may page it out between requests, and large
    models then decode an order of magnitude more slowly (mlx-lm#652)."""
    mx.set_cache_limit(memory.working)
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(memory.budget, recommended))
