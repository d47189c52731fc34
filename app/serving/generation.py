"""Runs generation requests: reserves queue slots, prepares and submits jobs, and converts the
updates of each running choice to events.

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
from typing import Any, TypeVar

from app.core.errors import AppError, ContextExcess, ErrorKind
from app.core.events import (
    Event,
    Finish,
    FinishReason,
    PrefillProgress,
    PromptTokenIds,
    PromptTokenLogprobs,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from app.core.images import is_row_id
from app.core.jobs import (
    ContextLimit,
    Ended,
    Job,
    PixelsNeeded,
    Prefilled,
    PromptLogprobs,
    Started,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.ports import Engine, ReservedSlots, Submission
from app.core.request_lifecycle import count_choices
from app.core.requests import Embeddings, EmbedRequest, GenerateRequest, estimate_size
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.core.units import pluralize
from app.images.decoder import ImageDecoder
from app.serving.embeddings import EmbeddingService
from app.serving.image_input import reject_all_images, verify_images
from app.serving.prompt_jobs import JobBuilder, PreparedChoice
from app.text.chat_template import build_tokenizer_info
from app.text.generated_turns import TurnRecorder
from app.text.output import ChoiceOutputProcessor, Delta, build_token_logprob
from app.text.prompt import RenderedPrompt

log = logging.getLogger(__name__)

T = TypeVar("T")

# The number of prompt tokens with log probabilities per event. With 20 logprobs per token,
# serializing an event takes 2 ms.
_SCORES_PER_EVENT = 128

# the number of characters that take about as much work as one token
_CHARACTERS_PER_TOKEN_ID = 4

# the number of tokens to log before and after the position of a cache miss
_LOGGED_CONTEXT_TOKENS = 8


class RunningChoice:
    """The state of a running choice. stack: closing it exits the context of the submission.
    arrived: the monotonic time in ns at which the request arrived. recorder: records the output, if
    later prompts may contain it. max_time: the maximum number of seconds of output; None for no
    limit. ended: whether the output has ended. cut: whether it ended before the job did."""

    def __init__(
        self,
        prepared: PreparedChoice,
        submission: Submission,
        stack: AsyncExitStack,
        answer: ChoiceOutputProcessor,
        arrived: int,
        recorder: TurnRecorder | None,
        max_time: float | None,
    ) -> None:
        self.recorder = recorder
        self.prepared = prepared
        self.submission = submission
        self.stack = stack
        self.answer = answer
        self.clock = ChoiceTimer(arrived)
        self._max_time = max_time
        self.reason: FinishReason = "stop"
        self.stop_token_id: int | None = None
        self.ended = self.cut = False

    def feed(self, token: Token) -> list[Delta]:
        """Adds a token. Returns the deltas that may be sent now."""
        if self.prepared.discard_output:
            self.clock.first_token_ns = token.timestamp_ns
            return []
        self.clock.record_token(token.timestamp_ns)
        deltas = self.answer.feed(token)
        if self.recorder is not None:
            self.recorder.feed(token.id, deltas)
        if self.answer.stopped:
            self._cut_after(self.answer.visible_tokens)
        elif self._max_time is not None and self.clock.exceeds(self._max_time):
            self._cut_after(self.clock.num_tokens)
            self.reason = "length"
        return deltas

    def record_prefill(self, update: Started | Prefilled) -> PrefillProgress:
        if isinstance(update, Prefilled):
            return self._prefill_progress(update.computed_tokens)
        self.clock.started = update.timestamp_ns
        self.clock.cached_tokens = update.cached_tokens
        return self._prefill_progress(update.cached_tokens)

    def record_end(self, update: Ended) -> None:
        """Records the end of the job. Raises AppError if the job has failed."""
        if update.reason == "error":
            raise _job_error(self.prepared.job, update)
        assert update.reason != "cancelled", "no other code may cancel a job"
        self.clock.ended = update.timestamp_ns
        self.reason = update.reason
        if update.stop_token_id in self.prepared.stop_token_ids:
            self.stop_token_id = update.stop_token_id
        self.ended = True

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

    def _prefill_progress(self, computed_tokens: int) -> PrefillProgress:
        return PrefillProgress(
            prompt_index=self.prepared.prompt_index,
            computed_tokens=computed_tokens,
            total_tokens=len(self.prepared.job.prompt_token_ids),
        )

    def _cut_after(self, tokens: int) -> None:
        """Ends the output early. The client received the first `tokens` sampled tokens."""
        self.submission.limit_cached_tokens(tokens)
        self.ended = self.cut = True


class ChoiceTimer:
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

    def exceeds(self, seconds: float) -> bool:
        """Returns whether at least `seconds` have passed between the first and the last token."""
        first = self.first_token_ns
        return first is not None and self.ended - first >= seconds * 1e9

    def build_timings(self) -> Timings:
        first = self.ended if self.first_token_ns is None else self.first_token_ns
        return Timings(
            prefill_ns=first - self.started,
            decode_ns=self.ended - first,
            total_ns=self.ended - self.arrived,
            inter_token_ns=tuple(self.inter_token_ns),
        )


def _job_error(job: Job, ended: Ended) -> AppError:
    message = ended.error or "the engine failed"
    if not ended.invalid_request:
        return AppError(ErrorKind.ENGINE, message)
    return AppError(ErrorKind.INVALID, message, param=job.grammar.param if job.grammar else None)


@dataclass(frozen=True, slots=True)
class _StreamEnd:
    """Marks the end of a stream. error: the exception with which the stream failed, or None."""

    error: Exception | None = None


Batches = AsyncGenerator[Sequence[T]]


def merge_batches(streams: Sequence[Batches[T]]) -> Batches[T]:
    """Merges streams of batches. Yields the items of all streams as they arrive, preserving the
    order within each stream. Ends when all streams have ended, or raises the first exception of a
    stream. Closing the iterator closes the streams and waits for them."""
    return streams[0] if len(streams) == 1 else _merge_several(streams)


async def _merge_several(streams: Sequence[Batches[T]]) -> Batches[T]:
    queue: asyncio.Queue[Sequence[T] | _StreamEnd] = asyncio.Queue()

    async def listen(stream: Batches[T]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(stream):
                async for batch in stream:
                    queue.put_nowait(batch)
        except Exception as raised:
            error = raised
        queue.put_nowait(_StreamEnd(error))

    listeners = [asyncio.create_task(listen(stream)) for stream in streams]
    try:
        left = len(listeners)
        while left:
            available = [await queue.get()]
            while not queue.empty():  # choices of one step arrive together
                available.append(queue.get_nowait())
            batch: list[T] = []
            error: Exception | None = None
            for item in available:
                if not isinstance(item, _StreamEnd):
                    batch += item
                elif item.error is None:
                    left -= 1
                else:
                    error = item.error
                    break
            if batch:
                yield batch
            if error is not None:
                raise error
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)


class Generation:
    """Runs the requests of one model. The engine may be a model handle, whose runner may be
    replaced."""

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        settings: Settings,
        workers: ThreadPools | None = None,
        decoder: ImageDecoder | None = None,
    ) -> None:
        """workers: the thread pools; None creates new ones. decoder: decodes the images of
        requests; None for a server without images. Raises AppError(MODEL_FILES) if the
        tokenizer, the template or the generation defaults are invalid."""
        self._settings = settings
        self._workers = workers or ThreadPools()
        self._files = files
        self._engine = engine
        self._decoder = decoder
        self._job_builder = JobBuilder(files, settings, decoder)
        self._tokenizer = self._job_builder.tokenizer
        for warning in self._job_builder.list_warnings():
            log.warning("%s", warning)
        self._embedding = EmbeddingService(
            files, engine, self._tokenizer, self._get_context_limit, self._workers
        )

    @asynccontextmanager
    async def open(
        self, request: GenerateRequest
    ) -> AsyncGenerator[AsyncIterator[Sequence[Event]]]:
        if self._files.is_encoder:
            raise AppError(
                ErrorKind.INVALID,
                f"{self._files.name} computes embeddings or scores and cannot generate text: send "
                "the request to /v1/embeddings or /v1/rerank, or choose another model",
                param="model",
            )
        arrived = time.monotonic_ns()
        choices = count_choices(request)
        self._check_num_choices(choices, "prompt" if request.n == 1 else "n")
        request = self._omit_all_images_without_tower(request)
        processor = self._job_builder.image_processor
        if processor is not None and self._decoder is not None:
            request = await verify_images(request, processor, self._decoder)
        async with AsyncExitStack() as stack:
            slots = stack.enter_context(self._engine.reserve(choices))
            streams: list[Batches[Event]] = []
            for prepared in await self._prepare(request):
                own = await stack.enter_async_context(AsyncExitStack())
                choice, submission = await self._submit(request, prepared, slots, own)
                running = RunningChoice(
                    choice,
                    submission,
                    own,
                    choice.create_output_processor(self._tokenizer),
                    arrived,
                    self._job_builder.create_turn_recorder(choice),
                    self._settings.max_time,
                )
                streams.append(self._stream_choice(running))
            # close the stream first, so that no submission is read while its context exits
            yield await stack.enter_async_context(aclosing(merge_batches(streams)))

    async def _submit(
        self,
        request: GenerateRequest,
        choice: PreparedChoice,
        slots: ReservedSlots,
        stack: AsyncExitStack,
    ) -> tuple[PreparedChoice, Submission]:
        """Submits a choice. If the grammar is not supported because of tool schemas that do not
        have to be enforced, prepares the choice again without the schemas. Returns the submitted
        choice."""
        try:
            return choice, await stack.enter_async_context(slots.submit(choice.job))
        except AppError as error:
            relaxed = replace(request, tool_schemas="ignore")
            preferred = request.tools and request.tool_schemas == "prefer"
            if error.kind is not ErrorKind.INVALID or not preferred or choice.job.grammar is None:
                raise
            log.info("the schemas of tools are not enforced: %s", error.redact())
        again = (await self._prepare(relaxed))[choice.choice]
        return again, await stack.enter_async_context(slots.submit(again.job))

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

    def apply(self, settings: Settings) -> None:
        """Applies new limits to later requests. settings: differ only in settings that a reload may
        change."""
        self._settings = settings
        self._job_builder.apply(settings)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await self._embedding.embed(request)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        encode = partial(self._encode, text, add_special_tokens=add_special_tokens)
        return await self._workers.run(encode, size=len(text))

    def _encode(
        self, text: str, *, add_special_tokens: bool, remedy: str = "split the text"
    ) -> Sequence[int]:
        """Tokenizes a text. Raises AppError(CONTEXT_LENGTH) if the text has far more tokens than
        the context; the error has the number of tokens that were counted until then."""
        context = self._files.context_length
        read = self._tokenizer.truncate_text(text, context)
        ids = self._tokenizer.encode(read, add_special_tokens=add_special_tokens)
        if len(read) < len(text):
            raise AppError(
                ErrorKind.CONTEXT_LENGTH,
                f"the text has more than {len(ids)} tokens, and the context length of this model "
                f"is {context} tokens: {remedy}",
                excess=ContextExcess(prompt_tokens=len(ids), context_length=context),
            )
        return ids

    async def render_chat(self, request: GenerateRequest) -> str:
        return (await self._render_chat(request)).text

    def _omit_all_images_without_tower(self, request: GenerateRequest) -> GenerateRequest:
        """Omits the images if the weights of the loaded model have no vision tower. Raises
        AppError(INVALID) if one belongs to the user's new question."""
        capacity = self._engine.status().capacity
        if not request.images or capacity is None or capacity.vision:
            return request
        return reject_all_images(request, self._files.name, ())

    async def _render_chat(self, request: GenerateRequest) -> RenderedPrompt:
        request = self._omit_all_images_without_tower(request)
        return await self._workers.run_cancellable(
            lambda token: self._job_builder.render_prompt(request, token),
            size=estimate_size(request),
            key=self._fairness_key(request.caller),
        )

    async def tokenize_chat(self, request: GenerateRequest) -> Sequence[int]:
        written = await self._render_chat(request)
        encode = partial(
            self._encode,
            written.text,
            add_special_tokens=written.add_special_tokens,
            remedy="shorten the conversation",
        )
        return await self._workers.run(encode, size=len(written.text))

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

    async def _stream_choice(self, choice: RunningChoice) -> Batches[Event]:
        """Converts the updates of a job to the events of a choice. Ends with `Finish`, or raises
        AppError(ENGINE)."""
        prepared = choice.prepared
        if before := list(_events_before_output(prepared)):
            yield before
        events: list[Event] = []
        async with choice.stack:
            async for updates in choice.submission:
                for update in updates:
                    if isinstance(update, Token):
                        events += choice.feed(update)
                        if choice.cut:
                            break
                    elif isinstance(update, PromptLogprobs):
                        if events:
                            yield events
                        async for event in self._stream_scores(prepared, update):
                            yield [event]
                        events = []
                    elif isinstance(update, PixelsNeeded):
                        if events:
                            yield events
                            events = []
                        await _provide_images(choice, update)
                    elif isinstance(update, Ended):
                        if update.reason == "error" and events:
                            yield events
                        choice.record_end(update)
                    else:
                        if isinstance(update, Started):
                            self._log_cache_miss(prepared.job, update)
                        events.append(choice.record_prefill(update))
                if choice.cut:
                    break
                if events and not choice.ended:
                    yield events
                    events = []
        if not choice.answer.stopped:
            events += choice.flush()
        yield [*events, choice.build_finish()]

    async def _stream_scores(
        self, prepared: PreparedChoice, scores: PromptLogprobs
    ) -> AsyncGenerator[PromptTokenLogprobs | TextDelta]:
        """Yields the logprobs of the prompt, and the echoed prompt with its logprobs, in chunks. A
        long prompt has a million logprobs, and each chunk is serialized on the event loop."""
        starts = range(0, len(prepared.job.prompt_token_ids), _SCORES_PER_EVENT)
        if (count := prepared.prompt_logprobs) is not None:
            for start in starts:
                read = partial(self._build_prompt_logprobs, prepared, scores, start, count)
                yield PromptTokenLogprobs(
                    prompt_index=prepared.prompt_index, logprobs=await self._workers.run(read)
                )
        if (count := prepared.echo_logprobs) is not None:
            async for delta in self._stream_echo(prepared, scores, count):
                yield delta

    async def _stream_echo(
        self, prepared: PreparedChoice, scores: PromptLogprobs, count: int
    ) -> AsyncGenerator[TextDelta]:
        """Yields the prompt with its logprobs. Each chunk contains the text of its tokens; the last
        chunk also contains the remaining text."""
        text = prepared.echo or ""
        for start in range(0, len(prepared.job.prompt_token_ids), _SCORES_PER_EVENT):
            read = partial(self._build_prompt_logprobs, prepared, scores, start, count)
            logprobs = await self._workers.run(read)
            end = len(b"".join(entry.token_bytes for entry in logprobs).decode(errors="ignore"))
            if start + _SCORES_PER_EVENT >= len(prepared.job.prompt_token_ids):
                end = len(text)
            yield TextDelta(choice=prepared.choice, text=text[:end], logprobs=logprobs)
            text = text[end:]

    def _build_prompt_logprobs(
        self, prepared: PreparedChoice, scores: PromptLogprobs, start: int, count: int
    ) -> tuple[TokenLogprob, ...]:
        """Returns the logprobs of up to `_SCORES_PER_EVENT` prompt tokens, beginning with `start`,
        with `count` alternatives each. The first token of the prompt has no logprob, because there
        is no preceding token."""
        ids = prepared.job.prompt_token_ids[start : start + _SCORES_PER_EVENT]
        # the scores begin with the second token
        behind = scores.logprobs[max(0, start - 1) : start - 1 + len(ids)]
        known = behind if start else ((None, ()), *behind)
        return tuple(
            build_token_logprob(
                self._tokenizer,
                Token(
                    job_id=scores.job_id,
                    id=id,
                    timestamp_ns=0,
                    logprob=logprob,
                    top_logprobs=top[:count],
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
        return "".join(
            "[image row]" if is_row_id(id) else self._tokenizer.token_text(id) for id in ids
        )


async def _provide_images(choice: RunningChoice, needed: PixelsNeeded) -> None:
    """Decodes images and sends their pixels to the engine. Raises AppError. If a decoded image is
    no longer needed, the engine ignores it."""
    for key in needed.keys:
        choice.submission.provide_images([await choice.prepared.images[key]()])


def _events_before_output(prepared: PreparedChoice) -> Iterator[Event]:
    if prepared.return_token_ids:
        yield PromptTokenIds(prompt_index=prepared.prompt_index, token_ids=prepared.prompt_ids)
    if prepared.echo and prepared.echo_logprobs is None:
        yield TextDelta(choice=prepared.choice, text=prepared.echo)
