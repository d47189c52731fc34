"""OpenAI's Agents SDK: agents with tools, typed results, sessions and handoffs, over both APIs.

pip install openai-agents
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/agents_sdk.py
"""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server
set_tracing_disabled(True)  # traces would go to OpenAI


class City(BaseModel):
    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


asked: list[str] = []


@function_tool
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Returns today's weather in a city."""
    asked.append(city)
    return f"It rains in {city}."


async def main() -> None:
    client = AsyncOpenAI()
    served = (await client.models.list()).data[0].id
    brief = ModelSettings(temperature=0, max_tokens=100, include_usage=True)
    for model in (
        OpenAIChatCompletionsModel(served, client),
        OpenAIResponsesModel(served, client),
    ):
        kind = type(model).__name__

        # Text, non-streamed and streamed.
        agent = Agent("helper", model=model, model_settings=brief)
        whole = await Runner.run(agent, "Hello!")
        stream = Runner.run_streamed(agent, "Hello!")
        pieces = [
            event.data.delta
            async for event in stream.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        print(f"{kind}: {whole.final_output!r} in {len(pieces)} pieces")
        assert "".join(pieces) == stream.final_output == whole.final_output != ""
        assert stream.context_wrapper.usage.output_tokens > 0

        # A typed result, and a required tool call.
        typed = Agent("typed", model=model, output_type=City, model_settings=brief)
        result = await Runner.run(typed, "Where were the Olympic Games of 1896?")
        print(f"{kind}: {result.final_output!r}")
        assert isinstance(result.final_output, City)
        forced = brief.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
        caller = Agent("caller", model=model, tools=[get_weather], model_settings=forced)
        asked.clear()
        result = await Runner.run(caller, "Does it rain in Oslo?")
        print(f"{kind}: asked for {asked}, then {result.final_output!r}")
        assert len(asked) == 1  # the tool result was sent back, and the model responded

        # A conversation stored in a session, and a handoff to another agent.
        session = SQLiteSession(kind)
        for text in ("Hello!", "And you?"):
            await Runner.run(agent, text, session=session)
        assert len(await session.get_items()) == 4
        triage = Agent("triage", model=model, handoffs=[agent], model_settings=forced)
        taken = await Runner.run(triage, "Hello!")
        print(f"{kind}: {taken.last_agent.name} took over")
        assert taken.last_agent is agent


if __name__ == "__main__":
    asyncio.run(main())
