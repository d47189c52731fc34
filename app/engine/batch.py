"""Sequences that take a step together: one forward pass, one sampling.

Knows: the model as a function, sequences, the sampler. Must not know: who runs and why, queues,
memory. Nothing is waited for here but in `Pending.read`.

    prefill, decode → Scored → sample → Pending → read → Drawn

Without grammars nothing has to be known for any of it. A row with one is `constrained`: it may be
scored, but not sampled, before the token in front of it has been read.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from app.engine.sampler import Rows, Sampled, own
from app.engine.scores import scored
from app.engine.sequence import Sequence
from models.base import Model
from models.kv import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A token whose value is known. sound: whether its logits were numbers."""

    token: int
    sound: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Sequences of which the next token can be sampled. logits: [B, V or more], lazy."""

    sequences: tuple[Sequence, ...]
    logits: mx.array

    @property
    def constrained(self) -> bool:
        """Whether any follows a grammar: then the tokens before must be known first."""
        return any(s.matcher is not None for s in self.sequences)

    def running(self) -> "Scored":
        """Without those that have ended since."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence.running]
        if len(rows) == len(self.sequences):
            return self
        left = tuple(self.sequences[row] for row in rows)
        return Scored(sequences=left, logits=self.logits[mx.array(rows, dtype=mx.int32)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Tokens on their way from the device, one for each of `sequences`."""

    sequences: tuple[Sequence, ...]
    sampled: Sampled

    def read(self) -> list[Drawn]:
        """Waits until the device is done with them."""
        sampled = self.sampled
        tokens = cast(list[int], sampled.tokens.tolist())
        sound = cast(list[bool], sampled.sound.tolist())
        logprobs, top_ids, top_logprobs = (_listed(array) for array in _optional(sampled))
        drawn = list[Drawn]()
        for row, sequence in enumerate(self.sequences):
            wants = sequence.job.top_logprobs
            top = zip(top_ids[row][:wants], top_logprobs[row][:wants], strict=True) if wants else ()
            drawn.append(
                Drawn(
                    token=tokens[row],
                    sound=sound[row],
                    logprob=None if wants is None else logprobs[row],
                    top=tuple(top),
                )
            )
        return drawn


class Batch:
    """Remembers the last rows' sampling state, so that a batch whose members stay the same
    gathers nothing."""

    def __init__(
        self, model: Model, *, vocab: int, agreed: Callable[[mx.array], mx.array] = own
    ) -> None:
        """vocab: ids that may be sampled, 0 to vocab - 1. agreed: see `Rows`."""
        self._model = model
        self._agreed = agreed
        self._vocab = vocab
        self._members: tuple[Sequence, ...] = ()
        self._rows: Rows | None = None

    def prefill(self, sequence: Sequence, count: int) -> Scored:
        """Evaluate the next `count` known ids of one sequence. Waits only for one that wants its
        prompt scored."""
        start = sequence.evaluated
        tokens = mx.array([sequence.ids[start : start + count]])
        hidden = self._model(tokens, sequence.kv)
        if sequence.unscored:
            self._score_prompt(sequence, hidden[0])
        sequence.evaluated += count
        return self._scored([sequence], hidden)

    def decode(self, sequences: Ids[Sequence], tokens: mx.array) -> Scored:
        """Evaluate one token [B] a sequence."""
        hidden = self._model(tokens[:, None], _together(sequences))
        for sequence in sequences:
            sequence.evaluated += 1
        return self._scored(sequences, hidden)

    def sample(self, scored: Scored) -> Pending:
        """One token a sequence; what their grammars forbid is not among them."""
        members = scored.sequences
        asked = [s.job.top_logprobs for s in members if s.job.top_logprobs is not None]
        sampled = self._rows_of(members).sample(
            scored.logits,
            top_logprobs=max(asked) if asked else None,
            allowed=_allowed(members) if scored.constrained else None,
        )
        pending = Pending(sequences=members, sampled=sampled)
        for sequence in members:
            sequence.pending += 1
        fields = (sampled.tokens, sampled.sound, *_optional(sampled))
        mx.async_eval([array for array in fields if array is not None])
        return pending

    def forget(self, sequence: Sequence) -> None:
        """A step of it failed: what sampling remembers of it, and of those beside it, is in
        doubt."""
        if sequence in self._members:
            self._members, self._rows = (), None

    def _score_prompt(self, sequence: Sequence, hidden: mx.array) -> None:
        """hidden: [L, D], from the first position that is not evaluated yet. Each position scores
        the id behind it, and the prompt's last one none; what was scored before the sequence had to
        begin again is known already."""
        job, first = sequence.job, sequence.evaluated
        begin = max(first, len(sequence.scores))
        end = min(first + len(hidden), len(job.ids) - 1)
        if begin >= end:
            return
        assert job.prompt_logprobs is not None
        sequence.scores += scored(
            self._model,
            hidden[begin - first : end - first],
            job.ids[begin + 1 : end + 1],
            vocab=self._vocab,
            count=job.prompt_logprobs,
        )

    def _scored(self, sequences: Ids[Sequence], hidden: mx.array) -> Scored:
        """hidden: [B, L, D], of which the last position counts."""
        return Scored(sequences=tuple(sequences), logits=self._model.logits(hidden[:, -1]))

    def _rows_of(self, members: tuple[Sequence, ...]) -> Rows:
        if self._rows is None or members != self._members:
            if self._rows is not None:
                self._rows.release()
            self._members, self._rows = members, None
            self._rows = Rows([s.row for s in members], self._agreed)
        return self._rows


def pending_tokens(groups: Ids[Pending], sequences: Ids[Sequence]) -> mx.array:
    """The pending tokens of `sequences`, which are in `groups` in this order: [B]."""
    if len(groups) == 1 and groups[0].sequences == tuple(sequences):
        return groups[0].sampled.tokens
    wanted = set(sequences)
    parts = list[mx.array]()
    for group in groups:
        rows = [row for row, sequence in enumerate(group.sequences) if sequence in wanted]
        if rows:
            parts.append(group.sampled.tokens[mx.array(rows)])
    return mx.concatenate(parts)


def _allowed(sequences: Ids[Sequence]) -> mx.array:
    """What each may draw: [B, V or more] bool; everything, for those without a grammar. Bits cross
    to the device, and are spread there."""
    masks = [None if s.matcher is None else s.matcher.allowed for s in sequences]
    size = next(len(mask) for mask in masks if mask is not None)
    bits = b"".join(b"\xff" * size if mask is None else mask for mask in masks)
    # MLX's stubs do not know of buffers
    words = mx.array(cast(Any, memoryview(bits).cast("I"))).reshape(len(masks), -1, 1)
    return ((words >> mx.arange(32, dtype=mx.uint32)) & 1).reshape(len(masks), -1) != 0


def _together(sequences: Ids[Sequence]) -> Ids[object]:
    """Their layer caches, side by side."""
    if len(sequences) == 1:
        return sequences[0].kv
    offsets = mx.array([sequence.evaluated for sequence in sequences])
    layers: Ids[tuple[LayerCache, ...]] = list(
        zip(*(sequence.kv for sequence in sequences), strict=True)
    )
    return [layer[0].together(layer, offsets) for layer in layers]


def _optional(sampled: Sampled) -> tuple[mx.array | None, ...]:
    return sampled.logprobs, sampled.top_ids, sampled.top_logprobs


def _listed(array: mx.array | None) -> Any:
    return [] if array is None else array.tolist()
