"""A request → the jobs that it comes to, and how their answers are read.

Knows: the text room, how long a prompt may be, what the model's makers recommend. Must not know:
runners, HTTP, tensors. Work for a worker thread: a long prompt takes a while.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.core.defaults import defaults
from app.core.errors import AppError, Kind, quote_client
from app.core.files import ModelFiles
from app.core.jobs import Job
from app.core.requests import (
    Conversation,
    GenerateRequest,
    Grammar,
    Message,
    Prompt,
    Sampling,
    Several,
)
from app.core.room import Room
from app.core.settings import Settings
from app.core.shift import kept, truncated
from app.core.workers import CancelToken
from app.text.answer import Answer, Reading
from app.text.infill import ends, infill
from app.text.prompt import Conversations, Written
from app.text.tokenizer import Tokenizer, stops

# What a context shift never discards where the request does not say: the first tokens, to which
# attention clings whatever they are (Xiao et al. 2023, arXiv:2309.17453; Ollama's num_keep is 4).
KEEP = 4

# An answer that may outgrow its context needs another end: so many contexts, as in Ollama.
SHIFTED_CONTEXTS = 10

_SEEDS = 1 << 64

# What a message and a tool weigh beside their texts, in characters: a template works on each.
_MESSAGE_CHARACTERS, _TOOL_CHARACTERS = 64, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One choice. prompt: which prompt of the request it answers. echo: the prompt's text, where
    the answer begins with it. tell_ids: whether the prompt's ids are to be told. silent: the job
    samples one token, because it must, and nobody wanted any."""

    choice: int
    prompt: int
    job: Job
    reading: Reading
    written: Written | None
    echo: str | None = None
    tell_ids: bool = False
    silent: bool = False

    def answer(self, tokenizer: Tokenizer) -> Answer:
        return Answer(
            tokenizer,
            choice=self.choice,
            prompt=self.job.ids,
            reading=self.reading,
            splitter=None if self.written is None else self.written.splitter(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """One prompt: its ids, its text where there is one, and how a conversation's answer is read.
    ends: ids that end the answer, besides the model's."""

    ids: tuple[int, ...]
    text: str | None = None
    written: Written | None = None
    ends: frozenset[int] = frozenset()


class Preparation:
    """For one model; immutable."""

    def __init__(self, files: ModelFiles, settings: Settings) -> None:
        """Raises AppError(MODEL_FILES) when tokenizer, template or recommendations are broken."""
        self._shifts = settings.context_shift
        self._most = settings.max_tokens
        self._files = files
        self.tokenizer = Tokenizer.load(files)
        self._conversations = Conversations(files, self.tokenizer)
        self._defaults = defaults(files)
        self._stops = stops(files, self.tokenizer, self._defaults.stops)

    def prepare(
        self, request: GenerateRequest, room: Room, token: CancelToken | None = None
    ) -> list[Prepared]:
        """All choices in their order. Raises AppError(INVALID or CONTEXT_LENGTH), Cancelled soon
        after `token` is cancelled."""
        token = token or CancelToken()
        several = isinstance(request.prompt, Several)
        prompts = request.prompt.prompts if isinstance(request.prompt, Several) else None
        prepared: list[Prepared] = []
        for number, prompt in enumerate((request.prompt,) if prompts is None else prompts):
            param = prompt.at if isinstance(prompt, Conversation) else "prompt"
            token.check()
            at = f"prompt.{number}" if several else param
            begun = self._begun(request, prompt, at, room, token)
            first = self._choice(request, begun, number, room)
            prepared += [_sibling(first, copy, request) for copy in range(request.n)]
        return prepared

    def written(self, request: GenerateRequest, token: CancelToken | None = None) -> Written:
        """The prompt of a request whose prompt is a conversation. Raises AppError(INVALID);
        Cancelled soon after `token` is cancelled."""
        assert isinstance(request.prompt, Conversation)
        return self._conversations.write(request, request.prompt, token)

    def _choice(self, request: GenerateRequest, begun: _Begun, number: int, room: Room) -> Prepared:
        written = begun.written
        return Prepared(
            choice=number * request.n,
            prompt=number,
            job=self._job(request, begun, room),
            reading=self._reading(request, written),
            written=written,
            echo=self._echo(begun) if request.echo else None,
            tell_ids=request.return_ids,
            silent=request.max_tokens == 0,
        )

    def _echo(self, begun: _Begun) -> str:
        return self.tokenizer.decode(begun.ids) if begun.text is None else begun.text

    def _begun(
        self,
        request: GenerateRequest,
        prompt: Prompt,
        param: str,
        room: Room,
        token: CancelToken,
    ) -> _Begun:
        """The prompt's ids: at least one, and, unless contexts are shifted, so few that one more
        fits the context."""
        match prompt:
            case Conversation():
                written = self._conversations.write(request, prompt, token)
                token.check()
                ids = self._encode(written.text, param, room, add_special=written.add_special)
                return _Begun(ids=tuple(ids), text=written.text, written=written)
            case str(text) if request.suffix:
                ids = self._infilled(text, request.suffix, param, room)
                return _Begun(ids=tuple(ids), text=text, ends=ends(self.tokenizer))
            case str(text):
                return _Begun(
                    ids=tuple(self._encode(text, param, room, add_special=True)), text=text
                )
            case Several():
                raise AssertionError("prompts within prompts")
            case ids:
                fitting = self._fitting(ids, param, room)
                for id_ in (min(ids), max(ids)):
                    self._check_id(id_, param, self._files.vocab_size)
                return _Begun(ids=tuple(fitting))

    def _job(self, request: GenerateRequest, begun: _Begun, room: Room) -> Job:
        ids: Sequence[int] = begun.ids
        keep = self._keep(request, ids)
        if self._shifts:
            ids = truncated(ids, context=room.context, keep=keep)
        sampling = Sampling.layered(self._defaults.sampling, request.sampling)
        for token, _ in sampling.logit_bias:
            self._check_id(token, "logit_bias", self._files.sampled_ids)
        grammar = _grammar(request, begun.written)
        scored = request.echo and request.top_logprobs is not None
        # Programs that score a text (lm-evaluation-harness) ask for one token behind it and leave
        # out its entry, the last one: it must be there, also where the text is over.
        endless = request.ignore_eos or (scored and request.max_tokens == 1)
        return Job(
            id=uuid.uuid4().hex,
            ids=tuple(ids),
            sampling=sampling,
            max_tokens=self._max_tokens(request, room.context, len(ids)),
            min_tokens=request.min_tokens,
            stop_ids=frozenset() if endless else self._stops.ids | begun.ends,
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.top_logprobs if scored else None,
            reuse=request.reuse,
            grammar=grammar,
            keep=kept(keep, length=len(ids), context=room.context),
            caller=request.caller,
        )

    def _reading(self, request: GenerateRequest, written: Written | None) -> Reading:
        reading = Reading(
            # the request's are apart: what ends the model's turns does so whoever asks
            stops=() if request.ignore_eos else self._stops.texts,
            asked=request.stop,
            min_tokens=request.min_tokens,
            ids=request.return_ids,
            parallel=request.parallel_tool_calls,
        )
        if written is None:
            return reading
        return replace(reading, shown=written.shown, call_id=written.family.call_id)

    def _keep(self, request: GenerateRequest, ids: Sequence[int]) -> int:
        """As `kept` reads it. Who counts tokens of a text does not count the one that begins it."""
        keep = KEEP if request.keep is None else request.keep
        begun = ids[0] == self.tokenizer.bos
        return keep + begun if keep >= 0 else keep

    def _max_tokens(self, request: GenerateRequest, context: int, prompt: int) -> int:
        if request.max_tokens == 0:
            return 1
        left = SHIFTED_CONTEXTS * context if self._shifts else context - prompt
        asked = request.max_tokens or self._defaults.max_tokens or left
        if not self._shifts:
            asked = min(asked, left)
        return asked if self._most is None else min(asked, self._most)

    def _encode(self, text: str, param: str, room: Room, *, add_special: bool) -> Sequence[int]:
        try:
            read = self._enough_of(text, room)
            ids = self.tokenizer.encode(read, add_special=add_special)
        except AppError as error:
            raise AppError(error.kind, error.marked, param=param) from error
        self._check_rows(ids, param)
        return self._fitting(ids, param, room, more=len(read) < len(text))

    def _infilled(self, text: str, suffix: str, param: str, room: Room) -> Sequence[int]:
        head, tail = self._enough_of(text, room), self._enough_of(suffix, room)
        ids = infill(self.tokenizer, head, tail)
        self._check_rows(ids, param)
        return self._fitting(
            ids, param, room, more=(head, tail) != (text, suffix), what="prompt with its suffix"
        )

    def _enough_of(self, text: str, room: Room) -> str:
        if self._shifts:  # then the end counts, however long the text is
            return text
        return self.tokenizer.enough_of(text, room.context)

    def _fitting(
        self,
        ids: Sequence[int],
        param: str,
        room: Room,
        *,
        more: bool = False,
        what: str = "prompt",
    ) -> Sequence[int]:
        """more: the prompt goes on behind these ids."""
        if not ids:
            raise AppError(Kind.INVALID, "the prompt has no tokens", param=param)
        if len(ids) >= room.context and not self._shifts:
            has = f"the {what} has {'more than ' if more else ''}{len(ids)} tokens"
            raise AppError(Kind.CONTEXT_LENGTH, f"{has}, {room.refusal(len(ids))}", param=param)
        return ids

    def _check_rows(self, ids: Sequence[int], param: str) -> None:
        """A tokenizer may have been given tokens that this model has nothing for."""
        token = max(ids, default=0)
        if token >= self._files.vocab_size:
            text = quote_client(repr(self.tokenizer.token_text(token)))
            raise AppError(
                Kind.INVALID,
                f"the prompt contains {text}, a token that the tokenizer has and the model "
                "does not: remove or rephrase it",
                param=param,
            )

    def _check_id(self, token: int, param: str, count: int) -> None:
        if not 0 <= token < count:
            raise AppError(
                Kind.INVALID,
                f"{token} is not a token id of this model, whose ids are 0 to {count - 1}",
                param=param,
            )


def size_of(request: GenerateRequest) -> int:
    """About how many characters are read to prepare it."""
    prompts = request.prompt.prompts if isinstance(request.prompt, Several) else (request.prompt,)
    total = _TOOL_CHARACTERS * len(request.tools) + len(request.suffix or "")
    for prompt in prompts:
        if isinstance(prompt, Conversation):
            total += sum(map(_message_size, prompt.messages))
        else:
            total += len(prompt)
    return total


def _message_size(message: Message) -> int:
    texts = (message.content, message.reasoning, *(call.arguments for call in message.tool_calls))
    return _MESSAGE_CHARACTERS + sum(len(text) for text in texts if text is not None)


def _grammar(request: GenerateRequest, written: Written | None) -> Grammar | None:
    """Raises AppError(INVALID) where the request wants an answer to go on that is over."""
    grammar = request.grammar if written is None else written.grammar
    if grammar is None:
        return None
    for name, given in (("min_tokens", request.min_tokens), ("ignore_eos", request.ignore_eos)):
        if given:
            message = (
                f"{name} cannot be combined with structured output, a forced tool call or a "
                "reasoning budget: leave out one"
            )
            raise AppError(Kind.INVALID, message, param=name)
    return grammar


def _sibling(first: Prepared, copy: int, request: GenerateRequest) -> Prepared:
    """Another choice to the same prompt: it draws otherwise, and only the first tells the ids."""
    if copy == 0:
        return first
    seed = first.job.sampling.seed
    drawn = None if seed is None else (seed + copy + _SEEDS // 2) % _SEEDS - _SEEDS // 2
    return replace(
        first,
        choice=first.choice + copy,
        job=replace(
            first.job,
            id=uuid.uuid4().hex,
            sampling=replace(first.job.sampling, seed=drawn),
        ),
        tell_ids=False,
    )
