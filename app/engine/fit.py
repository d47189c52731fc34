"""Whether a model fits, before any of its weights is read.

Knows: what is asked of the engine, what models and layer caches say of themselves unevaluated: an
array knows its shape and type before it has a value. Must not know: requests, what runs.

    budget  [ weights | working space | layer caches: sequences x context ........ | free ]

Weights and layer caches are counted to the byte, `--quantize` included; the working space is an
estimate, which the engine replaces by a measurement once the weights are there (`corrected`). So a
budget that is just enough by the one may be too little by the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from app.core.amounts import in_memory
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.residents import Need
from app.core.settings import Settings
from app.engine.device import device_budget
from app.engine.memory import Footprint, Memory, Working, longest_that, query_heads
from app.engine.weights import open_model, parameters
from models.base import Model, ModelError

# sequences at once when nobody says how many
MOST_PARALLEL = 8

# the length that each of several sequences is given room for when nobody says how many there are
USUAL_LENGTH = 4096

# what a step holds of a token at a time, in rows as wide as the widest result of a layer and in
# rows of hidden states: measured on Llamas of 288 to 2048 wide, and rounded up
_ROWS_HELD = 8

# experts that a token passes through, and how many are taken where the config does not say
_CHOSEN, _MANY_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes: weights; kv_per_context, the layer caches of one sequence of `context` positions;
    working, what a step needs while it runs; budget, for everything.

    context: positions of a sequence that were asked for, else what the model is served with.
    sequences: how many are to have that much at the same time. context_that_fits: the longest that
    so many can have, at most `context`; 0 where there is no room for any. fits: whether the server
    will start: with the context that was asked for, or with some where none was.
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
        """Bytes for everything that was asked for."""
        return self.weights + self.working + self.sequences * self.kv_per_context


def fit(files: ModelFiles, settings: Settings) -> Fit:
    """Of model files that were `complete`d. Reads headers only, and leaves nothing in memory; to
    be called on a thread that does nothing else with MLX, like everything that makes arrays.

    Raises AppError(MODEL_FILES) for files that cannot become a model.
    """
    return foretold(open_model(files, settings.quantize), files, settings)


def need(files: ModelFiles, settings: Settings, held: int = 0) -> Need:
    """What to give a model that shares the device with others; as `fit`, for the rest. Where it was
    said how much memory it shall have, that is what it needs: whether it can do with so much is
    seen when it is loaded. held: bytes that models have which are loaded already."""
    if settings.memory is not None:
        return Need(least=settings.memory, wanted=settings.memory, budget=device_budget(held))
    sizes = _Sizes(open_model(files, settings.quantize), files, settings)
    context = files.served_context(settings.context)
    usual = min(context, USUAL_LENGTH)
    many = settings.parallel or MOST_PARALLEL
    asked = sizes.together(many if settings.parallel else 1, context)
    least = asked if settings.context else sizes.together(1, usual)
    # as much again for cached prefixes on which nobody runs
    cached = many * sizes.footprint(usual)
    return Need(
        least=least,
        wanted=max(asked, sizes.together(many, usual)) + cached,
        budget=device_budget(held),
    )


def foretold(model: Model, files: ModelFiles, settings: Settings) -> Fit:
    """The same of a model whose weights may have been read or not."""
    sizes = _Sizes(model, files, settings)
    budget = settings.memory or device_budget()
    sequences = settings.parallel or 1
    context = files.served_context(settings.context)
    longest = longest_that(lambda length: sizes.together(sequences, length) <= budget, context)
    return Fit(
        weights=sizes.weights,
        kv_per_context=sizes.footprint(context),
        working=sizes.working(context),
        budget=budget,
        context=context,
        sequences=sequences,
        context_that_fits=longest,
        fits=longest >= (context if settings.context else 1),
    )


def corrected(found: Fit, memory: Memory, settings: Settings) -> Fit:
    """What was foretold, with the working space that was measured since."""

    def room(length: int) -> bool:
        return found.sequences * memory.footprint(length) <= memory.kv_budget

    longest = longest_that(room, found.context_that_fits)
    return replace(
        found,
        working=memory.working,
        context_that_fits=longest,
        fits=longest >= (found.context if settings.context else 1),
    )


def prefill_chunk(settings: Settings) -> int:
    """Prompt tokens per step: as few as keep the device busy (DECISIONS.md, 2026-11-21)."""
    if settings.prefill_chunk:
        return settings.prefill_chunk
    return 128 if mx.default_device().type == mx.DeviceType.cpu else 512


def refuse(found: Fit, files: ModelFiles) -> None:
    """Raises AppError(MODEL_FILES) for a model that does not fit, with what would."""
    if found.fits:
        return
    many = "a sequence" if found.sequences == 1 else f"{found.sequences} sequences"
    needs = (
        f"{files.path} does not fit in memory: weights {in_memory(found.weights)}, activations "
        f"{in_memory(found.working)}, KV cache for {many} of {found.context} tokens "
        f"{in_memory(found.sequences * found.kv_per_context)}, {in_memory(found.needed)} "
        f"in total, but the budget is {in_memory(found.budget)}"
    )
    if found.context_that_fits:
        advice = f"the largest --context that fits is {found.context_that_fits}"
        if found.sequences > 1:
            advice += f", or set --parallel below {found.sequences}"
    else:
        advice = "no context length fits: raise --memory, or serve a smaller model"
    raise AppError(Kind.MODEL_FILES, f"{needs}: {advice}")


class _Sizes:
    """What a model takes, in bytes. working, footprint: functions of a sequence's length."""

    def __init__(self, model: Model, files: ModelFiles, settings: Settings) -> None:
        """Raises AppError(MODEL_FILES)."""
        kv = model.make_kv()
        try:
            hidden = model(mx.array([[0]]), kv)
            vocab = model.logits(hidden[:, -1]).size
        except ModelError as error:
            raise AppError(Kind.MODEL_FILES, f"{files.path}: {error}") from error
        chunk = prefill_chunk(settings)
        self.weights = sum(array.nbytes for array in parameters(model))
        self.footprint = Footprint(kv, chunk)
        self.working = Working(
            token=_token_bytes(model, files.config, hidden, vocab),
            chunk=chunk,
            rows=settings.parallel or MOST_PARALLEL,
            vocab=vocab,
            heads=query_heads(files.config),
            layers=kv,
        )

    def together(self, sequences: int, length: int) -> int:
        return self.weights + self.working(length) + sequences * self.footprint(length)


def _token_bytes(model: Model, config: Mapping[str, Any], hidden: mx.array, vocab: int) -> int:
    """About what a step holds of one token while it runs."""
    assert isinstance(model, nn.Module)
    chosen = next((config[name] for name in _CHOSEN if config.get(name)), _MANY_CHOSEN)
    modules: Sequence[tuple[str, Any]] = model.named_modules()
    widths = {_width(module, chosen) for _, module in modules}
    # but for the output layer, of which there is one row
    widest = max(widths - {vocab}, default=0)
    last = hidden.shape[-1]
    # of a class that gives nothing but logits there is one row of them
    rows = _ROWS_HELD * (widest + last) if last < vocab else _ROWS_HELD * widest + last
    return rows * hidden.dtype.size


def _width(module: Any, chosen: int) -> int:
    """Numbers that come out of a linear layer for one token; of stacked ones, out of those that the
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
