"""The number of alternatives that a token may have."""

import pytest

from app.core.sampling_params import LogprobsLimit, limit_logprobs


@pytest.mark.parametrize(
    ("setting", "parallel", "expected"),
    [
        (20, 1, LogprobsLimit(maximum=20)),
        (0, 1, LogprobsLimit(maximum=0)),
        (1000, 1, LogprobsLimit(maximum=1000)),
        (-1, 1, LogprobsLimit(maximum=151_936, is_vocabulary=True)),
        (999_999, 3, LogprobsLimit(maximum=151_936, is_vocabulary=True)),
        # a step of 64 sequences fits in one message
        (-1, 64, LogprobsLimit(maximum=65_536)),
        (20, 1 << 22, LogprobsLimit(maximum=20)),
    ],
)
def test_the_limit_is_that_of_the_operator_and_of_a_step(
    setting: int, parallel: int, expected: LogprobsLimit
):
    assert limit_logprobs(setting, vocab_size=151_936, parallel=parallel) == expected


def test_a_small_vocabulary_is_the_limit():
    assert limit_logprobs(20, vocab_size=10, parallel=64) == LogprobsLimit(
        maximum=10, is_vocabulary=True
    )
