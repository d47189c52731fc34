"""Calls of earlier turns, for templates that offer tools and have no words for what came of them.

Such templates expect that an answer with calls is sent back as it was written (those of LFM2,
Granite and SmolLM3 do). OpenAI's clients send the calls apart from the text, so they are written
again: what a model finds in its own turns is how it goes on.

Knows: that a family can write its calls. Must not know: any family's syntax, templates.
"""

from collections.abc import Sequence
from dataclasses import replace

from app.core.requests import Message
from app.text.chat import parse_arguments
from app.text.family import ChatFamily
from app.text.plain_calls import render_tools_as_text


def inline_tool_calls(
    messages: Sequence[Message], family: ChatFamily, *, keep_results: bool
) -> Sequence[Message]:
    """The conversation without calls beside the text of its turns. keep_results: whether the
    template renders results as such; if not, the user tells them. Where the family cannot write a
    call of it, all are told in plain words. Raises AppError(INVALID) for arguments that are no
    object."""
    turns: list[Message] = []
    for place, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls):
            field = f"messages.{place}.tool_calls.{number}.function.arguments"
            parse_arguments(call, field)
        if message.tool_calls:
            written = family.render_calls(message.tool_calls)
            if written is None:
                return render_tools_as_text(messages, ())
            said = f"{message.content}\n{written}" if message.content else written
            turns.append(replace(message, content=said, tool_calls=()))
        else:
            turns.append(message)
    return turns if keep_results else render_tools_as_text(turns, ())
