"""The stages of sampling, each of which changes the logits of a row before a token is sampled.

Knows: tensors, the sampling parameters, the interface between the sampler and its stages.
Must not know: sequences, grammars, texts, the model.

A stage creates the state of a sequence and processes batches of sequences. `STAGES` lists the
stages in the order in which they are applied.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from app.core.sampling_params import SamplingParams

_DEFAULTS = SamplingParams()

# of bad words: an ID that matches no token, for positions before the output, and one that matches
# every token
_NONE, _ANY = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """The properties of a sequence that a stage may use.

    prompt: the prompt tokens.
    vocab: the vocabulary size. Token IDs from 0 to vocab - 1 may be sampled.
    stop_token_ids: the tokens that end the output.
    min_tokens: the number of tokens that must still be sampled before the output may end.
    num_drawn: the number of tokens at the end of `prompt` that were sampled before a restart.
    """

    sampling: SamplingParams
    prompt: Sequence[int]
    vocab: int
    stop_token_ids: frozenset[int]
    min_tokens: int
    num_drawn: int = 0

    def sets(self, knobs: Sequence[str]) -> bool:
        """Returns whether one of these fields differs from its default. The fields belong to this
        class or to `sampling`."""
        return any(
            self.min_tokens > 0
            if knob == "min_tokens"
            else getattr(self.sampling, knob) != getattr(_DEFAULTS, knob)
            for knob in knobs
        )


class StageState(Protocol):
    """The state that a stage keeps for one sequence between batches."""

    @property
    def group_key(self) -> Hashable:
        """The group key of the sequence. Sequences are computed together only if their keys are
        equal, so that a row is computed in the same way in every batch. None means that the stage
        is skipped, because it does not change the logits of this sequence."""
        ...


class StageBatch:
    """A stage applied to the rows of one batch."""

    def apply(self, logits: mx.array, step: int) -> mx.array:
        """Processes the logits, [b, V] float32 -> the same shape. `step` is the number of tokens
        that this batch has already sampled per row."""
        raise NotImplementedError

    def add(self, tokens: mx.array, step: int) -> None:
        """Adds the tokens sampled in this step, if the stage depends on them. `tokens` is a uint32
        array of shape [b], which may be lazy."""

    def release(self, num_draws: int) -> None:
        """Writes the state back to the sequences, if it has changed. `num_draws` is the number of
        tokens that this batch has sampled per row."""


class Stage(Protocol):
    @property
    def knobs(self) -> Sequence[str]:
        """The fields of `SamplingParams` or `StageInput` that the stage uses. The sampler skips the
        stage for sequences with default values for all of these fields."""
        ...

    def create_state(self, sequence: StageInput) -> StageState | None:
        """Creates the state of a sequence. Returns None if the stage never changes a logit of this
        sequence."""
        ...

    def create_batch(self, states: Sequence[Any]) -> StageBatch:
        """Creates a batch from states with equal group keys, which were created by
        `create_state`."""
        ...


@dataclass(frozen=True, slots=True)
class BiasState:
    """The bias of one sequence. `bias` has the shape [V] and the type float32."""

    bias: mx.array

    @property
    def group_key(self) -> bool:
        return True


class LogitBias:
    """OpenAI's `logit_bias`, which adds a number to the logit of a token. Implements `Stage`."""

    knobs = ("logit_bias",)

    def create_state(self, sequence: StageInput) -> BiasState | None:
        if not sequence.sampling.logit_bias:
            return None
        ids, values = zip(*sequence.sampling.logit_bias, strict=True)
        dense = mx.zeros((sequence.vocab,)).at[mx.array(list(ids))].add(mx.array(list(values)))
        return BiasState(dense)

    def create_batch(self, states: Sequence[BiasState]) -> StageBatch:
        return _BiasBatch(mx.stack([state.bias for state in states]))


class _BiasBatch(StageBatch):
    def __init__(self, bias: mx.array) -> None:
        self._bias = bias

    def apply(self, logits: mx.array, step: int) -> mx.array:
        return logits + self._bias


class PenaltyState:
    """The penalty state of one sequence.

    token_counts: [V] int32, the number of occurrences of each token in the window.
    window: [up to repeat_last_n] token IDs, see `_PenaltyBatch`; None if the window is the whole
        sequence.
    num_counted: the total number of tokens added to the window.
    """

    def __init__(self, sequence: StageInput) -> None:
        self.sampling = sequence.sampling
        last = self.sampling.repeat_last_n
        seen = list(sequence.prompt if last < 0 else sequence.prompt[-last:])
        self.num_counted = len(seen)
        # A prompt may contain tokens that cannot be sampled. They also occupy the window.
        ids = mx.array([id for id in seen if id < sequence.vocab], dtype=mx.int32)
        self.token_counts = mx.zeros((sequence.vocab,), dtype=mx.int32).at[ids].add(1)
        self.window = mx.array(seen, dtype=mx.int32) if last > 0 else None

    @property
    def group_key(self) -> str:
        return "all" if self.window is None else "window"


class Penalties:
    """Repetition, presence and frequency penalties for prompt and output tokens. Implements
    `Stage`."""

    knobs = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    def create_state(self, sequence: StageInput) -> PenaltyState | None:
        s = sequence.sampling
        neutral = s.repetition_penalty == 1 and not s.presence_penalty and not s.frequency_penalty
        return None if neutral or s.repeat_last_n == 0 else PenaltyState(sequence)

    def create_batch(self, states: Sequence[PenaltyState]) -> StageBatch:
        return _PenaltyBatch(states)


class _PenaltyBatch(StageBatch):
    """The penalties of a group of rows. Either all rows have a window or none.

    Added tokens may still be lazy, because the loop runs one step ahead. Counts and windows are
    therefore arrays. A window of n tokens is a ring buffer: the i-th token is stored at i mod n and
    overwrites an older token if i >= n. The array is only as long as the filled part of the window,
    because n may be larger than any context.
    """

    def __init__(self, states: Sequence[PenaltyState]) -> None:
        self._states = states
        self._counts = mx.stack([state.token_counts for state in states])
        self._repetition = _column(states, lambda s: s.repetition_penalty)
        self._presence = _column(states, lambda s: s.presence_penalty)
        self._frequency = _column(states, lambda s: s.frequency_penalty)
        self._numbers = mx.arange(len(states))
        windows = [state.window for state in states if state.window is not None]
        self._windows = _stack_padded(windows) if windows else None
        self._lengths = mx.array([state.sampling.repeat_last_n for state in states])
        self._num_counted = mx.array([state.num_counted for state in states])
        self._max_counted = max(state.num_counted for state in states)
        self._longest = max(state.sampling.repeat_last_n for state in states)

    def apply(self, logits: mx.array, step: int) -> mx.array:
        """Applies the penalties. The repetition penalty (Keskar et al. 2019) divides a positive
        logit and multiplies a negative one. The presence penalty is subtracted once per seen token,
        and the frequency penalty once per occurrence (OpenAI)."""
        repeated = mx.maximum(logits, 0) / self._repetition
        repeated = repeated + mx.minimum(logits, 0) * self._repetition
        penalized = repeated - self._presence - self._frequency * self._counts
        return mx.where(self._counts > 0, penalized, logits)

    def add(self, tokens: mx.array, step: int) -> None:
        self._counts = self._counts.at[self._numbers, tokens].add(1)
        if self._windows is None:
            return
        self._windows = self._grow_windows(self._windows, step)
        counted = self._num_counted + step
        places = counted % self._lengths
        replaced = self._windows[self._numbers, places]
        vocab = self._counts.shape[-1]
        leaves = (counted >= self._lengths) & (replaced < vocab)
        replaced = mx.minimum(replaced, vocab - 1)
        self._counts = self._counts.at[self._numbers, replaced].add(-leaves.astype(mx.int32))
        self._windows[self._numbers, places] = tokens.astype(mx.int32)

    def release(self, num_draws: int) -> None:
        for number, state in enumerate(self._states):
            state.num_counted += num_draws
            state.token_counts = self._counts[number]
            if self._windows is not None:
                filled = min(state.num_counted, state.sampling.repeat_last_n)
                state.window = self._windows[number, :filled]

    def _grow_windows(self, windows: mx.array, step: int) -> mx.array:
        filled = windows.shape[-1]
        needed = min(self._max_counted + step + 1, self._longest)
        if needed <= filled:
            return windows
        return mx.pad(windows, [(0, 0), (0, min(2 * needed, self._longest) - filled)])


def _stack_padded(windows: Sequence[mx.array]) -> mx.array:
    longest = max(map(len, windows))
    return mx.stack([mx.pad(window, (0, longest - len(window))) for window in windows])


def _column(states: Sequence[PenaltyState], field: Callable[[SamplingParams], float]) -> mx.array:
    return mx.array([[field(state.sampling)] for state in states], dtype=mx.float32)


@dataclass(frozen=True, slots=True)
class AllowedTokensState:
    """allowed: [V] bool."""

    allowed: mx.array

    @property
    def group_key(self) -> bool:
        return True


class AllowedTokens:
    """`allowed_token_ids`: all other tokens have probability 0. Implements `Stage`."""

    knobs = ("allowed_token_ids",)

    def create_state(self, sequence: StageInput) -> AllowedTokensState | None:
        ids = [id for id in sequence.sampling.allowed_token_ids if id < sequence.vocab]
        if not ids:
            return None
        allowed = mx.zeros((sequence.vocab,), dtype=mx.int32).at[mx.array(ids)].add(1)
        return AllowedTokensState(allowed > 0)

    def create_batch(self, states: Sequence[AllowedTokensState]) -> StageBatch:
        return _AllowedTokensBatch(mx.stack([state.allowed for state in states]))


class _AllowedTokensBatch(StageBatch):
    def __init__(self, allowed: mx.array) -> None:
        self._allowed = allowed

    def apply(self, logits: mx.array, step: int) -> mx.array:
        return mx.where(self._allowed, logits, -mx.inf)


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
    """`bad_words`: a token that would complete one of these sequences has probability 0. As in
    vLLM, only the output is searched, so a sequence may begin in the prompt. Implements `Stage`."""

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

    def create_batch(self, states: Sequence[BadWordsState]) -> StageBatch:
        return _BadWordsBatch(states)


class _BadWordsBatch(StageBatch):
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


class MinTokensState:
    """The state of one sequence. `tokens_left` is the number of tokens that must still be sampled
    before the output may end."""

    def __init__(self, stop_token_ids: list[int], tokens_left: int, vocab: int) -> None:
        self.stop_token_ids = stop_token_ids
        self.tokens_left = tokens_left
        self.vocab = vocab

    @property
    def group_key(self) -> bool | None:
        return True if self.tokens_left > 0 else None


class MinTokens:
    """`min_tokens`: stop tokens have probability 0 until the output has the minimum length.
    Implements `Stage`."""

    knobs = ("min_tokens",)

    def create_state(self, sequence: StageInput) -> MinTokensState | None:
        ids = sorted(id for id in sequence.stop_token_ids if id < sequence.vocab)
        if not ids or sequence.min_tokens <= 0:
            return None
        return MinTokensState(ids, sequence.min_tokens, sequence.vocab)

    def create_batch(self, states: Sequence[MinTokensState]) -> StageBatch:
        return _MinTokensBatch(states)


class _MinTokensBatch(StageBatch):
    """Masks stop tokens based on the number of sampled tokens, which is known before the tokens are
    read."""

    def __init__(self, states: Sequence[MinTokensState]) -> None:
        self._states = states
        vocab = states[0].vocab
        self._stop_mask = mx.stack(
            [
                mx.zeros((vocab,), dtype=mx.bool_).at[mx.array(state.stop_token_ids)].add(True)
                for state in states
            ]
        )
        self._tokens_left = mx.array([[state.tokens_left] for state in states])
        self._longest = max(state.tokens_left for state in states)

    def apply(self, logits: mx.array, step: int) -> mx.array:
        if step >= self._longest:
            return logits
        return mx.where(self._stop_mask & (step < self._tokens_left), -mx.inf, logits)

    def release(self, num_draws: int) -> None:
        for state in self._states:
            state.tokens_left = max(0, state.tokens_left - num_draws)


# in the order in which they are applied to the logits.
STAGES: tuple[Stage, ...] = (LogitBias(), Penalties(), AllowedTokens(), BadWords(), MinTokens())
