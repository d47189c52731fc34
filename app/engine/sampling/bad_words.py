"""`bad_words`: a token that would complete one of these sequences has probability 0.

Knows: tensors. Must not know: other stages, sequences, texts.

As in vLLM, only the output is searched, so a sequence may begin in the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.engine.sampling.stage import StageInput

# an ID that matches no token, for positions before the output, and an ID that matches every token
_NONE, _ANY = -1, -2


@dataclass(slots=True)
class BadWordsState:
    """prefixes: [n, k] int32, the token IDs of each sequence except the last one, left-padded with
    `_ANY`. last_ids: [n] int32, the last token ID of each sequence. recent: [k] int32, the most
    recently sampled token IDs."""

    prefixes: mx.array
    last_ids: mx.array
    recent: mx.array

    @property
    def group_key(self) -> bool:
        return True


class BadWords:
    """Implements `Stage`."""

    knobs = ("bad_words",)

    def create_state(self, sequence: StageInput) -> BadWordsState | None:
        words = [word for word in sequence.sampling.bad_words if max(word) < sequence.vocab]
        if not words:
            return None
        length = max(map(len, words)) - 1
        drawn = min(length, sequence.num_drawn, len(sequence.prompt))
        recent = list(sequence.prompt[len(sequence.prompt) - drawn :])
        prefixes = [[_ANY] * (length + 1 - len(word)) + list(word[:-1]) for word in words]
        return BadWordsState(
            prefixes=mx.array(prefixes, dtype=mx.int32).reshape(len(words), length),
            last_ids=mx.array([word[-1] for word in words], dtype=mx.int32),
            recent=mx.array([_NONE] * (length - drawn) + recent, dtype=mx.int32),
        )

    def create_batch(self, states: Sequence[BadWordsState]) -> "_BadWordsBatch":
        return _BadWordsBatch(states)


class _BadWordsBatch:
    """Rows are padded to the longest word and to the maximum number of words. Padding never
    matches, so it does not affect a row. Added tokens may still be lazy, so the recent token IDs
    are an array."""

    def __init__(self, states: Sequence[BadWordsState]) -> None:
        self._states = states
        words = max(len(state.last_ids) for state in states)
        length = max(len(state.recent) for state in states)
        self._prefixes = mx.stack([_pad_words(state, words, length) for state in states])
        self._last_ids = mx.stack(
            [mx.pad(state.last_ids, (0, words - len(state.last_ids))) for state in states]
        )
        self._exists = mx.stack([mx.arange(words) < len(state.last_ids) for state in states])
        self._recent = mx.stack(
            [
                mx.pad(state.recent, (length - len(state.recent), 0), constant_values=_NONE)
                for state in states
            ]
        )
        self._numbers = mx.arange(len(states))[:, None]

    def apply(self, logits: mx.array, step: int) -> mx.array:
        same = (self._prefixes == self._recent[:, None, :]) | (self._prefixes == _ANY)
        completed = self._exists & mx.all(same, axis=-1)
        counts = mx.zeros(logits.shape, dtype=mx.int32)
        counts = counts.at[self._numbers, self._last_ids].add(completed.astype(mx.int32))
        return mx.where(counts > 0, -mx.inf, logits)

    def add(self, tokens: mx.array, step: int) -> None:
        drawn = tokens.astype(mx.int32)[:, None]
        self._recent = mx.concatenate([self._recent, drawn], axis=1)[:, 1:]

    def release(self, num_draws: int) -> None:
        for number, state in enumerate(self._states):
            kept = len(state.recent)
            state.recent = self._recent[number, self._recent.shape[1] - kept :]


def _pad_words(state: BadWordsState, words: int, length: int) -> mx.array:
    """Pads the words of a row, [n, k] -> [words, length]."""
    count, own = state.prefixes.shape
    return mx.pad(state.prefixes, [(0, words - count), (length - own, 0)], constant_values=_ANY)
