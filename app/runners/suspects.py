"""Prompts that stood by when a runner died.

Knows: jobs as hashes, counts, a clock. Must not know: runners, asyncio. Some prompts kill whoever
evaluates them: a kernel that overflows at one length, a grammar that compiles for ever, a context
that needs more memory than was measured. Their clients try again, and kill again; here it is
noticed the second time.

A job that was running when a runner died is a suspect, and so is everybody who ran beside it. What
is asked of whoever runs them (`app.runners.resident`) is that suspects run one at a time: then
an innocent one comes to a good end, which clears it, and is not there when the killer kills again.
Others may run beside a suspect; they would be suspects, for the first time, after it.

A death by a signal of an operator weighs nothing. The kernel sends the same SIGKILL when memory
runs out; where it does not say which of the two it was, a death weighs less than a fault.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.core.embeddings import EmbedJob
from app.core.jobs import Job
from app.core.ports import FailureCause

# What a death weighs by its cause, and from which weight on a job is not run any more: two faults,
# or six deaths of which it is not known whether memory ran out.
CRASH_WEIGHTS: Mapping[FailureCause, int] = {"fault": 3, "unknown": 1, "outside": 0}
REFUSE_WEIGHT = 6

_MAX_RECORDS, _RECORD_TTL = 1000, 3600.0

AnyJob = Job | EmbedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashRecord:
    """crashes: how many a job ran at, and what they weigh together. last_crash: when the last one
    was."""

    crashes: int = 0
    weight: int = 0
    last_crash: float = 0.0


class CrashRecords:
    """Of one model. max_records: how many are remembered, the latest ones. ttl: seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_records: int = _MAX_RECORDS,
        ttl: float = _RECORD_TTL,
    ) -> None:
        self._clock = clock
        self._max_records = max_records
        self._ttl = ttl
        self._records: OrderedDict[bytes, CrashRecord] = OrderedDict()

    def get(self, job: AnyJob) -> CrashRecord:
        """At which deaths it ran, as far as that is remembered."""
        self._drop_expired()
        # a long prompt takes a millisecond to hash: not where there is nothing to compare it with
        known = self._records.get(_key(job)) if self._records else None
        return known or CrashRecord()

    def add_crash(self, jobs: Iterable[AnyJob], *, weight: int) -> None:
        """A runner died while these ran; answers of one prompt beside each other are one."""
        self._drop_expired()
        for key in {_key(job) for job in jobs}:
            before = self._records.pop(key, CrashRecord())
            self._records[key] = CrashRecord(
                crashes=before.crashes + 1, weight=before.weight + weight, last_crash=self._clock()
            )
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def clear(self, job: AnyJob) -> None:
        """It came to a good end."""
        self._records.pop(_key(job), None)

    def clear_all(self) -> None:
        self._records.clear()

    def _drop_expired(self) -> None:
        """The oldest ones stand first, since each accusation puts its job last."""
        oldest = self._clock() - self._ttl
        while self._records and next(iter(self._records.values())).last_crash < oldest:
            self._records.popitem(last=False)


def _key(job: AnyJob) -> bytes:
    """What a runner is asked to evaluate, not how its answer is drawn."""
    if isinstance(job, EmbedJob):
        parts, rest = job.inputs, f"embed {job.pooling}"
    else:
        parts, rest = (job.prompt_token_ids,), repr(job.grammar)
    digest = hashlib.blake2b(rest.encode(errors="surrogatepass"), digest_size=16)
    for ids in parts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(array("q", ids).tobytes())
    return digest.digest()
