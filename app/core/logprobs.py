"""Limits of log probabilities: how many alternatives a token may have.

Knows: the setting, what one event and one response may contain. Must not know: the names of request
fields.
"""

from dataclasses import dataclass

from app.core.errors import AppError, ErrorKind

# the limit of OpenAI's API
DEFAULT_MAX_LOGPROBS = 20

# the value of the setting, and in requests, for all tokens of the vocabulary, as in vLLM
WHOLE_VOCABULARY = -1

# The maximum number of alternatives of all sequences in one step. The process of a model sends a
# step as one message of at most 256 MiB (app/runners/channel.py), and an alternative takes up to 15
# bytes. Messages are decoded on the event loop, so the maximum is a quarter of that.
MAX_STEP_ALTERNATIVES = 1 << 22

# The maximum number of alternatives of one request, if its tokens have more than usual. They take
# about 250 bytes each until the response is encoded.
MAX_REQUEST_ALTERNATIVES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsLimit:
    """maximum: the number of alternatives that a token may have. is_vocabulary: whether these are
    all tokens of the vocabulary."""

    maximum: int = DEFAULT_MAX_LOGPROBS
    is_vocabulary: bool = False

    def resolve(self, name: str, count: int | None) -> int | None:
        """Returns the number of alternatives for a value of the field `name`. Raises
        AppError(INVALID) if it is not allowed."""
        if count is None or 0 <= count <= self.maximum:
            return count
        if count == WHOLE_VOCABULARY and self.is_vocabulary:
            return self.maximum
        raise AppError(
            ErrorKind.INVALID,
            f"{name} must be an integer from 0 to {self.maximum}, not {count}",
            param=name,
        )


USUAL_LOGPROBS_LIMIT = LogprobsLimit()


def limit_logprobs(setting: int, *, vocab_size: int, parallel: int) -> LogprobsLimit:
    """Returns the limit of one model. setting: `Settings.max_logprobs`. parallel: the maximum
    number of concurrent sequences."""
    wanted = vocab_size if setting == WHOLE_VOCABULARY else min(setting, vocab_size)
    per_sequence = max(DEFAULT_MAX_LOGPROBS, MAX_STEP_ALTERNATIVES // parallel)
    maximum = min(wanted, per_sequence)
    return LogprobsLimit(maximum=maximum, is_vocabulary=maximum == vocab_size)
