"""What a runner's process keeps for a parent that does not listen."""

import asyncio
import os
from pathlib import Path

from app import store
from app.core.settings import Settings
from app.runners.child_process import PrivateSocket
from app.runners.worker_protocol import WorkerInit
from app.runners.worker_server import WorkerServer


def test_heartbeats_that_nobody_hears_do_not_pile_up(tiny_model: Path) -> None:
    async def run() -> None:
        listener = PrivateSocket()
        opening = WorkerInit(
            parent_pid=0,
            socket_fd=os.dup(listener.fileno()),
            settings=Settings(watchdog=0.004),
            files=store.resolve(str(tiny_model)),
        )
        service = WorkerServer(opening)
        with service._socket:
            beating = asyncio.create_task(service._send_heartbeats())
            for _ in range(2):  # and they go on when one was heard
                await service._events.get()
                await asyncio.sleep(0.1)  # of which each takes a millisecond
                assert service._events.qsize() <= 1
            beating.cancel()
        listener.close()

    asyncio.run(run())
