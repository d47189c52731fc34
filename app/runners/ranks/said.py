"""Whether several engines that were told the same say the same.

Knows: what an engine says. Must not know: who compares. Times differ, and so may the last bits of
log-probabilities and of vectors; what is left decides what is computed next.
"""

import zlib

from app.core.jobs import Ended, JobUpdate, Prefilled, PromptLogprobs, Started, StepOutput, Token


class StepChecksum:
    """value: of all steps so far (CRC-32)."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, step: StepOutput) -> None:
        words = [_compared_fields(update) for update in step.updates]
        words += [(embedded.job_id, embedded.error) for embedded in step.embed_results]
        if words:
            self.value = zlib.crc32(repr(words).encode(), self.value)


def _compared_fields(update: JobUpdate) -> tuple[object, ...]:
    match update:
        case Started():
            return update.job_id, update.cached_tokens
        case Prefilled():
            return update.job_id, update.computed_tokens
        case PromptLogprobs():
            return update.job_id, len(update.logprobs)
        case Token():
            return update.job_id, update.id
        case Ended():
            return update.job_id, update.reason, update.error
