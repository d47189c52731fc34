"""Runs the steps of a batch of sequences. A step consists of one forward pass and one sampling
operation.

Knows: the model as a function, sequences, the sampler. Must not know: scheduling, queues, memory.
Only `InFlight.read` waits for the device.

    prefill → PrefillChunk ↘
    decode           → BatchLogits → sample → InFlight → read → SampledToken

Without grammars, no token values are needed until `read`. With a grammar, the forward pass can run
before the preceding tokens are read, but sampling must wait for them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx

from app.core.images import is_row_id
from app.engine.adapters import Adapters
from app.engine.decode_slab import DecodeSlab
from app.engine.sampling.logprobs import compute_prompt_logprobs
from app.engine.sampling.sampler import SamplerBatch, SamplerOutput, local_tokens
from app.engine.sequence import Sequence
from models.base import Model, SelectPositions, select_all, select_last
from models.batch_cache import PackedKVCache
from models.cpu_layout import is_batch_invariant
from models.image_inputs import ImageInputs, to_model_ids
from models.kv import KVBuffers, LayerCache, get_position_delta, set_position_delta
from models.mrope import ImageRange, find_delta, make_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A sampled token that has been read. `valid` is False if its logits contained invalid
    numbers."""

    token: int
    valid: bool
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLogits:
    """The logits from which the next token of each sequence can be sampled. `logits` is a lazy
    array of shape [B, V or more]. has_grammar: whether any sequence has a grammar. If so, the
    preceding tokens must be read before sampling."""

    sequences: tuple[Sequence, ...]
    logits: mx.array
    has_grammar: bool

    def without_ended(self) -> "BatchLogits":
        """Returns the batch without the sequences that have ended since the forward pass."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence.running]
        if len(rows) == len(self.sequences):
            return self
        return _make_logits(
            [self.sequences[row] for row in rows], self.logits[mx.array(rows, dtype=mx.int32)]
        )


def _make_logits(sequences: Ids[Sequence], logits: mx.array) -> BatchLogits:
    has_grammar = any(s.matcher is not None for s in sequences)
    return BatchLogits(sequences=tuple(sequences), logits=logits, has_grammar=has_grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Sampled tokens whose values have not been read yet, one for each of `sequences`."""

    sequences: tuple[Sequence, ...]
    output: SamplerOutput

    def read(self) -> list[SampledToken]:
        """Waits until the device has computed the tokens, and returns them."""
        sampled = self.output
        tokens = cast(list[int], sampled.tokens.tolist())
        sound = cast(list[bool], sampled.valid.tolist())
        if sampled.logprobs is None:
            return [
                SampledToken(token=token, valid=valid)
                for token, valid in zip(tokens, sound, strict=True)
            ]
        logprobs = cast(list[float], sampled.logprobs.tolist())
        top_ids, top_logprobs = _to_list(sampled.top_ids), _to_list(sampled.top_logprobs)
        drawn = list[SampledToken]()
        for row, sequence in enumerate(self.sequences):
            num_top = sequence.job.top_logprobs
            top = (
                zip(top_ids[row][:num_top], top_logprobs[row][:num_top], strict=True)
                if num_top
                else ()
            )
            drawn.append(
                SampledToken(
                    token=tokens[row],
                    valid=sound[row],
                    logprob=None if num_top is None else logprobs[row],
                    top_logprobs=tuple(top),
                )
            )
        return drawn


# A prompt chunk is dispatched in two parts. The first part has one in this many layers.
_FIRST_LAYERS_DIVISOR = 8


class PrefillChunk:
    """The prompt chunks of one forward pass, whose arrays are lazy.

    ends: the number of prompt tokens of each sequence up to the end of its chunk.
    num_tokens: the number of tokens of all chunks.
    scored: the logits of the first token of each sequence whose prompt is completed.
    """

    def __init__(
        self, sequences: Ids[Sequence], num_tokens: int, scored: BatchLogits | None
    ) -> None:
        self.sequences = sequences
        self.ends = [sequence.num_computed_tokens for sequence in sequences]
        self.num_tokens = num_tokens
        self.scored = scored
        count = max(1, len(sequences[0].kv) // _FIRST_LAYERS_DIVISOR)
        self._first_layers = _states([layer for s in sequences for layer in s.kv[:count]])
        layers = [layer for s in sequences for layer in s.kv]
        self._keys_and_values = _states([x for x in layers if isinstance(x, KVBuffers)])
        self._other_states = _states([x for x in layers if not isinstance(x, KVBuffers)])
        self._last = [next(a for a in reversed(_states(s.kv)) if a.size) for s in sequences]
        self._markers: list[mx.array] = []

    @property
    def unfinished(self) -> list[tuple[Sequence, int]]:
        """The running sequences whose prompts are not complete, and their ends."""
        done = () if self.scored is None else self.scored.sequences
        pairs = zip(self.sequences, self.ends, strict=True)
        return [(s, end) for s, end in pairs if s.running and s not in done]

    def dispatch_first_layers(self) -> None:
        """Gives the device work for a fraction of the pass."""
        mx.async_eval(self._first_layers)

    def dispatch(self) -> None:
        """Dispatches the rest of the pass. MLX references the outputs of an evaluation until it has
        ended, and the next step would have to copy caches with a second reference. Therefore the
        only outputs are elements of the last layer, for which the device must compute all keys and
        values. A last evaluation computes the rest, such as recurrent states."""
        # computed elements, because a slice would reference the buffer
        self._markers = [array[(0,) * array.ndim] == 0 for array in self._last]
        mx.async_eval(self._markers)
        mx.async_eval(self._keys_and_values)
        mx.async_eval(self._other_states)
        self._first_layers = self._keys_and_values = self._other_states = self._last = []

    def wait(self) -> None:
        """Waits until the device has computed the pass."""
        markers, self._markers = self._markers, []
        mx.eval(markers)


class ModelRunner:
    """Runs the model and the sampler. The sampler state of the last batch is kept, so that an
    unchanged batch does not have to be rebuilt."""

    def __init__(
        self,
        model: Model,
        *,
        vocab: int,
        broadcast_tokens: Callable[[mx.array], mx.array] = local_tokens,
        slab: DecodeSlab | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Creates a runner. `vocab` is the number of token IDs that may be sampled, from 0 to vocab
        - 1. For `broadcast_tokens`, see `SamplerBatch`. slab: None if the layer caches of sequences
        always remain separate. adapters: those of the model, if it has any."""
        self._model = model
        self._adapters = adapters
        self._slab = slab
        self._broadcast_tokens = broadcast_tokens
        self._vocab = vocab
        self._image_rules = model.image_rules
        # With a selection, the last layer multiplies fewer rows. Other operations would round
        # differently.
        self._selects = is_batch_invariant(model)
        self._members: tuple[Sequence, ...] = ()
        self._sampler_batch: SamplerBatch | None = None
        # Packing changes the shapes of operations. Where a CPU would round differently, a prompt
        # would no longer give the same tokens alone. On a GPU, batches round differently anyway.
        # Other caches cannot compute part of a batch, and other models compute single positions
        # differently.
        may_pack = self._selects or mx.default_device().type == mx.DeviceType.gpu
        self.packs_prompts = (
            may_pack
            and not (adapters is not None and adapters.has_default)
            and model.batch_invariant
            and all(isinstance(layer, KVBuffers) for layer in model.make_kv())
        )

    def prefill(self, sequence: Sequence, count: int) -> PrefillChunk:
        """Prefills the next `count` known tokens of one sequence. Waits for the device only if the
        job requests prompt log probabilities."""
        start = sequence.num_computed_tokens
        ids = sequence.ids[start : start + count]
        tokens = mx.array([to_model_ids(ids) if sequence.job.images else ids])
        scores_prompt = bool(sequence.num_unscored_tokens)
        select = select_all if scores_prompt else select_last
        self._set_position_delta(sequence)
        images = self._make_image_inputs(sequence, start, start + count)
        hidden = self._forward([sequence], tokens, sequence.kv, select, images)
        if scores_prompt:
            self._compute_prompt_logprobs(sequence, hidden[0])
        sequence.num_computed_tokens += count
        self._set_position_delta(sequence)
        complete = not sequence.num_uncomputed_tokens
        scored = self._last_logits([sequence], hidden) if complete else None
        return PrefillChunk([sequence], count, scored)

    def prefill_packed(self, parts: Ids[tuple[Sequence, int]]) -> PrefillChunk:
        """Prefills the next `count` known tokens of each sequence in one forward pass. Every layer
        cache must be a `KVBuffers`, no sequence may have an adapter, and no chunk may have image
        rows."""
        for sequence, _ in parts:
            self._set_position_delta(sequence)
        sequences, counts = [s for s, _ in parts], [count for _, count in parts]
        starts = [s.num_computed_tokens for s in sequences]
        places = [range(a, a + count) for a, count in zip(starts, counts, strict=True)]
        ids = [s.ids[i] for s, place in zip(sequences, places, strict=True) for i in place]
        deltas = [get_position_delta(s.kv) for s in sequences]
        positions = mx.array(
            [i + delta for place, delta in zip(places, deltas, strict=True) for i in place]
        )
        layers = cast(
            Ids[tuple[KVBuffers, ...]], list(zip(*(s.kv for s in sequences), strict=True))
        )
        kv = [PackedKVCache(layer, counts, positions) for layer in layers]
        last = zip(parts, accumulate(counts), strict=True)
        done = [(s, end - 1) for (s, count), end in last if s.num_uncomputed_tokens == count]
        rows = mx.array([row for _, row in done], dtype=mx.int32)
        tokens = mx.array(to_model_ids(ids))[:, None]
        hidden = self._forward([], tokens, kv, lambda hidden: hidden[rows])
        for sequence, count in parts:
            sequence.num_computed_tokens += count
        scored = self._last_logits([s for s, _ in done], hidden) if done else None
        return PrefillChunk(sequences, len(ids), scored)

    def arrange(self, sequences: Ids[Sequence]) -> Ids[Sequence]:
        """Chooses the layout of the layer caches for the next decode step, and returns the
        sequences in the order of its rows."""
        return sequences if self._slab is None else self._slab.arrange(sequences)

    def decode(self, sequences: Ids[Sequence], tokens: mx.array) -> BatchLogits:
        """Runs a forward pass with one token per sequence, in the order that `arrange` returned.
        The shape of `tokens` is [B]."""
        if self._slab is not None and sequences[0].slab is not None:
            kv = self._slab.make_batch(sequences)
        else:
            kv = _batched_kv(sequences)
        hidden = self._select_model(sequences)(tokens[:, None], kv)
        for sequence in sequences:
            sequence.num_computed_tokens += 1
        return self._last_logits(sequences, hidden)

    def sample(self, batch: BatchLogits) -> InFlight:
        """Samples one token per sequence, as allowed by the grammar of each sequence."""
        members = batch.sequences
        requested = [s.job.top_logprobs for s in members if s.job.top_logprobs is not None]
        sampled = self._sampler_batch_for(members).sample(
            batch.logits,
            top_logprobs=max(requested) if requested else None,
            bitmask=_grammar_bitmask(members) if batch.has_grammar else None,
        )
        pending = InFlight(sequences=members, output=sampled)
        for sequence in members:
            sequence.num_in_flight += 1
            sequence.decoding = True
        logprobs = (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
        mx.async_eval(
            [array for array in (sampled.tokens, sampled.valid, *logprobs) if array is not None]
        )
        return pending

    def reset_sampler(self, sequence: Sequence) -> None:
        """Drops the sampler state of a batch if it contains this sequence. The state may be
        invalid, because a step of the sequence failed."""
        if sequence in self._members:
            self._members, self._sampler_batch = (), None

    def _set_position_delta(self, sequence: Sequence) -> None:
        """Sets the position of the next token on the layer caches, which may have belonged to
        another sequence."""
        if self._image_rules is not None and self._image_rules.positions == "mrope":
            delta = find_delta(_image_ranges(sequence), sequence.num_computed_tokens)
            set_position_delta(sequence.kv, delta)

    def _make_image_inputs(self, sequence: Sequence, start: int, end: int) -> ImageInputs | None:
        """Returns the image rows of a chunk; None if it has none. All of them belong to the same
        image, whose features the sequence has."""
        image = sequence.current_image
        ids = sequence.ids
        rows = [i - start for i in range(start, end) if is_row_id(ids[i])] if image else []
        if image is None or not rows:
            return None
        assert end <= image.end, "the chunk has a different image"
        assert self._image_rules is not None, "the model does not process images"
        assert sequence.features is not None, "the image is not encoded"
        assert sequence.features.key == image.key, "the features belong to a different image"
        features = sequence.features.features
        first = sum(map(is_row_id, ids[image.start : start]))
        part = slice(first, first + len(rows))
        mrope = self._image_rules.positions == "mrope"
        return ImageInputs(
            rows=mx.array(rows, dtype=mx.int32),
            features=features.rows[part],
            deepstack=[array[part] for array in features.deepstack],
            positions=make_positions(_image_ranges(sequence), start, end) if mrope else None,
            groups=[(image.start, image.end)] if self._image_rules.atomic else [],
        )

    def _forward(
        self,
        rows: Ids[Sequence],
        tokens: mx.array,
        kv: Ids[object],
        select: SelectPositions,
        images: ImageInputs | None = None,
    ) -> mx.array:
        """Returns the selected hidden states. rows: see `_select_model`."""
        model = self._select_model(rows)
        if images is not None:
            if self._selects or model.selects_logits:
                return model(tokens, kv, select, images)
            return select(model(tokens, kv, select_all, images))
        if self._selects or model.selects_logits:
            return model(tokens, kv, select)
        return select(model(tokens, kv))

    def _select_model(self, rows: Ids[Sequence]) -> Model:
        """Returns the model for a forward pass of these sequences, one per row. Without adapters,
        this is the model itself."""
        if self._adapters is None:
            return self._model
        salts = [sequence.cache_salt for sequence in rows]
        is_used = any(salts) or self._adapters.has_default
        return self._adapters.select(salts) if is_used else self._model

    def _compute_prompt_logprobs(self, sequence: Sequence, hidden: mx.array) -> None:
        """Computes the log probabilities of the next prompt tokens.

        `hidden` has shape [L, D] and starts at the first uncomputed position. Each position except
        the last one of the prompt gives the log probability of the next token. Log probabilities
        that were computed before a restart of the sequence are kept.
        """
        job, first = sequence.job, sequence.num_computed_tokens
        begin = max(first, len(sequence.prompt_logprobs))
        end = min(first + len(hidden), len(job.prompt_token_ids) - 1)
        if begin >= end:
            return
        assert job.prompt_logprobs is not None
        sequence.prompt_logprobs += compute_prompt_logprobs(
            self._select_model([sequence]),
            hidden[begin - first : end - first],
            job.prompt_token_ids[begin + 1 : end + 1],
            vocab=self._vocab,
            count=job.prompt_logprobs,
        )

    def _last_logits(self, sequences: Ids[Sequence], hidden: mx.array) -> BatchLogits:
        """Computes the logits of the last position. The shape of `hidden` is [B, L, D]."""
        return _make_logits(sequences, self._select_model(sequences).logits(hidden[:, -1]))

    def _sampler_batch_for(self, members: tuple[Sequence, ...]) -> SamplerBatch:
        if self._sampler_batch is None or members != self._members:
            if self._sampler_batch is not None:
                self._sampler_batch.release()
            self._members, self._sampler_batch = members, None
            self._sampler_batch = SamplerBatch(
                [s.sampler_state for s in members], self._broadcast_tokens
            )
        return self._sampler_batch


def _image_ranges(sequence: Sequence) -> list[ImageRange]:
    return [ImageRange(image.start, *image.grid) for image in sequence.job.images]


def _states(layers: Ids[LayerCache]) -> list[mx.array]:
    return [array for layer in layers for array in layer.state()]


def gather_in_flight(groups: Ids[InFlight], sequences: Ids[Sequence]) -> mx.array:
    """Returns the in-flight tokens of `sequences`, in this order. The shape of the result is
    [B]."""
    if len(groups) == 1 and groups[0].sequences == tuple(sequences):
        return groups[0].output.tokens
    members = set(sequences)
    # a group without members may belong to a step that failed
    groups = [group for group in groups if not members.isdisjoint(group.sequences)]
    place = {s: row for row, s in enumerate(s for group in groups for s in group.sequences)}
    tokens = mx.concatenate([group.output.tokens for group in groups])
    return tokens[mx.array([place[sequence] for sequence in sequences])]


def _grammar_bitmask(sequences: Ids[Sequence]) -> mx.array:
    """Returns the tokens allowed for each sequence, as uint32 words with a bit per token [B, V / 32
    or more]. For a sequence without a grammar, all tokens are allowed."""
    masks = [None if s.matcher is None else s.matcher.bitmask for s in sequences]
    size = next(len(mask) for mask in masks if mask is not None)
    bits = b"".join(b"\xff" * size if mask is None else mask for mask in masks)
    # MLX's type stubs lack the buffer protocol.
    return mx.array(cast(Any, memoryview(bits).cast("I"))).reshape(len(masks), -1)


def _batched_kv(sequences: Ids[Sequence]) -> Ids[object]:
    """Batches the caches of the sequences, layer by layer."""
    if len(sequences) == 1:
        return sequences[0].kv
    positions = mx.array([s.num_computed_tokens + get_position_delta(s.kv) for s in sequences])
    layers: Ids[tuple[LayerCache, ...]] = list(
        zip(*(sequence.kv for sequence in sequences), strict=True)
    )
    return [layer[0].make_batch(layer, positions) for layer in layers]


def _to_list(array: mx.array | None) -> Any:
    return [] if array is None else array.tolist()
