"""Conversations for tests of real and small chat templates, with a byte tokenizer."""

from functools import cache
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

MADE_FOR_OTHER_CONVERSATIONS = {
    "hfjinja-fireworks-ai_firefunction-v1.jinja": "wants a turn of a role named functions",
    "hfjinja-meta-llama_Llama-Guard-3-11B-Vision.jinja": "judges the last two turns",
    "MiroThinker.jinja": "assigns to what is no namespace, which Jinja allows nowhere",
}

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


def calls(*cities: str, content: str | None = None) -> Message:
    """An assistant message with a call for each city, with ids as the server creates them."""
    return Message(
        role="assistant",
        content=content,
        tool_calls=tuple(
            ToolCall(id=_id(city), name="get_weather", arguments=f'{{"city": "{city}"}}')
            for city in cities
        ),
    )


def result(city: str) -> Message:
    """A tool message without the name of the function, as OpenAI's clients send it."""
    return Message(role="tool", content=f"sun over {city[::-1]}", tool_call_id=_id(city))


def _id(city: str) -> str:
    return f"call_0123456789abcdef{city}"


@cache
def make_prompt_builder(template: str) -> PromptBuilder:
    """Returns a builder without a state, so it can be shared. Test modules share those of the real
    templates, whose probing takes seconds."""
    return PromptBuilder(make_files(template), TOKENIZER)


def make_files(template: str) -> ModelFiles:
    """The files of a model that has only a template."""
    folder = Path("/nowhere")
    return ModelFiles(
        name="small",
        path=folder,
        config={},
        shards=(),
        tokenizer_path=folder / "tokenizer.json",
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
        generation_config={},
        chat_template=template,
        created=0,
    )


def build_prompt(
    builder: PromptBuilder,
    *messages: Message,
    tools: tuple[Tool, ...] = (),
    reasoning: ReasoningOptions = ReasoningOptions(),  # noqa: B008  # frozen
) -> RenderedPrompt:
    request = GenerateRequest(model="small", prompt="", tools=tools, reasoning=reasoning)
    return builder.build(request, Conversation(messages=messages))
