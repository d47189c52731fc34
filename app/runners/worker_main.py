"""A runner's process: one engine, one loopback socket, and a parent without which it ends.

Knows: in which order it begins and ends. Must not know: what is asked of it.
"""

import faulthandler
import logging
import os
import signal
import sys

from app.runners import parent_watch
from app.runners.compile_dir import prepare_compile_dir

# Building a decode step holds the interpreter for milliseconds at a time; at Python's default of
# 5 ms every token would leave that much later (DECISIONS.md, 2026-11-21).
_SWITCH_INTERVAL = 0.0005

# seconds that the engine may take to the end of its step; less than the parent waits
_STOP_TIMEOUT = 4.0


def main() -> int:
    parent_watch.tie_to_parent()
    # A service manager tells every process of a service to end. It is the parent's to say when:
    # streams may be running.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    line = parent_watch.read_first_line()
    if not line:
        return 1
    # a third of a second, in which the parent may go
    from app.runners.worker_protocol import WORKER_INIT
    from app.runners.worker_server import WorkerServer

    opening = WORKER_INIT.decode(line)
    parent_watch.exit_with_parent(opening.parent_pid)
    logging.basicConfig(
        level="DEBUG" if opening.settings.debug else opening.settings.log_level.upper(),
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    os.environ.update(prepare_compile_dir())
    sys.setswitchinterval(_SWITCH_INTERVAL)
    service = WorkerServer(opening)
    service.run()
    if not service.stop_engine(_STOP_TIMEOUT):
        # a load, or a step without end: threads cannot be ended, processes can
        sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # ended before it had begun
        sys.exit(1)
