"""The interface of a sampling stage, which changes the logits of a row before a token is drawn.

Knows: the interface between the sampler and its stages. Must not know: any stage, sequences, the
model.

A stage is one module with one object: it makes the state of a sequence and computes batches of
sequences. `STAGES` in app/engine/sampling/sampler.py lists the stages in their order.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from app.core.sampling_params import SamplingParams

_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """What a stage may use of a sequence. prompt: token ids. vocab: ids that may be sampled are 0
    to vocab - 1. stop_token_ids: ids that end the output. min_tokens: tokens still to be drawn
    before that."""

    sampling: SamplingParams
    prompt: Sequence[int]
    vocab: int
    stop_token_ids: frozenset[int]
    min_tokens: int

    def sets(self, knobs: Sequence[str]) -> bool:
        """Whether one of these fields, of this or of `sampling`, differs from its default."""
        return any(
            self.min_tokens > 0
            if knob == "min_tokens"
            else getattr(self.sampling, knob) != getattr(_DEFAULTS, knob)
            for knob in knobs
        )


class StageState(Protocol):
    """What a stage remembers of one sequence between batches."""

    @property
    def group_key(self) -> Hashable:
        """Sequences are computed together only if their keys are equal, so that a row is computed
        the same way in every batch. None: the stage is the identity for this sequence and is not
        run."""
        ...


class StageBatch(Protocol):
    """A stage for the rows of one batch."""

    def apply(self, logits: mx.array, step: int) -> mx.array:
        """[b, V] float32 -> the same shape. step: tokens that this batch drew before."""
        ...

    def add(self, tokens: mx.array, step: int) -> None:
        """tokens: [b] uint32, drawn in this step, perhaps lazy."""
        ...

    def release(self, num_draws: int) -> None:
        """Write back to the states. num_draws: tokens that this batch drew."""
        ...


class Stage(Protocol):
    @property
    def knobs(self) -> Sequence[str]:
        """Fields of `SamplingParams` or `StageInput`. The sampler skips the stage for sequences in
        which all of them have their defaults."""
        ...

    def create_state(self, sequence: StageInput) -> StageState | None:
        """None if the stage never changes a logit of this sequence."""
        ...

    def create_batch(self, states: Sequence[Any]) -> StageBatch:
        """states: of one group key, made by `create_state`."""
        ...
