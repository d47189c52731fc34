"""Builds the jobs of a request, with the options for processing their output.

Knows: app.text, the limit on a prompt's length, the generation defaults of the model. Must not
know: runners, HTTP, tensors. Runs on a worker thread, since a long prompt takes a while.
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
from app.core.requests import Conversation, GenerateRequest, Grammar, Message, Prompt, PromptBatch
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.core.thread_pools import CancelToken
from app.text.infill import build_infill_prompt, find_infill_stop_ids
from app.text.output import ChoiceOutputProcessor, OutputOptions
from app.text.prompt import PromptBuilder, RenderedPrompt
from app.text.tokenizer import Tokenizer, find_model_stop_conditions

# Default number of leading tokens that a context shift never discards: the first tokens get much
# attention whatever they are (Xiao et al. 2023, arXiv:2309.17453; Ollama's num_keep is 4).
DEFAULT_NUM_KEEP = 4

# Maximum output with context shift, in context lengths, as in Ollama.
MAX_SHIFTED_CONTEXTS = 10

_SEED_RANGE = 1 << 64

# Cost of rendering a message and a tool, in characters, in addition to their texts.
_CHARACTERS_PER_MESSAGE, _CHARACTERS_PER_TOOL = 64, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChoice:
    """One choice and its job. prompt_index: index of its prompt in the request. echo: text of the
    prompt if the output begins with it, else None. return_token_ids: whether to return the prompt's
    ids. discard_output: the request asked for no tokens; the job samples one, which is the minimum.
    """

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
    """An encoded prompt. text: None if the request has only ids. rendered_prompt: set for a
    conversation. stop_token_ids: ids that end the output in addition to the model's."""

    token_ids: tuple[int, ...]
    text: str | None = None
    rendered_prompt: RenderedPrompt | None = None
    stop_token_ids: frozenset[int] = frozenset()


class JobBuilder:
    """Builds the jobs of one model; immutable."""

    def __init__(self, files: ModelFiles, settings: Settings) -> None:
        """Raises AppError(MODEL_FILES) if the tokenizer, the template or the generation defaults
        are invalid."""
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
        """Returns all choices in order. Raises AppError(INVALID) or AppError(CONTEXT_LENGTH), and
        WorkCancelled soon after `token` is cancelled."""
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
        """Renders the prompt of a request whose prompt is a conversation. Raises AppError(INVALID),
        and WorkCancelled soon after `token` is cancelled."""
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
        """Encodes a prompt to at least one id; without context shift, at least one more id fits in
        the context. param: path of the request field."""
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
        # Programs that score a text (lm-evaluation-harness) request one more token and ignore its
        # entry, the last one: it must exist even if the model would end the output.
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
            num_keep=resolve_num_keep(keep, length=len(ids), context=context_limit.context_length)
            if self._context_shift
            else 0,
            caller=request.caller,
        )

    def _build_output_options(
        self, request: GenerateRequest, rendered_prompt: RenderedPrompt | None
    ) -> OutputOptions:
        reading = OutputOptions(
            # separate from the request's: the model's stop strings end its turns in any request
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
        """The argument of `resolve_num_keep`. A leading beginning-of-sequence id is added, since
        clients do not count it."""
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
        if self._context_shift:  # the end of the text is kept, however long the text is
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
        """Returns `ids`. Raises AppError if there are none or too many. is_clipped: whether the
        prompt is longer than these ids. what: name of the prompt in the message."""
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
        """Raises AppError(INVALID) for an id without an embedding: a tokenizer may have added
        tokens that the model lacks."""
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
    """The approximate number of characters to process to prepare a request."""
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
    """The grammar of the output, or None. Raises AppError(INVALID) if the request also asks to
    continue after the end of the output (min_tokens, ignore_eos)."""
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
    """A further choice for the same prompt, with a different seed; only the first choice returns
    the prompt's ids. copy: 0 is the first choice itself."""
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
