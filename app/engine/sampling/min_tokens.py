"""`min_tokens`: stop tokens have probability 0 until the output has the minimum length.

Knows: tensors. Must not know: other stages, sequences, grammars.
"""

from collections.abc import Sequence

import mlx.core as mx

from app.engine.sampling.stage import StageInput


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
    """Implements `Stage`."""

    knobs = ("min_tokens",)

    def create_state(self, sequence: StageInput) -> MinTokensState | None:
        ids = sorted(id for id in sequence.stop_token_ids if id < sequence.vocab)
        if not ids or sequence.min_tokens <= 0:
            return None
        return MinTokensState(ids, sequence.min_tokens, sequence.vocab)

    def create_batch(self, states: Sequence[MinTokensState]) -> "_MinTokensBatch":
        return _MinTokensBatch(states)


class _MinTokensBatch:
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

    def add(self, tokens: mx.array, step: int) -> None:
        pass

    def release(self, num_draws: int) -> None:
        for state in self._states:
            state.tokens_left = max(0, state.tokens_left - num_draws)
