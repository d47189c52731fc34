"""A request → the jobs that it comes to, and how their answers are read.

Knows: the text room, how long a prompt may be, what the model's makers recommend. Must not know:
runners, HTTP, tensors. Work for a worker thread: a long prompt takes a while.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.core.context_shift import resolve_num_keep, truncate_prompt
from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.generation_config import read_generation_defaults
from app.core.jobs import Job
from app.core.model_files import ModelFiles
from app.core.model_state import ContextLimit
from app.core.requests import (
    Conversation,
    GenerateRequest,
    Grammar,
    Message,
    Prompt,
    PromptBatch,
    SamplingParams,
)
from app.core.settings import Settings
from app.core.thread_pools import CancelToken
from app.text.infill import build_infill_prompt, find_infill_stop_ids
from app.text.output import ChoiceOutputProcessor, OutputOptions
from app.text.prompt import PromptBuilder, RenderedPrompt
from app.text.tokenizer import Tokenizer, find_model_stop_conditions

# What a context shift never discards where the request does not say: the first tokens, to which
# attention clings whatever they are (Xiao et al. 2023, arXiv:2309.17453; Ollama's num_keep is 4).
DEFAULT_NUM_KEEP = 4

# An answer that may outgrow its context needs another end: so many contexts, as in Ollama.
MAX_SHIFTED_CONTEXTS = 10

_SEED_RANGE = 1 << 64

# What a message and a tool weigh beside their texts, in characters: a template works on each.
_CHARACTERS_PER_MESSAGE, _CHARACTERS_PER_TOOL = 64, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChoice:
    """One choice. prompt_index: which prompt of the request it answers. echo: the prompt's text,
    where the answer begins with it. return_token_ids: whether the prompt's ids are to be told.
    discard_output: the job samples one token, because it must, and nobody wanted any."""

    choice: int
    prompt_index: int
    job: Job
    output_options: OutputOptions
    rendered_prompt: RenderedPrompt | None
    echo: str | None = None
    return_token_ids: bool = False
    discard_output: bool = False

    def create_output_processor(self, tokenizer: Tokenizer) -> ChoiceOutputProcessor:
        return ChoiceOutputProcessor(
            tokenizer,
            choice=self.choice,
            prompt_ids=self.job.prompt_token_ids,
            options=self.output_options,
            parser=None if self.rendered_prompt is None else self.rendered_prompt.build_parser(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedPrompt:
    """One prompt: its ids, its text where there is one, and how a conversation's answer is read.
    stop_token_ids: ids that end the answer, besides the model's."""

    token_ids: tuple[int, ...]
    text: str | None = None
    rendered_prompt: RenderedPrompt | None = None
    stop_token_ids: frozenset[int] = frozenset()


class JobBuilder:
    """For one model; immutable."""

    def __init__(self, files: ModelFiles, settings: Settings) -> None:
        """Raises AppError(MODEL_FILES) when tokenizer, template or recommendations are broken."""
        self._context_shift = settings.context_shift
        self._max_tokens_limit = settings.max_tokens
        self._files = files
        self.tokenizer = Tokenizer.load(files)
        self._prompt_builder = PromptBuilder(files, self.tokenizer)
        self._defaults = read_generation_defaults(files)
        self._stops = find_model_stop_conditions(files, self.tokenizer, self._defaults.stop_strings)

    def prepare(
        self,
        request: GenerateRequest,
        context_limit: ContextLimit,
        token: CancelToken | None = None,
    ) -> list[PreparedChoice]:
        """All choices in their order. Raises AppError(INVALID or CONTEXT_LENGTH), Cancelled soon
        after `token` is cancelled."""
        token = token or CancelToken()
        several = isinstance(request.prompt, PromptBatch)
        prompts = request.prompt.prompts if isinstance(request.prompt, PromptBatch) else None
        prepared: list[PreparedChoice] = []
        for number, prompt in enumerate((request.prompt,) if prompts is None else prompts):
            param = prompt.param if isinstance(prompt, Conversation) else "prompt"
            token.check()
            at = f"prompt.{number}" if several else param
            begun = self._encode_prompt(request, prompt, at, context_limit, token)
            first = self._build_choice(request, begun, number, context_limit)
            prepared += [_copy_choice(first, copy, request) for copy in range(request.n)]
        return prepared

    def render_prompt(
        self, request: GenerateRequest, token: CancelToken | None = None
    ) -> RenderedPrompt:
        """The prompt of a request whose prompt is a conversation. Raises AppError(INVALID);
        Cancelled soon after `token` is cancelled."""
        assert isinstance(request.prompt, Conversation)
        return self._prompt_builder.build(request, request.prompt, token)

    def _build_choice(
        self,
        request: GenerateRequest,
        encoded: _EncodedPrompt,
        prompt_index: int,
        context_limit: ContextLimit,
    ) -> PreparedChoice:
        written = encoded.rendered_prompt
        return PreparedChoice(
            choice=prompt_index * request.n,
            prompt_index=prompt_index,
            job=self._build_job(request, encoded, context_limit),
            output_options=self._build_output_options(request, written),
            rendered_prompt=written,
            echo=self._get_echo_text(encoded) if request.echo else None,
            return_token_ids=request.return_token_ids,
            discard_output=request.max_tokens == 0,
        )

    def _get_echo_text(self, encoded: _EncodedPrompt) -> str:
        return self.tokenizer.decode(encoded.token_ids) if encoded.text is None else encoded.text

    def _encode_prompt(
        self,
        request: GenerateRequest,
        prompt: Prompt,
        param: str,
        context_limit: ContextLimit,
        token: CancelToken,
    ) -> _EncodedPrompt:
        """The prompt's ids: at least one, and, unless contexts are shifted, so few that one more
        fits the context."""
        match prompt:
            case Conversation():
                written = self._prompt_builder.build(request, prompt, token)
                token.check()
                ids = self._encode(
                    written.text,
                    param,
                    context_limit,
                    add_special_tokens=written.add_special_tokens,
                )
                return _EncodedPrompt(
                    token_ids=tuple(ids), text=written.text, rendered_prompt=written
                )
            case str(text) if request.suffix:
                ids = self._encode_infill(text, request.suffix, param, context_limit)
                return _EncodedPrompt(
                    token_ids=tuple(ids),
                    text=text,
                    stop_token_ids=find_infill_stop_ids(self.tokenizer),
                )
            case str(text):
                return _EncodedPrompt(
                    token_ids=tuple(
                        self._encode(text, param, context_limit, add_special_tokens=True)
                    ),
                    text=text,
                )
            case PromptBatch():
                raise AssertionError("prompts within prompts")
            case ids:
                fitting = self._check_length(ids, param, context_limit)
                for id_ in (min(ids), max(ids)):
                    self._check_id(id_, param, self._files.vocab_size)
                return _EncodedPrompt(token_ids=tuple(fitting))

    def _build_job(
        self, request: GenerateRequest, encoded: _EncodedPrompt, context_limit: ContextLimit
    ) -> Job:
        ids: Sequence[int] = encoded.token_ids
        keep = self._resolve_num_keep(request, ids)
        if self._context_shift:
            ids = truncate_prompt(ids, context=context_limit.context_length, num_keep=keep)
        sampling = SamplingParams.merge(self._defaults.sampling, request.sampling)
        for token, _ in sampling.logit_bias:
            self._check_id(token, "logit_bias", self._files.sampleable_vocab_size)
        grammar = _resolve_grammar(request, encoded.rendered_prompt)
        scored = request.echo and request.top_logprobs is not None
        # Programs that score a text (lm-evaluation-harness) ask for one token behind it and leave
        # out its entry, the last one: it must be there, also where the text is over.
        endless = request.ignore_eos or (scored and request.max_tokens == 1)
        return Job(
            id=uuid.uuid4().hex,
            prompt_token_ids=tuple(ids),
            sampling=sampling,
            max_tokens=self._resolve_max_tokens(request, context_limit.context_length, len(ids)),
            min_tokens=request.min_tokens,
            stop_token_ids=frozenset() if endless else self._stops.ids | encoded.stop_token_ids,
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.top_logprobs if scored else None,
            cache_prompt=request.cache_prompt,
            grammar=grammar,
            num_keep=resolve_num_keep(keep, length=len(ids), context=context_limit.context_length),
            caller=request.caller,
        )

    def _build_output_options(
        self, request: GenerateRequest, rendered_prompt: RenderedPrompt | None
    ) -> OutputOptions:
        reading = OutputOptions(
            # the request's are apart: what ends the model's turns does so whoever asks
            model_stops=() if request.ignore_eos else self._stops.strings,
            stop_strings=request.stop,
            min_tokens=request.min_tokens,
            return_token_ids=request.return_token_ids,
            parallel_tool_calls=request.parallel_tool_calls,
        )
        if rendered_prompt is None:
            return reading
        return replace(
            reading,
            visible_special_ids=rendered_prompt.visible_special_ids,
            make_call_id=rendered_prompt.family.make_call_id,
        )

    def _resolve_num_keep(self, request: GenerateRequest, ids: Sequence[int]) -> int:
        """As `kept` reads it. Who counts tokens of a text does not count the one that begins it."""
        keep = DEFAULT_NUM_KEEP if request.num_keep is None else request.num_keep
        begun = ids[0] == self.tokenizer.bos_token_id
        return keep + begun if keep >= 0 else keep

    def _resolve_max_tokens(self, request: GenerateRequest, context: int, prompt: int) -> int:
        if request.max_tokens == 0:
            return 1
        left = MAX_SHIFTED_CONTEXTS * context if self._context_shift else context - prompt
        asked = request.max_tokens or self._defaults.max_tokens or left
        if not self._context_shift:
            asked = min(asked, left)
        return asked if self._max_tokens_limit is None else min(asked, self._max_tokens_limit)

    def _encode(
        self, text: str, param: str, context_limit: ContextLimit, *, add_special_tokens: bool
    ) -> Sequence[int]:
        try:
            read = self._clip_text(text, context_limit)
            ids = self.tokenizer.encode(read, add_special_tokens=add_special_tokens)
        except AppError as error:
            raise AppError(error.kind, error.marked_message, param=param) from error
        self._check_embeddable(ids, param)
        return self._check_length(ids, param, context_limit, is_clipped=len(read) < len(text))

    def _encode_infill(
        self, text: str, suffix: str, param: str, context_limit: ContextLimit
    ) -> Sequence[int]:
        head, tail = self._clip_text(text, context_limit), self._clip_text(suffix, context_limit)
        ids = build_infill_prompt(self.tokenizer, head, tail)
        self._check_embeddable(ids, param)
        return self._check_length(
            ids,
            param,
            context_limit,
            is_clipped=(head, tail) != (text, suffix),
            what="prompt with its suffix",
        )

    def _clip_text(self, text: str, context_limit: ContextLimit) -> str:
        if self._context_shift:  # then the end counts, however long the text is
            return text
        return self.tokenizer.truncate_text(text, context_limit.context_length)

    def _check_length(
        self,
        ids: Sequence[int],
        param: str,
        context_limit: ContextLimit,
        *,
        is_clipped: bool = False,
        what: str = "prompt",
    ) -> Sequence[int]:
        """is_clipped: the prompt goes on behind these ids."""
        if not ids:
            raise AppError(ErrorKind.INVALID, "the prompt has no tokens", param=param)
        if len(ids) >= context_limit.context_length and not self._context_shift:
            has = f"the {what} has {'more than ' if is_clipped else ''}{len(ids)} tokens"
            raise AppError(
                ErrorKind.CONTEXT_LENGTH,
                f"{has}, {context_limit.explain_too_long(len(ids))}",
                param=param,
            )
        return ids

    def _check_embeddable(self, ids: Sequence[int], param: str) -> None:
        """A tokenizer may have been given tokens that this model has nothing for."""
        token = max(ids, default=0)
        if token >= self._files.vocab_size:
            text = mark_client_text(repr(self.tokenizer.token_text(token)))
            raise AppError(
                ErrorKind.INVALID,
                f"the prompt contains {text}, a token that the tokenizer has and the model "
                "does not: remove or rephrase it",
                param=param,
            )

    def _check_id(self, token: int, param: str, count: int) -> None:
        if not 0 <= token < count:
            raise AppError(
                ErrorKind.INVALID,
                f"{token} is not a token id of this model, whose ids are 0 to {count - 1}",
                param=param,
            )


def estimate_size(request: GenerateRequest) -> int:
    """About how many characters are read to prepare it."""
    prompts = (
        request.prompt.prompts if isinstance(request.prompt, PromptBatch) else (request.prompt,)
    )
    total = _CHARACTERS_PER_TOOL * len(request.tools) + len(request.suffix or "")
    for prompt in prompts:
        if isinstance(prompt, Conversation):
            total += sum(map(_estimate_message_size, prompt.messages))
        else:
            total += len(prompt)
    return total


def _estimate_message_size(message: Message) -> int:
    texts = (message.content, message.reasoning, *(call.arguments for call in message.tool_calls))
    return _CHARACTERS_PER_MESSAGE + sum(len(text) for text in texts if text is not None)


def _resolve_grammar(
    request: GenerateRequest, rendered_prompt: RenderedPrompt | None
) -> Grammar | None:
    """Raises AppError(INVALID) where the request wants an answer to go on that is over."""
    grammar = request.grammar if rendered_prompt is None else rendered_prompt.grammar
    if grammar is None:
        return None
    for name, given in (("min_tokens", request.min_tokens), ("ignore_eos", request.ignore_eos)):
        if given:
            message = (
                f"{name} cannot be combined with structured output, a forced tool call or a "
                "reasoning budget: leave out one"
            )
            raise AppError(ErrorKind.INVALID, message, param=name)
    return grammar


def _copy_choice(first: PreparedChoice, copy: int, request: GenerateRequest) -> PreparedChoice:
    """Another choice to the same prompt: it draws otherwise, and only the first tells the ids."""
    if copy == 0:
        return first
    seed = first.job.sampling.seed
    drawn = (
        None if seed is None else (seed + copy + _SEED_RANGE // 2) % _SEED_RANGE - _SEED_RANGE // 2
    )
    return replace(
        first,
        choice=first.choice + copy,
        job=replace(
            first.job,
            id=uuid.uuid4().hex,
            sampling=replace(first.job.sampling, seed=drawn),
        ),
        return_token_ids=False,
    )
