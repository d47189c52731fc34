"""An engine for sessions: a real prefix cache for each kind of layers, and scripted output.

The layers are `FakeLayer`s, which hold the ids themselves.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from app.core.images import ImagePixels
from app.core.jobs import (
    CallResult,
    Capacity,
    Ended,
    EngineCall,
    EngineStats,
    Job,
    JobUpdate,
    Prefilled,
    Started,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.ports import RunnerFailure, RunnerState, RunnerStatus
from app.core.requests import EmbedJob
from tests import tiny
from tests.engine.prefix.harness import begin, feed, prefill
from tests.engine.prefix.radix_content import cache_of

# layers of a model: full attention only, with recurrent layers, with windowed layers
KINDS = ("kk", "kr", "wk")

CONTEXT = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The input of the engine. cached: the number of ids that each cache served. reported: the
    number that the engine reported."""

    ids: tuple[int, ...]
    cached: Mapping[str, int]
    reported: int

    @property
    def text(self) -> str:
        """One character for each id: the byte, or a private-use character for a special token."""
        return "".join(chr(id_ if id_ < 256 else 0xE000 + id_) for id_ in self.ids)


class SessionEngine:
    """Implements `Runner`. outputs: the output for the prompt that contains the key, which is a
    word of one request. together: the number of requests that run at the same time from now on:
    none of them gets output before all of them have begun. max_running: of all jobs so far."""

    def __init__(self) -> None:
        self.outputs: dict[str, str] = {}
        self.prompts: dict[str, Prompt] = {}
        self.max_running = 0
        self._caches = {kinds: cache_of(kinds) for kinds in KINDS}
        self._barrier = asyncio.Barrier(1)
        self._reporting = itertools.cycle(KINDS)
        self._running = 0
        self._state: RunnerState = "loading"
        self._tokenizer: tokenizers.Tokenizer | None = None

    def run_together(self, count: int) -> None:
        self._barrier = asyncio.Barrier(count)

    async def start(self, files: ModelFiles) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer_path))
        self._state = "ready"

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator["SessionJob"]:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(list(job.prompt_token_ids), skip_special_tokens=False)
        [key] = [word for word in self.outputs if word in text]
        output = self._tokenizer.encode(self.outputs.pop(key), add_special_tokens=False).ids
        leases = {
            kinds: begin(cache, job.prompt_token_ids, turn_ends=job.message_ends or ())
            for kinds, cache in self._caches.items()
        }
        cached = {kinds: lease.cached for kinds, lease in leases.items()}
        reported = cached[next(self._reporting)]
        self.prompts[key] = Prompt(ids=job.prompt_token_ids, cached=cached, reported=reported)
        self._running += 1
        self.max_running = max(self.max_running, self._running)
        try:
            yield SessionJob(job, reported, output, self._barrier)
        finally:
            self._running -= 1
            # the stop token is sampled, but not computed
            for lease in leases.values():
                prefill(lease, job.prompt_token_ids)
                feed(lease, output)
                computed = (*job.prompt_token_ids, *output)
                lease.commit(computed, keep=len(computed))

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        raise AssertionError("the session has no embeddings")

    def status(self) -> RunnerStatus:
        capacity = Capacity(
            parallel=8, context_length=CONTEXT, kv_budget=1 << 30, kv_bytes_per_sequence=1
        )
        return RunnerStatus(state=self._state, progress=100, stats=EngineStats(), capacity=capacity)

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        raise AssertionError(call)

    async def wait_for_failure(self) -> RunnerFailure:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the engine never fails")

    async def stop(self) -> None:
        self._state = "failed"


class SessionJob:
    """Implements `Submission`."""

    def __init__(
        self, job: Job, cached: int, output: Sequence[int], barrier: asyncio.Barrier
    ) -> None:
        self._job = job
        self._cached = cached
        self._output = output
        self._barrier = barrier
        self.started_ns: int | None = None
        self.ended_ns: int | None = None

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the jobs have no images")

    def limit_cached_tokens(self, tokens: int) -> None:
        raise AssertionError("every output ends with a stop token")

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        name, length = self._job.id, len(self._job.prompt_token_ids)
        await self._barrier.wait()
        self.started_ns = time.monotonic_ns()
        yield [Started(job_id=name, cached_tokens=self._cached, timestamp_ns=self.started_ns)]
        yield [Prefilled(job_id=name, computed_tokens=length)]
        for id_ in self._output:
            yield [Token(job_id=name, id=id_, timestamp_ns=time.monotonic_ns())]
        self.ended_ns = time.monotonic_ns()
        yield [
            Ended(
                job_id=name,
                reason="stop",
                timestamp_ns=self.ended_ns,
                stop_token_id=min(self._job.stop_token_ids),
            )
        ]


def write_model(folder: Path, template: str, ends: frozenset[str]) -> Path:
    """A model folder with this chat template. ends: special tokens that end the model's turns. Its
    weights are never loaded."""
    tokenizer = tiny.tokenizer()
    added = sorted(ends - {"<s>", "</s>"})
    tokenizer.add_special_tokens([tokenizers.AddedToken(text) for text in added])
    ids = [tiny.END, *map(tokenizer.token_to_id, added)]
    size = tokenizer.get_vocab_size()
    tiny.write(folder, vocab_size=size, max_position_embeddings=CONTEXT, eos_token_id=ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return folder
