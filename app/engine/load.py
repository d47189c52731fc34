"""Model files -> a loop that is ready to generate.

Knows: in which order things are done, the device's memory settings, which policy suits. Must not
know: where models come from, requests. Runs on the engine thread, like everything that touches a
tensor.
"""

import gc
import traceback
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.ports import PrefixCache
from app.core.settings import Settings
from app.engine.fit import (
    MOST_PARALLEL,
    USUAL_LENGTH,
    Fit,
    corrected,
    foretold,
    prefill_chunk,
    refuse,
)
from app.engine.loop import Loop
from app.engine.memory import Memory, clear_cache, measured, query_heads
from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.single import SinglePrefixCache
from app.engine.prefix.slots import SlotPrefixCache
from app.engine.ranks import Ranks
from app.engine.sampler import own
from app.engine.scheduler import Limits
from app.engine.weights import Report, open_model, read
from models.base import Model
from models.kv import LayerCache
from models.layout import batch_invariant


def load(files: ModelFiles, settings: Settings, report: Report, ranks: Ranks | None = None) -> Loop:
    """ranks: those that each load a part of it, this one among them.

    Raises AppError(MODEL_FILES), also for a model that leaves no room for a sequence. Whatever is
    raised, no tensor is left behind, in the frames of the traceback neither."""
    kept = mx.set_cache_limit(0)  # what a weight was made of is given back at once
    try:
        return _loaded(files, settings, report, ranks)
    except Exception as error:
        _let_go(error)
        mx.set_cache_limit(kept)
        raise


def _loaded(files: ModelFiles, settings: Settings, report: Report, ranks: Ranks | None) -> Loop:
    model = open_model(files, settings.quantize, ranks)
    if ranks is not None:
        settings = ranks.settled(settings)
    elif settings.exact and batch_invariant(model):
        # what it would take away is not what makes bits differ here
        settings = replace(settings, exact=False)
    fit = foretold(model, files, settings)
    refuse(fit, files)
    read(model, files.path, report)
    memory = _tried(model, fit, files, settings)
    if ranks is not None:
        memory = ranks.measured(memory)
    refuse(corrected(fit, memory, settings), files)
    _bound_allocator(memory)
    context = fit.context
    limits = Limits(
        running=settings.parallel or _suitable_parallel(settings, memory, context),
        prefill=prefill_chunk(settings),
        whole=settings.exact,
    )
    return Loop(
        model,
        _prefix_cache(model, settings, limits, context),
        vocab=files.sampled_ids,
        limits=limits,
        memory=memory,
        context=context,
        exact=settings.exact,
        shift=model.shift if settings.context_shift else None,
        agreed=own if ranks is None else ranks.agreed,
    )


def _tried(model: Model, fit: Fit, files: ModelFiles, settings: Settings) -> Memory:
    """One token evaluated."""
    try:
        return measured(
            model,
            budget=fit.budget,
            weights=fit.weights,
            chunk=prefill_chunk(settings),
            rows=settings.parallel or MOST_PARALLEL,
            heads=query_heads(files.config),
            context=fit.context_that_fits,
        )
    except (MemoryError, RuntimeError) as error:  # what the device cannot do, or has no room for
        raise AppError(
            Kind.MODEL_FILES, f"{files.path}: a trial forward pass failed: {error}"
        ) from error


def _let_go(error: BaseException | None) -> None:
    """An error is kept until it was told, and its traceback holds every frame's variables."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    clear_cache()


def _suitable_parallel(settings: Settings, memory: Memory, context: int) -> int:
    """As many sequences as fit with a usual length each, at least one. One where the cache has only
    one entry, or where bits count: kernels round differently for a batch."""
    if settings.exact or settings.cache == "single":
        return 1
    usual = memory.footprint(min(context, USUAL_LENGTH))
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


def _bound_allocator(memory: Memory) -> None:
    """Free buffers that the allocator keeps count as working space. On Metal, keep what we use
    resident: without it the system may page it out between requests, and large models then decode
    an order of magnitude slower (mlx-lm#652)."""
    mx.set_cache_limit(memory.working)
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(memory.budget, recommended))
