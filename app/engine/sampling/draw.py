"""Samples one token per row from processed logits, with temperature, top_k, top_p, min_p and random
noise.

Knows: tensors, the definitions of the filters, seeds. Must not know: penalties, the state of
sequences.

Every array has one row per sequence, and every stage operates on rows independently. The
`SamplingMethod` of a row determines how the row is computed, and depends only on the row's own
settings. The result is therefore independent of the other rows in the batch.

This module uses MLX's operations, for a GPU. On the CPU, app/engine/sampling/sampler.py draws the
same tokens. Each filter keeps the most likely tokens down to a threshold. The methods therefore
need only a few tokens instead of a filtered copy of the vocabulary:

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
from app.engine.memory_profile import MAX_CANDIDATES_PER_PASS, MAX_PASS_BYTES
from models.layers import compile_on_gpu

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1

# A lower temperature would scale logits beyond the range of float32. vLLM has the same limit.
_MIN_TEMPERATURE = 1e-5

# All values of top_k up to this number use the same method, because fewer candidates are not
# cheaper.
_MIN_TOP_K_CANDIDATES = 64

# The number of nucleus candidates is 2^n - 1, so that n bisections search them. It is large enough
# that the probability that all of them lie outside the nucleus is at most 2^-48. From top_p 0.9 on,
# fifteen are.
_MIN_NUCLEUS_CANDIDATES = 15
_NUCLEUS_MISS_BITS = 48

# Slightly less than 2^-32, so that (2^32 - 1) times this value rounds to the largest float32 below
# one.
_UNIT = (1 - 2**-24) * 2**-32


@dataclass(frozen=True, slots=True)
class SamplingMethod:
    """The sampling method of a row. Rows with the same method are computed together. For `size`,
    see the table in the module docstring."""

    kind: Literal["greedy", "all", "best", "nucleus"]
    size: int = 0


def select_method(sampling: SamplingParams, vocab: int) -> SamplingMethod:
    """Returns the cheapest method for these sampling parameters."""
    if is_greedy(sampling):
        return SamplingMethod("greedy")
    if 0 < sampling.top_k < vocab:
        count = max(sampling.top_k, _MIN_TOP_K_CANDIDATES)
        return SamplingMethod("best", min(1 << (count - 1).bit_length(), vocab))
    if sampling.top_p < 1:
        return SamplingMethod("nucleus", _num_candidates(sampling.top_p, vocab))
    return SamplingMethod("all")


def _num_candidates(top_p: float, vocab: int) -> int:
    """Returns the number of candidates to examine. Given that all previous candidates are outside
    the nucleus, the next candidate is outside with a probability of at most 1 - p."""
    bits = -math.log2(1 - top_p)
    count = vocab if bits * vocab < _NUCLEUS_MISS_BITS else math.ceil(_NUCLEUS_MISS_BITS / bits)
    return (1 << max(count, _MIN_NUCLEUS_CANDIDATES).bit_length()) - 1


def is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _MIN_TEMPERATURE


def top_p_bound(sampling: SamplingParams) -> float:
    """Returns the total probability of the nucleus. The most likely token is always kept. If top_p
    is off, tokens whose cumulative probability exceeds one due to rounding are also kept."""
    return max(sampling.top_p, 1e-30) if sampling.top_p < 1 else math.inf


def log_min_p(sampling: SamplingParams) -> float:
    return math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf


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
        self._top_p = _column(samplings, top_p_bound)
        self._nucleus_mass = self._top_p[:, :, None]  # an input, not an operation of each step
        self._min_p = _column(samplings, log_min_p)
        self._any_min_p = any(s.min_p > 0 for s in samplings)
        self._seed_words = [seed_words(seed) for seed in seeds]
        self._num_drawn = num_drawn
        self._ids: mx.array | None = None  # created once, not in the graph of each step

    def __call__(self, logits: mx.array, step: int) -> mx.array:
        """Samples one token per row. `logits` has shape [b, V] and dtype float32. `step` is the
        number of previous calls. Returns the token IDs [b] as uint32. For a row that contains NaN
        or has no finite logit, the result is an arbitrary token of the vocabulary."""
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
        return mx.argmax(self._add_noise(scaled, self._count_up(logits), step), axis=-1)

    def _draw_from_top_k(self, logits: mx.array, step: int) -> mx.array:
        """Samples from the top_k most likely tokens. Exactly top_k tokens are kept; ties are broken
        in favor of lower token IDs.

        The nucleus (Holtzman et al. 2020) contains each token for which the probabilities of all
        more likely tokens sum to less than p. The token that crosses p is therefore kept, together
        with tokens of the same probability.
        """
        ids, best = topk(logits, self._method.size)
        ranks = self._count_up(best)
        scaled = _scale_top_k(best, best[:, :1], self._temperature, ranks, self._top_k)
        mass = mx.exp(scaled)
        total = mx.sum(mass, axis=-1, keepdims=True)
        kept = _keep_nucleus(scaled, mx.cumsum(mass, axis=-1), mass, self._top_p, total)
        edge = mx.min(kept, axis=-1, keepdims=True)
        noisy = _mask_below(scaled, edge, self._add_noise(scaled, ids, step))
        return _take_at(ids, mx.argmax(noisy, axis=-1, keepdims=True))

    def _draw_from_nucleus(self, logits: mx.array, step: int) -> mx.array:
        """Samples from the nucleus without sorting the vocabulary to find it.

        The result is the token in the nucleus with the largest scaled + noise. It is therefore
        sufficient to rank the tokens by scaled + noise and to test a few candidates. A candidate is
        in the nucleus if the probabilities of all more likely tokens sum to less than p. If no
        candidate is inside, the result is one of the candidates.
        """
        scaled = self._scale(logits, mx.max(logits, axis=-1, keepdims=True))
        noisy = self._add_noise(scaled, self._count_up(logits), step)
        candidates, costs = _find_smallest(-noisy, min(self._method.size, logits.shape[-1]))
        top_logits = _take(scaled, candidates)
        inside = _mask_outside(top_logits, self._nucleus_edge(scaled, top_logits), costs)
        return _take_at(candidates, mx.argmin(inside, axis=-1, keepdims=True))

    def _nucleus_edge(self, scaled: mx.array, top_logits: mx.array) -> mx.array:
        """Returns the smallest of `top_logits` [b, m] that is in the nucleus of `scaled`. Returns
        shape [b, 1], with inf for a row without such a logit.

        The logits are sorted, and the range that contains the edge is divided into parts. Each pass
        tests the last logit of each part but the last one, and continues in the first part that
        ends inside.
        """
        ladder = mx.sort(top_logits, axis=-1)
        size = self._method.size + 1
        if missing := size - 1 - ladder.shape[-1]:
            # the mass above -inf is the total, so these are outside
            ladder = mx.pad(ladder, [(0, 0), (missing, 0)], constant_values=-mx.inf)
        ladder, scaled = ladder[:, :, None], scaled[:, None]
        mass = mx.exp(scaled)
        limits = self._nucleus_mass, mx.sum(mass, axis=-1, keepdims=True)
        begin = edge = None
        while size > 1:
            parts = min(_count_tests(mass.size) + 1, size)
            size //= parts
            if begin is None:
                tested = ladder[:, size - 1 :: size]
            else:
                ends = mx.array([[[(part + 1) * size - 1] for part in range(parts - 1)]], mx.uint32)
                tested = mx.take_along_axis(ladder, begin + ends, axis=1)
            above = mx.sum(_mass_above(scaled, tested, mass), axis=-1, keepdims=True)
            smallest = mx.min(_inside_or_inf(tested, above, *limits), axis=1, keepdims=True)
            edge = smallest if edge is None else mx.minimum(edge, smallest)
            if size > 1:
                step = mx.array(size, dtype=mx.uint32)
                skipped = mx.sum(_size_if_outside(above, *limits, step), axis=1, keepdims=True)
                begin = skipped if begin is None else begin + skipped
        assert edge is not None
        return edge[:, 0]

    def _count_up(self, values: mx.array) -> mx.array:
        """Returns the indices of the columns of values [b, n], which are the same in each call."""
        if self._ids is None:
            self._ids = mx.arange(values.shape[-1], dtype=mx.uint32)
        return self._ids

    def _scale(self, logits: mx.array, largest: mx.array) -> mx.array:
        """Returns scaled logits relative to the maximum, so that no temperature causes an
        overflow."""
        return _scale(logits, largest, self._temperature)

    def _add_noise(self, scaled: mx.array, ids: mx.array, step: int) -> mx.array:
        """Adds Gumbel noise (the Gumbel-max trick): argmax(scaled + noise) is a sample from
        softmax(scaled). Tokens less likely than min_p times the most likely token (Nguyen et al.
        2024) are excluded."""
        # computed here, because a device would need a dozen operations for these few numbers
        rows = zip(self._seed_words, self._num_drawn, strict=True)
        keys = [noise_key(words, drawn + step) for words, drawn in rows]
        start = mx.array([[key[0]] for key in keys], dtype=mx.uint32)
        stride = mx.array([[key[1]] for key in keys], dtype=mx.uint32)
        noisy = _add_noise(scaled, ids, start, stride)
        return _mask_below(scaled, self._min_p, noisy) if self._any_min_p else noisy


def topk(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Returns the `count` largest values of each row, largest first. Ties are broken in favor of
    lower indices.

    values: [b, n], count <= n -> indices [b, count] uint32, values [b, count].
    """
    indices, negative = _find_smallest(-values, count)
    order = mx.argsort(negative, axis=-1)
    return _take(indices, order), -_take(negative, order)


def _find_smallest(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Returns the `count` smallest values of each row, in the order of their indices. Ties are
    broken in favor of lower indices. The shapes are the same as for `topk`.

    The row is split into blocks. The `count` smallest values are all in the `count` blocks with the
    smallest minima. Most of the row is therefore read only once, to find the block minima.
    """
    width = values.shape[-1]
    block = 1 << int(math.log2(width / count) / 2)
    if block < 4:
        indices = _smallest_places(values, count)
        return indices, _take(values, indices)
    if width % block:
        values = mx.pad(values, [(0, 0), (0, -width % block)], constant_values=mx.inf)
    minima = mx.min(values.reshape(len(values), -1, block), axis=-1)
    # in ascending order, so that ties are still broken in favor of lower indices
    blocks = _smallest_places(minima, count)[:, :, None]
    # a constant, not an operation of the graph
    offsets = mx.array(list(range(block)), dtype=mx.uint32)
    inside = _block_indices(blocks, mx.array(block, dtype=mx.uint32), offsets)
    inside = inside.reshape(len(values), -1)
    found = _take(values, inside)
    places = _smallest_places(found, count)
    indices = _take(inside, places)
    if width % block:  # only a row with NaN reaches the padding
        indices = mx.minimum(indices, width - 1)
    return indices, _take(found, places)


def _smallest_places(values: mx.array, count: int) -> mx.array:
    """Returns the indices of the `count` smallest values of each row, in ascending order."""
    if count >= values.shape[-1]:
        return mx.broadcast_to(mx.arange(values.shape[-1], dtype=mx.uint32), values.shape)
    return mx.sort(mx.argpartition(values, count - 1, axis=-1)[:, :count], axis=-1)


def _count_tests(size: int) -> int:
    """Returns the number of candidates to test in a pass over `size` tokens. On a CPU, a pass with
    more than one would save nothing."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return 1
    most = min(MAX_CANDIDATES_PER_PASS, max(1, MAX_PASS_BYTES // (4 * size)))
    return (1 << (most + 1).bit_length() - 1) - 1


# The chains of element-wise operations. On a GPU, each one is compiled into few kernels. [b, 1] and
# [b, n] are the shapes of their arguments, which may be of any size: MLX does not compile again if
# the batch changes.


@compile_on_gpu
def _scale(logits: mx.array, largest: mx.array, temperature: mx.array) -> mx.array:
    return (logits - largest) / temperature


@compile_on_gpu
def _scale_top_k(
    best: mx.array, largest: mx.array, temperature: mx.array, ranks: mx.array, top_k: mx.array
) -> mx.array:
    return mx.where(ranks < top_k, (best - largest) / temperature, -mx.inf)


@compile_on_gpu
def _keep_nucleus(
    scaled: mx.array, cumulative: mx.array, mass: mx.array, top_p: mx.array, total: mx.array
) -> mx.array:
    return mx.where(cumulative - mass < top_p * total, scaled, mx.inf)


@compile_on_gpu
def _block_indices(blocks: mx.array, block: mx.array, offsets: mx.array) -> mx.array:
    return blocks * block + offsets


@compile_on_gpu
def _mass_above(scaled: mx.array, tested: mx.array, mass: mx.array) -> mx.array:
    # The mask is applied by multiplication, because mx.where takes four times as long on a CPU.
    return (scaled > tested) * mass


@compile_on_gpu
def _inside_or_inf(tested: mx.array, above: mx.array, top_p: mx.array, total: mx.array) -> mx.array:
    return mx.where(above < top_p * total, tested, mx.inf)


@compile_on_gpu
def _size_if_outside(above: mx.array, top_p: mx.array, total: mx.array, size: mx.array) -> mx.array:
    return mx.where(above < top_p * total, 0, size)


@compile_on_gpu
def _mask_outside(top_logits: mx.array, edge: mx.array, costs: mx.array) -> mx.array:
    return mx.where(top_logits >= edge, costs, mx.inf)


@compile_on_gpu
def _mask_below(scaled: mx.array, edge: mx.array, noisy: mx.array) -> mx.array:
    return mx.where(scaled >= edge, noisy, -mx.inf)


@compile_on_gpu
def _add_noise(scaled: mx.array, ids: mx.array, start: mx.array, stride: mx.array) -> mx.array:
    return scaled + gumbel_noise(start, stride, ids)


def gumbel_noise(start: mx.array, stride: mx.array, ids: mx.array) -> mx.array:
    """Returns standard Gumbel noise for each token. start, stride: [b, 1] uint32, the key of a row.
    ids: [b, n] or [n] uint32 -> [b, n].

    The noise comes from a 32-bit SplitMix stream (Steele, Lea, Flood 2014) with random access. The
    token ID is the position. The noise therefore depends only on the key and the ID, not on the
    other tokens.
    """
    hashed = lowbias32(start + ids * stride)
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


def noise_key(words: tuple[int, int, int, int], drawn: int) -> tuple[int, int]:
    """Returns the start and the odd stride of the stream of a token. words: of the row's seed.
    drawn: the number of tokens that the row has already sampled."""
    start, stride, start_step, stride_step = words
    return (
        _lowbias32(start + drawn * start_step & _MASK32),
        _lowbias32(stride + drawn * stride_step & _MASK32) | 1,
    )


def _lowbias32(word: int) -> int:
    """The same as `lowbias32`."""
    word = (word ^ word >> 16) * 0x7FEB352D & _MASK32
    word = (word ^ word >> 15) * 0x846CA68B & _MASK32
    return word ^ word >> 16


def seed_words(seed: int) -> tuple[int, int, int, int]:
    """Applies SplitMix64 to the seed, and again to the result. Returns the first result as two
    32-bit start words of the noise, and the second one as two odd strides."""
    first = _splitmix64(seed + 1)
    second = _splitmix64(first + 1)
    return first >> 32, first & _MASK32, second >> 32 | 1, second & _MASK32 | 1


def _splitmix64(place: int) -> int:
    z = (place * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _take_at(ids: mx.array, places: mx.array) -> mx.array:
    """Returns ids[row, places[row]] for each row. ids: [b, n], places: [b, 1] -> [b]."""
    return _take(ids, places).squeeze(-1)


def _take(values: mx.array, places: mx.array) -> mx.array:
    return mx.take_along_axis(values, places, axis=-1)


def _column(
    samplings: Sequence[SamplingParams], field: Callable[[SamplingParams], float]
) -> mx.array:
    return mx.array([[field(sampling)] for sampling in samplings], dtype=mx.float32)
