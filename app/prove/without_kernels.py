"""`python -m app.prove.without_kernels`: answers jobs without mlxrunner's kernels, in a separate
process, because a process selects its kernels when it imports MLX.

Knows: its input and output, one message per answer. Must not know: comparisons.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.prove.comparison import Answer
from app.prove.conditions import Chains, run_alone
from app.prove.engine import ProofEngine, ProofJob
from app.runners.channel import FrameReader, encode, encode_frame, make_decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofInput:
    files: ModelFiles
    settings: Settings
    jobs: tuple[ProofJob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofOutput:
    """One answer. error: set if no more jobs can be run."""

    job_id: str = ""
    answer: Answer | None = None
    error: str | None = None


def run_without_kernels(
    files: ModelFiles, settings: Settings, chains: Chains, seconds: float
) -> Mapping[str, Answer]:
    """Runs the jobs one at a time, those with the shortest prompts first. Returns the answers that
    ended within `seconds`: MLX's operations can be a hundred times slower than the kernels, above
    all with 16-bit scales. Raises AppError(ENGINE)."""
    jobs = sorted(
        (job for chain in chains for job in chain), key=lambda one: len(one.job.prompt_token_ids)
    )
    question = ProofInput(files=files, settings=settings, jobs=tuple(jobs))
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    status = 0
    # a file keeps the output of the process before its time ended
    with tempfile.TemporaryFile() as output:
        with suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                # -P: the user's folder may contain another `app`
                [sys.executable, "-P", "-m", __name__],
                input=encode(question),
                stdout=output,
                env={**os.environ, "MLXRUNNER_KERNELS": "off", "PYTHONPATH": path},
                timeout=seconds,
                check=False,
            ).returncode
        output.seek(0)
        answers = read_answers(output.read())
    if status:
        why = f"the process without kernels exited with status {status}"
        raise AppError(ErrorKind.ENGINE, why)
    return answers


def read_answers(output: bytes) -> Mapping[str, Answer]:
    """Reads the output of the process, whose last message may be incomplete. Raises
    AppError(ENGINE) with the error of the process."""
    reader: FrameReader[ProofOutput] = FrameReader(make_decoder(ProofOutput))
    answers: dict[str, Answer] = {}
    for message in reader.feed(output):
        if message.answer is None:
            raise AppError(ErrorKind.ENGINE, message.error or "")
        answers[message.job_id] = message.answer
    return answers


def main() -> int:
    question: ProofInput = make_decoder(ProofInput).decode(sys.stdin.buffer.read())
    try:
        with ProofEngine(question.files, question.settings) as engine:
            for job in question.jobs:
                for job_id, answer in run_alone(engine, [[job]]).items():
                    _write(ProofOutput(job_id=job_id, answer=answer))
    except AppError as error:
        _write(ProofOutput(error=error.message))
    return 0


def _write(output: ProofOutput) -> None:
    sys.stdout.buffer.write(encode_frame(output))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
