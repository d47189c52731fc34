"""Conversations over chat templates, real ones and made ones, with a byte tokenizer."""

from pathlib import Path

from app.core.model_files import ModelFiles
from app.core.requests import (
    Conversation,
    GenerateRequest,
    Message,
    ReasoningOptions,
    Tool,
    ToolCall,
)
from app.text.prompt import PromptBuilder, RenderedPrompt
from app.text.tokenizer import Tokenizer
from tests import tiny

TOKENIZER = Tokenizer(tiny.tokenizer())

USER = Message(role="user", content="Weather in Oslo?")
SYSTEM = Message(role="system", content="Be brief.")
ANSWER = Message(role="assistant", content="Seven degrees.", reasoning="MUSING")

WEATHER = Tool(
    name="get_weather",
    description="Tells the weather.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
)
CLOCK = Tool(name="get_time", description=None, parameters={"type": "object", "properties": {}})


def calls(*places: str, content: str | None = None) -> Message:
    """A turn with a call for each place, with ids as we give them."""
    return Message(
        role="assistant",
        content=content,
        tool_calls=tuple(
            ToolCall(id=_id(place), name="get_weather", arguments=f'{{"city": "{place}"}}')
            for place in places
        ),
    )


def result(place: str) -> Message:
    """As OpenAI's clients send it: without the name of the function."""
    return Message(role="tool", content=f"sun over {place[::-1]}", tool_call_id=_id(place))


def _id(place: str) -> str:
    return f"call_0123456789abcdef{place}"


def conversations(template: str) -> PromptBuilder:
    nowhere = Path("/nowhere")
    files = ModelFiles(
        name="made",
        path=nowhere,
        config={},
        shards=(),
        tokenizer_path=nowhere / "tokenizer.json",
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
        generation_config={},
        chat_template=template,
        created=0,
    )
    return PromptBuilder(files, TOKENIZER)


def written(
    talk: PromptBuilder,
    *messages: Message,
    tools: tuple[Tool, ...] = (),
    thinking: ReasoningOptions = ReasoningOptions(),  # noqa: B008  # frozen
) -> RenderedPrompt:
    request = GenerateRequest(model="made", prompt="", tools=tools, reasoning=thinking)
    return talk.build(request, Conversation(messages=messages))
