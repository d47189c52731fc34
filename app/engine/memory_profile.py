"""Memory sizes: the bytes per sequence, the bytes per step, and the maximum length that fits.

Knows: layer caches, models as functions, arithmetic. Must not know: requests, running jobs, the
machine.

The sizes of weights and caches are computed rather than read from the allocator, because the ledger
must be correct before the memory is allocated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.engine.precision import find_precision
from models.attention_pieces import device_of_shape
from models.attention_route import AttentionShape, workspace_bytes
from models.base import Model
from models.kernels.in_place_attention import score_buffer_bytes
from models.kv import STEP, LayerCache, evaluate_caches

# The number of profile runs and their number of tokens. With fewer tokens, a constant amount would
# count as part of each token, and layers that sort tokens by expert would not sort.
_PROFILE_RUNS, _PROFILE_LENGTH = 2, 16

# The shape of a reduction that occupies a CPU for about 2 ms, and no memory. The peak memory of a
# pass depends on how far the device lags behind the thread that schedules its work, because MLX
# allocates arrays when it schedules their computation. A long chunk makes the device lag as far as
# MLX allows. A short one does not, so each layer is scheduled behind this reduction.
_DELAY_SHAPE = (500, 1000)

# The activations of a token as a multiple of the measured ones, in percent. In tests, longer chunks
# held up to 40 % more per token than the profile runs.
_ACTIVATION_PERCENT = 150

# The number of prompt positions whose log probabilities are computed together. A small number keeps
# the memory for logits small, but with only one position, the weights of the output layer would be
# read for each position.
PROMPT_LOGPROBS_CHUNK = 8

# The number of candidates that the draw with top_p tests in one pass over the vocabulary on a GPU,
# where each pass launches a few kernels. A pass holds a number per token and candidate. It tests
# fewer if these numbers would take more bytes, which would also take longer than another pass.
MAX_CANDIDATES_PER_PASS, MAX_PASS_BYTES = 15, 16 << 20


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
    num_layers, buffers_per_layer: the number of layer caches of a sequence, and the maximum number
        of buffers of one of them.
    hidden_size: the hidden size of the model; None if the model returns only logits.
    kv_dtype: the type of stored keys and values; None for a model without attention.
    """

    budget: int
    weights: int
    working: int
    max_length: int
    kv_footprint: Callable[[int], int]
    num_layers: int = 0
    buffers_per_layer: int = 1
    hidden_size: int | None = None
    kv_dtype: str | None = None

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
    attention: the shapes of each layer's attention (models/attention_route.py).
    """

    bytes_per_token: int
    chunk: int
    max_batch_size: int
    vocab: int
    heads: int
    layers: Sequence[LayerCache]
    attention: Sequence[Sequence[AttentionShape]]

    @property
    def bytes_per_row(self) -> int:
        """The number of bytes per decoded sequence. Sampling needs three times the size of the
        float32 logits in addition to the logits."""
        return 16 * self.vocab

    def __call__(self, context: int) -> int:
        """Returns the number of bytes for sequences of up to `context` positions. This includes the
        activations of a prompt chunk, the logits, and the memory that attention holds for the
        chunk's scores of all visible positions."""
        # Prompt log probabilities computed in the same step need as much per position as a row.
        needed = (
            self.chunk * self.bytes_per_token
            + (self.max_batch_size + PROMPT_LOGPROBS_CHUNK) * self.bytes_per_row
        )
        if mx.default_device().type == mx.DeviceType.gpu:
            pass_bytes = 4 * self.max_batch_size * self.vocab * MAX_CANDIDATES_PER_PASS
            needed += min(pass_bytes, MAX_PASS_BYTES)
        return needed + max(
            (
                self._attention_bytes(layer, shapes, context)
                for layer, shapes in zip(self.layers, self.attention, strict=True)
            ),
            default=0,
        )

    def _attention_bytes(
        self, layer: LayerCache, shapes: Sequence[AttentionShape], context: int
    ) -> int:
        seen = self._visible_positions(layer, context)
        ours = score_buffer_bytes(layer, self.heads, seen)
        if ours is not None:
            return ours
        return max(
            (
                workspace_bytes(device_of_shape(shape), shape, length=self.chunk, total=seen)
                for shape in shapes
            ),
            default=0,
        )

    def _visible_positions(self, layer: LayerCache, context: int) -> int:
        """Returns the number of positions that one query of the layer attends to. This is derived
        from the cache size: a full cache grows with the context, a sliding window grows up to the
        window size, and a recurrent state does not grow."""
        bytes_then = layer.estimate_nbytes(context, self.chunk)
        if layer.estimate_nbytes(2 * context, self.chunk) > bytes_then:
            return context
        return min(context, STEP * bytes_then // max(1, layer.estimate_nbytes(1, self.chunk)))


def attention_shapes(layers: Sequence[LayerCache]) -> list[Sequence[AttentionShape]]:
    """Returns the shapes of each layer's attention. `layers` are the caches of a sequence with at
    least two positions that were computed together."""
    return [layer.attention_shapes for layer in layers]


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
    """Measures the working memory by computing a few tokens. See `ActivationMemory` and
    `MemoryProfile` for the parameters.

    The memory per token is assumed not to depend on the number of tokens. Model classes of mlx-lm,
    which return logits, may compute anything, so a whole chunk is computed with them. Logits are
    not included otherwise, because they are computed only for the last position of a prompt.
    """
    # one token would be computed like a decode step
    lengths = [max(2, min(_PROFILE_LENGTH, context))] * _PROFILE_RUNS
    tries = [(length, *_profile_run(model, length)) for length in lengths]
    _, _, hidden, kv = tries[-1]
    last = hidden[:, -1]
    logits = model.logits(last)
    if logits is last:  # a class that returns only logits passes them through
        length = max(2, min(chunk, context))
        tries.insert(0, (length, *_profile_run(model, length)))
    token = max(0, *(_ACTIVATION_PERCENT * held // (100 * length) for length, held, _, _ in tries))
    del tries
    layers = _copy_without_spare(kv)
    working = ActivationMemory(
        bytes_per_token=token,
        chunk=chunk,
        max_batch_size=max_batch_size,
        vocab=logits.size,
        heads=heads,
        layers=layers,
        attention=attention_shapes(kv),
    )
    return MemoryProfile(
        budget=budget,
        weights=weights,
        working=working(context),
        max_length=context,
        kv_footprint=KVFootprint(layers, chunk),
        num_layers=len(layers),
        buffers_per_layer=max((len(layer.state()) for layer in layers), default=1),
        # A class that returns only logits passes them through (models/mlx_lm_adapter.py).
        hidden_size=None if logits is last else last.shape[-1],
        kv_dtype=find_precision(layers),
    )


def _copy_without_spare(kv: Sequence[LayerCache]) -> list[LayerCache]:
    """Copies caches that are kept, because a copy has no spare capacity."""
    layers = [layer.copy() for layer in kv]
    evaluate_caches(layers)
    return layers


def _profile_run(model: Model, length: int) -> tuple[int, mx.array, Sequence[LayerCache]]:
    """Returns the peak memory without the caches, the hidden states, and the caches. length: the
    number of tokens."""
    kv = model.make_kv()
    one = mx.array(1.0)
    mx.eval(one)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    hidden = model(mx.zeros((1, length), mx.int32), kv)
    # The graph is built first, so that only MLX's own work takes place during a reduction.
    for outputs in (*(layer.state() for layer in kv), hidden):
        mx.async_eval(mx.max(mx.broadcast_to(one, _DELAY_SHAPE)))
        mx.async_eval(outputs)
    mx.eval(hidden)
    return mx.get_peak_memory() - before - sum(layer.nbytes for layer in kv), hidden, kv
