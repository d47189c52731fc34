"""Draws one id per row from processed logits: temperature, top_k, top_p, min_p and random noise.

Knows: tensors, the filters' definitions, seeds. Must not know: penalties, the state of sequences.

Every array has one row per sequence, every stage works along a row, and everything that decides how
a row is computed (its `SamplingMethod`) comes from its own settings. So a row does not depend on
the other rows of its batch.

All filters keep "the most likely ids, down to some bound". Hence a draw never needs a filtered copy
of the vocabulary, only a few ids:

    greedy    the most likely id
    all       argmax(scaled + noise)                           temperature, min_p
    best      the same among `size` most likely, sorted        top_k, then the rest on these
    nucleus   `size` leaders by scaled + noise, of which the   top_p over the whole vocabulary
              first that lies in the nucleus is the draw
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from app.core.sampling_params import SamplingParams

_MASK64 = (1 << 64) - 1

# a lower temperature scales logits out of float32's range; vLLM has the same limit
_MIN_TEMPERATURE = 1e-5

# top_k up to this shares one method: fewer candidates are not cheaper
_MIN_TOP_K_CANDIDATES = 64

# leaders of a nucleus are 2^n - 1, so that n bisection steps search them; and so many that all of
# them lie outside it at most once in 2^60 draws
_MIN_NUCLEUS_CANDIDATES = 63
_NUCLEUS_MISS_BITS = 60

# 2^-32, but such that (2^32 - 1) times it rounds to the largest float32 below one
_UNIT = (1 - 2**-24) * 2**-32


@dataclass(frozen=True, slots=True)
class SamplingMethod:
    """How a row is drawn. Rows with one method are computed together. size: see the module's
    table."""

    kind: Literal["greedy", "all", "best", "nucleus"]
    size: int = 0


def choose_method(sampling: SamplingParams, vocab: int) -> SamplingMethod:
    if sampling.temperature < _MIN_TEMPERATURE:
        return SamplingMethod("greedy")
    if 0 < sampling.top_k < vocab:
        wanted = max(sampling.top_k, _MIN_TOP_K_CANDIDATES)
        return SamplingMethod("best", min(1 << (wanted - 1).bit_length(), vocab))
    if sampling.top_p < 1:
        return SamplingMethod("nucleus", _num_candidates(sampling.top_p, vocab))
    return SamplingMethod("all")


def _num_candidates(top_p: float, vocab: int) -> int:
    """How many leaders to examine. Each lies outside the nucleus with a probability of at most 1 -
    p, given that all leaders before it were outside."""
    bits = -math.log2(1 - top_p)
    wanted = vocab if bits * vocab < _NUCLEUS_MISS_BITS else math.ceil(_NUCLEUS_MISS_BITS / bits)
    return (1 << max(wanted, _MIN_NUCLEUS_CANDIDATES).bit_length()) - 1


class Draw:
    """The draws of rows that share a method.

    seeds: one per row, taken modulo 2^64. num_drawn: how many ids each row has drawn before.
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
        # the most likely id always stays; "off" also keeps ids that rounding puts beyond a sum of
        # one
        self._top_p = _column(samplings, lambda s: max(s.top_p, 1e-30) if s.top_p < 1 else math.inf)
        self._min_p = _column(samplings, lambda s: math.log(s.min_p) if s.min_p > 0 else -math.inf)
        self._any_min_p = any(s.min_p > 0 for s in samplings)
        words = [_seed_words(seed) for seed in seeds]
        self._bases = mx.array([[a, b] for a, b, _, _ in words], dtype=mx.uint32)
        self._strides = mx.array([[c | 1, d | 1] for _, _, c, d in words], dtype=mx.uint32)
        self._num_drawn = mx.array([[count] for count in num_drawn], dtype=mx.uint32)

    def __call__(self, logits: mx.array, step: int) -> mx.array:
        """logits: [b, V] float32. step: number of earlier calls. -> [b] ids, uint32. A row with
        NaN, or without a finite logit, returns some id of the vocabulary."""
        match self._method.kind:
            case "greedy":
                return mx.argmax(logits, axis=-1)
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
        """Exactly top_k ids are kept; among equal logits at the bound, the lower ids.

        Nucleus (Holtzman et al. 2020): the most likely ids whose predecessors sum to less than p,
        so the one that crosses p is kept, and so are ids of the same probability.
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
        """A draw from the nucleus, without sorting the vocabulary to find it.

        The largest scaled + noise within the nucleus belongs to the first id of the nucleus in the
        ranking of all ids by scaled + noise. So it is enough to rank, and to test for a few leaders
        whether the ids that are more likely sum to less than p. Each test is one pass over the row;
        if a leader is inside, all more likely ones are, so bisection needs few tests.
        """
        top = mx.argmax(logits, axis=-1, keepdims=True)
        scaled = self._scale(logits, mx.take_along_axis(logits, top, axis=-1))
        ids = mx.arange(logits.shape[-1], dtype=mx.uint32)[None]
        leaders, _ = topk(
            self._add_noise(scaled, ids, step), min(self._method.size, logits.shape[-1])
        )
        theirs = mx.take_along_axis(scaled, leaders, axis=-1)
        inside = theirs >= self._nucleus_threshold(scaled, theirs)
        # the most likely id is the last candidate: it is always inside
        first = mx.argmax(mx.concatenate([inside, mx.ones_like(top) > 0], axis=-1), axis=-1)
        return _take_at(mx.concatenate([leaders, top], axis=-1), first[:, None])

    def _nucleus_threshold(self, scaled: mx.array, theirs: mx.array) -> mx.array:
        """The least likely of `theirs` [b, m] that lies in the nucleus of `scaled`; -> [b, 1], inf
        if none does."""
        ladder = -mx.sort(-theirs, axis=-1)
        missing = self._method.size - ladder.shape[-1]
        ladder = mx.pad(ladder, [(0, 0), (0, missing)], constant_values=-mx.inf)
        mass = mx.exp(scaled)
        bound = self._top_p * mx.sum(mass, axis=-1, keepdims=True)
        inside = mx.zeros((len(ladder), 1), dtype=mx.int32)  # rungs known to be inside
        step = (self._method.size + 1) // 2
        while step:
            rung = mx.take_along_axis(ladder, inside + step - 1, axis=-1)
            # multiplied by a mask: mx.where takes four times as long on a CPU
            above = mx.sum((scaled > rung) * mass, axis=-1, keepdims=True)
            inside = inside + step * (above < bound)
            step //= 2
        last = mx.take_along_axis(ladder, mx.maximum(inside - 1, 0), axis=-1)
        return mx.where(inside > 0, last, mx.inf)

    def _scale(self, logits: mx.array, largest: mx.array) -> mx.array:
        """Log-likelihoods relative to the largest, so that no temperature overflows."""
        return (logits - largest) / self._temperature

    def _add_noise(self, scaled: mx.array, ids: mx.array, step: int) -> mx.array:
        """Gumbel-max: argmax(scaled + noise) is a draw from softmax(scaled). Ids less likely than
        min_p times the most likely (Nguyen et al. 2024) are excluded."""
        keys = lowbias32(self._bases + (self._num_drawn + step) * self._strides)
        noisy = scaled + gumbel_noise(keys, ids)
        return mx.where(scaled >= self._min_p, noisy, -mx.inf) if self._any_min_p else noisy


def topk(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest values of each row, largest first; among equals the lower index first.

    values: [b, n], count <= n -> indices [b, count] uint32, values [b, count].

    The row is split into blocks. Each of the `count` largest values lies in one of the `count`
    blocks with the largest maxima: otherwise `count` maxima would rank before it. So most of the
    row is read only once, to find the maxima.
    """
    width = values.shape[-1]
    block = 1 << int(math.log2(width / count) / 2)
    if block < 4:
        return _topk_by_partition(values, count)
    if width % block:
        values = mx.pad(values, [(0, 0), (0, -width % block)], constant_values=-mx.inf)
    blocks = values.reshape(len(values), -1, block)
    found, _ = _topk_by_partition(mx.max(blocks, axis=-1), count)
    # ascending, so that among equals the lower position still has the lower index
    found = mx.sort(found, axis=-1)
    inside = mx.take_along_axis(blocks, found[:, :, None], axis=1).reshape(len(values), -1)
    places, best = _topk_by_partition(inside, count)
    indices = mx.take_along_axis(found, places // block, axis=-1) * block + places % block
    # the padding is reached only by a row with NaN
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
    """Standard Gumbel noise of each id; keys: [b, 2] uint32, ids: [b or 1, n] uint32 -> [b, n].

    A 32-bit SplitMix stream (Steele, Lea, Flood 2014) with random access: the key is the start and
    the odd stride, the id is the position. So the noise depends on (key, id) only, not on the other
    ids.
    """
    hashed = lowbias32(keys[:, :1] + ids * (keys[:, 1:] | 1))
    # u in (0, 1), with full relative precision near 0, where the largest noise comes from
    u = (hashed.astype(mx.float32) + 0.5) * _UNIT
    # -log(1 - u) corrected for the rounding of 1 - u (Kahan's log1p, four times as fast as mx.log1p
    # on a CPU); where 1 - u rounds to 1 it is u
    rest = 1 - u
    exponential = mx.maximum(u, mx.log(rest) * u / mx.minimum(rest - 1, -(2.0**-25)))
    return -mx.log(exponential)


def lowbias32(words: mx.array) -> mx.array:
    """A bijection of uint32 in which every input bit affects every output bit: `lowbias32`
    (Wellons, "Prospecting for Hash Functions", 2018)."""
    words = (words ^ (words >> 16)) * mx.array(0x7FEB352D, dtype=mx.uint32)
    words = (words ^ (words >> 15)) * mx.array(0x846CA68B, dtype=mx.uint32)
    return words ^ (words >> 16)


def _seed_words(seed: int) -> tuple[int, int, int, int]:
    """SplitMix64's output for the seed, and for that output again, as 32-bit halves."""
    first = _splitmix64(seed + 1)
    second = _splitmix64(first + 1)
    return first >> 32, first & 0xFFFFFFFF, second >> 32, second & 0xFFFFFFFF


def _splitmix64(place: int) -> int:
    z = (place * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _take_at(ids: mx.array, places: mx.array) -> mx.array:
    """ids: [b, n], places: [b, 1] -> [b]."""
    return mx.take_along_axis(ids, places, axis=-1)[:, 0]


def _column(
    samplings: Sequence[SamplingParams], field: Callable[[SamplingParams], float]
) -> mx.array:
    return mx.array([[field(sampling)] for sampling in samplings], dtype=mx.float32)
