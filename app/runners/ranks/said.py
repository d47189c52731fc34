"""Whether several engines that were told the same say the same.

Knows: what an engine says. Must not know: who compares. Times differ, and so may the last bits of
log-probabilities and of vectors; what is left decides what is computed next.
"""

import zlib

from app.core.jobs import Ended, Prefilled, PromptScores, Started, Step, Token, Update


class Said:
    """checksum: of all steps so far (CRC-32)."""

    def __init__(self) -> None:
        self.checksum = 0

    def add(self, step: Step) -> None:
        words = [_essence(update) for update in step.updates]
        words += [(embedded.job, embedded.error) for embedded in step.embedded]
        if words:
            self.checksum = zlib.crc32(repr(words).encode(), self.checksum)


def _essence(update: Update) -> tuple[object, ...]:
    match update:
        case Started():
            return update.job, update.cached
        case Prefilled():
            return update.job, update.done
        case PromptScores():
            return update.job, len(update.scores)
        case Token():
            return update.job, update.id
        case Ended():
            return update.job, update.reason, update.error
