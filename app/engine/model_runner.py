"""Sequences that take a step together: one forward pass, one sampling.

Knows: the model as a function, sequences, the sampler. Must not know: who runs and why, queues,
memory. Nothing is waited for here but in `InFlight.read`.

    prefill, decode → Scored → sample → Pending → read → Drawn

Without grammars nothing has to be known for any of it. A row with one is `constrained`: it may be
scored, but not sampled, before the token in front of it has been read.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from app.engine.sampling.logprobs import compute_prompt_logprobs
from app.engine.sampling.sampler import SamplerBatch, SamplerOutput, local_tokens
from app.engine.sequence import Sequence
from models.base import Model
from models.kv import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A token whose value is known. valid: whether its logits were numbers."""

    token: int
    valid: bool
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLogits:
    """Sequences of which the next token can be sampled. logits: [B, V or more], lazy."""

    sequences: tuple[Sequence, ...]
    logits: mx.array

    @property
    def has_grammar(self) -> bool:
        """Whether any follows a grammar: then the tokens before must be known first."""
        return any(s.matcher is not None for s in self.sequences)

    def without_ended(self) -> "BatchLogits":
        """Without those that have ended since."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence.running]
        if len(rows) == len(self.sequences):
            return self
        left = tuple(self.sequences[row] for row in rows)
        return BatchLogits(sequences=left, logits=self.logits[mx.array(rows, dtype=mx.int32)])


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Tokens on their way from the device, one for each of `sequences`."""

    sequences: tuple[Sequence, ...]
    output: SamplerOutput

    def read(self) -> list[SampledToken]:
        """Waits until the device is done with them."""
        sampled = self.output
        tokens = cast(list[int], sampled.tokens.tolist())
        sound = cast(list[bool], sampled.valid.tolist())
        logprobs, top_ids, top_logprobs = (_to_list(array) for array in _logprob_arrays(sampled))
        drawn = list[SampledToken]()
        for row, sequence in enumerate(self.sequences):
            wants = sequence.job.top_logprobs
            top = zip(top_ids[row][:wants], top_logprobs[row][:wants], strict=True) if wants else ()
            drawn.append(
                SampledToken(
                    token=tokens[row],
                    valid=sound[row],
                    logprob=None if wants is None else logprobs[row],
                    top_logprobs=tuple(top),
                )
            )
        return drawn


class ModelRunner:
    """Remembers the last rows' sampling state, so that a batch whose members stay the same
    gathers nothing."""

    def __init__(
        self,
        model: Model,
        *,
        vocab: int,
        broadcast_tokens: Callable[[mx.array], mx.array] = local_tokens,
    ) -> None:
        """vocab: ids that may be sampled, 0 to vocab - 1. broadcast_tokens: see `MlxLmBatch`."""
        self._model = model
        self._broadcast_tokens = broadcast_tokens
        self._vocab = vocab
        self._members: tuple[Sequence, ...] = ()
        self._sampler_batch: SamplerBatch | None = None

    def prefill(self, sequence: Sequence, count: int) -> BatchLogits:
        """Evaluate the next `count` known ids of one sequence. Waits only for one that wants its
        prompt scored."""
        start = sequence.num_computed_tokens
        tokens = mx.array([sequence.ids[start : start + count]])
        hidden = self._model(tokens, sequence.kv)
        if sequence.num_unscored_tokens:
            self._compute_prompt_logprobs(sequence, hidden[0])
        sequence.num_computed_tokens += count
        return self._last_logits([sequence], hidden)

    def decode(self, sequences: Ids[Sequence], tokens: mx.array) -> BatchLogits:
        """Evaluate one token [B] a sequence."""
        hidden = self._model(tokens[:, None], _batched_kv(sequences))
        for sequence in sequences:
            sequence.num_computed_tokens += 1
        return self._last_logits(sequences, hidden)

    def sample(self, batch: BatchLogits) -> InFlight:
        """One token a sequence; what their grammars forbid is not among them."""
        members = batch.sequences
        asked = [s.job.top_logprobs for s in members if s.job.top_logprobs is not None]
        sampled = self._sampler_batch_for(members).sample(
            batch.logits,
            top_logprobs=max(asked) if asked else None,
            allowed=_grammar_masks(members) if batch.has_grammar else None,
        )
        pending = InFlight(sequences=members, output=sampled)
        for sequence in members:
            sequence.num_in_flight += 1
        fields = (sampled.tokens, sampled.valid, *_logprob_arrays(sampled))
        mx.async_eval([array for array in fields if array is not None])
        return pending

    def reset_sampler(self, sequence: Sequence) -> None:
        """A step of it failed: what sampling remembers of it, and of those beside it, is in
        doubt."""
        if sequence in self._members:
            self._members, self._sampler_batch = (), None

    def _compute_prompt_logprobs(self, sequence: Sequence, hidden: mx.array) -> None:
        """hidden: [L, D], from the first position that is not evaluated yet. Each position scores
        the id behind it, and the prompt's last one none; what was scored before the sequence had to
        begin again is known already."""
        job, first = sequence.job, sequence.num_computed_tokens
        begin = max(first, len(sequence.prompt_logprobs))
        end = min(first + len(hidden), len(job.prompt_token_ids) - 1)
        if begin >= end:
            return
        assert job.prompt_logprobs is not None
        sequence.prompt_logprobs += compute_prompt_logprobs(
            self._model,
            hidden[begin - first : end - first],
            job.prompt_token_ids[begin + 1 : end + 1],
            vocab=self._vocab,
            count=job.prompt_logprobs,
        )

    def _last_logits(self, sequences: Ids[Sequence], hidden: mx.array) -> BatchLogits:
        """hidden: [B, L, D], of which the last position counts."""
        return BatchLogits(sequences=tuple(sequences), logits=self._model.logits(hidden[:, -1]))

    def _sampler_batch_for(self, members: tuple[Sequence, ...]) -> SamplerBatch:
        if self._sampler_batch is None or members != self._members:
            if self._sampler_batch is not None:
                self._sampler_batch.release()
            self._members, self._sampler_batch = members, None
            self._sampler_batch = SamplerBatch(
                [s.sampler_state for s in members], self._broadcast_tokens
            )
        return self._sampler_batch


def gather_in_flight(groups: Ids[InFlight], sequences: Ids[Sequence]) -> mx.array:
    """The pending tokens of `sequences`, which are in `groups` in this order: [B]."""
    if len(groups) == 1 and groups[0].sequences == tuple(sequences):
        return groups[0].output.tokens
    wanted = set(sequences)
    parts = list[mx.array]()
    for group in groups:
        rows = [row for row, sequence in enumerate(group.sequences) if sequence in wanted]
        if rows:
            parts.append(group.output.tokens[mx.array(rows)])
    return mx.concatenate(parts)


def _grammar_masks(sequences: Ids[Sequence]) -> mx.array:
    """What each may draw: [B, V or more] bool; everything, for those without a grammar. Bits cross
    to the device, and are spread there."""
    masks = [None if s.matcher is None else s.matcher.bitmask for s in sequences]
    size = next(len(mask) for mask in masks if mask is not None)
    bits = b"".join(b"\xff" * size if mask is None else mask for mask in masks)
    # MLX's stubs do not know of buffers
    words = mx.array(cast(Any, memoryview(bits).cast("I"))).reshape(len(masks), -1, 1)
    return ((words >> mx.arange(32, dtype=mx.uint32)) & 1).reshape(len(masks), -1) != 0


def _batched_kv(sequences: Ids[Sequence]) -> Ids[object]:
    """Their layer caches, side by side."""
    if len(sequences) == 1:
        return sequences[0].kv
    offsets = mx.array([sequence.num_computed_tokens for sequence in sequences])
    layers: Ids[tuple[LayerCache, ...]] = list(
        zip(*(sequence.kv for sequence in sequences), strict=True)
    )
    return [layer[0].make_batch(layer, offsets) for layer in layers]


def _logprob_arrays(sampled: SamplerOutput) -> tuple[mx.array | None, ...]:
    return sampled.logprobs, sampled.top_ids, sampled.top_logprobs


def _to_list(array: mx.array | None) -> Any:
    return [] if array is None else array.tolist()
