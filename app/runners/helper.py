"""A process that answers one question and ends.

Knows: how it is started, that it gets one line and writes one, how it is ended. Must not know: what
the question is. Its standard input stays open as long as the answer is awaited, so that it ends
with whoever asks (`app.runners.lifeline`).
"""

import asyncio
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from app.runners.interpreter import command, environment
from app.runners.output import Output

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """answer: what it wrote to standard output. status: its exit status, a signal being negative.
    reason: what it wrote to standard error that may say why it ended."""

    answer: bytes
    status: int
    reason: str


async def ask(
    module: str, question: bytes, patience: float, variables: Mapping[str, str] | None = None
) -> Reply:
    """patience: seconds until the process is killed, which raises TimeoutError. variables: what its
    environment holds beside ours. Raises OSError where no process can be started."""
    process = await asyncio.create_subprocess_exec(
        *command(module),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**environment(), **(variables or {})},
        process_group=0,  # as in `app.runners.spawned`
    )
    complaint = Output()
    try:
        async with asyncio.timeout(patience):
            answer = await _answered(process, question, complaint)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Reply(answer=answer, status=process.returncode or 0, reason=complaint.reason())


async def _answered(process: Process, question: bytes, complaint: Output) -> bytes:
    """What it writes until it ends; what it complains of is kept."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question + b"\n")
    try:
        answer, _, _ = await asyncio.gather(
            process.stdout.read(), _listen(process, complaint), process.wait()
        )
    finally:
        process.stdin.close()
    return answer


async def _listen(process: Process, complaint: Output) -> None:
    assert process.stderr is not None
    while data := await process.stderr.read(_CHUNK):
        deque(complaint.feed(data), maxlen=0)
    deque(complaint.flush(), maxlen=0)
