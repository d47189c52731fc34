"""Memory sizes: bytes that a sequence takes, bytes that a step takes, and what fits.

Knows: layer caches, models as functions, arithmetic. Must not know: requests, what runs, the
machine.

Sizes of weights and caches are computed rather than read from the allocator: the ledger must be
correct before the memory is allocated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.base import Model
from models.kernels.in_place_attention import score_buffer_bytes
from models.kv import STEP, LayerCache

# config keys of the number of query heads, and its default if the config has none
_QUERY_HEAD_KEYS = ("num_attention_heads", "num_query_heads", "num_heads", "n_heads", "n_head")
_DEFAULT_QUERY_HEADS = 64

# how far the device lags behind Python varies, and so does the peak memory: the largest of several
# runs is used
_PROFILE_RUNS = 3

# prompt positions whose log-probabilities are computed at a time: few enough that their logits need
# little memory, enough that the output layer's weights are not read for each position
PROMPT_LOGPROBS_CHUNK = 8


def clear_allocator_cache() -> None:
    """Free the allocator's cache of unused buffers. Does nothing on a CPU: there is no such cache,
    and MLX would wait for all pending work with the GIL held. If that is a collective whose other
    rank has died, it would wait forever, and no Python thread could report it or end the process.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        mx.clear_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Sizes in bytes.

    budget: for everything. weights: of the model. working: reserved for the activations of a step,
    with sequences of up to `max_length` positions. kv_footprint: positions -> bytes of one
    sequence's layer caches. hidden_size: width of a hidden state; None for a model that returns
    logits only.
    """

    budget: int
    weights: int
    working: int
    max_length: int
    kv_footprint: Callable[[int], int]
    hidden_size: int | None = None

    @property
    def kv_budget(self) -> int:
        """Bytes for layer caches of running sequences and for cached prefixes."""
        return max(0, self.budget - self.weights - self.working)

    def max_context(self, limit: int) -> int:
        """The longest sequence that fits alone, at most `limit` positions."""
        return longest_fitting(
            lambda length: self.kv_footprint(length) <= self.kv_budget, min(limit, self.max_length)
        )


def longest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """`limit` if it fits, else the largest multiple of STEP that does. fits: a predicate that holds
    up to some length."""
    if fits(limit):
        return limit
    low, high = 0, -(-limit // STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


class KVFootprint:
    """Bytes of one sequence's layer caches, computed from the caches of a sequence of one or two
    tokens."""

    def __init__(self, layers: Sequence[LayerCache], chunk: int) -> None:
        """layers: caches of such a sequence; they need not be evaluated. chunk: positions evaluated
        at a time."""
        self._layers = layers
        self._chunk = chunk

    def __call__(self, positions: int) -> int:
        return sum(layer.estimate_nbytes(positions, self._chunk) for layer in self._layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """Working memory of a step.

    bytes_per_token: bytes per prompt token. chunk: prompt tokens in a step. max_batch_size:
    sequences that decode together. vocab: logits per sequence. heads: query heads of an attention
    layer. layers: layer caches.
    """

    bytes_per_token: int
    chunk: int
    max_batch_size: int
    vocab: int
    heads: int
    layers: Sequence[LayerCache]

    def __call__(self, context: int) -> int:
        """Bytes for sequences of up to `context` positions: activations of a prompt chunk, and
        logits. On a CPU also attention scores: MLX's operations hold the scores of the chunk
        against all visible positions, which other devices never materialise."""
        # float32 logits, and three times as much again during sampling; also for the prompt
        # positions whose log-probabilities are computed in the same step
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
        """Positions that one query of the layer attends to, inferred from the cache size: a full
        cache grows with the context, a sliding window stops growing at its window, a state never
        grows."""
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
    """Measure the working memory by evaluating two tokens. The parameters are those of
    `ActivationMemory` and `MemoryProfile`.

    A prompt token is assumed to need half of that. Logits are not included, since only those of a
    prompt's last position are computed.
    """
    tries = [_profile_run(model) for _ in range(_PROFILE_RUNS)]
    token = max(0, *(-(-held // 2) for held, _, _ in tries))
    _, hidden, kv = tries[-1]
    del tries
    # copies without spare capacity, because these are kept
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
        # a class that returns logits only passes them through (models/mlx_lm_adapter.py)
        hidden_size=None if logits is last else last.shape[-1],
    )


def _profile_run(model: Model) -> tuple[int, mx.array, Sequence[LayerCache]]:
    """(peak bytes without the caches, the hidden states, the caches). Two tokens, since a single
    one may be computed with fewer operations than a prompt."""
    kv = model.make_kv()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    hidden = model(mx.array([[0, 0]]), kv)
    mx.eval(hidden, [layer.state() for layer in kv])
    return mx.get_peak_memory() - before - sum(layer.nbytes for layer in kv), hidden, kv


def num_query_heads(config: Mapping[str, Any]) -> int:
    """The number of query heads under any of its names in the config; of a list with a number per
    layer, the largest."""
    for name in _QUERY_HEAD_KEYS:
        match config.get(name):
            case int(heads):
                return heads
            case [int(), *_] as heads:
                return max(heads)
            case _:
                pass
    return _DEFAULT_QUERY_HEADS
