"""`python -m app.runners.tokenizer_check_main`: the process that checks a tokenizer.

Knows: its input and output, one message each, resource limits. Must not know: the texts of the
check. The process runs a single check, and exits if its parent exits.
"""

import os
import resource
import sys
import threading
import time
from functools import partial

from app.core.errors import AppError
from app.runners import parent_watch
from app.runners.channel import encode, make_decoder, read_frame
from app.runners.tokenizer_check import OUT_OF_MEMORY_STATUS, CheckRequest, CheckResponse

# The interval in seconds between two checks of the memory usage.
_MEMORY_POLL_INTERVAL = 0.02


def main() -> int:
    parent_watch.tie_to_parent()
    message = read_frame(partial(os.read, 0))
    if message is None:
        return 1
    question: CheckRequest = make_decoder(CheckRequest).decode(message)
    parent_watch.exit_with_parent(question.parent_pid)
    apply_limits(question.memory_limit, question.cpu_limit)
    try:
        answer = _check(question)
    except MemoryError:
        return OUT_OF_MEMORY_STATUS
    sys.stdout.buffer.write(encode(answer))
    return 0


def _check(request: CheckRequest) -> CheckResponse:
    # This import is slow, so it comes after `exit_with_parent`.
    from app.text.tokenizer import Tokenizer
    from app.text.tokenizer_probe import probe_tokenizer

    try:
        probe_tokenizer(Tokenizer.load(request.files))
    except AppError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from error
        return CheckResponse(error=error.message)
    return CheckResponse(error=None)


def apply_limits(memory: int, cpu: int) -> None:
    """Limits the resources of this process. `memory` is the limit in bytes. `cpu` is the number of
    seconds of CPU time after which the process gets SIGXCPU; it gets SIGKILL one second later."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower_limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    if sys.platform == "linux":
        _lower_limit(resource.RLIMIT_AS, memory, memory)
    else:  # macOS does not enforce it
        watch_memory(memory)


def watch_memory(max_bytes: int) -> None:
    """Exits this process when it has used more than `max_bytes` bytes. Runs on a thread, because
    the library releases the GIL while it processes a text."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)

    def watch() -> None:
        while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit <= max_bytes:
            time.sleep(_MEMORY_POLL_INTERVAL)
        os._exit(OUT_OF_MEMORY_STATUS)

    threading.Thread(target=watch, name="memory", daemon=True).start()


def _lower_limit(kind: int, soft: int, hard: int) -> None:
    """Sets a limit, capped at an existing hard limit."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
