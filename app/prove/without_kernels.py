"""`python -m app.prove.without_kernels`: answers jobs without mlxrunner's kernels, in a process of
its own, because a process selects its kernels when it imports MLX.

Knows: one line of input, one line of output. Must not know: comparisons.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.prove.comparison import Answer
from app.prove.conditions import Chains, run_alone
from app.prove.engine import ProofEngine, ProofJob
from app.runners.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofInput:
    files: ModelFiles
    settings: Settings
    chains: tuple[tuple[ProofJob, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofOutput:
    """error: set if the jobs could not be run."""

    answers: tuple[tuple[str, Answer], ...] = ()
    error: str | None = None


def run_without_kernels(
    files: ModelFiles, settings: Settings, chains: Chains
) -> Mapping[str, Answer]:
    """Runs the jobs one at a time. Raises AppError(ENGINE)."""
    question = ProofInput(files=files, settings=settings, chains=tuple(map(tuple, chains)))
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    finished = subprocess.run(
        # -P: the user's folder may contain another `app`
        [sys.executable, "-P", "-m", __name__],
        input=Codec[ProofInput](ProofInput).encode(question),
        stdout=subprocess.PIPE,
        env={**os.environ, "MLXRUNNER_KERNELS": "off", "PYTHONPATH": path},
        check=False,
    )
    if finished.returncode:
        why = f"the process without kernels exited with status {finished.returncode}"
        raise AppError(ErrorKind.ENGINE, why)
    result = Codec[ProofOutput](ProofOutput).decode(finished.stdout)
    if result.error is not None:
        raise AppError(ErrorKind.ENGINE, result.error)
    return dict(result.answers)


def main() -> int:
    question = Codec[ProofInput](ProofInput).decode(sys.stdin.buffer.read())
    try:
        with ProofEngine(question.files, question.settings) as engine:
            result = ProofOutput(answers=tuple(run_alone(engine, question.chains).items()))
    except AppError as error:
        result = ProofOutput(error=error.message)
    sys.stdout.buffer.write(Codec[ProofOutput](ProofOutput).encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
