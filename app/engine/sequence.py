"""The state of one sequence in the engine.

Knows: the job, the layer caches, the tokens. Must not know: other sequences, the model.

    ids       [ prompt ......................... | sampled ........ ]   values known
    caches    [ computed, in order ............................. ]      offset = num_computed_tokens
    in flight                                                    [ t ]  sampled, value not yet read

A running sequence is either prefilling or decoding. A decoding sequence computes one sampled token
at a time, whose value may or may not have been read.

A waiting sequence has no caches. A preempted sequence returns to waiting: its prompt and sampled
tokens are prefilled again, and its output then continues unchanged.
"""

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Ids
from contextlib import ExitStack
from typing import Protocol, cast

from app.core.images import ImagePixels, ImageSpan, is_row_id
from app.core.jobs import Job
from app.engine.image_cache import FeatureLease
from app.engine.prefix.cache import Lease, ShiftingLease, common_prefix_length
from app.engine.sampling.logprobs import PromptLogprob
from app.engine.sampling.sampler import SamplerState
from app.grammar.compiler import Matcher
from models.kv import LayerCache

# Called with layer caches, start and end. Returns whether the positions were removed.
ShiftLayers = Callable[[Ids[LayerCache], int, int], bool]


class SharedSlab(Protocol):
    """The slabs that contain the latest positions of a sequence. See
    `app.engine.decode_slab.DecodeSlab`."""

    def settle(self, sequence: "Sequence") -> None: ...

    def leave(self, sequence: "Sequence") -> None: ...

    def forget(self, sequence: "Sequence") -> None: ...


class Sequence:
    """The state of one sequence. A new sequence is waiting. `start` gives it layer caches. `commit`
    and `discard` return them when the sequence ends or is preempted."""

    def __init__(
        self,
        job: Job,
        *,
        vocab: int,
        matcher: Matcher | None = None,
        cache_salt: int = 0,
        atomic_images: bool = False,
    ) -> None:
        """Creates a waiting sequence. The sequence owns `matcher`, which is the matcher of the
        job's grammar in its initial state. cache_salt: only sequences with the same salt share
        prefixes, because adapters change the caches of the same tokens. atomic_images: see
        `models.image_inputs.ImageRules`."""
        assert (matcher is None) == (job.grammar is None), "a grammar without a matcher"
        self.job = job
        self.matcher = matcher  # in the state after the last known token
        self.ids = list(job.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_output_tokens = 0  # sampled tokens that have been read
        self.has_run = False  # whether the sequence has ever started
        self.num_in_flight = 0  # sampled tokens that have not been read yet
        self.decoding = False  # whether the next input is a sampled token, and not a prompt chunk
        self.prompt_logprobs: list[
            PromptLogprob
        ] = []  # for all prompt tokens except the first, if requested
        self.isolated = False  # computed unbatched, because a batch failed
        # Contains the positions that the caches lack; None if the caches are complete.
        self.slab: SharedSlab | None = None
        self.reserved_bytes = 0  # bytes reserved in the memory budget
        self.reserved_positions = 0  # positions that fit in these bytes
        # The pixels that were requested for images, by key, and those that have arrived.
        self.requested_images: set[bytes] = set()
        self.pixels: dict[bytes, ImagePixels] = {}
        self.features: FeatureLease | None = None  # of the image whose rows are computed
        self._shared_prefix_lengths: dict[str, int] = {}
        self._vocab = vocab
        self.cache_salt = cache_salt
        # The ranges of positions that must be computed in one chunk.
        self.atomic_ranges = [(i.start, i.end) for i in job.images] if atomic_images else []
        self._seed = secrets.randbits(63) if job.sampling.seed is None else job.sampling.seed
        self._lease: Lease[LayerCache] | None = None
        self._sampler_state: SamplerState | None = None

    @property
    def running(self) -> bool:
        return self._lease is not None

    @property
    def lease(self) -> Lease[LayerCache]:
        assert self._lease is not None, "the sequence is not running"
        return self._lease

    @property
    def sampler_state(self) -> SamplerState:
        assert self._sampler_state is not None, "the sequence is not running"
        return self._sampler_state

    @property
    def kv(self) -> Ids[LayerCache]:
        return self.lease.kv

    def to_cache_ids(self, ids: Ids[int]) -> Ids[int]:
        """Returns the tokens as the prefix cache knows them. With a salt, the first one is beyond
        the vocabulary, so that no prefix matches one with a different salt."""
        if not self.cache_salt or not ids:
            return ids
        return [ids[0] + self.cache_salt * self._vocab, *ids[1:]]

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of known tokens that must be computed before the next token can be sampled.
        While decoding, it is 1 if the last sampled token has been read before it is computed, and
        otherwise 0."""
        return max(0, len(self.ids) - self.num_computed_tokens)

    @property
    def prefilling(self) -> bool:
        return self.running and not self.decoding

    @property
    def num_unscored_tokens(self) -> int:
        """The number of prompt tokens whose requested log probabilities are not computed yet."""
        if self.job.prompt_logprobs is None:
            return 0
        return len(self.job.prompt_token_ids) - 1 - len(self.prompt_logprobs)

    @property
    def may_reuse_prefix(self) -> bool:
        """Whether the sequence may use the prefix cache. A preempted sequence may reuse its own
        prefix even if the job disables the cache. Prompt log probabilities need hidden states,
        which are never cached."""
        return (self.job.cache_prompt or self.has_run) and not self.num_unscored_tokens

    @property
    def tokens_to_next_stop(self) -> int:
        """The number of tokens up to the next position at which prefill pauses: the next checkpoint
        position of the prefix cache, the beginning or the end of an image, or the end of the known
        tokens. So a chunk has rows of at most one image, and the positions of these stops depend
        only on the prompt."""
        computed = self.num_computed_tokens
        stops = [
            *self.lease.checkpoint_positions,
            *(stop for image in self.job.images for stop in (image.start, image.end)),
        ]
        return min((p for p in stops if p > computed), default=len(self.ids)) - computed

    def limit_chunk(self, share: int) -> int:
        """Returns the number of tokens of the next chunk. share: its maximum, which an atomic range
        may exceed."""
        count = self.tokens_to_next_stop
        at = self.num_computed_tokens
        atomic = any(start <= at < end for start, end in self.atomic_ranges)
        return count if atomic else min(share, count)

    @property
    def current_image(self) -> ImageSpan | None:
        """The image that contains the next position to compute."""
        at = self.num_computed_tokens
        return next((image for image in self.job.images if image.start <= at < image.end), None)

    @property
    def awaits_features(self) -> bool:
        """Whether the next chunk has image rows whose features the sequence does not have yet."""
        image = self.current_image if self.prefilling else None
        if image is None or (self.features is not None and self.features.key == image.key):
            return False
        return any(map(is_row_id, self.ids[self.num_computed_tokens : image.end]))

    def release_unneeded_features(self) -> None:
        """Releases the features of an image that is computed."""
        image = self.current_image if self.prefilling else None
        if self.features is not None and (image is None or image.key != self.features.key):
            self.features.release()
            self.features = None

    @property
    def needs_another_token(self) -> bool:
        """Whether the sequence may need another token after those that have been sampled."""
        return self.num_output_tokens + self.num_in_flight < self.job.max_tokens

    @property
    def grammar_done(self) -> bool:
        """Whether the grammar is complete and allows no more tokens."""
        return self.matcher is not None and self.matcher.done

    def shared_prefix_length(self, other: "Sequence") -> int:
        """Returns the length in tokens of the common prefix of both prompts. The result is cached,
        because it is needed in each step while this sequence waits."""
        known = self._shared_prefix_lengths.get(other.job.id)
        if known is None:
            known = self._shared_prefix_lengths[other.job.id] = common_prefix_length(
                self.job.prompt_token_ids, other.job.prompt_token_ids
            )
        return known

    def provide_images(self, images: Ids[ImagePixels]) -> None:
        """Stores pixels that were requested."""
        for image in images:
            if image.key in self.requested_images:
                self.requested_images.remove(image.key)
                self.pixels[image.key] = image

    def drop_pixels(self) -> None:
        """Drops all pixels, including those that were requested and arrive later."""
        self.pixels.clear()
        self.requested_images.clear()

    def start(self, lease: Lease[LayerCache]) -> None:
        self._lease = lease
        self._shared_prefix_lengths.clear()
        self.num_computed_tokens = lease.cached
        self.num_in_flight = 0
        self.decoding = False
        # The sampler state is rebuilt from the tokens at each start.
        self._sampler_state = SamplerState(
            self.job.sampling,
            seed=self._seed,
            prompt=[id for id in self.ids if not is_row_id(id)] if self.job.images else self.ids,
            vocab=self._vocab,
            stop_token_ids=self.job.stop_token_ids,
            min_tokens=self.job.min_tokens,
            num_drawn=self.num_output_tokens,
        )
        self.has_run = True

    def append_token(self, token: int) -> None:
        """Appends a sampled token whose value is now known. Raises GrammarError if the grammar does
        not allow the token."""
        self.ids.append(token)
        self.num_output_tokens += 1
        self.num_in_flight -= 1
        if self.matcher is not None:
            self.matcher.accept(token)

    def shift(self, remove: ShiftLayers) -> None:
        """Removes part of a full context. If the layers cannot shift, the remaining tokens must be
        prefilled again."""
        if self.slab is not None:
            self.slab.leave(self)
        lease = cast(ShiftingLease[LayerCache], self.lease)
        computed = self.to_cache_ids(self.ids[: self.num_computed_tokens])
        uncomputed = self.ids[self.num_computed_tokens :]
        left = lease.shift(computed, num_keep=self.job.num_keep, remove=remove)
        kept = [id % self._vocab if self.cache_salt else id for id in left.ids]
        self.ids, self.num_computed_tokens = [*kept, *uncomputed], left.num_computed
        self.decoding = left.num_computed == len(left.ids)

    def publish(self, length: int) -> None:
        """Makes the first `length` tokens available to other sequences."""
        if self.slab is not None:
            self.slab.settle(self)
        self.lease.publish(self.to_cache_ids(self.ids[:length]))

    def commit(self, *, keep: int) -> None:
        """Ends the lease. The prefix cache keeps at most the first `keep` tokens. If an exception
        is raised, the lease has ended and the caches are dropped."""
        try:
            if self.slab is not None:
                self.slab.leave(self)
        except BaseException:
            self.discard()
            raise
        try:
            computed = self.to_cache_ids(self.ids[: self.num_computed_tokens])
            self.lease.commit(computed, keep=keep)
        finally:
            self._clear_lease()

    def discard(self) -> None:
        """Ends the lease and drops the caches, whose content may be invalid. If an exception is
        raised, the lease has ended as well."""
        with ExitStack() as ending:
            ending.callback(self._clear_lease)
            ending.callback(self.lease.discard)
            if self.slab is not None:
                self.slab.forget(self)

    def _clear_lease(self) -> None:
        if self.features is not None:
            self.features.release()
            self.features = None
        self.drop_pixels()
        self._lease = self._sampler_state = None
        self.decoding = False
        self.num_computed_tokens = self.reserved_bytes = self.reserved_positions = 0
