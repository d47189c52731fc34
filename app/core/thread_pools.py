"""Thread pools for work that must not run on the event loop: parsing, templates, tokenization.

Knows: asyncio, threads, the key and size of each work item, the caller of the current request. Must
not know: the purpose of the work.

Small and large work items run on different threads, so that a short request never waits for a long
one. Each queue is fair: scheduling is round-robin between keys, and one key never uses more than
half of the threads. Most of the work holds the GIL, so a thread for large work sleeps after each
item for as long as the item took. Threads of an idle pool end, because a library may keep a cache
per thread: tokenizers caches up to 10,000 words, which need up to 8 KB each.
"""

import asyncio
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from app.core.request_context import REQUEST_CONTEXT
from app.core.runtime import trim_malloc

Result = TypeVar("Result")

# The number of threads for small work. Most of this work holds the GIL, so more threads would only
# delay the event loop further.
_SMALL_THREADS = 4

# The maximum number of threads for large work. Tokenization releases the GIL.
_MAX_LARGE_THREADS = 8

# Work items with at least this many bytes or characters are large. Tokenizing them takes about 20
# ms or more.
_LARGE_WORK_SIZE = 64 * 1024

# The maximum number of seconds that a thread sleeps after an item.
_MAX_REST_SECONDS = 1.0

# The number of seconds without work after which the threads of a pool end. The first prompt after
# that takes longer to tokenize, because the caches of the new threads are empty.
_IDLE_SECONDS = 30.0


class WorkCancelled(Exception):
    """Raised when work is cancelled because its result is no longer needed."""


class CancelToken:
    """Signals to running work that its result is no longer needed. Thread-safe."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def check(self) -> None:
        """Raises WorkCancelled after `cancel`."""
        if self._cancelled:
            raise WorkCancelled


@dataclass(eq=False, slots=True)
class _WorkItem:
    """A queued work item. done: the future for its result, which is set on the event loop."""

    key: str
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class FairThreadPool:
    """Runs work on threads, round-robin between keys. All other code of this class runs on one
    event loop.

    The threads are daemon threads, so the process exits without waiting for them. rest: the number
    of seconds that a thread sleeps per second of CPU time used by its work. idle: the number of
    seconds without work after which all threads end.
    """

    def __init__(
        self, threads: int, name: str, *, rest: float = 0.0, idle: float = _IDLE_SECONDS
    ) -> None:
        self._name = name
        self._max_threads = threads
        self._rest = rest
        self._idle = idle
        self._idle_timer: asyncio.TimerHandle | None = None
        self._last_used = 0.0  # in the event loop's time
        self._threads: list[threading.Thread] = []
        self._max_per_key = max(1, threads // 2)
        self._queues: dict[str, deque[_WorkItem]] = {}
        self._running: Counter[str] = Counter()
        self._inbox: SimpleQueue[_WorkItem | None] = SimpleQueue()

    @property
    def running(self) -> int:
        """The number of busy threads."""
        return self._running.total()

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues.values()))

    async def run(self, work: Callable[[], Result], *, key: str) -> Result:
        """Calls `work` on a thread with a copy of this task's context. Returns its result or raises
        its exception. Cancelling the call drops work that has not started; work that has started
        runs to completion."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        item = _WorkItem(key, partial(copy_context().run, work), done)
        self._queues.setdefault(key, deque()).append(item)
        self._dispatch()
        try:
            return await done
        finally:
            self._drop(item)
            # The traceback of an error raised here refers to this frame. If the frame also referred
            # to the error, the reference cycle would keep the work's objects in memory until the
            # garbage collector runs.
            del done, item

    def _drop(self, item: _WorkItem) -> None:
        queue = self._queues.get(item.key)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._queues[item.key]

    def _dispatch(self) -> None:
        while self.running < self._max_threads and (item := self._pop_next()) is not None:
            self._running[item.key] += 1
            if self.running > len(self._threads):
                thread = threading.Thread(target=self._run_thread, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._inbox.put(item)

    def _pop_next(self) -> _WorkItem | None:
        """Returns the next item of the least recently served key."""
        for key, queue in self._queues.items():
            if self._running[key] < self._max_per_key:
                item = queue.popleft()
                del self._queues[key]
                if queue:
                    self._queues[key] = queue
                return item
        return None

    def _run_thread(self) -> None:
        while (item := self._inbox.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            began = time.thread_time()
            try:
                result = item.work()
            except BaseException as raised:  # the awaiting task raises it
                error = raised
            # the loop may be closed, because the server does not wait for work on shutdown
            with suppress(RuntimeError):
                item.done.get_loop().call_soon_threadsafe(self._finish, item, result, error)
            used = time.thread_time() - began
            # otherwise this thread would keep these objects in memory until its next item
            del item, result, error
            if self._rest:
                time.sleep(min(_MAX_REST_SECONDS, self._rest * used))

    def _finish(self, item: _WorkItem, result: Any, error: BaseException | None) -> None:
        self._running[item.key] -= 1
        if not self._running[item.key]:
            del self._running[item.key]
        if not item.done.done():
            if error is None:
                item.done.set_result(result)
            else:
                item.done.set_exception(error)
        self._dispatch()
        loop = asyncio.get_running_loop()
        self._last_used = loop.time()
        if self._idle_timer is None:
            self._idle_timer = loop.call_later(self._idle, self._end_idle_threads)

    def _end_idle_threads(self) -> None:
        """Ends all threads of an idle pool, and then returns the memory that they have freed to the
        system."""
        loop, self._idle_timer = asyncio.get_running_loop(), None
        if self.running:
            return  # a timer starts when this work is finished
        ends = self._last_used + self._idle
        if loop.time() < ends:
            self._idle_timer = loop.call_at(ends, self._end_idle_threads)
            return
        threads, self._threads = self._threads, []
        for _ in threads:
            self._inbox.put(None)
        threading.Thread(target=_release_memory, args=(threads,), daemon=True).start()


def _release_memory(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
    trim_malloc()


class ThreadPools:
    """The thread pools of one server."""

    def __init__(self) -> None:
        large = min(_MAX_LARGE_THREADS, max(2, os.cpu_count() or 2))
        self.small = FairThreadPool(_SMALL_THREADS, "work")
        self.large = FairThreadPool(large, "large-work", rest=1.0)

    @property
    def running(self) -> int:
        return self.small.running + self.large.running

    @property
    def queued(self) -> int:
        return self.small.queued + self.large.queued

    async def run(
        self, work: Callable[[], Result], *, size: int = 0, key: str | None = None
    ) -> Result:
        """Runs work like `FairThreadPool.run`. size: the number of bytes or characters to process.
        key: the owner of the work, for fair scheduling; by default, the caller of the current
        request."""
        if key is None:
            context = REQUEST_CONTEXT.get()
            key = "" if context is None else context.caller
        queue = self.large if size >= _LARGE_WORK_SIZE else self.small
        return await queue.run(work, key=key)

    async def run_cancellable(
        self, work: Callable[[CancelToken], Result], *, size: int = 0, key: str | None = None
    ) -> Result:
        """Runs work like `run`, but passes a token to `work`. Cancelling this call cancels the
        token, so that `work` can end early if it checks the token."""
        token = CancelToken()
        try:
            return await self.run(lambda: work(token), size=size, key=key)
        except asyncio.CancelledError:
            token.cancel()
            raise
