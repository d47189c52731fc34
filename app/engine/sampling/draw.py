"""Samples one token per row from processed logits, with temperature, top_k, top_p, min_p and random
noise.

Knows: tensors, the definitions of the filters, seeds. Must not know: penalties, the state of
sequences.

Every array has one row per sequence, and every stage operates on rows independently. The
`SamplingMethod` of a row determines how the row is computed, and depends only on the row's own
settings. The result is therefore independent of the other rows in the batch.

On the CPU, one operation of the kernels samples all rows: "fused". It draws the same tokens as the
other methods, which use MLX's operations and run on a GPU; sums are rounded in another order, so a
token at the very edge of the nucleus may differ. Each filter keeps the most likely tokens down to a
threshold. These methods therefore need only a few tokens instead of a filtered copy of the
vocabulary:

    greedy    the most likely token
    all       argmax(scaled + noise)                            temperature, min_p
    best      the same among the `size` most likely tokens      top_k, then the other filters
    nucleus   the first of the `size` candidates with the       top_p over the whole vocabulary
              largest scaled + noise that is in the nucleus
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from app.core.sampling_params import SamplingParams
from models import kernels

_MASK64 = (1 << 64) - 1

# A lower temperature would scale logits beyond the range of float32. vLLM has the same limit.
_MIN_TEMPERATURE = 1e-5

# All values of top_k up to this number use the same method, because fewer candidates are not
# cheaper.
_MIN_TOP_K_CANDIDATES = 64

# The number of nucleus candidates is 2^n - 1, so that n bisection steps search them. It is large
# enough that the probability that all of them lie outside the nucleus is at most 2^-60.
_MIN_NUCLEUS_CANDIDATES = 63
_NUCLEUS_MISS_BITS = 60

# Slightly less than 2^-32, so that (2^32 - 1) times this value rounds to the largest float32 below
# one.
_UNIT = (1 - 2**-24) * 2**-32


@dataclass(frozen=True, slots=True)
class SamplingMethod:
    """The sampling method of a row. Rows with the same method are computed together. For `size`,
    see the table in the module docstring."""

    kind: Literal["greedy", "fused", "all", "best", "nucleus"]
    size: int = 0


def select_method(sampling: SamplingParams, vocab: int) -> SamplingMethod:
    """Returns the method for these sampling parameters on this device."""
    method = choose_method(sampling, vocab)
    if method.kind == "greedy" or kernels.ops() is None:
        return method
    return SamplingMethod("fused")


def choose_method(sampling: SamplingParams, vocab: int) -> SamplingMethod:
    """Returns the cheapest method of MLX's operations for these sampling parameters."""
    if sampling.temperature < _MIN_TEMPERATURE:
        return SamplingMethod("greedy")
    if 0 < sampling.top_k < vocab:
        count = max(sampling.top_k, _MIN_TOP_K_CANDIDATES)
        return SamplingMethod("best", min(1 << (count - 1).bit_length(), vocab))
    if sampling.top_p < 1:
        return SamplingMethod("nucleus", _num_candidates(sampling.top_p, vocab))
    return SamplingMethod("all")


def _num_candidates(top_p: float, vocab: int) -> int:
    """Returns the number of candidates to examine. Given that all previous candidates lie outside
    the nucleus, the next candidate lies outside with a probability of at most 1 - p."""
    bits = -math.log2(1 - top_p)
    count = vocab if bits * vocab < _NUCLEUS_MISS_BITS else math.ceil(_NUCLEUS_MISS_BITS / bits)
    return (1 << max(count, _MIN_NUCLEUS_CANDIDATES).bit_length()) - 1


class Draw:
    """Samples the rows that share a method.

    seeds: one seed per row, taken modulo 2^64.
    num_drawn: the number of tokens that each row has already sampled.
    """

    def __init__(
        self,
        method: SamplingMethod,
        samplings: Sequence[SamplingParams],
        *,
        seeds: Sequence[int],
        num_drawn: Sequence[int],
    ) -> None:
        self._method = method
        self._temperature = _column(samplings, lambda s: s.temperature)
        self._top_k = _column(samplings, lambda s: s.top_k)
        # The most likely token is always kept. If top_p is off, tokens whose cumulative probability
        # exceeds one due to rounding are also kept.
        self._top_p = _column(samplings, lambda s: max(s.top_p, 1e-30) if s.top_p < 1 else math.inf)
        self._min_p = _column(samplings, lambda s: math.log(s.min_p) if s.min_p > 0 else -math.inf)
        self._any_min_p = any(s.min_p > 0 for s in samplings)
        words = [_seed_words(seed) for seed in seeds]
        self._bases = mx.array([[a, b] for a, b, _, _ in words], dtype=mx.uint32)
        self._strides = mx.array([[c | 1, d | 1] for _, _, c, d in words], dtype=mx.uint32)
        self._num_drawn = mx.array([[count] for count in num_drawn], dtype=mx.uint32)
        self._settings = mx.concatenate(
            [self._temperature, self._top_k, self._top_p, self._min_p], axis=1
        )
        self._words = mx.concatenate([self._bases, self._strides, self._num_drawn], axis=1)

    def __call__(self, logits: mx.array, step: int) -> mx.array:
        """Samples one token per row. `logits` has shape [b, V] and dtype float32. `step` is the
        number of previous calls. Returns the token IDs [b] as uint32. For a row that contains NaN
        or has no finite logit, the result is an arbitrary token of the vocabulary."""
        match self._method.kind:
            case "greedy":
                return mx.argmax(logits, axis=-1)
            case "fused":
                return kernels.ops().sample(logits, self._settings, self._words, step)
            case "all":
                return self._draw_from_all(logits, step)
            case "best":
                return self._draw_from_top_k(logits, step)
            case "nucleus":
                return self._draw_from_nucleus(logits, step)

    def _draw_from_all(self, logits: mx.array, step: int) -> mx.array:
        scaled = self._scale(logits, mx.max(logits, axis=-1, keepdims=True))
        ids = mx.arange(logits.shape[-1], dtype=mx.uint32)[None]
        return mx.argmax(self._add_noise(scaled, ids, step), axis=-1)

    def _draw_from_top_k(self, logits: mx.array, step: int) -> mx.array:
        """Samples from the top_k most likely tokens. Exactly top_k tokens are kept; ties are broken
        in favor of lower token IDs.

        The nucleus (Holtzman et al. 2020) contains each token for which the probabilities of all
        more likely tokens sum to less than p. The token that crosses p is therefore kept, together
        with tokens of the same probability.
        """
        ids, best = topk(logits, self._method.size)
        ranks = mx.arange(best.shape[-1])[None]
        scaled = mx.where(ranks < self._top_k, self._scale(best, best[:, :1]), -mx.inf)
        mass = mx.exp(scaled)
        before = mx.cumsum(mass, axis=-1) - mass
        kept = before < self._top_p * mx.sum(mass, axis=-1, keepdims=True)
        edge = mx.min(mx.where(kept, scaled, mx.inf), axis=-1, keepdims=True)
        scaled = mx.where(scaled >= edge, scaled, -mx.inf)
        return _take_at(ids, mx.argmax(self._add_noise(scaled, ids, step), axis=-1, keepdims=True))

    def _draw_from_nucleus(self, logits: mx.array, step: int) -> mx.array:
        """Samples from the nucleus without sorting the vocabulary to find it.

        The result is the token in the nucleus with the largest scaled + noise. It is therefore
        sufficient to rank the tokens by scaled + noise and to test a few candidates. A candidate is
        in the nucleus if the probabilities of all more likely tokens sum to less than p. Each test
        is one pass over the row. If a candidate is in the nucleus, all more likely candidates are
        as well, so bisection needs only a few tests.
        """
        top = mx.argmax(logits, axis=-1, keepdims=True)
        scaled = self._scale(logits, mx.take_along_axis(logits, top, axis=-1))
        ids = mx.arange(logits.shape[-1], dtype=mx.uint32)[None]
        leaders, _ = topk(
            self._add_noise(scaled, ids, step), min(self._method.size, logits.shape[-1])
        )
        top_logits = mx.take_along_axis(scaled, leaders, axis=-1)
        inside = top_logits >= self._nucleus_threshold(scaled, top_logits)
        # The most likely token is the last candidate, because it is always in the nucleus.
        first = mx.argmax(mx.concatenate([inside, mx.ones_like(top) > 0], axis=-1), axis=-1)
        return _take_at(mx.concatenate([leaders, top], axis=-1), first[:, None])

    def _nucleus_threshold(self, scaled: mx.array, top_logits: mx.array) -> mx.array:
        """Returns the smallest of `top_logits` [b, m] that is in the nucleus of `scaled`. Returns
        shape [b, 1], with inf for a row without such a logit."""
        ladder = -mx.sort(-top_logits, axis=-1)
        missing = self._method.size - ladder.shape[-1]
        ladder = mx.pad(ladder, [(0, 0), (0, missing)], constant_values=-mx.inf)
        mass = mx.exp(scaled)
        bound = self._top_p * mx.sum(mass, axis=-1, keepdims=True)
        inside = mx.zeros((len(ladder), 1), dtype=mx.int32)  # candidates known to be inside
        step = (self._method.size + 1) // 2
        while step:
            rung = mx.take_along_axis(ladder, inside + step - 1, axis=-1)
            # The mask is applied by multiplication, because mx.where takes four times as long on a
            # CPU.
            above = mx.sum((scaled > rung) * mass, axis=-1, keepdims=True)
            inside = inside + step * (above < bound)
            step //= 2
        last = mx.take_along_axis(ladder, mx.maximum(inside - 1, 0), axis=-1)
        return mx.where(inside > 0, last, mx.inf)

    def _scale(self, logits: mx.array, largest: mx.array) -> mx.array:
        """Returns scaled logits relative to the maximum, so that no temperature causes an
        overflow."""
        return (logits - largest) / self._temperature

    def _add_noise(self, scaled: mx.array, ids: mx.array, step: int) -> mx.array:
        """Adds Gumbel noise (the Gumbel-max trick): argmax(scaled + noise) is a sample from
        softmax(scaled). Tokens less likely than min_p times the most likely token (Nguyen et al.
        2024) are excluded."""
        keys = lowbias32(self._bases + (self._num_drawn + step) * self._strides)
        noisy = scaled + gumbel_noise(keys, ids)
        return mx.where(scaled >= self._min_p, noisy, -mx.inf) if self._any_min_p else noisy


def topk(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Returns the `count` largest values of each row, largest first. Ties are broken in favor of
    lower indices.

    values: [b, n], count <= n -> indices [b, count] uint32, values [b, count].

    The row is split into blocks. The `count` largest values are all in the `count` blocks with the
    largest maxima. Most of the row is therefore read only once, to find the block maxima.
    """
    width = values.shape[-1]
    block = 1 << int(math.log2(width / count) / 2)
    if block < 4:
        return _topk_by_partition(values, count)
    if width % block:
        values = mx.pad(values, [(0, 0), (0, -width % block)], constant_values=-mx.inf)
    blocks = values.reshape(len(values), -1, block)
    found, _ = _topk_by_partition(mx.max(blocks, axis=-1), count)
    # Sort ascending, so that ties are still broken in favor of lower indices.
    found = mx.sort(found, axis=-1)
    inside = mx.take_along_axis(blocks, found[:, :, None], axis=1).reshape(len(values), -1)
    places, best = _topk_by_partition(inside, count)
    indices = mx.take_along_axis(found, places // block, axis=-1) * block + places % block
    # Only a row with NaN reaches the padding.
    return mx.minimum(indices, width - 1), best


def _topk_by_partition(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    if count < values.shape[-1]:
        places = mx.argpartition(-values, count - 1, axis=-1)[:, :count]
        places = mx.sort(places, axis=-1)
        values = mx.take_along_axis(values, places, axis=-1)
        order = mx.argsort(-values, axis=-1)
        return mx.take_along_axis(places, order, axis=-1), mx.take_along_axis(values, order, -1)
    order = mx.argsort(-values, axis=-1)
    return order, mx.take_along_axis(values, order, axis=-1)


def gumbel_noise(keys: mx.array, ids: mx.array) -> mx.array:
    """Returns standard Gumbel noise for each token; keys: [b, 2] uint32, ids: [b or 1, n] uint32 ->
    [b, n].

    The noise comes from a 32-bit SplitMix stream (Steele, Lea, Flood 2014) with random access. The
    key contains the start and the odd stride, and the token ID is the position. The noise therefore
    depends only on (key, ID), not on the other tokens.
    """
    hashed = lowbias32(keys[:, :1] + ids * (keys[:, 1:] | 1))
    # u is in (0, 1). It has full relative precision near 0, where the noise is largest.
    u = (hashed.astype(mx.float32) + 0.5) * _UNIT
    # -log(1 - u) is corrected for the rounding of 1 - u (Kahan's log1p, four times as fast as
    # mx.log1p on a CPU). Where 1 - u rounds to 1, the result is u.
    rest = 1 - u
    exponential = mx.maximum(u, mx.log(rest) * u / mx.minimum(rest - 1, -(2.0**-25)))
    return -mx.log(exponential)


def lowbias32(words: mx.array) -> mx.array:
    """A bijective hash of uint32 in which every input bit affects every output bit: `lowbias32`
    from Wellons, "Prospecting for Hash Functions", 2018."""
    words = (words ^ (words >> 16)) * mx.array(0x7FEB352D, dtype=mx.uint32)
    words = (words ^ (words >> 15)) * mx.array(0x846CA68B, dtype=mx.uint32)
    return words ^ (words >> 16)


def _seed_words(seed: int) -> tuple[int, int, int, int]:
    """Applies SplitMix64 to the seed, and again to the result. Returns both results as 32-bit
    halves."""
    first = _splitmix64(seed + 1)
    second = _splitmix64(first + 1)
    return first >> 32, first & 0xFFFFFFFF, second >> 32, second & 0xFFFFFFFF


def _splitmix64(place: int) -> int:
    z = (place * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _take_at(ids: mx.array, places: mx.array) -> mx.array:
    """Returns ids[row, places[row]] for each row. ids: [b, n], places: [b, 1] -> [b]."""
    return mx.take_along_axis(ids, places, axis=-1)[:, 0]


def _column(
    samplings: Sequence[SamplingParams], field: Callable[[SamplingParams], float]
) -> mx.array:
    return mx.array([[field(sampling)] for sampling in samplings], dtype=mx.float32)
