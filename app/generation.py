"""One request's life: encode → submit → stream ids → text → events.

Knows: the text room and the `Runner` protocol. Must not know: HTTP, tensors, where the model runs.
Cancellation has one place: leaving `open` leaves the submission, which cancels the job.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import assert_never

from app.core.defaults import defaults
from app.core.errors import AppError, Kind
from app.core.events import Event, Finish, FinishReason, Progress, Timings, Usage
from app.core.files import ModelFiles
from app.core.jobs import Ended, Job, Prefilled, Started, Token
from app.core.ports import ModelCard, Runner, RunnerStatus, Submission
from app.core.requests import Conversation, GenerateRequest, Message, Sampling
from app.core.room import Room
from app.core.settings import Settings
from app.core.shift import kept, truncated
from app.text.answer import Answer
from app.text.chat import ChatTemplate
from app.text.tokenizer import Tokenizer, stops

log = logging.getLogger(__name__)

# What a context shift never discards where the request does not say: the first tokens, to which
# attention clings whatever they are (Xiao et al. 2023, arXiv:2309.17453; Ollama's num_keep is 4).
KEEP = 4

# An answer that may outgrow its context needs another end: so many contexts, as in Ollama.
SHIFTED_CONTEXTS = 10

_SYSTEM = ("system", "developer")

# tokens of text that a log line shows on each side of a place
_AROUND = 8


class Generation:
    """Implements `Generate` for one model."""

    def __init__(self, files: ModelFiles, runner: Runner, settings: Settings) -> None:
        """Raises AppError(MODEL_FILES) when tokenizer, template or recommendations are broken."""
        self._settings = settings
        self._files = files
        self._runner = runner
        self._tokenizer = Tokenizer.load(files)
        self._template = ChatTemplate(files)
        self._defaults = defaults(files)
        self._stops = stops(files, self._tokenizer, self._defaults.stops)

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[Event]]:
        arrived = time.monotonic_ns()
        # Ollama's clients write out the tag that a name without one stands for
        if request.model.removesuffix(":latest") != self._files.name:
            raise AppError(
                Kind.MODEL_NOT_FOUND,
                f"the model {request.model[:200]!r} is not served here; "
                f"this server has {self._files.name!r}",
                param="model",
            )
        # a long prompt, or a long stop string, takes a while: the event loop must not
        job, answer = await asyncio.to_thread(self._prepare, request, self._room())
        async with self._runner.submit(job) as submission:
            yield _events(submission, job, answer, arrived, self._note_start)

    async def tokenize(self, text: str) -> Sequence[int]:
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special=True)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self._tokenizer.decode_verbatim, ids)

    def models(self) -> Sequence[ModelCard]:
        files, context = self._files, self._room().context
        return [ModelCard(id=files.name, created=files.created, context_length=context)]

    def status(self) -> RunnerStatus:
        return self._runner.status()

    def _room(self) -> Room:
        return Room(
            model=self._files.context_length,
            asked=self._files.served_context(self._settings.context),
            capacity=self._runner.status().capacity,
        )

    def _prepare(self, request: GenerateRequest, room: Room) -> tuple[Job, Answer]:
        job = self._job(request, room)
        # the request's come on top: what ends the model's turns does so whoever asks
        stops = (*self._stops.texts, *request.stop)
        return job, Answer(self._tokenizer, prompt=job.ids, stops=stops)

    def _job(self, request: GenerateRequest, room: Room) -> Job:
        ids = self._ids(request, room)
        keep = self._keep(request, ids)
        if self._settings.context_shift:
            ids = truncated(ids, context=room.context, keep=keep)
        sampling = Sampling.layered(self._defaults.sampling, request.sampling)
        for token, _ in sampling.logit_bias:
            self._check_id(token, "logit_bias", self._files.sampled_ids)
        return Job(
            id=uuid.uuid4().hex,
            ids=tuple(ids),
            sampling=sampling,
            max_tokens=self._max_tokens(request, room.context, len(ids)),
            stop_ids=self._stops.ids,
            top_logprobs=request.top_logprobs,
            reuse=request.reuse,
            grammar=request.grammar,
            keep=kept(keep, length=len(ids), context=room.context),
        )

    def _keep(self, request: GenerateRequest, ids: Sequence[int]) -> int:
        """As `kept` reads it. Who counts tokens of a text does not count the one that begins it."""
        keep = KEEP if request.keep is None else request.keep
        begun = ids[0] == self._tokenizer.bos
        return keep + begun if keep >= 0 else keep

    def _max_tokens(self, request: GenerateRequest, context: int, prompt: int) -> int:
        asked = request.max_tokens or self._defaults.max_tokens
        if self._settings.context_shift:
            return asked or SHIFTED_CONTEXTS * context
        left = context - prompt
        return left if asked is None else min(asked, left)

    def _ids(self, request: GenerateRequest, room: Room) -> Sequence[int]:
        """The prompt's ids: at least one, and, unless contexts are shifted, so few that one more
        fits the context."""
        param = "messages" if isinstance(request.prompt, Conversation) else "prompt"
        match request.prompt:
            case Conversation(messages=messages):
                text = self._template.render(self._with_system(messages))
                return self._encode(text, param, room, add_special=not self._template.complete)
            case str(text):
                return self._encode(text, param, room, add_special=True)
            case ids:
                for token in ids:
                    self._check_id(token, param, self._files.vocab_size)
                return self._fitting(ids, param, room)

    def _encode(self, text: str, param: str, room: Room, *, add_special: bool) -> Sequence[int]:
        whole = text
        if not self._settings.context_shift:  # else the end counts, however long the text is
            text = self._tokenizer.enough_of(whole, room.context)
        ids = self._tokenizer.encode(text, add_special=add_special)
        self._check_rows(ids, param)
        return self._fitting(ids, param, room, more=len(text) < len(whole))

    def _fitting(
        self, ids: Sequence[int], param: str, room: Room, *, more: bool = False
    ) -> Sequence[int]:
        """more: the prompt goes on behind these ids."""
        if not ids:
            raise AppError(
                Kind.INVALID, "the prompt has no tokens: there is nothing to continue", param=param
            )
        if len(ids) >= room.context and not self._settings.context_shift:
            has = f"the prompt has {'more than ' if more else ''}{len(ids)} tokens"
            raise AppError(Kind.CONTEXT_LENGTH, f"{has}, {room.refusal(len(ids))}", param=param)
        return ids

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        """What the model is told at first, unless the conversation tells it."""
        system = self._files.system
        if system is None or any(message.role in _SYSTEM for message in messages):
            return messages
        return (Message(role="system", content=system), *messages)

    def _check_rows(self, ids: Sequence[int], param: str) -> None:
        """A tokenizer may have been given tokens that this model has nothing for."""
        token = max(ids, default=0)
        if token >= self._files.vocab_size:
            raise AppError(
                Kind.INVALID,
                f"the prompt holds {self._tokenizer.token_text(token)!r}, a token that this "
                "model's tokenizer knows and the model does not: write it otherwise",
                param=param,
            )

    def _check_id(self, token: int, param: str, count: int) -> None:
        if not 0 <= token < count:
            raise AppError(
                Kind.INVALID,
                f"{token} is not a token id of this model, whose ids are 0 to {count - 1}",
                param=param,
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
            "%s (%s at %d): behind %r the prompt goes on %r, and what is cached %r",
            served,
            miss.reason,
            miss.at,
            self._shown(job.ids[max(0, miss.at - _AROUND) : miss.at]),
            self._shown(job.ids[miss.at : miss.at + _AROUND]),
            self._shown(miss.had[:_AROUND]),
        )

    def _shown(self, ids: Sequence[int]) -> str:
        return "".join(map(self._tokenizer.token_text, ids))


async def _events(
    submission: Submission,
    job: Job,
    answer: Answer,
    arrived: int,
    note_start: Callable[[Job, Started], None],
) -> AsyncIterator[Event]:
    """Updates of a job → events. Ends with Finish, or raises AppError(ENGINE)."""
    clock = _Clock(arrived)
    async for update in submission:
        match update:
            case Started():
                note_start(job, update)
                clock.started = update.at
                clock.cached = update.cached
                yield Progress(done=update.cached, total=len(job.ids))
            case Prefilled():
                yield Progress(done=update.done, total=len(job.ids))
            case Token():
                clock.tick(update.at)
                if delta := answer.feed(update):
                    yield delta
                if answer.stopped:
                    submission.keep(answer.visible_tokens)
                    yield clock.finish("stop", job)
                    return
            case Ended():
                if update.reason == "error":
                    raise AppError(Kind.ENGINE, update.error or "the engine failed")
                assert update.reason != "cancelled", "nobody else may cancel a job"
                clock.ended = update.at
                if delta := answer.flush():
                    yield delta
                yield clock.finish("stop" if answer.stopped else update.reason, job)
                return
            case _:
                assert_never(update)


class _Clock:
    """When things happened, in monotonic nanoseconds, and how often."""

    def __init__(self, arrived: int) -> None:
        self.arrived = self.started = arrived
        self.first: int | None = None
        self.ended = arrived
        self.cached = 0
        self.tokens = 0

    def tick(self, at: int) -> None:
        self.tokens += 1
        self.ended = at
        if self.first is None:
            self.first = at

    def finish(self, reason: FinishReason, job: Job) -> Finish:
        first = self.ended if self.first is None else self.first
        return Finish(
            reason=reason,
            usage=Usage(
                prompt_tokens=len(job.ids),
                completion_tokens=self.tokens,
                cached_tokens=self.cached,
            ),
            timings=Timings(
                prompt_ns=first - self.started,
                eval_ns=self.ended - first,
                total_ns=self.ended - self.arrived,
            ),
        )
