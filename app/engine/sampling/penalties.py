"""Repetition, presence and frequency penalties for prompt and output tokens.

Knows: tensors, token counts. Must not know: other stages, sequences.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from app.core.sampling_params import SamplingParams
from app.engine.sampling.stage import StageInput


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
    """Implements `Stage`."""

    knobs = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    def create_state(self, sequence: StageInput) -> PenaltyState | None:
        s = sequence.sampling
        neutral = s.repetition_penalty == 1 and not s.presence_penalty and not s.frequency_penalty
        return None if neutral or s.repeat_last_n == 0 else PenaltyState(sequence)

    def create_batch(self, states: Sequence[PenaltyState]) -> "_PenaltyBatch":
        return _PenaltyBatch(states)


class _PenaltyBatch:
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
