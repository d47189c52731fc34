"""What becomes of sequences, and what is told of it: a start, tokens, an end.

Knows: sequences, where they stand in the roster, the clock. Must not know: the model, what a step
is made of. Everything that a client hears of the engine is said here, in this order and once.
"""

import contextlib
import logging
import math
import time
from collections.abc import Generator

from app.core.jobs import Ended, EndReason, Prefilled, PromptScores, Started, Token, Update
from app.engine.batch import Drawn
from app.engine.grammar import GrammarError, TooComplex
from app.engine.memory import clear_cache
from app.engine.roster import Roster
from app.engine.sequence import Sequence
from app.engine.tally import Tally

log = logging.getLogger(__name__)

# sampled tokens of a sequence between two looks of the prefix cache at it
SHOW_EVERY = 64

_FAILED = "the engine failed while processing this request"
_UNSOUND = (
    "the model produced NaN or infinite logits: its weights or its quantization may be corrupt"
)
_RULED_OUT = (
    "no token can be sampled: the logits are NaN, or -inf for every token that the grammar allows"
)


class Reports:
    """exact: cache only what was prefilled, never what was decoded (other kernels, other bits)."""

    def __init__(self, roster: Roster, tally: Tally, *, exact: bool) -> None:
        self._roster = roster
        self._tally = tally
        self._exact = exact
        self._updates: list[Update] = []

    @property
    def waiting(self) -> bool:
        """Whether there is something that nobody has been told yet."""
        return bool(self._updates)

    def told(self) -> tuple[Update, ...]:
        """All that happened since this was asked last, in order."""
        updates, self._updates = tuple(self._updates), []
        return updates

    def start(self, sequence: Sequence) -> None:
        job, lease = sequence.job, sequence.lease
        self._tally.lookup(len(job.ids), lease.cached, lease.miss)
        self._updates.append(Started(job=job.id, cached=lease.cached, at=_now(), miss=lease.miss))
        left = len(job.ids) - lease.cached
        log.debug("prompt of %d tokens: %d cached, %d to compute", len(job.ids), lease.cached, left)

    def advance(self, sequence: Sequence) -> None:
        """A chunk of its prompt has been evaluated, and it is not the last one."""
        self._updates.append(Prefilled(job=sequence.job.id, done=sequence.evaluated))

    def take(self, sequence: Sequence, drawn: Drawn) -> None:
        """The value of its next token is known."""
        job = sequence.job
        if not drawn.sound or not _sound(sequence):
            self.fail(sequence, _UNSOUND if sequence.matcher is None else _RULED_OUT)
            return
        if sequence.sampled == 0:
            self._begin_answer(sequence)
        try:
            sequence.add(drawn.token)
        except GrammarError as error:
            message = f"generation cannot continue under its grammar: {error}"
            self.fail(sequence, message, invalid=isinstance(error, TooComplex))
            return
        if drawn.token in job.stop_ids:
            self.end(sequence, "stop")
            return
        self._updates.append(
            Token(job=job.id, id=drawn.token, at=_now(), logprob=drawn.logprob, top=drawn.top)
        )
        self._tally.generated += 1
        if sequence.complete:
            self.end(sequence, "stop")
        elif sequence.sampled == job.max_tokens:
            self.end(sequence, "length")
        elif sequence.running and not self._exact and sequence.sampled % SHOW_EVERY == 0:
            sequence.lease.reached(sequence.ids[: sequence.evaluated])

    def end(self, sequence: Sequence, reason: EndReason, *, keep: int | None = None) -> None:
        """keep: cache only this many of its sampled tokens."""
        self._roster.leave(sequence)
        if sequence.running:
            if self._exact:
                keep = 0
            unwanted = 0 if keep is None else sequence.sampled - keep
            sequence.commit(keep=len(sequence.ids) - unwanted)
        self._updates.append(Ended(job=sequence.job.id, reason=reason, at=_now()))

    def fail(self, sequence: Sequence, error: str = _FAILED, *, invalid: bool = False) -> None:
        """invalid: what the request asks for is to blame."""
        self._roster.leave(sequence)
        if sequence.running:
            sequence.discard()
        clear_cache()
        self._tally.failures += 1
        self._updates.append(
            Ended(job=sequence.job.id, reason="error", at=_now(), error=error, invalid=invalid)
        )

    @contextlib.contextmanager
    def at_the_cost_of(self, sequence: Sequence, what: str) -> Generator[None]:
        """What is raised within ends this sequence, and nothing else."""
        try:
            yield
        except Exception:
            log.exception(what)
            self._tally.faults += 1
            self.fail(sequence)

    def _begin_answer(self, sequence: Sequence) -> None:
        """Its prompt is done."""
        job = sequence.job
        self._updates.append(Prefilled(job=job.id, done=len(job.ids)))
        if job.prompt_logprobs is not None:
            assert not sequence.unscored, "a prompt is scored before anything follows it"
            self._updates.append(PromptScores(job=job.id, scores=tuple(sequence.scores)))


def _sound(sequence: Sequence) -> bool:
    return sequence.sampled > 0 or not any(math.isnan(score) for score, _ in sequence.scores)


def _now() -> int:
    return time.monotonic_ns()
