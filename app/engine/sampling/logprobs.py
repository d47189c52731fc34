"""Log probabilities of sampled tokens and prompt tokens.

Knows: tensors, the logits of a model. Must not know: sequences, caches, requests.

Log probabilities are always computed in float32 from the raw logits of all tokens in the
vocabulary, before any sampling stage.
"""

import math
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from app.engine.memory_profile import PROMPT_LOGPROBS_CHUNK
from app.engine.sampling.draw import topk
from models import kernels
from models.base import Model

# The natural log probability of one token, and the most likely tokens with their log probabilities,
# most likely first.
PromptLogprob = tuple[float, tuple[tuple[int, float], ...]]


def compute_logprobs(
    logits: mx.array, ids: mx.array, count: int
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Returns the log probabilities of `ids` [B] under logits [B, V], as float32 [B]. Also returns
    the `count` most likely tokens and their log probabilities, both of shape [B, k] and most likely
    first; None if count is 0.

    The maximum is subtracted before summing. Near 1e4, float32 has a resolution of 1e-3, so without
    the subtraction, every log probability would have an error of this size.

    On the CPU, one operation of the kernels scores all rows. It sums probabilities in a different
    order than MLX, so the last bits differ.
    """
    if (ops := kernels.ops(logits)) is None:
        return compute_logprobs_with_mlx(logits, ids, count)
    count = min(count, logits.shape[-1])
    chosen, best, largest = ops.logprobs(logits, ids.astype(mx.uint32), count)
    return chosen, best if count else None, largest if count else None


def compute_logprobs_with_mlx(
    logits: mx.array, ids: mx.array, count: int
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Computes the result of `compute_logprobs` with MLX's operations."""
    relative = logits - mx.max(logits, axis=-1, keepdims=True)
    total = mx.logsumexp(relative, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(relative, ids[:, None], axis=-1) - total)[:, 0]
    if count == 0:
        return chosen, None, None
    best, largest = topk(relative, min(count, logits.shape[-1]))
    return chosen, best, largest - total


def compute_prompt_logprobs(
    model: Model, hidden: mx.array, ids: Sequence[int], *, vocab: int, count: int
) -> list[PromptLogprob]:
    """Returns the log probability of each of `ids`, given the hidden states [n, D] at the preceding
    positions. Waits for the device.

    Processes and evaluates a few positions at a time, because the logits of a whole chunk could be
    as large as a model. Token IDs from 0 to vocab - 1 may be sampled; all other IDs have
    probability 0.
    """
    assert hidden.shape[0] == len(ids)
    found: list[PromptLogprob] = []
    for start in range(0, len(ids), PROMPT_LOGPROBS_CHUNK):
        some = ids[start : start + PROMPT_LOGPROBS_CHUNK]
        logits = model.logits(hidden[start : start + PROMPT_LOGPROBS_CHUNK])[:, :vocab].astype(
            mx.float32
        )
        known = mx.array([min(id, vocab - 1) for id in some])
        logprobs, best, largest = compute_logprobs(logits, known, count)
        mx.eval([array for array in (logprobs, best, largest) if array is not None])
        values = cast(list[float], logprobs.tolist())
        tops = _top_logprobs(best, largest, len(some))
        found += [
            (logprob if id < vocab else -math.inf, top)
            for id, logprob, top in zip(some, values, tops, strict=True)
        ]
    return found


def _top_logprobs(
    ids: mx.array | None, logprobs: mx.array | None, rows: int
) -> list[tuple[tuple[int, float], ...]]:
    if ids is None or logprobs is None:
        return [()] * rows
    found = cast(list[list[int]], ids.tolist())
    top_values = cast(list[list[float]], logprobs.tolist())
    return [
        tuple(zip(row, values, strict=True)) for row, values in zip(found, top_values, strict=True)
    ]
