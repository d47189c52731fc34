"""Builds the jobs of a request, and the options for processing their output.

Knows: app.text, the limit on a prompt's length, the generation defaults of the model. Must not
know: runners, HTTP, tensors. This code runs on a worker thread, because preparing a long prompt is
slow.
"""

import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from app.core.context_shift import resolve_num_keep, truncate_prompt
from app.core.errors import AppError, ContextExcess, ErrorKind, mark_client_text
from app.core.images import Image, ImagePixels, ImageSpan, PlacedImage, make_row_id
from app.core.jobs import ContextLimit, Job
from app.core.model_files import ModelFiles, read_generation_defaults
from app.core.requests import (
    UNCONSTRAINED_FIELDS,
    Conversation,
    GenerateRequest,
    Grammar,
    Prompt,
    PromptBatch,
)
from app.core.sampling_params import DEFAULT_MAX_LOGPROBS, MAX_REQUEST_ALTERNATIVES, SamplingParams
from app.core.settings import Settings
from app.core.thread_pools import CancelToken
from app.core.units import pluralize
from app.images.decoder import ImageDecoder
from app.images.plan import ImageProcessor
from app.images.processor import load_image_processor
from app.serving.image_input import get_image, omit_images
from app.text.generated_turns import GeneratedTurns, TurnRecorder
from app.text.infill import build_infill_prompt, find_infill_stop_ids
from app.text.output import ChoiceOutputProcessor, OutputOptions
from app.text.prompt import PromptBuilder, RenderedPrompt
from app.text.tokenizer import Tokenizer, encode_bad_words, find_model_stop_conditions

# The default number of leading tokens that a context shift never discards. The first tokens act as
# attention sinks, regardless of their content (Xiao et al. 2023, arXiv:2309.17453). Ollama's
# num_keep is also 4.
DEFAULT_NUM_KEEP = 4

# The maximum output with context shift, as a multiple of the context length. Ollama uses the same
# limit.
MAX_SHIFTED_CONTEXTS = 10

_SEED_RANGE = 1 << 64

DecodeImage = Callable[[], Awaitable[ImagePixels]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChoice:
    """One choice and its job. prompt_index: the index of its prompt in the request. echo: the text
    of the prompt if the output begins with it, else None. echo_logprobs, prompt_logprobs: the
    number of alternatives of each prompt token in the output and next to it; None for no logprobs.
    return_token_ids: whether to return the prompt's token IDs. discard_output: whether max_tokens
    is 0. The job then samples one token, which is the minimum, and the output is discarded.
    stop_token_ids: the stop tokens of the request, without the model's stop tokens. prompt_ids: the
    tokens of the prompt; unlike in the job, the rows of an image are image tokens. images: for
    each key of `Job.images`, a function that decodes the image, or raises AppError."""

    choice: int
    prompt_index: int
    job: Job
    output_options: OutputOptions
    rendered_prompt: RenderedPrompt | None
    echo: str | None = None
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    discard_output: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    prompt_ids: tuple[int, ...] = ()
    images: Mapping[bytes, DecodeImage] = field(default_factory=dict[bytes, DecodeImage])

    def create_output_processor(self, tokenizer: Tokenizer) -> ChoiceOutputProcessor:
        return ChoiceOutputProcessor(
            tokenizer,
            choice=self.choice,
            prompt_ids=self.prompt_ids,
            options=self.output_options,
            parser=None if self.rendered_prompt is None else self.rendered_prompt.build_parser(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedPrompt:
    """A tokenized prompt. text: the text; None if the request contains only token IDs.
    rendered_prompt: set for a conversation. stop_token_ids: stop tokens in addition to the model's
    stop tokens. message_ends, images: see `Job`."""

    token_ids: tuple[int, ...]
    text: str | None = None
    rendered_prompt: RenderedPrompt | None = None
    stop_token_ids: frozenset[int] = frozenset()
    message_ends: tuple[int, ...] | None = None
    images: tuple[ImageSpan, ...] = ()


class JobBuilder:
    """Builds the jobs of one model. generated_turns: the model's earlier outputs, for later
    prompts."""

    def __init__(
        self, files: ModelFiles, settings: Settings, decoder: ImageDecoder | None = None
    ) -> None:
        """decoder: decodes the images of requests; None for a server without images. Raises
        AppError(MODEL_FILES) if the tokenizer, the template or the generation defaults are
        invalid."""
        self._decoder = decoder
        self.image_processor: ImageProcessor | None = None
        if settings.vision and decoder is not None:
            self.image_processor = load_image_processor(files, max_tokens=settings.image_tokens)
        self._context_shift = settings.context_shift
        self.apply(settings)
        self._files = files
        self.tokenizer = Tokenizer.load(files)
        self._defaults = read_generation_defaults(files)
        self._stops = find_model_stop_conditions(files, self.tokenizer, self._defaults.stop_strings)
        self.generated_turns = GeneratedTurns()
        turn_ends = [*map(self.tokenizer.token_text, self._stops.ids), *self._stops.strings]
        self._prompt_builder = PromptBuilder(
            files,
            self.tokenizer,
            self.generated_turns,
            [text for text in turn_ends if text],
            self.image_processor,
        )

    @property
    def stop_strings(self) -> Sequence[str]:
        """The model's own stop strings, which the engine does not know."""
        return self._stops.strings

    def list_warnings(self) -> Iterator[str]:
        """Yields one sentence for each part that a chat model has and this one lacks."""
        if self._files.is_encoder:
            return
        if not self._prompt_builder.has_template:
            yield (
                f"{self._files.name} has no chat template: the messages of a conversation are "
                "joined by line breaks"
            )
        if not (self._stops.ids or self._stops.strings):
            yield (
                f"{self._files.name} has no stop token (eos_token_id): an answer ends only at a "
                "stop string of the request, or at its maximum length"
            )

    def apply(self, settings: Settings) -> None:
        """Applies new limits to later requests."""
        self._max_tokens_limit = settings.max_tokens

    def prepare(
        self,
        request: GenerateRequest,
        context_limit: ContextLimit,
        token: CancelToken | None = None,
    ) -> list[PreparedChoice]:
        """Returns all choices in order. Raises AppError(INVALID) or AppError(CONTEXT_LENGTH), and
        raises WorkCancelled soon after `token` is cancelled."""
        token = token or CancelToken()
        request = self._omit_unsupported_images(request)
        if not self._context_shift:  # which needs the engine's context length
            context_limit = replace(context_limit, request_context=request.max_context)
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

    def create_turn_recorder(self, choice: PreparedChoice) -> TurnRecorder | None:
        """Returns the recorder for the output, or None if later prompts cannot contain it."""
        prompt = choice.rendered_prompt
        if prompt is None or choice.discard_output:
            return None
        return TurnRecorder(
            self.generated_turns,
            choice.job.caller,
            prompt_length=prompt.digested_length,
            prompt_digest=prompt.digest,
            context_ids=choice.prompt_ids,
        )

    def render_prompt(
        self, request: GenerateRequest, token: CancelToken | None = None
    ) -> RenderedPrompt:
        """Renders the prompt of a request whose prompt is a conversation. Raises AppError(INVALID),
        and raises WorkCancelled soon after `token` is cancelled."""
        request = self._omit_unsupported_images(request)
        assert isinstance(request.prompt, Conversation)
        return self._prompt_builder.build(request, request.prompt, token)

    def _omit_unsupported_images(self, request: GenerateRequest) -> GenerateRequest:
        """Omits images of a shape that the model does not support. Raises AppError(INVALID) if one
        belongs to the user's new question."""
        processor = self.image_processor
        if processor is None or not request.images:
            return request

        def reject(placed: PlacedImage) -> AppError | None:
            try:
                processor.plan(get_image(placed))
            except AppError as error:
                return error
            return None

        return omit_images(request, reject)

    def _build_choice(
        self,
        request: GenerateRequest,
        encoded: _EncodedPrompt,
        prompt_index: int,
        context_limit: ContextLimit,
    ) -> PreparedChoice:
        written = encoded.rendered_prompt
        job = self._build_job(request, encoded, context_limit)
        return PreparedChoice(
            choice=prompt_index * request.n,
            prompt_index=prompt_index,
            job=job,
            output_options=self._build_output_options(request, written),
            rendered_prompt=written,
            echo=self._get_echo_text(encoded) if request.echo else None,
            echo_logprobs=request.top_logprobs if request.echo else None,
            prompt_logprobs=request.prompt_logprobs,
            return_token_ids=request.return_token_ids,
            discard_output=request.max_tokens == 0,
            stop_token_ids=frozenset(request.stop_token_ids),
            prompt_ids=encoded.token_ids if encoded.images else job.prompt_token_ids,
            images=self._list_decoders(request, written),
        )

    def _list_decoders(
        self, request: GenerateRequest, written: RenderedPrompt | None
    ) -> dict[bytes, DecodeImage]:
        decoder = self._decoder
        if decoder is None or written is None:
            return {}
        return {
            one.key: partial(decoder.decode, one.image, one.plan, caller=request.caller)
            for one in written.images
        }

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
        """Tokenizes a prompt. The result has at least one token. Without context shift, at least
        one more token fits in the context. param: the path of the request field."""
        match prompt:
            case Conversation():
                return self._encode_conversation(request, prompt, param, context_limit, token)
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
                raise AssertionError("a prompt batch cannot contain another batch")
            case ids:
                fitting = self._check_length(ids, param, context_limit)
                for id_ in (min(ids), max(ids)):
                    self._check_id(id_, param, self._files.vocab_size)
                return _EncodedPrompt(token_ids=tuple(fitting))

    def _encode_conversation(
        self,
        request: GenerateRequest,
        prompt: Conversation,
        param: str,
        context_limit: ContextLimit,
        token: CancelToken,
    ) -> _EncodedPrompt:
        capacity = context_limit.capacity
        written = self._prompt_builder.build(
            request,
            prompt,
            token,
            needs_message_ends=capacity is None or capacity.needs_checkpoints,
        )
        token.check()
        num_rows = sum(one.plan.num_tokens for one in written.images)
        ids, ends = self._encode_at(
            written.text,
            param,
            context_limit,
            add_special_tokens=written.add_special_tokens,
            positions=written.message_ends,
            num_rows=num_rows,
        )
        images = self._find_images(request, written, ids)
        if prompt.earlier_ids:
            length = len(ids)
            earlier = self._append_to_earlier(prompt.earlier_ids, ids)
            ids = self._check_length(earlier, "context", context_limit, num_rows=num_rows)
            ends = ()
            moved = len(ids) - length
            images = tuple(structs.replace(one, start=one.start + moved) for one in images)
        return _EncodedPrompt(
            token_ids=tuple(ids),
            images=images,
            text=written.text,
            rendered_prompt=written,
            message_ends=tuple(sorted(set(ends))),
        )

    def _find_images(
        self, request: GenerateRequest, written: RenderedPrompt, ids: Sequence[int]
    ) -> tuple[ImageSpan, ...]:
        """Returns the positions of the images of a rendered prompt. Its text may contain the text
        of the image token elsewhere as well. Raises AppError(INVALID) for options that cannot be
        combined with images."""
        if not written.images:
            return ()
        if request.prompt_logprobs is not None:
            message = "prompt_logprobs is not supported for a prompt with images: leave it out"
            raise AppError(ErrorKind.INVALID, message, param="prompt_logprobs")
        token = written.images[0].plan.token
        id_ = self.tokenizer.added_token_to_id(token)
        found = [position for position, one in enumerate(ids) if one == id_]
        if len(found) != written.text.count(token):
            param = written.images[0].image.param
            message = f"{param}: the model's tokenizer does not keep the image token {token}"
            raise AppError(ErrorKind.INVALID, message, param=param)
        spans: list[ImageSpan] = []
        first = counted = 0
        for one in written.images:
            first += written.text.count(token, counted, one.start)
            counted = one.start
            start, last = found[first], found[first + one.plan.num_tokens - 1]
            spans.append(
                ImageSpan(key=one.key, start=start, length=last + 1 - start, grid=one.plan.grid)
            )
        return tuple(spans)

    def _append_to_earlier(self, earlier: tuple[int, ...], ids: Sequence[int]) -> Sequence[int]:
        """Appends a prompt to the token IDs of an earlier conversation."""
        for id_ in (min(earlier), max(earlier)):
            self._check_id(id_, "context", self._files.vocab_size)
        if self._image_token_id in earlier:
            message = "context contains an image, which is not stored: use /api/chat instead"
            raise AppError(ErrorKind.INVALID, message, param="context")
        begun = ids[0] == self.tokenizer.bos_token_id
        return [*earlier, *ids[begun:]]

    @property
    def _image_token_id(self) -> int | None:
        """The ID of the image token, or None."""
        if self.image_processor is None:
            return None
        smallest = Image(data=b"", format="png", width=64, height=64, digest=b"")
        return self.tokenizer.added_token_to_id(self.image_processor.plan(smallest).token)

    def _build_job(
        self, request: GenerateRequest, encoded: _EncodedPrompt, context_limit: ContextLimit
    ) -> Job:
        ids: Sequence[int] = encoded.token_ids
        keep = self._resolve_num_keep(request, ids)
        if encoded.images:  # which cannot be cut, so the prompt fits
            ids = _number_rows(ids, encoded.images)
        elif self._context_shift:
            ids = truncate_prompt(ids, context=context_limit.context_length, num_keep=keep)
        sampling = self._resolve_sampling(request)
        grammar = _resolve_grammar(request, encoded.rendered_prompt)
        max_tokens = self._resolve_max_tokens(request, context_limit.context_length, len(ids))
        _check_alternatives(request, len(ids), max_tokens)
        scored = request.echo and request.top_logprobs is not None
        counts = (request.prompt_logprobs, request.top_logprobs if scored else None)
        # Programs that score a text (lm-evaluation-harness) request one more token and ignore the
        # last entry. The entry must exist even if the model would end the output.
        endless = request.ignore_eos or (scored and request.max_tokens == 1)
        return Job(
            id=uuid.uuid4().hex,
            prompt_token_ids=tuple(ids),
            sampling=sampling,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=frozenset(request.stop_token_ids).union(
                () if endless else self._stops.ids | encoded.stop_token_ids
            ),
            top_logprobs=request.top_logprobs,
            prompt_logprobs=max((count for count in counts if count is not None), default=None),
            cache_prompt=request.cache_prompt,
            grammar=grammar,
            num_keep=resolve_num_keep(keep, length=len(ids), context=context_limit.context_length)
            if self._context_shift
            else 0,
            caller=request.caller,
            adapter=request.adapter,
            # positions are different in a truncated prompt
            message_ends=encoded.message_ends if len(ids) == len(encoded.token_ids) else (),
            images=encoded.images,
        )

    def _resolve_sampling(self, request: GenerateRequest) -> SamplingParams:
        """Merges the defaults with the request's parameters. Raises AppError(INVALID) for IDs that
        the model does not have, and if no token would be left to sample."""
        sampling = SamplingParams.merge(self._defaults.sampling, request.sampling)
        count = self._files.sampleable_vocab_size
        for name, ids in (
            ("logit_bias", (id_ for id_, _ in sampling.logit_bias)),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("stop_token_ids", request.stop_token_ids),
        ):
            for id_ in ids:
                self._check_id(id_, name, count)
        words = encode_bad_words(self.tokenizer, request.bad_words, count)
        sampling = replace(sampling, bad_words=words)
        forbidden = {word[-1] for word in words}
        if request.min_tokens:
            forbidden |= self._stops.ids.union(request.stop_token_ids)
        if forbidden.issuperset(sampling.allowed_token_ids or range(count)):
            name = "allowed_token_ids" if sampling.allowed_token_ids else "bad_words"
            message = f"{name}, with bad_words and min_tokens, could leave no token to sample"
            raise AppError(ErrorKind.INVALID, message, param=name)
        return sampling

    def _build_output_options(
        self, request: GenerateRequest, rendered_prompt: RenderedPrompt | None
    ) -> OutputOptions:
        reading = OutputOptions(
            # separate from the request's stop strings, because the model's stop strings end its
            # turns in any request
            model_stops=() if request.ignore_eos else self._stops.strings,
            stop_strings=request.stop,
            include_stop=request.include_stop,
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
        """Returns the argument of `resolve_num_keep`. A leading beginning-of-sequence token is
        added to the count, because clients do not count it."""
        keep = DEFAULT_NUM_KEEP if request.num_keep is None else request.num_keep
        begun = ids[0] == self.tokenizer.bos_token_id
        return keep + begun if keep >= 0 else keep

    def _resolve_max_tokens(self, request: GenerateRequest, context: int, prompt: int) -> int:
        if request.max_tokens == 0:
            return 1
        left = MAX_SHIFTED_CONTEXTS * context if self._context_shift else context - prompt
        if left < request.output_reserve:
            raise AppError(
                ErrorKind.CONTEXT_LENGTH,
                f"the prompt has {prompt} tokens and leaves {left} of the context of {context} "
                f"tokens for the output, which needs {request.output_reserve}: shorten the prompt",
                excess=ContextExcess(
                    prompt_tokens=prompt,
                    context_length=context,
                    output_tokens=request.max_tokens or request.output_reserve,
                ),
            )
        requested = request.max_tokens or self._defaults.max_tokens or left
        if not self._context_shift:
            requested = min(requested, left)
        return (
            requested if self._max_tokens_limit is None else min(requested, self._max_tokens_limit)
        )

    def _encode(
        self, text: str, param: str, context_limit: ContextLimit, *, add_special_tokens: bool
    ) -> Sequence[int]:
        ids, _ = self._encode_at(
            text, param, context_limit, add_special_tokens=add_special_tokens, positions=()
        )
        return ids

    def _encode_at(
        self,
        text: str,
        param: str,
        context_limit: ContextLimit,
        *,
        add_special_tokens: bool,
        positions: Sequence[int],
        num_rows: int = 0,
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Tokenizes text, and returns the number of tokens before each position. num_rows: the
        number of image rows in it."""
        try:
            read = self._clip_text(text, context_limit)
            ids, counts = self.tokenizer.encode_with_positions(
                read, positions, add_special_tokens=add_special_tokens
            )
        except AppError as error:
            raise AppError(error.kind, error.marked_message, param=param) from error
        self._check_embeddable(ids, param, num_rows=num_rows)
        checked = self._check_length(
            ids, param, context_limit, is_clipped=len(read) < len(text), num_rows=num_rows
        )
        return checked, counts

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
        if self._context_shift:  # the end of the text is kept, regardless of its length
            return text
        return self.tokenizer.truncate_text(text, context_limit.context_length)

    def _check_length(
        self,
        ids: Sequence[int],
        param: str,
        context_limit: ContextLimit,
        *,
        is_clipped: bool = False,
        num_rows: int = 0,
        what: str = "prompt",
    ) -> Sequence[int]:
        """Returns `ids`. Raises AppError if there are no tokens or too many tokens. is_clipped:
        whether the prompt is longer than `ids`. num_rows: the number of image rows in the prompt,
        which is then not truncated, because an image cannot be cut. what: the name of the prompt in
        the message."""
        if not ids:
            raise AppError(ErrorKind.INVALID, "the prompt has no tokens", param=param)
        is_too_long = len(ids) >= context_limit.context_length
        if is_too_long and (num_rows or not self._context_shift):
            more = "more than " if is_clipped else ""
            explanation = context_limit.explain_too_long(len(ids))
            if num_rows:
                explanation += (
                    f"; {pluralize(num_rows, 'token')} of the prompt belong to images, which are "
                    "never truncated: send fewer or smaller images"
                )
            # clients of llama.cpp recognize the error by the first words
            raise AppError(
                ErrorKind.CONTEXT_LENGTH,
                f"the {what} exceeds the available context size: it has {more}"
                f"{pluralize(len(ids), 'token')}, {explanation}",
                param=param,
                excess=ContextExcess(
                    prompt_tokens=len(ids), context_length=context_limit.context_length
                ),
            )
        return ids

    def _check_embeddable(self, ids: Sequence[int], param: str, *, num_rows: int = 0) -> None:
        """Raises AppError(INVALID) for a token without an embedding, because a tokenizer may have
        added tokens that the model lacks. num_rows: the number of image tokens that image rows will
        replace."""
        token = max(ids, default=0)
        if token >= self._files.vocab_size and num_rows and token == self._image_token_id:
            others = [one for one in ids if one != token]
            if len(ids) - len(others) == num_rows:  # no text has the token
                token = max(others, default=0)
        if token >= self._files.vocab_size:
            text = mark_client_text(repr(self.tokenizer.token_text(token)))
            raise AppError(
                ErrorKind.INVALID,
                f"the prompt contains {text}, a token that the tokenizer has but the model "
                "does not: remove or rephrase it",
                param=param,
            )

    def _check_id(self, token: int, param: str, count: int) -> None:
        if not 0 <= token < count:
            raise AppError(
                ErrorKind.INVALID,
                f"{token} is not a token ID of this model, whose IDs are 0 to {count - 1}",
                param=param,
            )


def _number_rows(ids: Sequence[int], images: Sequence[ImageSpan]) -> list[int]:
    """Replaces the image tokens of each image by the IDs of its rows."""
    numbered = list(ids)
    for image in images:
        token = ids[image.start]
        row = 0
        for position in range(image.start, image.end):
            if ids[position] == token:
                numbered[position] = make_row_id(image.key, row)
                row += 1
    return numbered


def _resolve_grammar(
    request: GenerateRequest, rendered_prompt: RenderedPrompt | None
) -> Grammar | None:
    """Returns the grammar of the output, or None. Raises AppError(INVALID) if the request also has
    parameters that affect where the output ends or which tokens it may contain."""
    grammar = request.grammar if rendered_prompt is None else rendered_prompt.grammar
    if grammar is None:
        return None
    for name in UNCONSTRAINED_FIELDS:
        if request.sampling.get(name) or getattr(request, name, None):
            message = (
                f"{name} cannot be combined with structured output, a forced tool call or a "
                "reasoning budget: remove one of them"
            )
            raise AppError(ErrorKind.INVALID, message, param=name)
    return grammar


def _check_alternatives(request: GenerateRequest, prompt: int, max_tokens: int) -> None:
    """Raises AppError(INVALID) if the log probabilities would take too much memory. Typical numbers
    of alternatives are not limited. prompt: the number of prompt tokens."""
    output = max_tokens + prompt if request.echo else max_tokens
    for name, count, num_tokens in (
        ("prompt_logprobs", request.prompt_logprobs, prompt),
        (None, request.top_logprobs, output * request.n),
    ):
        total = (count or 0) * num_tokens
        if (count or 0) > DEFAULT_MAX_LOGPROBS and total > MAX_REQUEST_ALTERNATIVES:
            what = "the output" if name is None else "the prompt"
            raise AppError(
                ErrorKind.INVALID,
                f"the log probabilities of {what} have up to {total} alternatives: {count} for "
                f"each of {pluralize(num_tokens, 'token')}; a request may have at most "
                f"{MAX_REQUEST_ALTERNATIVES}: ask for fewer alternatives, or for fewer tokens",
                param=name,
            )


def _copy_choice(first: PreparedChoice, copy: int, request: GenerateRequest) -> PreparedChoice:
    """Returns another choice for the same prompt, with a different seed. Only the first choice
    returns the prompt's token IDs and log probabilities. copy: the index of the choice; 0 returns
    the first choice."""
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
            prompt_logprobs=first.echo_logprobs,
        ),
        prompt_logprobs=None,
        return_token_ids=False,
    )
