"""One request's life: reserve → prepare → submit → stream ids → text → events.

Knows: preparation, the text room, the `Engine` protocol. Must not know: HTTP, tensors, where the
model runs. Cancellation has one place: leaving `open` leaves the submissions, which cancels the
jobs. A choice that has ended leaves its own, so that nobody computes what nobody will see.
"""

import hashlib
import logging
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, assert_never

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError, Kind
from app.core.events import (
    Event,
    Finish,
    FinishReason,
    Progress,
    Prompt,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from app.core.files import ModelFiles
from app.core.jobs import Ended, Job, Prefilled, PromptScores, Started, Token
from app.core.merged import merged
from app.core.ports import Engine, Submission
from app.core.requests import GenerateRequest
from app.core.room import Room
from app.core.settings import Settings
from app.core.watched import choices_of
from app.core.workers import Workers
from app.embedding import Embedding
from app.preparation import Preparation, Prepared, size_of
from app.text.answer import Answer, scored
from app.text.chat import tokenizer_info

log = logging.getLogger(__name__)

# settings that may change how an answer is computed
_ENGINE_SETTINGS = (
    "quantize",
    "parallel",
    "context",
    "context_shift",
    "memory",
    "cache",
    "multi_user",
    "exact",
    "prefill_chunk",
)

# Tokens of an echoed prompt in one event. With 20 log-probabilities each, writing them takes 2 ms.
_ECHO_TOKENS = 128

# characters that a token id is about as much work as
_ID_CHARACTERS = 4

# tokens of text that a log line shows on each side of a place
_AROUND = 8


class Generation:
    """Generates from one model. Outlives what runs its jobs: the engine may be a handle."""

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        settings: Settings,
        workers: Workers | None = None,
    ) -> None:
        """workers: None makes some. Raises AppError(MODEL_FILES) when tokenizer, template or
        recommendations are broken."""
        self._settings = settings
        self._workers = workers or Workers()
        self._files = files
        self._engine = engine
        self._preparation = Preparation(files, settings)
        self._tokenizer = self._preparation.tokenizer
        self._embedding = Embedding(files, engine, self._tokenizer, self._room, self._workers)

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[Event]]:
        arrived = time.monotonic_ns()
        self._files.check_asked(request.model)
        choices = choices_of(request)
        self._check_choices(choices, "prompt" if request.n == 1 else "n")
        async with AsyncExitStack() as stack:
            places = stack.enter_context(self._engine.reserve(choices))
            said: list[AsyncGenerator[Event]] = []
            for choice in await self._prepared(request):
                own = await stack.enter_async_context(AsyncExitStack())
                submission = await own.enter_async_context(places.submit(choice.job))
                line = _Line(choice, submission, own, choice.answer(self._tokenizer), arrived)
                said.append(self._events(line))
            # left first, so that nobody listens to a submission that is being left
            yield await stack.enter_async_context(aclosing(merged(said)))

    async def _prepared(self, request: GenerateRequest) -> list[Prepared]:
        """Ends early when this is cancelled. Others' requests to this model, and to other models,
        go on beside it."""
        room = self._room()
        return await self._workers.run_cancellable(
            lambda token: self._preparation.prepare(request, room, token),
            size=size_of(request),
            key=self._key(request.caller),
        )

    def _key(self, caller: str) -> str:
        """Whose work it is: a model whose template is slow must not keep others waiting."""
        return f"{caller}/{self._files.name}"

    def _check_choices(self, count: int, param: str) -> None:
        """More than can be here at once would be told to come again for ever."""
        capacity = self._engine.status().capacity
        if capacity is None or count <= (most := capacity.parallel + self._settings.max_queue):
            return
        message = (
            f"the request asks for {count} choices, but the server can run and queue at most "
            f"{most}: ask for fewer, or increase --max-queue"
        )
        raise AppError(Kind.INVALID, message, param=param)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await self._embedding.embed(request)

    async def tokenize(self, text: str, *, add_special: bool = True) -> Sequence[int]:
        encode = partial(self._ids_of, text, add_special=add_special)
        return await self._workers.run(encode, size=len(text))

    def _ids_of(self, text: str, *, add_special: bool) -> Sequence[int]:
        """Raises AppError(CONTEXT_LENGTH) for a text that no prompt to this model could hold."""
        read = self._tokenizer.enough_of(text, self._files.context_length)
        if len(read) < len(text):
            message = (
                f"the text has far more than {self._files.context_length} tokens, the context "
                "length of this model: split it"
            )
            raise AppError(Kind.CONTEXT_LENGTH, message)
        return self._tokenizer.encode(text, add_special=add_special)

    async def prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        self._files.check_asked(request.model)
        written = await self._workers.run_cancellable(
            lambda token: self._preparation.written(request, token),
            size=size_of(request),
            key=self._key(request.caller),
        )
        return await self.tokenize(written.text, add_special=written.add_special)

    async def token_bytes(self, ids: Sequence[int]) -> Sequence[bytes]:
        size = _ID_CHARACTERS * len(ids)
        return await self._workers.run(lambda: [*map(self._tokenizer.token_bytes, ids)], size=size)

    async def tokenizer_info(self) -> Mapping[str, Any]:
        return tokenizer_info(self._files, self._tokenizer, context=self.context)

    async def detokenize(self, ids: Sequence[int]) -> str:
        size = _ID_CHARACTERS * len(ids)
        return await self._workers.run(lambda: self._tokenizer.decode_verbatim(ids), size=size)

    @property
    def context(self) -> int:
        """Positions of one sequence, as far as it is known."""
        return self._room().context

    def _room(self) -> Room:
        return Room(
            model=self._files.context_length,
            asked=self._files.served_context(self._settings.context),
            capacity=self._engine.status().capacity,
        )

    async def _events(self, line: "_Line") -> AsyncGenerator[Event]:
        """Updates of a job → events of a choice. Ends with Finish, or raises AppError(ENGINE)."""
        prepared, answer, clock = line.prepared, line.answer, line.clock
        job = prepared.job
        if prepared.tell_ids:
            yield Prompt(prompt=prepared.prompt, ids=job.ids)
        if prepared.echo and job.prompt_logprobs is None:
            yield TextDelta(choice=prepared.choice, text=prepared.echo)
        async with line.stack:
            async for update in line.submission:
                match update:
                    case Started():
                        self._note_start(job, update)
                        clock.started = update.at
                        clock.cached = update.cached
                        yield Progress(
                            prompt=prepared.prompt, done=update.cached, total=len(job.ids)
                        )
                    case Prefilled():
                        yield Progress(prompt=prepared.prompt, done=update.done, total=len(job.ids))
                    case PromptScores():
                        async for delta in self._echoed(prepared, update):
                            yield delta
                    case Token() if prepared.silent:
                        clock.first = update.at
                    case Token():
                        clock.tick(update.at)
                        for delta in answer.feed(update):
                            yield delta
                        if answer.stopped:
                            line.submission.keep(answer.visible_tokens)
                            break
                        if clock.spent(self._settings.max_time):
                            line.submission.keep(clock.tokens)
                            line.reason = "length"
                            break
                    case Ended():
                        if update.reason == "error":
                            raise _failure(job, update)
                        assert update.reason != "cancelled", "nobody else may cancel a job"
                        clock.ended = update.at
                        line.reason = update.reason
                    case _:
                        assert_never(update)
        if not answer.stopped:
            for delta in answer.flush():
                yield delta
        yield line.finish()

    async def _echoed(self, prepared: Prepared, scores: PromptScores) -> AsyncGenerator[TextDelta]:
        """The prompt with its log-probabilities, in pieces: a long prompt has a million of them,
        and each piece is written on the event loop. A piece has as much of the text as its tokens
        spell, the last one all that is left."""
        text = prepared.echo or ""
        for start in range(0, len(prepared.job.ids), _ECHO_TOKENS):
            read = partial(self._scored_part, prepared, scores, start)
            logprobs = await self._workers.run(read)
            end = len(b"".join(entry.raw for entry in logprobs).decode(errors="ignore"))
            if start + _ECHO_TOKENS >= len(prepared.job.ids):
                end = len(text)
            yield TextDelta(choice=prepared.choice, text=text[:end], logprobs=logprobs)
            text = text[end:]

    def _scored_part(
        self, prepared: Prepared, scores: PromptScores, start: int
    ) -> tuple[TokenLogprob, ...]:
        """Of the prompt's tokens from `start` on. The first token of all has no log-probability:
        nothing comes before it."""
        ids = prepared.job.ids[start : start + _ECHO_TOKENS]
        # the scores begin with those of the second token
        behind = scores.scores[max(0, start - 1) : start - 1 + len(ids)]
        known = behind if start else ((None, ()), *behind)
        return tuple(
            scored(self._tokenizer, Token(job=scores.job, id=id, at=0, logprob=logprob, top=top))
            for id, (logprob, top) in zip(ids, known, strict=True)
        )

    def _note_start(self, job: Job, started: Started) -> None:
        """Why the prefix cache served no more, for whoever looks for it. The only place where text
        of a prompt gets into the log, and only with --debug."""
        if not self._settings.debug:
            return
        served = f"{job.id}: {started.cached} of {len(job.ids)} prompt tokens were cached"
        miss = started.miss
        if miss is None:
            log.debug("%s", served)
            return
        log.debug(
            "%s (%s at %d): after %r the prompt continues with %r, and the cached prefix with %r",
            served,
            miss.reason,
            miss.at,
            self._shown(job.ids[max(0, miss.at - _AROUND) : miss.at]),
            self._shown(job.ids[miss.at : miss.at + _AROUND]),
            self._shown(miss.had[:_AROUND]),
        )

    def _shown(self, ids: Sequence[int]) -> str:
        return "".join(map(self._tokenizer.token_text, ids))


class _Line:
    """One choice while it is being made. stack: leaving it leaves the submission."""

    def __init__(
        self,
        prepared: Prepared,
        submission: Submission,
        stack: AsyncExitStack,
        answer: Answer,
        arrived: int,
    ) -> None:
        self.prepared = prepared
        self.submission = submission
        self.stack = stack
        self.answer = answer
        self.clock = _Clock(arrived)
        self.reason: FinishReason = "stop"

    def finish(self) -> Finish:
        clock, answer, job = self.clock, self.answer, self.prepared.job
        reason: FinishReason = "stop" if answer.stopped else self.reason
        if self.prepared.silent:
            reason = "length"
        if reason == "stop" and answer.calls:
            reason = "tool_calls"
        return Finish(
            choice=self.prepared.choice,
            prompt=self.prepared.prompt,
            reason=reason,
            usage=Usage(
                prompt_tokens=len(job.ids),
                completion_tokens=clock.tokens,
                cached_tokens=clock.cached,
                reasoning_tokens=answer.reasoning_tokens,
            ),
            timings=clock.timings(),
            stop=answer.stop,
        )


class _Clock:
    """When things happened, in monotonic nanoseconds, and how often."""

    def __init__(self, arrived: int) -> None:
        self.arrived = self.started = arrived
        self.first: int | None = None
        self.ended = arrived
        self.cached = 0
        self.tokens = 0
        self.gaps = array("q")  # a list of ints takes five times as much

    def tick(self, at: int) -> None:
        self.tokens += 1
        if self.first is None:
            self.first = at
        else:
            self.gaps.append(at - self.ended)
        self.ended = at

    def spent(self, seconds: float | None) -> bool:
        """Whether so much time has passed between the first token and the last."""
        return (
            seconds is not None
            and self.first is not None
            and self.ended - self.first >= seconds * 1e9
        )

    def timings(self) -> Timings:
        first = self.ended if self.first is None else self.first
        return Timings(
            prompt_ns=first - self.started,
            eval_ns=self.ended - first,
            total_ns=self.ended - self.arrived,
            gaps_ns=tuple(self.gaps),
        )


def _failure(job: Job, ended: Ended) -> AppError:
    message = ended.error or "the engine failed"
    if not ended.invalid:
        return AppError(Kind.ENGINE, message)
    return AppError(Kind.INVALID, message, param=job.grammar.at if job.grammar else None)


def fingerprint(files: ModelFiles, settings: Settings) -> str:
    """Changes with whatever may change the answer to a seed: the model and its weights, our
    version and that of what computes, and the settings that the engine reads."""
    parts = (
        version("mlxrunner"),
        version("mlx"),
        files.name,
        str(files.stored),
        files.weights,
        repr(sorted((name, str(value)) for name, value in files.config.items())),
        repr([getattr(settings, name) for name in _ENGINE_SETTINGS]),
    )
    return f"fp_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"
