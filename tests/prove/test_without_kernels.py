"""Answers of a process without kernels, which may be stopped at any time."""

import pytest

from app.core.errors import AppError
from app.prove.comparison import Answer
from app.prove.without_kernels import ProofOutput, read_answers
from app.runners.channel import encode_frame

ANSWER = Answer(tokens=(), reason="stop")


def write_messages(*outputs: ProofOutput) -> bytes:
    return b"".join(encode_frame(one) for one in outputs)


def test_a_stopped_process_leaves_the_answers_that_it_wrote() -> None:
    written = write_messages(*(ProofOutput(job_id=name, answer=ANSWER) for name in ("0.0", "0.1")))
    assert read_answers(written) == {"0.0": ANSWER, "0.1": ANSWER}
    first = write_messages(ProofOutput(job_id="0.0", answer=ANSWER))
    for end in range(len(written)):
        assert len(read_answers(written[:end])) == (end >= len(first))


def test_its_error_is_raised() -> None:
    written = write_messages(
        ProofOutput(job_id="0.0", answer=ANSWER), ProofOutput(error="no memory")
    )
    with pytest.raises(AppError, match="no memory"):
        read_answers(written)
