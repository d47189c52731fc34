"""The interface of a sampling stage, which changes the logits of a row before a token is sampled.

Knows: the interface between the sampler and its stages. Must not know: any stage, sequences, the
model.

A stage is a module that defines one object, which creates the state of a sequence and processes
batches of sequences. `STAGES` in app/engine/sampling/sampler.py lists the stages in order.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from app.core.sampling_params import SamplingParams

_DEFAULTS = SamplingParams()


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


class StageBatch(Protocol):
    """A stage applied to the rows of one batch."""

    def apply(self, logits: mx.array, step: int) -> mx.array:
        """Processes the logits, [b, V] float32 -> the same shape. `step` is the number of tokens
        that this batch has already sampled per row."""
        ...

    def add(self, tokens: mx.array, step: int) -> None:
        """Adds the tokens sampled in this step. `tokens` is a uint32 array of shape [b], which may
        be lazy."""
        ...

    def release(self, num_draws: int) -> None:
        """Writes the state back to the sequences. `num_draws` is the number of tokens that this
        batch has sampled per row."""
        ...


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
