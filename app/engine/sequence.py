"""The state of one sequence while the engine works on it.

Knows: its job, its layer caches, the ids it has seen. Must not know: other sequences, the model.

    ids      [ prompt ......................... | sampled ........ ]   values known
    caches   [ evaluated, in order ............................ ]      offset = len(evaluated)
    pending                                                     [ t ]  sampled, value not yet read

A waiting sequence has no caches. A preempted one waits again: then all its ids, the sampled ones
too, are a prompt to evaluate again, and its output continues unchanged.
"""

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import cast

import mlx.core as mx

from app.core.jobs import Job
from app.core.ports import Lease, ShiftingLease
from app.engine.prefix.matching import common_prefix_length
from app.engine.sampling.logprobs import PromptLogprob
from app.engine.sampling.sampler import SamplerState
from app.grammar.compiler import Matcher
from models.kv import LayerCache

# layer caches, start, end -> whether these positions were removed
ShiftLayers = Callable[[Ids[LayerCache], int, int], bool]


class Sequence:
    """Created waiting. `start` gives it layer caches; `commit` and `discard` return them, at its
    end or before it waits again."""

    def __init__(self, job: Job, *, vocab: int, matcher: Matcher | None = None) -> None:
        """matcher: of the job's grammar, in its start state; owned by this sequence."""
        assert (matcher is None) == (job.grammar is None), "a grammar that nobody compiled"
        self.job = job
        self.matcher = matcher  # its state is after the last id whose value is known
        self.ids = list(job.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_output_tokens = 0  # sampled ids whose value is known
        self.has_run = False  # whether it ever ran
        self.num_in_flight = 0  # sampled ids whose value is not known yet
        self.prompt_logprobs: list[
            PromptLogprob
        ] = []  # of the prompt's ids but the first, if the job requests them
        self.isolated = False  # decoded alone, because a shared step failed
        self.reserved_bytes = 0  # bytes that the memory budget charges for it
        self.reserved_positions = 0  # positions that these bytes suffice for
        self._shared_prefix_lengths: dict[str, int] = {}
        self._vocab = vocab
        self._seed = secrets.randbits(63) if job.sampling.seed is None else job.sampling.seed
        self._lease: Lease[LayerCache] | None = None
        self._sampler_state: SamplerState | None = None

    @property
    def running(self) -> bool:
        return self._lease is not None

    @property
    def lease(self) -> Lease[LayerCache]:
        assert self._lease is not None, "the sequence does not run"
        return self._lease

    @property
    def sampler_state(self) -> SamplerState:
        assert self._sampler_state is not None, "the sequence does not run"
        return self._sampler_state

    @property
    def kv(self) -> Ids[LayerCache]:
        return self.lease.kv

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known ids that must be evaluated before the next one can be sampled. (During decoding,
        one more id is evaluated than is known.)"""
        return max(0, len(self.ids) - self.num_computed_tokens)

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt ids whose requested log-probability is not computed yet."""
        if self.job.prompt_logprobs is None:
            return 0
        return len(self.job.prompt_token_ids) - 1 - len(self.prompt_logprobs)

    @property
    def may_reuse_prefix(self) -> bool:
        """Whether it may use the prefix cache. A preempted sequence may reuse its own prefix even
        if the job disables the cache. Prompt log-probabilities need hidden states, which are never
        cached."""
        return (self.job.cache_prompt or self.has_run) and not self.num_unscored_tokens

    @property
    def next_prefill_stop(self) -> int:
        """Where prefill stops next: at the end of the ids, or at the prefix cache's next
        checkpoint."""
        return next(
            (p for p in self.lease.checkpoint_positions if p > self.num_computed_tokens),
            len(self.ids),
        )

    @property
    def needs_another_token(self) -> bool:
        """Whether a token after the pending one may be needed."""
        return self.num_output_tokens + 1 < self.job.max_tokens

    @property
    def grammar_done(self) -> bool:
        """Whether the grammar allows no further token."""
        return self.matcher is not None and self.matcher.done

    def shared_prefix_length(self, other: "Sequence") -> int:
        """The number of ids that both prompts begin with. Cached, because it is needed at each step
        while this sequence waits."""
        known = self._shared_prefix_lengths.get(other.job.id)
        if known is None:
            known = self._shared_prefix_lengths[other.job.id] = common_prefix_length(
                self.job.prompt_token_ids, other.job.prompt_token_ids
            )
        return known

    def start(self, lease: Lease[LayerCache]) -> None:
        self._lease = lease
        self._shared_prefix_lengths.clear()
        self.num_computed_tokens = lease.cached
        self.num_in_flight = 0
        # the sampling state follows from the ids, so it is rebuilt at each start
        self._sampler_state = SamplerState(
            self.job.sampling,
            seed=self._seed,
            prompt=self.ids,
            vocab=self._vocab,
            stop_token_ids=self.job.stop_token_ids,
            min_tokens=self.job.min_tokens,
            num_drawn=self.num_output_tokens,
        )
        self.has_run = True

    def append_token(self, token: int) -> None:
        """Append a sampled id whose value is now known. Raises GrammarError if the grammar does not
        allow it."""
        self.ids.append(token)
        self.num_output_tokens += 1
        self.num_in_flight -= 1
        if self.matcher is not None:
            self.matcher.accept(token)

    def shift(self, remove: ShiftLayers) -> None:
        """The context is full: remove part of it. If the layers cannot shift, the remaining ids
        become a prompt again."""
        lease = cast(ShiftingLease[LayerCache], self.lease)
        left = lease.shift(self.ids, num_keep=self.job.num_keep, remove=remove)
        self.ids, self.num_computed_tokens = list(left.ids), left.num_computed

    def kv_arrays(self) -> list[mx.array]:
        """The arrays that must be evaluated to evaluate the caches."""
        return [array for layer in self.kv for array in layer.state()]

    def commit(self, *, keep: int) -> None:
        """Return the caches; at most the first `keep` ids are cached."""
        self.lease.commit(self.ids[: self.num_computed_tokens], keep=keep)
        self._clear_lease()

    def discard(self) -> None:
        """Return the caches as invalid."""
        self.lease.discard()
        self._clear_lease()

    def _clear_lease(self) -> None:
        self._lease = self._sampler_state = None
        self.num_computed_tokens = self.reserved_bytes = self.reserved_positions = 0
