"""Prompt construction: from requests to text or ids, and the settings for parsing the output.

Knows: the model's template and family, tools, reasoning variables of templates, fill-in-the-middle.
Must not know: the context length, the engine, sampling.
"""

import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
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
)
from app.core.thread_pools import CancelToken
from app.grammar.constraint import AnswerStart, OutputRequirements, ReasoningTags, build_constraint
from app.text.capabilities import add_tool_names, detect_capabilities
from app.text.chat_template import ChatTemplate
from app.text.family import ChatFamily, find_family
from app.text.generic_tool_calls import GenericFamily, inline_tool_calls, render_tools_as_text
from app.text.syntax.output_parser import OutputParser
from app.text.tokenizer import Tokenizer

# most common first; the last is Cohere's
_ENABLE_VARIABLES = ("enable_thinking", "thinking", "reasoning")

# Seed-OSS's: the model was trained to respect it, and does not reason at 0
_BUDGET_VARIABLE = "thinking_budget"

_OFF_EFFORTS = ("none",)


def build_thinking_kwargs(
    thinking: ReasoningOptions,
    variables: Set[str],
    *,
    supports_reasoning: bool,
    supports_none: bool,
) -> Mapping[str, Any]:
    """Returns reasoning variables for the template. variables: those that it reads.
    supports_reasoning: whether its models reason. supports_none: whether it supports the effort
    "none".

    Raises AppError(INVALID) for an effort that the model does not support or that is unknown.
    """
    budget = {} if thinking.token_budget is None else {_BUDGET_VARIABLE: thinking.token_budget}
    told = budget if _BUDGET_VARIABLE in variables else {}
    return {
        **told,
        **_build_effort_kwargs(
            thinking.effort,
            variables,
            supports_reasoning=supports_reasoning,
            supports_none=supports_none,
        ),
    }


def _build_effort_kwargs(
    effort: str | None, variables: Set[str], *, supports_reasoning: bool, supports_none: bool
) -> Mapping[str, Any]:
    if effort is None:
        return {}
    switch = next((name for name in _ENABLE_VARIABLES if name in variables), None)
    if effort in _OFF_EFFORTS and switch is not None:
        return {switch: False}
    if effort in _OFF_EFFORTS and _BUDGET_VARIABLE in variables:
        return {_BUDGET_VARIABLE: 0}
    if "reasoning_effort" in variables and (supports_none or effort not in _OFF_EFFORTS):
        told = {"reasoning_effort": effort}
        return told if switch is None else {switch: True, **told}
    if switch is not None:
        return {switch: True}
    if effort in _OFF_EFFORTS and not supports_reasoning:
        return {}
    if effort in _OFF_EFFORTS:
        message = "this model always reasons: set thinking_budget to limit it"
        raise AppError(ErrorKind.INVALID, message, param="reasoning_effort")
    if not supports_reasoning:
        message = "this model does not support reasoning: omit reasoning_effort"
        raise AppError(ErrorKind.INVALID, message, param="reasoning_effort")
    return {}


def check_thinking_budget(thinking: ReasoningOptions, *, supports_reasoning: bool) -> None:
    """Raises AppError(INVALID) for a reasoning budget if the model does not reason."""
    if thinking.token_budget is not None and not supports_reasoning:
        message = "this model does not support reasoning: omit thinking_budget"
        raise AppError(ErrorKind.INVALID, message, param="thinking_budget")


_SYSTEM_ROLES = ("system", "developer")

_NONE_EFFORT = re.compile(r"""(['"])none\1""")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A rendered conversation. text: the prompt. add_special_tokens: whether to encode it with the
    special tokens at the start of a text. grammar: the grammar of the output. family, tools,
    reasoning_tags, in_reasoning: how the output is parsed; see `ChatFamily.build_parser`.
    visible_special_ids: special tokens of its syntax."""

    text: str
    add_special_tokens: bool
    grammar: Grammar | None
    family: ChatFamily
    tools: tuple[Tool, ...]
    reasoning_tags: ReasoningTags | None
    in_reasoning: bool
    visible_special_ids: frozenset[int]

    def build_parser(self) -> OutputParser | None:
        """Returns the output parser; None if the whole output is content."""
        if self.reasoning_tags is None and not self.tools and self.family.plain_without_tools:
            return None
        return self.family.build_parser(
            tools=self.tools, tags=self.reasoning_tags, in_reasoning=self.in_reasoning
        )


class PromptBuilder:
    """Builds the prompts of one model; immutable."""

    def __init__(self, files: ModelFiles, tokenizer: Tokenizer) -> None:
        """Raises AppError(MODEL_FILES) if the template is broken."""
        self._system_prompt = files.system_prompt
        self._tokenizer = tokenizer
        self._template = ChatTemplate(files)
        source = self._template.get_source(tools=True)
        self._family = find_family(source) or GenericFamily()
        self._generic_family = GenericFamily(self._family.reasoning_separator)
        self._reasoning_tags = self._family.reasoning_tags(source)
        self._capabilities = detect_capabilities(self._template.render)

    def build(
        self,
        request: GenerateRequest,
        conversation: Conversation,
        cancel_token: CancelToken | None = None,
    ) -> RenderedPrompt:
        """Renders a conversation. Raises AppError(INVALID); WorkCancelled when `cancel_token` is
        cancelled."""
        tools = () if request.tool_choice == "none" else request.tools
        _check_tool_choice(request)
        reasons = self._reasoning_tags is not None
        check_thinking_budget(request.reasoning, supports_reasoning=reasons)
        messages = self._add_system_prompt(conversation.messages)
        text, offered = self._render_with_fallback(request, messages, tools, cancel_token)
        turn = self._detect_reasoning(request, text)
        asked = OutputRequirements(
            grammar=request.grammar,
            tools=tools,
            choice=request.tool_choice,
            parallel=request.parallel_tool_calls,
        )
        # a model that was given tools as text calls them in the generic format
        reader = self._family if offered or not tools else self._generic_family
        grammar, family = None, reader
        if tools or request.grammar is not None or turn.thinking_budget is not None:
            constraint = build_constraint(
                asked,
                turn,
                reader,
                lambda trigger: GenericFamily(reader.reasoning_separator, trigger=trigger),
                self._tokenizer.added_token_to_id,
            )
            grammar, family = constraint.grammar, constraint.family
        return RenderedPrompt(
            text=text,
            add_special_tokens=not self._template.includes_special_tokens,
            grammar=grammar,
            family=family,
            tools=tools,
            reasoning_tags=turn.reasoning_tags,
            in_reasoning=turn.in_reasoning,
            visible_special_ids=self._find_marker_ids(
                family if tools else None, turn.reasoning_tags
            ),
        )

    def _render_with_fallback(
        self,
        request: GenerateRequest,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        cancel_token: CancelToken | None,
    ) -> tuple[str, bool]:
        """Renders the prompt; also returns whether the template rendered the tools. What it does
        not support or fails on is rendered as text. Raises the template's error if that fails
        too."""
        capabilities = self._capabilities
        calls = any(message.tool_calls or message.role == "tool" for message in messages)
        recounts = (
            capabilities.supports_tool_calls
            if tools
            else capabilities.supports_tool_calls_without_tools
        )
        offered = capabilities.supports_tools and bool(tools)
        messages = list(add_tool_names(messages))
        if offered and calls and not recounts:
            messages = inline_tool_calls(
                messages, self._family, keep_results=capabilities.supports_tool_responses
            )
        elif (tools and not offered) or (calls and not recounts):
            messages = render_tools_as_text(messages, tools)
        try:
            return self._render(request, messages, tools if offered else (), cancel_token), offered
        except AppError:
            if not tools and not calls:
                raise
            with suppress(AppError):
                return self._render(
                    request, render_tools_as_text(messages, tools), (), cancel_token
                ), False
            raise

    def _render(
        self,
        request: GenerateRequest,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        cancel_token: CancelToken | None,
    ) -> str:
        template, capabilities = self._template, self._capabilities
        variables = build_thinking_kwargs(
            request.reasoning,
            template.get_variables(tools=bool(tools)),
            supports_reasoning=self._reasoning_tags is not None,
            supports_none=_NONE_EFFORT.search(template.get_source(tools=bool(tools))) is not None,
        )
        return template.render(
            capabilities.adapt_messages(messages),
            tools=capabilities.format_tools(tools),
            string_arguments=capabilities.requires_string_arguments,
            cancel_token=cancel_token,
            **{**variables, **request.chat_template_kwargs},
        )

    def _detect_reasoning(self, request: GenerateRequest, text: str) -> AnswerStart:
        tags = self._reasoning_tags
        if tags is None or text.rstrip().endswith(tags.close):
            return AnswerStart(reasoning_tags=None)
        opened = self._family.ends_in_reasoning(text, tags)
        return AnswerStart(
            reasoning_tags=tags, in_reasoning=opened, thinking_budget=request.reasoning.token_budget
        )

    def _find_marker_ids(
        self, family: ChatFamily | None, tags: ReasoningTags | None
    ) -> frozenset[int]:
        """Returns special tokens that the output parser needs to see."""
        texts = () if family is None and tags is None else self._family.markers
        ids = (self._tokenizer.token_to_id(text) for text in texts)
        return frozenset(id for id in ids if id is not None)

    def _add_system_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Adds the model's default system prompt, unless the conversation has one."""
        if self._system_prompt is None or any(
            message.role in _SYSTEM_ROLES for message in messages
        ):
            return messages
        return (Message(role="system", content=self._system_prompt), *messages)


def _check_tool_choice(request: GenerateRequest) -> None:
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice) and all(t.name != choice.name for t in request.tools):
        message = f"tool_choice names {mark_client_text(repr(choice.name))}, which is not in tools"
        raise AppError(ErrorKind.INVALID, message, param="tool_choice")
