"""Conversations of three turns with a model that thinks and calls tools, through one library.

Usage: python conversations.py LIBRARY, with SERVER_URL and SERVER_MODEL in the environment.
tests/clients/test_conversations.py runs it in the environment of the library, which is not that of
the tests. It prints a line of JSON for each conversation: its name, and all thoughts, calls and
texts that the library got. The library sends each turn back as it represents it.
"""

# pyright: reportMissingImports=false
# The libraries are not installed where the tests are checked.

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

PROMPTS = [
    "FIRST-TASK: the weather in Rome?",
    "SECOND-TASK: and in Oslo?",
    "THIRD-TASK: which is warmer?",
]
SHELL_PROMPT = "SHELL-TASK: read the notes"

URL, MODEL = os.environ.get("SERVER_URL", ""), os.environ.get("SERVER_MODEL", "")
KEY = "any"  # the libraries require one, the server does not


@dataclass(kw_only=True)
class Conversation:
    """The library's view of the model's output."""

    name: str
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, *, thought: str | None = None, text: str | None = None) -> None:
        """Adds what is there. Templates and libraries treat white space around it differently."""
        if thought and thought.strip():
            self.thoughts.append(thought.strip())
        if text and text.strip():
            self.texts.append(text.strip())

    def add_call(self, name: str, arguments: str | dict[str, Any]) -> None:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        self.calls.append((name, parsed))


def get_weather(city: str) -> str:
    """The weather of today in a city."""
    return f"18 degrees in {city}"


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of today in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def use_litellm() -> Iterator[Conversation]:
    import litellm

    litellm.suppress_debug_info = True  # it prints advice
    routes: dict[str, dict[str, Any]] = {
        "openai": {"api_base": f"{URL}/v1"},
        "hosted_vllm": {"api_base": f"{URL}/v1"},
        "lm_studio": {"api_base": f"{URL}/v1"},
        # in these APIs, the request turns thinking on
        "anthropic": {
            "api_base": URL,
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "allowed_openai_params": ["thinking"],
            "max_tokens": 4000,
        },
        "ollama_chat": {"api_base": URL, "reasoning_effort": "low"},
    }

    def complete(route: str, messages: list[Any], is_streamed: bool) -> Any:
        response: Any = litellm.completion(
            model=f"{route}/{MODEL}",
            messages=messages,
            tools=[WEATHER_TOOL],
            api_key=KEY,
            stream=is_streamed,
            **routes[route],
        )
        if is_streamed:
            response = litellm.stream_chunk_builder(list(response), messages=messages)
        return response.choices[0].message

    def converse(route: str, is_streamed: bool) -> Conversation:
        conversation = Conversation(name=f"{route}{', streamed' if is_streamed else ''}")
        messages: list[Any] = []
        for prompt in PROMPTS:
            messages.append({"role": "user", "content": prompt})
            calls = None
            while calls is None or calls:
                message = complete(route, messages, is_streamed)
                messages.append(message)
                thought = getattr(message, "reasoning_content", None)
                conversation.add(thought=thought, text=message.content)
                calls = message.tool_calls or []
                for call in calls:
                    arguments = call.function.arguments
                    conversation.add_call(call.function.name, arguments)
                    result = get_weather(**json.loads(arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return conversation

    for route in routes:
        yield converse(route, is_streamed=False)
        yield converse(route, is_streamed=True)


def use_litellm_generate() -> Iterator[Conversation]:
    """LiteLLM's route that writes the conversation into one text, for /api/generate. It sends no
    thoughts back."""
    import litellm

    litellm.suppress_debug_info = True
    for is_streamed in (False, True):
        conversation = Conversation(name=f"ollama{', streamed' if is_streamed else ''}")
        messages: list[Any] = []
        for prompt in PROMPTS:
            messages.append({"role": "user", "content": prompt})
            response: Any = litellm.completion(
                model=f"ollama/{MODEL}", messages=messages, api_base=URL, stream=is_streamed
            )
            if is_streamed:
                response = litellm.stream_chunk_builder(list(response), messages=messages)
            message = response.choices[0].message
            messages.append(message)
            thought = getattr(message, "reasoning_content", None)
            conversation.add(thought=thought, text=message.content)
        yield conversation


def use_mini_swe_agent() -> Iterator[Conversation]:
    """One task, in which each turn is a command."""
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = yaml.safe_load((builtin_config_dir / "default.yaml").read_text("utf-8"))
    for route in ("openai", "hosted_vllm"):
        model_settings = {
            **config["model"],
            "model_name": f"{route}/{MODEL}",
            "cost_tracking": "ignore_errors",
            "model_kwargs": {"api_base": f"{URL}/v1", "api_key": KEY},
        }
        agent = DefaultAgent(LitellmModel(**model_settings), LocalEnvironment(), **config["agent"])
        agent.run(SHELL_PROMPT)
        conversation = Conversation(name=route)
        for message in agent.messages:
            if message["role"] == "assistant":
                thought = message.get("reasoning_content")
                conversation.add(thought=thought, text=message["content"])
                for call in message["tool_calls"]:
                    conversation.add_call(call["function"]["name"], call["function"]["arguments"])
        yield conversation


def use_openai_agents() -> Iterator[Conversation]:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)  # traces would go to OpenAI
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    models = {
        "chat": agents.OpenAIChatCompletionsModel(MODEL, client),
        "responses": agents.OpenAIResponsesModel(MODEL, client),
    }

    def collect(conversation: Conversation, items: list[Any]) -> None:
        for item in items:
            match item:
                case agents.ReasoningItem(raw_item=raw):
                    for part in (*raw.summary, *(raw.content or [])):
                        conversation.add(thought=part.text)
                case agents.ToolCallItem(raw_item=raw):
                    conversation.add_call(raw.name, raw.arguments)
                case agents.MessageOutputItem():
                    conversation.add(text=agents.ItemHelpers.text_message_output(item))
                case _:
                    pass

    async def converse(api: str, is_streamed: bool) -> Conversation:
        conversation = Conversation(name=f"{api}{', streamed' if is_streamed else ''}")
        agent = agents.Agent(
            name="weather", model=models[api], tools=[agents.function_tool(get_weather)]
        )
        messages: list[Any] = []
        for prompt in PROMPTS:
            messages.append({"role": "user", "content": prompt})
            if is_streamed:
                result = agents.Runner.run_streamed(agent, messages)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, messages)
            collect(conversation, result.new_items)
            messages = result.to_input_list()
        return conversation

    async def converse_in_all() -> list[Conversation]:
        return [await converse(api, is_streamed) for api in models for is_streamed in (False, True)]

    yield from asyncio.run(converse_in_all())


def use_pydantic_ai() -> Iterator[Conversation]:
    import pydantic_ai
    from pydantic_ai import messages as parts
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    models = {
        "chat": OpenAIChatModel(MODEL, provider=provider),
        "responses": OpenAIResponsesModel(
            MODEL, provider=provider, settings={"openai_reasoning_summary": "detailed"}
        ),
    }

    async def read_events(context: Any, events: AsyncIterable[Any]) -> None:
        async for _ in events:
            pass

    def collect(conversation: Conversation, messages: list[Any]) -> None:
        for message in messages:
            for part in message.parts:
                match part:
                    case parts.ThinkingPart(content=content, provider_details=details):
                        # the content of a reasoning item, which has no summary
                        raw = (details or {}).get("raw_content", [])
                        conversation.add(thought=content or "".join(raw))
                    case parts.ToolCallPart(tool_name=name, args=arguments):
                        conversation.add_call(name, arguments or {})
                    case parts.TextPart(content=content):
                        conversation.add(text=content)
                    case _:
                        pass

    async def converse(api: str, is_streamed: bool) -> Conversation:
        conversation = Conversation(name=f"{api}{', streamed' if is_streamed else ''}")
        agent = pydantic_ai.Agent(models[api], tools=[get_weather])
        messages: list[Any] = []
        for prompt in PROMPTS:
            result = await agent.run(
                prompt,
                message_history=messages,
                event_stream_handler=read_events if is_streamed else None,
            )
            messages = result.all_messages()
        collect(conversation, messages)
        return conversation

    async def converse_in_all() -> list[Conversation]:
        return [await converse(api, is_streamed) for api in models for is_streamed in (False, True)]

    yield from asyncio.run(converse_in_all())


def use_strands() -> Iterator[Conversation]:
    import strands
    from strands.models.openai import OpenAIModel

    for is_streamed in (False, True):
        model = OpenAIModel(
            client_args={"base_url": f"{URL}/v1", "api_key": KEY},
            model_id=MODEL,
            stream=is_streamed,
        )
        agent = strands.Agent(model, tools=[strands.tool(get_weather)], callback_handler=None)
        for prompt in PROMPTS:
            agent(prompt)
        conversation = Conversation(name="chat, streamed" if is_streamed else "chat")
        for message in agent.messages:
            for block in message["content"] if message["role"] == "assistant" else ():
                if reasoning := block.get("reasoningContent"):
                    conversation.add(thought=reasoning["reasoningText"]["text"])
                if call := block.get("toolUse"):
                    conversation.add_call(call["name"], call["input"])
                conversation.add(text=block.get("text"))
        yield conversation


LIBRARIES = {
    "litellm": use_litellm,
    "litellm-generate": use_litellm_generate,
    "mini-swe-agent": use_mini_swe_agent,
    "openai-agents": use_openai_agents,
    "pydantic-ai": use_pydantic_ai,
    "strands": use_strands,
}


def main() -> None:
    for conversation in LIBRARIES[sys.argv[1]]():
        print(json.dumps(asdict(conversation)), flush=True)


if __name__ == "__main__":
    main()
