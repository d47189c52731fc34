"""The entry point of a model process, which has one engine and one channel to its parent.

Knows: the order of startup and shutdown. Must not know: requests. The process exits if its parent
exits.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys

from app.core.runtime import (
    freeze_survivors,
    import_without_collections,
    shorten_switch_interval,
)
from app.runners import parent_watch
from app.runners.channel import read_frame
from app.runners.compile_dir import prepare_compile_dir


def main() -> int:
    parent_watch.tie_to_parent()
    # Service managers send SIGTERM to every process of a service. Ignore it: the parent decides
    # when this process exits, because requests may still be running. It closes the channel.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    end = socket.socket(fileno=int(sys.argv[-1]))
    # These imports take a third of a second. The parent may not know the model yet.
    with import_without_collections():
        from app.engine.wired_memory import unwire_memory
        from app.runners.worker import Worker
        from app.runners.worker_protocol import WORKER_INIT

    message = read_frame(end.recv)
    if message is None:
        return 1
    init = WORKER_INIT.decode(message)
    parent_watch.exit_with_parent(init.parent_pid, before_exit=unwire_memory)
    logging.basicConfig(
        level="DEBUG" if init.settings.debug else init.settings.log_level.upper(),
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    os.environ.update(prepare_compile_dir())
    shorten_switch_interval()
    worker = Worker(init, end)
    with freeze_survivors():
        worker.run()
    if not worker.stop_engine():
        # A load or a hung step is still running. The thread cannot be killed, but the process can
        # exit.
        sys.stderr.flush()
        unwire_memory()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
