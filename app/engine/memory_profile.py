"""Bytes: what a sequence takes, what a step takes, what fits.

Knows: layer caches, models as functions, arithmetic. Must not know: requests, what runs, the
machine. Bytes of weights and caches are counted, not asked of the allocator: the books must be
right before the memory is taken.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.base import Model
from models.kernels.in_place_attention import score_buffer_bytes
from models.kv import STEP, LayerCache

# how configs name the number of a layer's queries, and what is taken where none of them is there
_QUERY_HEAD_KEYS = ("num_attention_heads", "num_query_heads", "num_heads", "n_heads", "n_head")
_DEFAULT_QUERY_HEADS = 64

# how far a device lags behind who asks differs, and with it what is held at once: the most counts
_PROFILE_RUNS = 3

# places of a prompt whose ids are scored at a time: few enough that it costs little to keep room
# for their logits, enough that the output layer's weights are not read for each place anew
PROMPT_LOGPROBS_CHUNK = 8


def clear_allocator_cache() -> None:
    """What the allocator keeps of arrays that are gone. On a CPU it keeps nothing, and MLX would
    only wait for all work under way, with Python's lock in its hand: for ever, where a collective's
    other rank is gone, and nobody could tell of it or end the process."""
    if mx.default_device().type != mx.DeviceType.cpu:
        mx.clear_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """budget: bytes for everything. weights: of the model. working: kept free for what a step needs
    while it runs, with sequences of up to `max_length` positions. kv_footprint: positions -> bytes
    of one sequence's layer caches. hidden_size: numbers of a hidden state; None for a model that
    gives nothing but logits."""

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
    """`limit` positions, or as many whole steps as fit. fits: true up to some length."""
    if fits(limit):
        return limit
    low, high = 0, -(-limit // STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


class KVFootprint:
    """Bytes of one sequence's layer caches, by those of a sequence of a token or two."""

    def __init__(self, layers: Sequence[LayerCache], chunk: int) -> None:
        """layers: of such a sequence; they need not be evaluated. chunk: positions evaluated
        at a time."""
        self._layers = layers
        self._chunk = chunk

    def __call__(self, positions: int) -> int:
        return sum(layer.estimate_nbytes(positions, self._chunk) for layer in self._layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """What a step needs while it runs.

    bytes_per_token: bytes that one token of a prompt takes. chunk: prompt tokens in a step.
    max_batch_size: sequences that decode together. vocab: logits of one of them. heads: queries of
    a layer that attends. layers: caches, each as its layer needs it.
    """

    bytes_per_token: int
    chunk: int
    max_batch_size: int
    vocab: int
    heads: int
    layers: Sequence[LayerCache]

    def __call__(self, context: int) -> int:
        """Bytes, where sequences have up to `context` positions: those of a prompt chunk and of the
        logits. On a CPU also those of attention scores: with MLX's own operations the chunk's over
        all that a query sees, which other devices never hold in full."""
        # float32 logits, and as much again three times over while they are sampled; those of a
        # prompt that is scored beside them
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
        """Positions of which one query of the layer has a score. Its cache tells: one that still
        grows keeps every position, a windowed one stops at its window, a state never grows."""
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
    """Evaluate two tokens and draw conclusions; the arguments are those of `ActivationMemory` and
    `Memory`.

    A token of a prompt is taken to need half as much; its logits are not asked for, since
    those of a prompt are only wanted at its end.
    """
    tries = [_profile_run(model) for _ in range(_PROFILE_RUNS)]
    token = max(0, *(-(-held // 2) for held, _, _ in tries))
    _, hidden, kv = tries[-1]
    del tries
    # without their free room: these are kept
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
        # a class that gives logits only has nothing left to do for them (models/mlx_lm_adapter.py)
        hidden_size=None if logits is last else last.shape[-1],
    )


def _profile_run(model: Model) -> tuple[int, mx.array, Sequence[LayerCache]]:
    """(bytes held at the most, but for the caches; the hidden states; the caches). Not one, which
    may be computed in fewer operations than a prompt's."""
    kv = model.make_kv()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    hidden = model(mx.array([[0, 0]]), kv)
    mx.eval(hidden, [layer.state() for layer in kv])
    return mx.get_peak_memory() - before - sum(layer.nbytes for layer in kv), hidden, kv


def num_query_heads(config: Mapping[str, Any]) -> int:
    """Queries of a layer that attends, by whatever name the config calls them. A list has them for
    each layer."""
    for name in _QUERY_HEAD_KEYS:
        match config.get(name):
            case int(heads):
                return heads
            case [int(), *_] as heads:
                return max(heads)
            case _:
                pass
    return _DEFAULT_QUERY_HEADS
