"""Memory sizes: the bytes per sequence, the bytes per step, and the maximum length that fits.

Knows: layer caches, models as functions, arithmetic. Must not know: requests, running jobs, the
machine.

The sizes of weights and caches are computed rather than read from the allocator, because the ledger
must be correct before the memory is allocated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.base import Model
from models.kernels.in_place_attention import score_buffer_bytes
from models.kv import STEP, LayerCache

# The config keys for the number of query heads, and the default if all of them are missing.
_QUERY_HEAD_KEYS = ("num_attention_heads", "num_query_heads", "num_heads", "n_heads", "n_head")
_DEFAULT_QUERY_HEADS = 64

# The peak memory depends on how far the device lags behind Python, which varies. The maximum of
# several runs is therefore used.
_PROFILE_RUNS = 3

# The number of prompt positions whose log probabilities are computed together. A small number keeps
# the memory for logits small, but with only one position, the weights of the output layer would be
# read for each position.
PROMPT_LOGPROBS_CHUNK = 8


def clear_allocator_cache() -> None:
    """Frees the allocator's cache of unused buffers.

    Does nothing on a CPU, which has no such cache. There, MLX would only wait for all pending work
    while holding the GIL. If another rank has exited during a collective operation, MLX would wait
    forever, and no Python thread could report the problem or exit the process.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        mx.clear_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """The memory sizes of a loaded model in bytes.

    budget: the memory budget of the engine.
    weights: the size of the weights.
    working: the bytes reserved for the activations of a step, for sequences of up to `max_length`
        positions.
    kv_footprint: returns the size of one sequence's layer caches for a number of positions.
    hidden_size: the hidden size of the model; None if the model returns only logits.
    """

    budget: int
    weights: int
    working: int
    max_length: int
    kv_footprint: Callable[[int], int]
    hidden_size: int | None = None

    @property
    def kv_budget(self) -> int:
        """The number of bytes available for the layer caches of running sequences and for cached
        prefixes."""
        return max(0, self.budget - self.weights - self.working)

    def max_context(self, limit: int) -> int:
        """Returns the maximum length of a single sequence that fits in memory, up to `limit`
        positions."""
        return longest_fitting(
            lambda length: self.kv_footprint(length) <= self.kv_budget, min(limit, self.max_length)
        )


def longest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """Returns `limit` if it fits, and otherwise the largest multiple of STEP that fits. The
    predicate `fits` must be monotonic."""
    if fits(limit):
        return limit
    low, high = 0, -(-limit // STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


class KVFootprint:
    """The size of the layer caches of one sequence, extrapolated from a sequence with one or two
    tokens."""

    def __init__(self, layers: Sequence[LayerCache], chunk: int) -> None:
        """`layers` are the caches of such a sequence, which may be unevaluated. `chunk` is the
        number of positions per forward pass."""
        self._layers = layers
        self._chunk = chunk

    def __call__(self, positions: int) -> int:
        return sum(layer.estimate_nbytes(positions, self._chunk) for layer in self._layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """The working memory of a step.

    bytes_per_token: the number of bytes per prompt token.
    chunk: the number of prompt tokens per step.
    max_batch_size: the maximum number of sequences that are decoded together.
    vocab: the number of logits per sequence.
    heads: the number of query heads of an attention layer.
    layers: the layer caches.
    """

    bytes_per_token: int
    chunk: int
    max_batch_size: int
    vocab: int
    heads: int
    layers: Sequence[LayerCache]

    def __call__(self, context: int) -> int:
        """Returns the number of bytes for sequences of up to `context` positions. This includes the
        activations of a prompt chunk and the logits. On a CPU, it also includes the attention
        scores of the chunk for all visible positions, which MLX materializes only on CPUs."""
        # Sampling needs three times the size of the float32 logits in addition to the logits.
        # Prompt log probabilities computed in the same step need the same amount per position.
        needed = (
            self.chunk * self.bytes_per_token
            + 16 * (self.max_batch_size + PROMPT_LOGPROBS_CHUNK) * self.vocab
        )
        if mx.default_device().type == mx.DeviceType.cpu:
            needed += max(
                (self._attention_score_bytes(layer, context) for layer in self.layers), default=0
            )
        return needed

    def _attention_score_bytes(self, layer: LayerCache, context: int) -> int:
        seen = self._visible_positions(layer, context)
        ours = score_buffer_bytes(layer, self.heads, seen)
        return 2 * 4 * self.heads * self.chunk * seen if ours is None else ours

    def _visible_positions(self, layer: LayerCache, context: int) -> int:
        """Returns the number of positions that one query of the layer attends to. This is derived
        from the cache size: a full cache grows with the context, a sliding window grows up to the
        window size, and a recurrent state does not grow."""
        bytes_then = layer.estimate_nbytes(context, self.chunk)
        if layer.estimate_nbytes(2 * context, self.chunk) > bytes_then:
            return context
        return min(context, STEP * bytes_then // max(1, layer.estimate_nbytes(1, self.chunk)))


def profile_memory(
    model: Model,
    *,
    budget: int,
    weights: int,
    chunk: int,
    max_batch_size: int,
    heads: int,
    context: int,
) -> MemoryProfile:
    """Measures the working memory by computing two tokens. See `ActivationMemory` and
    `MemoryProfile` for the parameters.

    A prompt token is assumed to need half of the measured memory. Logits are not included, because
    they are computed only for the last position of a prompt.
    """
    tries = [_profile_run(model) for _ in range(_PROFILE_RUNS)]
    token = max(0, *(-(-kv_bytes // 2) for kv_bytes, _, _ in tries))
    _, hidden, kv = tries[-1]
    del tries
    # These caches are kept, so unused capacity is trimmed by copying them.
    layers = [layer.copy() for layer in kv]
    mx.eval([layer.state() for layer in layers])
    last = hidden[:, -1]
    logits = model.logits(last)
    working = ActivationMemory(
        bytes_per_token=token,
        chunk=chunk,
        max_batch_size=max_batch_size,
        vocab=logits.size,
        heads=heads,
        layers=layers,
    )
    return MemoryProfile(
        budget=budget,
        weights=weights,
        working=working(context),
        max_length=context,
        kv_footprint=KVFootprint(layers, chunk),
        # A class that returns only logits passes them through (models/mlx_lm_adapter.py).
        hidden_size=None if logits is last else last.shape[-1],
    )


def _profile_run(model: Model) -> tuple[int, mx.array, Sequence[LayerCache]]:
    """Returns the peak memory without the caches, the hidden states, and the caches. Uses two
    tokens, because a single token may be computed with fewer operations than a prompt."""
    kv = model.make_kv()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    hidden = model(mx.array([[0, 0]]), kv)
    mx.eval(hidden, [layer.state() for layer in kv])
    return mx.get_peak_memory() - before - sum(layer.nbytes for layer in kv), hidden, kv


def num_query_heads(config: Mapping[str, Any]) -> int:
    """Returns the number of query heads from any of the config keys. For a list with one number per
    layer, returns the maximum."""
    for name in _QUERY_HEAD_KEYS:
        match config.get(name):
            case int(heads):
                return heads
            case [int(), *_] as heads:
                return max(heads)
            case _:
                pass
    return _DEFAULT_QUERY_HEADS
