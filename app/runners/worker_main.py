"""The entry point of a model process, which has one engine and one Unix socket.

Knows: the order of startup and shutdown. Must not know: requests. The process exits if its parent
exits.
"""

import faulthandler
import logging
import os
import signal
import sys

from app.core.gc_freeze import freeze_survivors
from app.core.switch_interval import shorten_switch_interval
from app.runners import parent_watch
from app.runners.compile_dir import prepare_compile_dir


def main() -> int:
    parent_watch.tie_to_parent()
    # Service managers send SIGTERM to every process of a service. Ignore it: the parent decides
    # when this process exits, because requests may still be running.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    line = parent_watch.read_first_line()
    if not line:
        return 1
    # These imports take a third of a second, during which the parent may exit.
    from app.engine.wired_memory import unwire_memory
    from app.runners.worker_protocol import WORKER_INIT
    from app.runners.worker_server import WorkerServer

    opening = WORKER_INIT.decode(line)
    parent_watch.exit_with_parent(opening.parent_pid, before_exit=unwire_memory)
    logging.basicConfig(
        level="DEBUG" if opening.settings.debug else opening.settings.log_level.upper(),
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    os.environ.update(prepare_compile_dir())
    shorten_switch_interval()
    service = WorkerServer(opening)
    with freeze_survivors():
        service.run()
    if not service.stop_engine():
        # A load or a hung step is still running. The thread cannot be killed, but the process can
        # exit.
        sys.stderr.flush()
        unwire_memory()
        os._exit(1)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # stopped before the server was started
        sys.exit(1)
