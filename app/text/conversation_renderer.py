"""Renders a conversation, or parts of it, and works around limitations of the chat template.

Knows: the model's template, its capabilities and family, tools as text. Must not know: the output,
reasoning variables, tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.core.errors import AppError
from app.core.requests import Message, Tool
from app.core.thread_pools import CancelToken
from app.text.capabilities import TemplateCapabilities, add_tool_names
from app.text.chat_template import ChatTemplate, parse_arguments
from app.text.family import ChatFamily
from app.text.generic_tool_calls import inline_tool_calls, render_tools_as_text
from app.text.message_folding import fold_messages


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
