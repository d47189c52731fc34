"""Events of a model process whose parent does not read them."""

import asyncio
import os
from pathlib import Path

from app import store
from app.core.settings import Settings
from app.runners.child_process import PrivateSocket
from app.runners.worker_protocol import WorkerInit
from app.runners.worker_server import WorkerServer


def test_unread_heartbeats_do_not_accumulate(tiny_model: Path) -> None:
    async def run() -> None:
        listener = PrivateSocket()
        init = WorkerInit(
            parent_pid=0,
            socket_fd=os.dup(listener.fileno()),
            settings=Settings(watchdog=0.004),
            files=store.resolve(str(tiny_model)),
        )
        worker = WorkerServer(init)
        with worker._socket:
            task = asyncio.create_task(worker._send_heartbeats())
            for _ in range(2):  # heartbeats continue after one is read
                await worker._events.get()
                await asyncio.sleep(0.1)  # 100 intervals of a millisecond
                assert worker._events.qsize() <= 1
            task.cancel()
        listener.close()

    asyncio.run(run())
