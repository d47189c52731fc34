"""How long a sampled token waits for its post while a long prompt is prefilled.

A thread waits for the arrays that the engine samples, which gives the time at which the device has
computed a token. The engine's own `post` gives the other time. The length of a chunk is the time
between two reports of progress.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from app import store
from app.core.jobs import Ended, EngineMessage, EngineReady, Job, Prefilled, StepOutput, Token
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.thread import EngineThread

CHUNK, PROMPT_TOKENS, ROUNDS = 128, 4000, 3
STREAMS = (1, 4)


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Seconds. delays: from a token's availability to its post, for each step with a token of a
    running stream during the prefill. chunks: the times between two chunks."""

    delays: list[float]
    chunks: list[float]


def report(folder: Path) -> str:
    lines = [
        f"delay of a running stream's token, from the device to its post, during the prefill of "
        f"{PROMPT_TOKENS} tokens in chunks of {CHUNK}:",
        "streams  delays  median ms  p99 ms  longest ms  chunk ms  p99 / chunk",
    ]
    for streams in STREAMS:
        rounds = [measure(folder, streams) for _ in range(ROUNDS)]
        delays = sorted(delay for one in rounds for delay in one.delays)
        chunk = median(seconds for one in rounds for seconds in one.chunks)
        p99 = delays[int(0.99 * (len(delays) - 1))]
        lines.append(
            f"{streams:7}  {len(delays):6}  {1e3 * median(delays):9.2f}  {1e3 * p99:6.2f}  "
            f"{1e3 * delays[-1]:10.2f}  {1e3 * chunk:8.1f}  {p99 / chunk:11.3f}"
        )
    return "\n".join(lines)


def measure(folder: Path, streams: int) -> Delays:
    """One prefill of a long prompt alongside `streams` streams."""
    recorder = _Recorder()
    settings = Settings(prefill_chunk=CHUNK, parallel=streams + 1, cache="radix")
    files = store.resolve(str(folder))

    def read(progress: Callable[[int, int], None]) -> Loop:
        loop = load(files, settings, progress)
        recorder.watch(loop)
        return loop

    thread = EngineThread(read, recorder.post)
    thread.start()
    recorder.ready.wait()
    for i in range(streams):
        thread.submit(_job(f"stream {i}", 20, 4000))
    while recorder.num_tokens < 10 * streams:
        time.sleep(0.01)
    thread.submit(_job("prompt", PROMPT_TOKENS, 1))
    recorder.ended.wait()
    thread.stop()
    assert thread.join(60)
    return recorder.delays()


class _Recorder:
    """Records the times at which tokens are available, and the posts of the engine thread."""

    def __init__(self) -> None:
        self.ready, self.ended = threading.Event(), threading.Event()
        self.num_tokens = 0
        self._available: list[tuple[tuple[str, ...], float]] = []
        self._posts: list[tuple[tuple[str, ...], float]] = []
        self._progress: list[float] = []
        self._sampled: queue.SimpleQueue[tuple[tuple[str, ...], mx.array]] = queue.SimpleQueue()
        threading.Thread(target=self._wait_for_arrays, daemon=True).start()

    def watch(self, loop: Loop) -> None:
        runner: Any = loop._model_runner  # pyright: ignore[reportPrivateUsage]
        sample = runner.sample

        def sample_and_watch(batch: Any) -> Any:
            group = sample(batch)
            names = tuple(sequence.job.id for sequence in group.sequences)
            self._sampled.put((names, group.output.tokens))
            return group

        runner.sample = sample_and_watch

    def post(self, message: EngineMessage) -> None:
        now = time.perf_counter()
        if isinstance(message, EngineReady):
            self.ready.set()
        if not isinstance(message, StepOutput):
            return
        for update in message.updates:
            match update:
                case Token():
                    self.num_tokens += 1
                    self._posts.append(((update.job_id,), now))
                case Prefilled(job_id="prompt"):
                    self._progress.append(now)
                case Ended(job_id="prompt"):
                    self.ended.set()
                case _:
                    pass

    def delays(self) -> Delays:
        """The first stream's tokens are posted in the order in which they are sampled."""
        name = "stream 0"
        available = [now for names, now in self._available if name in names]
        posted = [now for names, now in self._posts if name in names]
        first, last = self._progress[0], self._progress[-1]
        delays = [
            max(0.0, post - ready)
            for ready, post in zip(available, posted, strict=False)
            if first < post < last
        ]
        chunks = [b - a for a, b in zip(self._progress, self._progress[1:], strict=False)]
        return Delays(delays=delays, chunks=chunks)

    def _wait_for_arrays(self) -> None:
        while True:
            names, tokens = self._sampled.get()
            mx.eval(tokens)
            self._available.append((names, time.perf_counter()))


def _job(name: str, length: int, max_tokens: int) -> Job:
    return Job(
        id=name,
        prompt_token_ids=tuple(1 + (17 * i + len(name)) % 250 for i in range(length)),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
    )
