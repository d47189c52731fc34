"""Builds prompts from requests, works around limitations of the chat template, and determines how
to parse the output.

Knows: the model's template and family, tools, the reasoning variables of templates. Must not know:
the context length, the engine, sampling.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.model_files import ModelFiles
from app.core.requests import (
    Conversation,
    GenerateRequest,
    Grammar,
    Message,
    NamedToolChoice,
    ReasoningOptions,
    Tool,
    Verbosity,
)
from app.core.thread_pools import CancelToken
from app.grammar.constraint import (
    AnswerStart,
    Constraint,
    OutputRequirements,
    ReasoningTags,
    build_constraint,
)
from app.images.plan import ImageProcessor
from app.text.capabilities import TemplateCapabilities, add_tool_names, detect_capabilities
from app.text.chat_template import ChatTemplate, parse_arguments
from app.text.family import ChatFamily, find_family
from app.text.generated_turns import (
    EditedText,
    GeneratedTurns,
    OutputMeaning,
    digest_prompt,
    restore_generated_text,
)
from app.text.generic_tool_calls import GenericFamily, inline_tool_calls, render_tools_as_text
from app.text.image_marks import ImageMarks, PromptImage
from app.text.message_folding import SYSTEM_ROLES, fold_messages
from app.text.prompt_boundaries import find_message_ends, render_to_continue
from app.text.syntax.output_parser import OutputParser
from app.text.tokenizer import Tokenizer

# ordered by frequency in templates; the last name is used by Cohere
_ENABLE_VARIABLES = ("enable_thinking", "thinking", "reasoning")

# The variable used by Seed-OSS, which was trained to respect the budget and does not reason if it
# is 0.
_BUDGET_VARIABLE = "thinking_budget"

_OFF_EFFORTS = ("none",)

_VERBOSITY_VARIABLE, DEFAULT_VERBOSITY = "verbosity", "medium"

NONE_EFFORT = re.compile(r"""(['"])none\1""")

# replacements for the highest efforts, for templates that do not support them
_TOP_EFFORTS, _HIGH_EFFORT = ("xhigh", "max"), "high"


class ConversationRenderer:
    """Renders the conversation of one request. offers_tools: whether the template renders the
    tools. If not, they are described in text."""

    def __init__(
        self,
        template: ChatTemplate,
        capabilities: TemplateCapabilities,
        family: ChatFamily,
        *,
        tools: Sequence[Tool],
        get_variables: Callable[[bool], Mapping[str, Any]],
        cancel_token: CancelToken | None = None,
    ) -> None:
        """get_variables: returns the template's variables, with or without tools."""
        self._template = template
        self._capabilities = capabilities
        self._family = family
        self._tools = tools
        self._get_variables = get_variables
        self._cancel_token = cancel_token
        self._as_text = False
        self.offers_tools = capabilities.supports_tools and bool(tools)

    def fold(self, messages: Sequence[Message]) -> list[Message]:
        """Folds messages that the template would not keep (`app/text/message_folding.py`). If
        calls are rendered as text, raises AppError(INVALID) for arguments that are not an
        object."""
        if self._inlines_calls:  # before folding, which renumbers the messages
            for index, message in enumerate(messages):
                for number, call in enumerate(message.tool_calls):
                    field = f"messages.{index}.tool_calls.{number}.function.arguments"
                    parse_arguments(call, field)
        return fold_messages(messages, self._capabilities.placement)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Renders the prompt of a folded conversation. If the template does not support tools and
        calls, or fails on them, they are rendered as text. Raises the template's error if this also
        fails."""
        try:
            return self.render_part(messages, add_generation_prompt=add_generation_prompt)
        except AppError as error:
            if not self._tools and not _has_calls(messages):
                raise
            self._as_text, self.offers_tools = True, False
            try:
                return self.render_part(messages, add_generation_prompt=add_generation_prompt)
            except AppError:
                raise error from None

    def render_part(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """Renders other messages in the same way. Raises AppError(INVALID)."""
        capabilities = self._capabilities
        tools = self._tools if self.offers_tools else ()
        variables = dict(self._get_variables(bool(tools)))
        if not add_generation_prompt:
            variables["add_generation_prompt"] = False
        return self._template.render(
            self.adapt(messages),
            tools=capabilities.format_tools(tools),
            string_arguments=capabilities.requires_string_arguments,
            content_format=capabilities.content_format,
            cancel_token=self._cancel_token,
            **variables,
        )

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages as the template gets them."""
        return self._capabilities.adapt_messages(self._replace_calls(messages))

    def _replace_calls(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Replaces tools, calls and results that the template does not support with text."""
        tools, calls = self._tools, _has_calls(messages)
        messages = list(add_tool_names(messages))
        if self._as_text:
            return render_tools_as_text(messages, tools)
        if self._inlines_calls and calls:
            return inline_tool_calls(
                messages,
                self._family,
                keep_results=self._capabilities.supports_tool_responses,
                merges_assistant=not self._capabilities.placement.keeps_several_assistant,
            )
        if (tools and not self.offers_tools) or (calls and not self._supports_calls):
            return render_tools_as_text(messages, tools)
        return messages

    @property
    def _supports_calls(self) -> bool:
        if self._tools:
            return self._capabilities.supports_tool_calls
        return self._capabilities.supports_tool_calls_without_tools

    @property
    def _inlines_calls(self) -> bool:
        return self.offers_tools and not self._supports_calls


def _has_calls(messages: Sequence[Message]) -> bool:
    return any(message.tool_calls or message.role == "tool" for message in messages)


def build_thinking_kwargs(
    thinking: ReasoningOptions,
    variables: Set[str],
    *,
    supports_reasoning: bool,
    supports_none: bool,
) -> Mapping[str, Any]:
    """Returns the reasoning variables for the template. variables: the variables that the template
    reads. supports_reasoning: whether models with this template reason. supports_none: whether the
    template supports the effort "none".

    Raises AppError(INVALID) for an effort that is unknown or that the model does not support.
    """
    budget = {} if thinking.token_budget is None else {_BUDGET_VARIABLE: thinking.token_budget}
    budget_kwargs = budget if _BUDGET_VARIABLE in variables else {}
    if thinking.effort is None and thinking.enabled:
        switch_kwargs = _build_switch_kwargs(thinking, variables, supports_reasoning)
        return {**budget_kwargs, **switch_kwargs}
    return {
        **budget_kwargs,
        **_build_effort_kwargs(
            thinking.effort,
            variables,
            supports_reasoning=supports_reasoning,
            supports_none=supports_none,
            param=thinking.param,
        ),
    }


def build_verbosity_kwargs(verbosity: Verbosity | None, variables: Set[str]) -> dict[str, Any]:
    """Returns the template variable for verbosity. Raises AppError(INVALID) for a non-default
    verbosity if the template has no such variable."""
    if verbosity is None:
        return {}
    if _VERBOSITY_VARIABLE in variables:
        return {_VERBOSITY_VARIABLE: verbosity.level}
    if verbosity.level != DEFAULT_VERBOSITY:
        message = (
            f"this model's chat template does not read {_VERBOSITY_VARIABLE}: omit "
            f"{verbosity.param}, or use {DEFAULT_VERBOSITY!r}"
        )
        raise AppError(ErrorKind.INVALID, message, param=verbosity.param)
    return {}


def _build_switch_kwargs(
    thinking: ReasoningOptions, variables: Set[str], supports_reasoning: bool
) -> dict[str, Any]:
    switch = _find_switch(variables)
    if switch is not None:
        return {switch: True}
    if not supports_reasoning and "reasoning_effort" not in variables:
        message = f"this model does not support reasoning: omit {thinking.param}"
        raise AppError(ErrorKind.INVALID, message, param=thinking.param)
    return {}


def _build_effort_kwargs(
    effort: str | None,
    variables: Set[str],
    *,
    supports_reasoning: bool,
    supports_none: bool,
    param: str,
) -> Mapping[str, Any]:
    if effort is None:
        return {}
    switch = _find_switch(variables)
    if effort in _OFF_EFFORTS and switch is not None:
        return {switch: False}
    if effort in _OFF_EFFORTS and _BUDGET_VARIABLE in variables:
        return {_BUDGET_VARIABLE: 0}
    if "reasoning_effort" in variables and (supports_none or effort not in _OFF_EFFORTS):
        kwargs = {"reasoning_effort": effort}
        return kwargs if switch is None else {switch: True, **kwargs}
    if switch is not None:
        return {switch: True}
    if effort in _OFF_EFFORTS and not supports_reasoning:
        return {}
    if effort in _OFF_EFFORTS:
        message = "this model cannot disable reasoning: set thinking_budget to limit it"
        raise AppError(ErrorKind.INVALID, message, param=param)
    if not supports_reasoning:
        message = f"this model does not support reasoning: omit {param}"
        raise AppError(ErrorKind.INVALID, message, param=param)
    return {}


def _find_switch(variables: Set[str]) -> str | None:
    """Returns the variable that enables or disables reasoning, if the template reads one."""
    return next((name for name in _ENABLE_VARIABLES if name in variables), None)


def check_thinking_budget(thinking: ReasoningOptions, *, supports_reasoning: bool) -> None:
    """Raises AppError(INVALID) if the request sets a reasoning budget for a model without
    reasoning."""
    if thinking.token_budget is not None and not supports_reasoning:
        param = thinking.budget_param
        message = f"this model does not support reasoning: omit {param}"
        raise AppError(ErrorKind.INVALID, message, param=param)


def fit_reasoning(
    thinking: ReasoningOptions,
    variables: Set[str],
    source: str,
    *,
    supports_reasoning: bool,
    supports_budget: bool,
) -> ReasoningOptions:
    """Removes options that the model does not support, if the options are lenient. source: the
    source of the template. supports_budget: whether the end of the reasoning can be enforced."""
    effort, budget = thinking.effort, thinking.token_budget
    if effort in _TOP_EFFORTS and not re.search(rf"""(['"]){effort}\1""", source):
        effort = _HIGH_EFFORT
    switchable = _find_switch(variables) is not None
    if effort in _OFF_EFFORTS:
        switchable = switchable or _BUDGET_VARIABLE in variables
        supported = switchable or (
            "reasoning_effort" in variables and NONE_EFFORT.search(source) is not None
        )
    else:
        supported = switchable or "reasoning_effort" in variables
    return replace(
        thinking,
        effort=effort if supported else None,
        enabled=thinking.enabled and (supported or supports_reasoning),
        token_budget=budget if supports_reasoning and supports_budget else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A rendered conversation. text: the prompt. add_special_tokens: whether the tokenizer must add
    the special tokens at the start of a text. grammar: the grammar of the output. reasoning_tags:
    the reasoning tags, if the prompt allows reasoning. family, tools, parsed_tags, in_reasoning,
    special_tokens, calls_end_reasoning: the settings for parsing the output; see
    `ChatFamily.build_parser`. visible_special_ids: the special tokens of the family's syntax.
    digest: the digest of the text; see `GeneratedTurns`. message_ends: the positions in the text at
    which other prompts are likely to diverge, in ascending order; empty unless requested."""

    text: str
    add_special_tokens: bool
    grammar: Grammar | None
    family: ChatFamily
    tools: tuple[Tool, ...]
    reasoning_tags: ReasoningTags | None
    parsed_tags: ReasoningTags | None
    in_reasoning: bool
    special_tokens: frozenset[str]
    calls_end_reasoning: bool
    visible_special_ids: frozenset[int]
    digest: bytes = b""
    digested_length: int = 0
    message_ends: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()

    def build_parser(self) -> OutputParser | None:
        """Returns the output parser, or None if the whole output is content."""
        if self.parsed_tags is None and not self.tools and self.family.plain_without_tools:
            return None
        return self.family.build_parser(
            tools=self.tools,
            tags=self.parsed_tags,
            in_reasoning=self.in_reasoning,
            special_tokens=self.special_tokens,
            calls_end_reasoning=self.calls_end_reasoning,
        )


class PromptBuilder:
    """Builds the prompts of one model. Instances are immutable."""

    def __init__(
        self,
        files: ModelFiles,
        tokenizer: Tokenizer,
        generated_turns: GeneratedTurns | None = None,
        turn_ends: Sequence[str] = (),
        image_processor: ImageProcessor | None = None,
    ) -> None:
        """generated_turns: the generated turns of this model. turn_ends: the texts that end a turn
        of the model. image_processor: None for a model that reads text only. Raises
        AppError(MODEL_FILES) if the template is invalid."""
        self._image_processor = image_processor
        self._system_prompt = files.system_prompt
        self._first_messages = tuple(
            Message(role=role, content=content) for role, content in files.first_messages
        )
        self._tokenizer = tokenizer
        self._generated_turns = generated_turns or GeneratedTurns()
        self._turn_ends = turn_ends
        self._template = ChatTemplate(files)
        source = self._template.get_source(tools=True)
        self._family = find_family(source) or GenericFamily()
        self._generic_family = GenericFamily(self._family)
        self._reasoning_tags = self._family.reasoning_tags(source)
        self._marker_ids = self._find_marker_ids()
        switch = _find_switch(self._template.get_variables(tools=True))
        variants: list[Mapping[str, Any]] = [{}]
        if switch is not None:
            variants = [{switch: True}, {switch: False}]
        mark = "" if image_processor is None else image_processor.mark
        self._capabilities = detect_capabilities(self._template.render, variants, image_mark=mark)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template.includes_special_tokens

    def build(
        self,
        request: GenerateRequest,
        conversation: Conversation,
        cancel_token: CancelToken | None = None,
        *,
        needs_message_ends: bool = False,
    ) -> RenderedPrompt:
        """Renders a conversation. Raises AppError(INVALID) if the conversation cannot be rendered.
        Raises WorkCancelled when `cancel_token` is cancelled."""
        tools = () if request.tool_choice == "none" else request.tools
        _check_tool_choice(request)
        reasons = self._reasoning_tags is not None
        request = replace(request, reasoning=self._fit_reasoning(request, bool(tools)))
        check_thinking_budget(request.reasoning, supports_reasoning=reasons)
        messages = self._add_system_prompt(self._add_first_messages(conversation))
        conversation = replace(conversation, messages=tuple(messages))
        marks = self._create_marks(request, messages, tools)
        if marks is not None:
            messages = marks.messages
        renderer = ConversationRenderer(
            self._template,
            self._capabilities,
            self._family,
            tools=tools if marks is None else marks.tools,
            get_variables=partial(self._get_variables, request, marks),
            cancel_token=cancel_token,
        )
        folded = renderer.fold(messages)
        rendered = self._render(renderer, conversation, folded)
        keyed = None if marks is None else marks.add_keys(rendered, renderer.adapt(folded))
        text = EditedText(text=rendered) if keyed is None else keyed.text
        # if the tools were described in text, calls are in the generic format
        reader = self._family if renderer.offers_tools or not tools else self._generic_family
        restored = self._restore_turns(request, conversation, text.text, reader, tools)
        expanded, images = EditedText(text=restored.text), ()
        if keyed is not None:
            expanded, images = keyed.expand(restored.text)
        ends: Sequence[int] = ()
        if needs_message_ends:
            before = messages[:-1] if conversation.continue_final else messages
            ends = find_message_ends(renderer.render_part, renderer.fold, before, rendered)
        turn = self._begin_answer(request, conversation, restored.text)
        constraint = self._build_constraint(request, tools, turn, reader)
        return RenderedPrompt(
            text=expanded.text,
            add_special_tokens=not self._template.includes_special_tokens,
            grammar=constraint.grammar,
            family=constraint.family,
            tools=tools,
            reasoning_tags=turn.reasoning_tags,
            parsed_tags=self._select_parsed_tags(conversation),
            in_reasoning=turn.in_reasoning,
            special_tokens=frozenset(self._marker_ids),
            calls_end_reasoning=not constraint.enforces_calls,
            visible_special_ids=frozenset(self._marker_ids.values()),
            digest=digest_prompt(restored.text),
            digested_length=len(restored.text),
            message_ends=tuple(
                expanded.map_position(restored.map_position(text.map_position(end))) for end in ends
            ),
            images=images,
        )

    def _create_marks(
        self, request: GenerateRequest, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> ImageMarks | None:
        """Returns None for a conversation without images. Raises AppError(INVALID) if the model
        reads text only."""
        first = next((one for message in messages for one in message.images), None)
        if first is None:
            return None
        if self._image_processor is None:
            param = first.image.param
            message = f"{param}: this model reads text only: remove the image"
            raise AppError(ErrorKind.INVALID, message, param=param)
        return ImageMarks(self._image_processor, messages, tools, request.chat_template_kwargs)

    def _fit_reasoning(self, request: GenerateRequest, tools: bool) -> ReasoningOptions:
        """Adapts the reasoning options to the model. tools: whether the template renders tools."""
        if not request.reasoning.lenient:
            return request.reasoning
        tags = self._reasoning_tags
        close = None if tags is None else self._tokenizer.added_token_to_id(tags.close)
        return fit_reasoning(
            request.reasoning,
            self._template.get_variables(tools=tools),
            self._template.get_source(tools=tools),
            supports_reasoning=tags is not None,
            supports_budget=close is not None,
        )

    def _build_constraint(
        self,
        request: GenerateRequest,
        tools: tuple[Tool, ...],
        turn: AnswerStart,
        reader: ChatFamily,
    ) -> Constraint[ChatFamily]:
        """Builds the grammar of the output, and selects the family that parses it."""
        if not (tools or request.grammar is not None or turn.thinking_budget is not None):
            return Constraint(grammar=None, family=reader)
        requirements = OutputRequirements(
            grammar=request.grammar,
            tools=_drop_schemas(tools) if request.tool_schemas == "ignore" else tools,
            choice=request.tool_choice,
            parallel=request.parallel_tool_calls,
        )
        return build_constraint(
            requirements,
            turn,
            reader,
            lambda trigger: GenericFamily(reader, trigger=trigger, enforced=True),
            self._tokenizer.added_token_to_id,
        )

    def _restore_turns(
        self,
        request: GenerateRequest,
        conversation: Conversation,
        rendered: str,
        family: ChatFamily,
        tools: tuple[Tool, ...],
    ) -> EditedText:
        """Replaces rendered assistant turns with the text that was generated."""

        def parse(prompt: str, output: str) -> OutputMeaning:
            start = self._detect_reasoning(request, prompt)
            parser = family.build_parser(
                tools=tools,
                tags=self._reasoning_tags,
                in_reasoning=start.in_reasoning,
                special_tokens=self._marker_ids,
            )
            return OutputMeaning.of([*parser.feed(output), *parser.flush()])

        return restore_generated_text(
            rendered,
            self._generated_turns.find(request.caller, conversation.messages),
            decode=lambda turn: turn.decode(self._tokenizer),
            turn_ends=self._turn_ends,
            parse=parse,
        )

    def _render(
        self,
        renderer: ConversationRenderer,
        conversation: Conversation,
        messages: Sequence[Message],
    ) -> str:
        """messages: those of the conversation, folded."""
        if not conversation.continue_final:
            return renderer.render(messages)
        return render_to_continue(
            partial(renderer.render, add_generation_prompt=False),
            messages,
            param=conversation.param,
        )

    def _get_variables(
        self, request: GenerateRequest, marks: ImageMarks | None, tools: bool
    ) -> Mapping[str, Any]:
        """Returns the request's variables for the template with or without tools."""
        template = self._template
        template_variables = template.get_variables(tools=tools)
        verbosity = build_verbosity_kwargs(request.verbosity, template_variables)
        variables = build_thinking_kwargs(
            self._fit_reasoning(request, tools),
            template_variables,
            supports_reasoning=self._reasoning_tags is not None,
            supports_none=NONE_EFFORT.search(template.get_source(tools=tools)) is not None,
        )
        own = request.chat_template_kwargs if marks is None else marks.variables
        return {**verbosity, **variables, **own}

    def _begin_answer(
        self, request: GenerateRequest, conversation: Conversation, text: str
    ) -> AnswerStart:
        """Returns the state in which the output starts. An output that continues content has no
        reasoning, and an output that continues reasoning starts within reasoning."""
        last = conversation.messages[-1] if conversation.continue_final else None
        if last is not None and last.content:
            return AnswerStart(reasoning_tags=None)
        if last is not None and last.reasoning and self._reasoning_tags is not None:
            budget = request.reasoning.token_budget
            return AnswerStart(
                reasoning_tags=self._reasoning_tags, in_reasoning=True, thinking_budget=budget
            )
        return self._detect_reasoning(request, text)

    def _detect_reasoning(self, request: GenerateRequest, text: str) -> AnswerStart:
        tags = self._reasoning_tags
        if tags is None or text.rstrip().endswith(tags.close):
            return AnswerStart(reasoning_tags=None)
        opened = self._family.ends_in_reasoning(text, tags)
        return AnswerStart(
            reasoning_tags=tags, in_reasoning=opened, thinking_budget=request.reasoning.token_budget
        )

    def _select_parsed_tags(self, conversation: Conversation) -> ReasoningTags | None:
        """Returns the tags of reasoning in the output. Models sometimes reason although the prompt
        turns reasoning off, but not in the middle of their text."""
        last = conversation.messages[-1] if conversation.continue_final else None
        return None if last is not None and last.content else self._reasoning_tags

    def _find_marker_ids(self) -> dict[str, int]:
        """Returns the special tokens of the family's syntax, which the output parser needs."""
        tags = self._reasoning_tags
        texts = (*self._family.markers, *(() if tags is None else (tags.open.strip(), tags.close)))
        ids = {text: self._tokenizer.token_to_id(text) for text in texts}
        special = self._tokenizer.special_ids
        return {text: id for text, id in ids.items() if id is not None and id in special}

    def _add_first_messages(self, conversation: Conversation) -> Sequence[Message]:
        """Inserts the model's own first messages after the leading system messages."""
        messages = conversation.messages
        if not self._first_messages or conversation.earlier_ids:
            return messages
        index = next(
            (n for n, message in enumerate(messages) if message.role not in SYSTEM_ROLES),
            len(messages),
        )
        return (*messages[:index], *self._first_messages, *messages[index:])

    def _add_system_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Adds the model's default system prompt, unless the conversation begins with one."""
        if self._system_prompt is None or (messages and messages[0].role in SYSTEM_ROLES):
            return messages
        return (Message(role="system", content=self._system_prompt), *messages)


def _drop_schemas(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Returns the tools with schemas that allow any object, for the grammar of the output."""
    return tuple(replace(tool, parameters={"type": "object"}, strict=False) for tool in tools)


def _check_tool_choice(request: GenerateRequest) -> None:
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice) and all(t.name != choice.name for t in request.tools):
        message = f"tool_choice names {mark_client_text(repr(choice.name))}, which is not in tools"
        raise AppError(ErrorKind.INVALID, message, param="tool_choice")
