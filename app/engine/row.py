"""What sampling remembers of one sequence.

Knows: `SamplingParams`, the ids that a sequence has seen, as tensors. Must not know: sequences,
other rows, how anything is drawn.
"""

from collections.abc import Sequence

import mlx.core as mx

from app.core.requests import SamplingParams


class SamplerState:
    """What sampling remembers of one sequence while no `MlxLmBatch` has it.

    seed: taken modulo 2^64. prompt: ids that penalties look at, besides those to be sampled.
    vocab: ids that may be sampled or biased, 0 to vocab - 1. stop_ids: those that are not drawn
    before min_tokens others were.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        vocab: int,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.vocab = vocab
        self.num_drawn = 0
        self.stop_ids = sorted(id for id in stop_ids if id < vocab)
        self.min_tokens = min_tokens
        self.bias = _dense_bias(sampling.logit_bias, vocab) if sampling.logit_bias else None
        self.token_counts: mx.array | None = None  # [V] int32: how often each id is in sight
        self.window: mx.array | None = (
            None  # [up to repeat_last_n] ids in sight, see `_TokenCounts`
        )
        self.num_counted = 0  # ids that ever came in sight
        if _has_penalties(sampling):
            self._count_prompt_tokens(prompt)

    @property
    def min_tokens_left(self) -> int:
        """How many more it draws before one of its ends may come."""
        return max(0, self.min_tokens - self.num_drawn) if self.stop_ids else 0

    def _count_prompt_tokens(self, prompt: Sequence[int]) -> None:
        last = self.sampling.repeat_last_n
        seen = list(prompt if last < 0 else prompt[-last:])
        self.num_counted = len(seen)
        # a prompt may hold ids that cannot be sampled; they take their place in the window
        ids = mx.array([id for id in seen if id < self.vocab], dtype=mx.int32)
        self.token_counts = mx.zeros((self.vocab,), dtype=mx.int32).at[ids].add(1)
        if last > 0:
            self.window = mx.array(seen, dtype=mx.int32)


def _has_penalties(sampling: SamplingParams) -> bool:
    s = sampling
    neutral = s.repetition_penalty == 1 and not s.presence_penalty and not s.frequency_penalty
    return not neutral and s.repeat_last_n != 0


def _dense_bias(pairs: Sequence[tuple[int, float]], vocab: int) -> mx.array:
    ids, values = zip(*pairs, strict=True)
    return mx.zeros((vocab,)).at[mx.array(list(ids))].add(mx.array(list(values)))
