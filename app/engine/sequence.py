"""All that one request is while the engine works on it.

Knows: its job, its layer caches, the ids it has seen. Must not know: other sequences, the model.

    ids      [ prompt ......................... | sampled ........ ]   values known
    caches   [ evaluated, in order ............................ ]      offset = len(evaluated)
    pending                                                     [ t ]  sampled, value not yet read

It waits without caches, and may be sent back to waiting: then all its ids, the sampled ones too,
are a prompt to evaluate again, and it goes on as if nothing had happened.
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

# layer caches, start, end -> whether these positions have been forgotten
ShiftLayers = Callable[[Ids[LayerCache], int, int], bool]


class Sequence:
    """Begins waiting; `start` and `park` take it in and out of memory. Ends by giving the lease
    back."""

    def __init__(self, job: Job, *, vocab: int, matcher: Matcher | None = None) -> None:
        """matcher: of the job's grammar, at its beginning; this one's own."""
        assert (matcher is None) == (job.grammar is None), "a grammar that nobody compiled"
        self.job = job
        self.matcher = matcher  # stands behind the last id whose value is known
        self.ids = list(job.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_output_tokens = 0  # sampled ids whose value is known
        self.has_run = False  # whether it ever ran
        self.num_in_flight = 0  # sampled ids whose value is not known yet
        self.prompt_logprobs: list[
            PromptLogprob
        ] = []  # of the prompt's ids, all but the first, if the job asks
        self.isolated = False  # whether it was in a step that failed
        self.reserved_bytes = 0  # bytes that the books hold against it
        self.reserved_positions = 0  # positions that these bytes are good for
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
        """Known ids that still have to be evaluated before the next one can be sampled. (While it
        decodes, one more is evaluated than is known.)"""
        return max(0, len(self.ids) - self.num_computed_tokens)

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt ids of which the job wants to know the log-probability and nobody does yet."""
        if self.job.prompt_logprobs is None:
            return 0
        return len(self.job.prompt_token_ids) - 1 - len(self.prompt_logprobs)

    @property
    def may_reuse_prefix(self) -> bool:
        """Whether the prefix cache may serve it. What a parked sequence left is its own, whatever
        it thinks of the cache; but hidden states, which scores are made of, are never cached."""
        return (self.job.cache_prompt or self.has_run) and not self.num_unscored_tokens

    @property
    def next_prefill_stop(self) -> int:
        """Where prefill stops next: at the end of the ids, or where the prefix cache wants to
        look."""
        return next(
            (p for p in self.lease.checkpoint_positions if p > self.num_computed_tokens),
            len(self.ids),
        )

    @property
    def needs_another_token(self) -> bool:
        """Whether a token behind the pending one could still be reported."""
        return self.num_output_tokens + 1 < self.job.max_tokens

    @property
    def grammar_done(self) -> bool:
        """Whether a grammar lets nothing follow."""
        return self.matcher is not None and self.matcher.done

    def shared_prefix_length(self, other: "Sequence") -> int:
        """How many ids the prompts of both begin with. Asked again at each step while this one
        waits, so it is remembered."""
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
        # what sampling remembers follows from the ids, so it is made anew each time
        self._sampler_state = SamplerState(
            self.job.sampling,
            seed=self._seed,
            prompt=self.ids,
            vocab=self._vocab,
            stop_ids=self.job.stop_token_ids,
            min_tokens=self.job.min_tokens,
        )
        self._sampler_state.num_drawn = self.num_output_tokens
        self.has_run = True

    def append_token(self, token: int) -> None:
        """A sampled id whose value is known now. Raises GrammarError where it cannot follow."""
        self.ids.append(token)
        self.num_output_tokens += 1
        self.num_in_flight -= 1
        if self.matcher is not None:
            self.matcher.accept(token)

    def shift(self, remove: ShiftLayers) -> None:
        """Its context is full: go on with less of it. Where layers cannot shift, what is left is a
        prompt again."""
        lease = cast(ShiftingLease[LayerCache], self.lease)
        left = lease.shift(self.ids, num_keep=self.job.num_keep, remove=remove)
        self.ids, self.num_computed_tokens = list(left.ids), left.num_computed

    def kv_arrays(self) -> list[mx.array]:
        """What must be evaluated for the caches to be real."""
        return [array for layer in self.kv for array in layer.state()]

    def commit(self, *, keep: int) -> None:
        """Give the caches back, remembering the first `keep` ids at most."""
        self.lease.commit(self.ids[: self.num_computed_tokens], keep=keep)
        self._clear_lease()

    def discard(self) -> None:
        """Give the caches back as doubtful."""
        self.lease.discard()
        self._clear_lease()

    def _clear_lease(self) -> None:
        self._lease = self._sampler_state = None
        self.num_computed_tokens = self.reserved_bytes = self.reserved_positions = 0
