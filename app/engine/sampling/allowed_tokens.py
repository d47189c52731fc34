"""`allowed_token_ids`: all other tokens have probability 0.

Knows: tensors. Must not know: other stages, sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.engine.sampling.stage import StageInput


@dataclass(frozen=True, slots=True)
class AllowedTokensState:
    """allowed: [V] bool."""

    allowed: mx.array

    @property
    def group_key(self) -> bool:
        return True


class AllowedTokens:
    """Implements `Stage`."""

    knobs = ("allowed_token_ids",)

    def create_state(self, sequence: StageInput) -> AllowedTokensState | None:
        ids = [id for id in sequence.sampling.allowed_token_ids if id < sequence.vocab]
        if not ids:
            return None
        allowed = mx.zeros((sequence.vocab,), dtype=mx.int32).at[mx.array(ids)].add(1)
        return AllowedTokensState(allowed > 0)

    def create_batch(self, states: Sequence[AllowedTokensState]) -> "_AllowedTokensBatch":
        return _AllowedTokensBatch(mx.stack([state.allowed for state in states]))


class _AllowedTokensBatch:
    def __init__(self, allowed: mx.array) -> None:
        self._allowed = allowed

    def apply(self, logits: mx.array, step: int) -> mx.array:
        return mx.where(self._allowed, logits, -mx.inf)

    def add(self, tokens: mx.array, step: int) -> None:
        pass

    def release(self, num_draws: int) -> None:
        pass
