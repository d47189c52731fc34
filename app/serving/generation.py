"""Runs generation requests: reserves queue slots, prepares and submits jobs, and streams their
events.

Knows: the preparation of jobs, app.text, the `Engine` protocol. Must not know: HTTP, tensors, where
the model runs.

Exiting `open` exits the contexts of the submissions, which cancels the jobs. No other code cancels
jobs. A finished choice exits its context immediately, so that no unused tokens are computed.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, assert_never

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    Finish,
    FinishReason,
    PrefillProgress,
    PromptTokenIds,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from app.core.jobs import ContextLimit, Ended, Job, Prefilled, PromptLogprobs, Started, Token
from app.core.model_files import ModelFiles
from app.core.observers import count_choices
from app.core.ports import Engine, ReservedSlots, Submission
from app.core.requests import GenerateRequest, estimate_size
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.core.units import pluralize
from app.serving.embeddings import EmbeddingService
from app.serving.prompt_jobs import JobBuilder, PreparedChoice
from app.text.chat_template import build_tokenizer_info
from app.text.generated_turns import TurnRecorder
from app.text.output import ChoiceOutputProcessor, Delta, build_token_logprob

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _StreamEnd:
    """Marks the end of a stream. error: the exception with which the stream failed, or None."""

    error: Exception | None = None


async def merge_async_iterators(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yields the items of all streams as they arrive, preserving the order within each stream. Ends
    when all streams have ended, or raises the first exception of a stream. Closing the iterator
    closes the streams and waits for them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[tuple[T] | _StreamEnd] = asyncio.Queue()

    async def listen(stream: AsyncGenerator[T]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((item,))
        except Exception as raised:
            error = raised
        queue.put_nowait(_StreamEnd(error))

    listeners = [asyncio.create_task(listen(stream)) for stream in streams]
    try:
        left = len(listeners)
        while left:
            match await queue.get():
                case (item,):
                    yield item
                case _StreamEnd(error=error):
                    if error is not None:
                        raise error
                    left -= 1
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)


log = logging.getLogger(__name__)

# The number of tokens of an echoed prompt per event. With 20 logprobs per token, serializing an
# event takes 2 ms.
_ECHO_CHUNK_TOKENS = 128

# the number of characters that take about as much work as one token
_CHARACTERS_PER_TOKEN_ID = 4

# the number of tokens to log before and after the position of a cache miss
_LOGGED_CONTEXT_TOKENS = 8


class Generation:
    """Runs the requests of one model. The engine may be a model handle, whose runner may be
    replaced."""

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        settings: Settings,
        workers: ThreadPools | None = None,
    ) -> None:
        """workers: the thread pools; None creates new ones. Raises AppError(MODEL_FILES) if the
        tokenizer, the template or the generation defaults are invalid."""
        self._settings = settings
        self._workers = workers or ThreadPools()
        self._files = files
        self._engine = engine
        self._job_builder = JobBuilder(files, settings)
        self._tokenizer = self._job_builder.tokenizer
        self._embedding = EmbeddingService(
            files, engine, self._tokenizer, self._get_context_limit, self._workers
        )

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[Event]]:
        arrived = time.monotonic_ns()
        choices = count_choices(request)
        self._check_num_choices(choices, "prompt" if request.n == 1 else "n")
        async with AsyncExitStack() as stack:
            places = stack.enter_context(self._engine.reserve(choices))
            streams: list[AsyncGenerator[Event]] = []
            for prepared in await self._prepare(request):
                own = await stack.enter_async_context(AsyncExitStack())
                choice, submission = await self._submit(request, prepared, places, own)
                line = _ChoiceState(
                    choice,
                    submission,
                    own,
                    choice.create_output_processor(self._tokenizer),
                    arrived,
                    self._job_builder.create_turn_recorder(choice),
                )
                streams.append(self._stream_choice(line))
            # close the stream first, so that no submission is read while its context exits
            yield await stack.enter_async_context(aclosing(merge_async_iterators(streams)))

    async def _submit(
        self,
        request: GenerateRequest,
        choice: PreparedChoice,
        places: ReservedSlots,
        stack: AsyncExitStack,
    ) -> tuple[PreparedChoice, Submission]:
        """Submits a choice. If the grammar is not supported because of tool schemas that do not
        have to be enforced, prepares the choice again without the schemas. Returns the submitted
        choice."""
        try:
            return choice, await stack.enter_async_context(places.submit(choice.job))
        except AppError as error:
            relaxed = replace(request, tool_schemas="ignore")
            preferred = request.tools and request.tool_schemas == "prefer"
            if error.kind is not ErrorKind.INVALID or not preferred or choice.job.grammar is None:
                raise
            log.info("the schemas of tools are not enforced: %s", error.redact())
        again = (await self._prepare(relaxed))[choice.choice]
        return again, await stack.enter_async_context(places.submit(again.job))

    async def _prepare(self, request: GenerateRequest) -> list[PreparedChoice]:
        """Prepares the jobs of a request on a worker thread. Cancelling the call ends the
        preparation early. Requests from other callers or for other models are prepared
        concurrently."""
        room = self._get_context_limit()
        return await self._workers.run_cancellable(
            lambda token: self._job_builder.prepare(request, room, token),
            size=estimate_size(request),
            key=self._fairness_key(request.caller),
        )

    def _fairness_key(self, caller: str) -> str:
        """Returns the key for thread pools. The key includes the model, because a slow template
        must not delay requests for other models."""
        return f"{caller}/{self._files.name}"

    def _check_num_choices(self, count: int, param: str) -> None:
        """Raises AppError(INVALID) if the number of choices exceeds the capacity of the server and
        its queue. Otherwise, such a request would always get a 429."""
        capacity = self._engine.status().capacity
        if capacity is None or count <= (most := capacity.parallel + self._settings.max_queue):
            return
        message = (
            f"the request asks for {pluralize(count, 'choice')}, but the server can run and queue "
            f"at most {most}: ask for fewer, or increase --max-queue"
        )
        raise AppError(ErrorKind.INVALID, message, param=param)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await self._embedding.embed(request)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        encode = partial(self._encode, text, add_special_tokens=add_special_tokens)
        return await self._workers.run(encode, size=len(text))

    def _encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Tokenizes a text. Raises AppError(CONTEXT_LENGTH) if the text exceeds the model's context
        length."""
        read = self._tokenizer.truncate_text(text, self._files.context_length)
        if len(read) < len(text):
            message = (
                f"the text has far more than {self._files.context_length} tokens, which is the "
                "context length of this model: split the text"
            )
            raise AppError(ErrorKind.CONTEXT_LENGTH, message)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def tokenize_chat(self, request: GenerateRequest) -> Sequence[int]:
        written = await self._workers.run_cancellable(
            lambda token: self._job_builder.render_prompt(request, token),
            size=estimate_size(request),
            key=self._fairness_key(request.caller),
        )
        return await self.tokenize(written.text, add_special_tokens=written.add_special_tokens)

    async def get_token_bytes(self, ids: Sequence[int]) -> Sequence[bytes]:
        size = _CHARACTERS_PER_TOKEN_ID * len(ids)
        return await self._workers.run(lambda: [*map(self._tokenizer.token_bytes, ids)], size=size)

    async def get_tokenizer_info(self) -> Mapping[str, Any]:
        return build_tokenizer_info(self._files, self._tokenizer, context=self.context_length)

    async def detokenize(self, ids: Sequence[int]) -> str:
        size = _CHARACTERS_PER_TOKEN_ID * len(ids)
        return await self._workers.run(lambda: self._tokenizer.decode_verbatim(ids), size=size)

    @property
    def context_length(self) -> int:
        """The maximum number of positions in a sequence, as far as known."""
        return self._get_context_limit().context_length

    def _get_context_limit(self) -> ContextLimit:
        return ContextLimit(
            model_context=self._files.context_length,
            configured_context=self._files.resolve_context_length(self._settings.context),
            capacity=self._engine.status().capacity,
        )

    async def _stream_choice(self, choice: "_ChoiceState") -> AsyncGenerator[Event]:
        """Converts the updates of a job to the events of a choice. Ends with `Finish`, or raises
        AppError(ENGINE)."""
        prepared, answer, clock = choice.prepared, choice.answer, choice.clock
        job = prepared.job
        for event in _events_before_output(prepared):
            yield event
        async with choice.stack:
            async for update in choice.submission:
                match update:
                    case Started():
                        self._log_cache_miss(job, update)
                        clock.started = update.timestamp_ns
                        clock.cached_tokens = update.cached_tokens
                        yield _prefill_progress(prepared, update.cached_tokens)
                    case Prefilled():
                        yield _prefill_progress(prepared, update.computed_tokens)
                    case PromptLogprobs():
                        async for delta in self._stream_echo(prepared, update):
                            yield delta
                    case Token() if prepared.discard_output:
                        clock.first_token_ns = update.timestamp_ns
                    case Token():
                        clock.record_token(update.timestamp_ns)
                        deltas = answer.feed(update)
                        if choice.recorder is not None:
                            choice.recorder.feed(update.id, deltas)
                        for delta in deltas:
                            yield delta
                        if answer.stopped:
                            choice.submission.limit_cached_tokens(answer.visible_tokens)
                            break
                        if clock.exceeds(self._settings.max_time):
                            choice.submission.limit_cached_tokens(clock.num_tokens)
                            choice.reason = "length"
                            break
                    case Ended():
                        if update.reason == "error":
                            raise _job_error(job, update)
                        assert update.reason != "cancelled", "no other code may cancel a job"
                        clock.ended = update.timestamp_ns
                        choice.reason = update.reason
                        if update.stop_token_id in prepared.stop_token_ids:
                            choice.stop_token_id = update.stop_token_id
                    case _:
                        assert_never(update)
        if not answer.stopped:
            for delta in choice.flush():
                yield delta
        yield choice.build_finish()

    async def _stream_echo(
        self, prepared: PreparedChoice, scores: PromptLogprobs
    ) -> AsyncGenerator[TextDelta]:
        """Yields the prompt with its logprobs in chunks. A long prompt has a million logprobs, and
        each chunk is serialized on the event loop. Each chunk contains the text of its tokens; the
        last chunk also contains the remaining text."""
        text = prepared.echo or ""
        for start in range(0, len(prepared.job.prompt_token_ids), _ECHO_CHUNK_TOKENS):
            read = partial(self._build_echo_logprobs, prepared, scores, start)
            logprobs = await self._workers.run(read)
            end = len(b"".join(entry.token_bytes for entry in logprobs).decode(errors="ignore"))
            if start + _ECHO_CHUNK_TOKENS >= len(prepared.job.prompt_token_ids):
                end = len(text)
            yield TextDelta(choice=prepared.choice, text=text[:end], logprobs=logprobs)
            text = text[end:]

    def _build_echo_logprobs(
        self, prepared: PreparedChoice, scores: PromptLogprobs, start: int
    ) -> tuple[TokenLogprob, ...]:
        """Returns the logprobs of up to `_ECHO_CHUNK_TOKENS` prompt tokens, beginning with `start`.
        The first token of the prompt has no logprob, because there is no preceding token."""
        ids = prepared.job.prompt_token_ids[start : start + _ECHO_CHUNK_TOKENS]
        # the scores begin with the second token
        behind = scores.logprobs[max(0, start - 1) : start - 1 + len(ids)]
        known = behind if start else ((None, ()), *behind)
        return tuple(
            build_token_logprob(
                self._tokenizer,
                Token(
                    job_id=scores.job_id, id=id, timestamp_ns=0, logprob=logprob, top_logprobs=top
                ),
            )
            for id, (logprob, top) in zip(ids, known, strict=True)
        )

    def _log_cache_miss(self, job: Job, started: Started) -> None:
        """Logs the reason for a cache miss. No other code logs prompt text, and this method logs it
        only with --debug."""
        if not self._settings.debug:
            return
        served = (
            f"{job.id}: {started.cached_tokens} of {len(job.prompt_token_ids)} "
            "prompt tokens were cached"
        )
        miss = started.miss
        if miss is None:
            log.debug("%s", served)
            return
        log.debug(
            "%s (%s at %d): after %r the prompt continues with %r, and the cached prefix with %r",
            served,
            miss.reason,
            miss.position,
            self._decode_for_log(
                job.prompt_token_ids[max(0, miss.position - _LOGGED_CONTEXT_TOKENS) : miss.position]
            ),
            self._decode_for_log(
                job.prompt_token_ids[miss.position : miss.position + _LOGGED_CONTEXT_TOKENS]
            ),
            self._decode_for_log(miss.cached_ids[:_LOGGED_CONTEXT_TOKENS]),
        )

    def _decode_for_log(self, ids: Sequence[int]) -> str:
        return "".join(map(self._tokenizer.token_text, ids))


class _ChoiceState:
    """The state of a running choice. stack: closing it exits the context of the submission.
    arrived: the monotonic time in ns at which the request arrived. recorder: records the output, if
    later prompts may contain it."""

    def __init__(
        self,
        prepared: PreparedChoice,
        submission: Submission,
        stack: AsyncExitStack,
        answer: ChoiceOutputProcessor,
        arrived: int,
        recorder: TurnRecorder | None,
    ) -> None:
        self.recorder = recorder
        self.prepared = prepared
        self.submission = submission
        self.stack = stack
        self.answer = answer
        self.clock = _ChoiceTimer(arrived)
        self.reason: FinishReason = "stop"
        self.stop_token_id: int | None = None

    def flush(self) -> list[Delta]:
        """Ends the output. Returns the remaining deltas."""
        deltas = self.answer.flush(self.stop_token_id)
        is_model_end = self.reason == "stop" and self.stop_token_id is None
        if self.recorder is not None and is_model_end and not self.answer.stopped:
            self.recorder.finish(deltas)
        return deltas

    def build_finish(self) -> Finish:
        clock, answer, job = self.clock, self.answer, self.prepared.job
        reason: FinishReason = "stop" if answer.stopped else self.reason
        if self.prepared.discard_output:
            reason = "length"
        if reason == "stop" and answer.num_tool_calls:
            reason = "tool_calls"
        return Finish(
            choice=self.prepared.choice,
            prompt_index=self.prepared.prompt_index,
            reason=reason,
            usage=Usage(
                prompt_tokens=len(job.prompt_token_ids),
                completion_tokens=clock.num_tokens,
                cached_tokens=clock.cached_tokens,
                reasoning_tokens=answer.reasoning_tokens,
            ),
            timings=clock.build_timings(),
            stop_string=answer.matched_stop,
            stop_token_id=self.stop_token_id,
        )


class _ChoiceTimer:
    """The timestamps of a choice, as monotonic times in ns, and its token counts."""

    def __init__(self, arrived: int) -> None:
        self.arrived = self.started = arrived
        self.first_token_ns: int | None = None
        self.ended = arrived
        self.cached_tokens = 0
        self.num_tokens = 0
        self.inter_token_ns = array("q")  # a list of ints would take five times the memory

    def record_token(self, at: int) -> None:
        self.num_tokens += 1
        if self.first_token_ns is None:
            self.first_token_ns = at
        else:
            self.inter_token_ns.append(at - self.ended)
        self.ended = at

    def exceeds(self, seconds: float | None) -> bool:
        """Returns whether at least `seconds` have passed between the first and the last token.
        Returns False if `seconds` is None."""
        return (
            seconds is not None
            and self.first_token_ns is not None
            and self.ended - self.first_token_ns >= seconds * 1e9
        )

    def build_timings(self) -> Timings:
        first = self.ended if self.first_token_ns is None else self.first_token_ns
        return Timings(
            prefill_ns=first - self.started,
            decode_ns=self.ended - first,
            total_ns=self.ended - self.arrived,
            inter_token_ns=tuple(self.inter_token_ns),
        )


def _events_before_output(prepared: PreparedChoice) -> Iterator[Event]:
    job = prepared.job
    if prepared.return_token_ids:
        yield PromptTokenIds(prompt_index=prepared.prompt_index, token_ids=job.prompt_token_ids)
    if prepared.echo and job.prompt_logprobs is None:
        yield TextDelta(choice=prepared.choice, text=prepared.echo)


def _prefill_progress(prepared: PreparedChoice, computed_tokens: int) -> PrefillProgress:
    return PrefillProgress(
        prompt_index=prepared.prompt_index,
        computed_tokens=computed_tokens,
        total_tokens=len(prepared.job.prompt_token_ids),
    )


def _job_error(job: Job, ended: Ended) -> AppError:
    message = ended.error or "the engine failed"
    if not ended.invalid_request:
        return AppError(ErrorKind.ENGINE, message)
    return AppError(ErrorKind.INVALID, message, param=job.grammar.param if job.grammar else None)
