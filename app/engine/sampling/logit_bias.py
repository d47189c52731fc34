"""OpenAI's `logit_bias`, which adds a number to the logit of a token.

Knows: tensors. Must not know: other stages, sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.engine.sampling.stage import StageInput


@dataclass(frozen=True, slots=True)
class BiasState:
    """The bias of one sequence. `bias` has the shape [V] and the type float32."""

    bias: mx.array

    @property
    def group_key(self) -> bool:
        return True


class LogitBias:
    """Implements `Stage`."""

    knobs = ("logit_bias",)

    def create_state(self, sequence: StageInput) -> BiasState | None:
        if not sequence.sampling.logit_bias:
            return None
        ids, values = zip(*sequence.sampling.logit_bias, strict=True)
        dense = mx.zeros((sequence.vocab,)).at[mx.array(list(ids))].add(mx.array(list(values)))
        return BiasState(dense)

    def create_batch(self, states: Sequence[BiasState]) -> "_BiasBatch":
        return _BiasBatch(mx.stack([state.bias for state in states]))


class _BiasBatch:
    def __init__(self, bias: mx.array) -> None:
        self._bias = bias

    def apply(self, logits: mx.array, step: int) -> mx.array:
        return logits + self._bias

    def add(self, tokens: mx.array, step: int) -> None:
        pass

    def release(self, num_draws: int) -> None:
        pass
