"""Samples all rows of a batch in one operation of the CPU kernels: logit bias, penalties, masks,
filters and the draw.

Knows: tensors, the settings of the built-in stages, seeds. Must not know: sequences, how the
operation computes.

The operation draws the same tokens as the stages and app/engine/sampling/draw.py, which use MLX's
operations. Sums are rounded in another order, so a token at the very edge of the nucleus may
differ. Each row has its own settings, and is computed as it would be alone. Penalties and bad words
need the tokens of a row, the last of which may still be lazy. The kernel therefore gets them as
arrays, and counts them anew in each step.
"""

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from app.engine.sampling.draw import is_greedy, log_min_p, seed_words, top_p_bound
from app.engine.sampling.stages import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
    Stage,
    StageInput,
)
from models import kernels

# The stages that the operation includes, which applies them in the order of `STAGES`.
_STAGES = (LogitBias, Penalties, AllowedTokens, BadWords, MinTokens)

# The initial number of tokens in the buffer of a batch.
_INITIAL_CAPACITY = 32


def can_fuse(stages: Iterable[Stage]) -> bool:
    """Returns whether the operation exists on this device and includes these stages."""
    return kernels.ops() is not None and all(isinstance(stage, _STAGES) for stage in stages)


class FusedState:
    """The sampling state of one sequence while it is not in a `FusedBatch`.

    row: the settings for the operation.
    num_drawn: the number of tokens sampled since this object was created.
    drawn: these tokens, [num_drawn] uint32; empty if the operation does not need them.
    """

    def __init__(self, sequence: StageInput, seed: int) -> None:
        sampling, vocab = sequence.sampling, sequence.vocab
        penalized = sequence.sets(Penalties.knobs) and sampling.repeat_last_n != 0
        words = [word for word in sampling.bad_words if max(word) < vocab]
        allowed = [id for id in sampling.allowed_token_ids if id < vocab]
        self.row = kernels.ops().SampleRow(
            vocab=vocab,
            temperature=0.0 if is_greedy(sampling) else sampling.temperature,
            top_k=sampling.top_k,
            top_p=top_p_bound(sampling),
            min_p=log_min_p(sampling),
            seed_words=seed_words(seed),
            num_drawn=sequence.num_drawn,
            known=list(sequence.prompt) if penalized or words else [],
            output_begin=max(0, len(sequence.prompt) - sequence.num_drawn),
            bias=[(id, value) for id, value in sampling.logit_bias if id < vocab],
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            penalty_window=sampling.repeat_last_n,
            allowed_tokens=allowed or None,
            bad_words=words,
            stop_tokens=[id for id in sequence.stop_token_ids if id < vocab],
            min_tokens=sequence.min_tokens,
        )
        self.num_drawn = 0
        self.drawn = mx.zeros((0,), dtype=mx.uint32)


class FusedBatch:
    """The rows that are sampled in one operation. `broadcast_tokens`: see `SamplerBatch`."""

    def __init__(
        self, states: Sequence[FusedState], broadcast_tokens: Callable[[mx.array], mx.array]
    ) -> None:
        self._states = states
        self._broadcast_tokens = broadcast_tokens
        self._rows = [state.row for state in states]
        self._num_earlier = [state.num_drawn for state in states]
        searched = [state for state in states if state.row.uses_history]
        self._earlier = mx.concatenate([state.drawn for state in searched]) if searched else None
        # [steps or more, rows], the tokens sampled in this batch
        self._recent = (
            mx.zeros((_INITIAL_CAPACITY, len(states)), dtype=mx.uint32) if searched else None
        )

    def draw(
        self, logits: mx.array, bitmask: mx.array | None, step: int
    ) -> tuple[mx.array, mx.array]:
        """Samples one token per row. Returns the tokens and whether they are valid; see
        `SamplerOutput`."""
        tokens, valid = kernels.ops().sample(
            logits, self._rows, self._num_earlier, step, self._earlier, self._recent, bitmask
        )
        tokens = self._broadcast_tokens(tokens)
        if self._recent is not None:
            if step == len(self._recent):
                self._recent = mx.pad(self._recent, [(0, step), (0, 0)])
            self._recent[step] = tokens
        return tokens, valid

    def release(self, num_draws: int) -> None:
        for place, state in enumerate(self._states):
            state.num_drawn += num_draws
            if self._recent is not None and state.row.uses_history:
                state.drawn = mx.concatenate([state.drawn, self._recent[:num_draws, place]])
