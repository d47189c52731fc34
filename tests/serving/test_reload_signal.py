"""SIGHUP: requests a reload, and never ends the process."""

import asyncio
import os
import signal

from app.serving.reload_signal import ReloadSignal
from tests.waiting import wait_until_async


def test_a_signal_before_the_loop_runs_causes_a_reload():
    """The default action ended the process, also while a model was downloaded."""
    reload_signal, reloads = ReloadSignal(), list[int]()

    async def reload() -> None:
        reloads.append(1)

    async def body() -> None:
        task = asyncio.create_task(reload_signal.run(reload))
        await wait_until_async(lambda: len(reloads) == 1)
        os.kill(os.getpid(), signal.SIGHUP)
        await wait_until_async(lambda: len(reloads) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.kill(os.getpid(), signal.SIGHUP)  # after the end of the loop

    before = signal.getsignal(signal.SIGHUP)
    with reload_signal.handled():
        os.kill(os.getpid(), signal.SIGHUP)
        asyncio.run(body())
    assert len(reloads) == 2
    assert signal.getsignal(signal.SIGHUP) is before


def test_signals_during_a_reload_cause_one_more():
    reload_signal = ReloadSignal()

    async def body() -> None:
        may_end, reloads = asyncio.Event(), list[int]()

        async def reload() -> None:
            reloads.append(1)
            await may_end.wait()

        task = asyncio.create_task(reload_signal.run(reload))
        os.kill(os.getpid(), signal.SIGHUP)
        await wait_until_async(lambda: len(reloads) == 1)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert len(reloads) == 1, "one at a time"
        may_end.set()
        await wait_until_async(lambda: len(reloads) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(reloads) == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with reload_signal.handled():
        asyncio.run(body())


def test_other_handlers_can_be_restored_early():
    """The launcher of a remote rank ends it with this signal."""
    before = signal.getsignal(signal.SIGHUP)
    reload_signal = ReloadSignal()
    with reload_signal.handled():
        assert signal.getsignal(signal.SIGHUP) is not before
        reload_signal.restore()
        assert signal.getsignal(signal.SIGHUP) is before
    assert signal.getsignal(signal.SIGHUP) is before
