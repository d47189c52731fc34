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

from app.runners.interpreter import build_command, build_environment
from app.runners.output import ProcessOutput

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedChild:
    """stdout: what it wrote to standard output. status: its exit status, a signal being negative.
    reason: what it wrote to standard error that may say why it ended."""

    stdout: bytes
    status: int
    reason: str


async def run_module(
    module: str, input_line: bytes, limit: float, extra_env: Mapping[str, str] | None = None
) -> CompletedChild:
    """limit: seconds until the process is killed, which raises TimeoutError. extra_env: what its
    environment holds beside ours. Raises OSError where no process can be started."""
    process = await asyncio.create_subprocess_exec(
        *build_command(module),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**build_environment(), **(extra_env or {})},
        process_group=0,  # as in `app.runners.spawned`
    )
    complaint = ProcessOutput()
    try:
        async with asyncio.timeout(limit):
            answer = await _communicate(process, input_line, complaint)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return CompletedChild(
        stdout=answer, status=process.returncode or 0, reason=complaint.find_reason()
    )


async def _communicate(process: Process, input_line: bytes, stderr: ProcessOutput) -> bytes:
    """What it writes until it ends; what it complains of is kept."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(input_line + b"\n")
    try:
        answer, _, _ = await asyncio.gather(
            process.stdout.read(), _read_stderr(process, stderr), process.wait()
        )
    finally:
        process.stdin.close()
    return answer


async def _read_stderr(process: Process, stderr: ProcessOutput) -> None:
    assert process.stderr is not None
    while data := await process.stderr.read(_CHUNK):
        deque(stderr.feed(data), maxlen=0)
    deque(stderr.flush(), maxlen=0)
