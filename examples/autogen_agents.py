"""AutoGen: agents that talk to each other, typed results, and a required tool call.

pip install autogen-agentchat 'autogen-ext[openai]'
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/autogen_agents.py
"""

import asyncio
import json
import os
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelInfo,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import OpenAI
from pydantic import BaseModel, Field

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server

# The library knows the features of OpenAI's models. For other models, declare them.
INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    structured_output=True,
    family="unknown",
)


class City(BaseModel):
    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


async def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    return f"It rains in {city}."


async def main() -> None:
    served = OpenAI().models.list().data[0].id
    client = OpenAIChatCompletionClient(
        model=served, model_info=INFO, temperature=0, max_tokens=80, include_name_in_message=True
    )

    # Text, non-streamed and streamed.
    helper = AssistantAgent("helper", client, system_message="You are brief.")
    whole = (await helper.run(task="Hello!")).messages[-1].to_text()
    writer = AssistantAgent(
        "writer", client, system_message="You are brief.", model_client_stream=True
    )
    pieces = [
        event.content
        async for event in writer.run_stream(task="Hello!")
        if isinstance(event, ModelClientStreamingChunkEvent)
    ]
    print(f"text: {whole!r} in {len(pieces)} pieces")
    assert "".join(pieces) == whole != ""

    # A typed result.
    typed = AssistantAgent("typed", client, output_content_type=City)
    city = (await typed.run(task="Where were the Olympic Games of 1896?")).messages[-1].content
    print(f"typed: {city!r}")
    assert isinstance(city, City)

    # A required call, its result, and the response to the result.
    tool = FunctionTool(get_weather, description="The weather of a city.", strict=True)
    question = UserMessage(content="Does it rain in Oslo?", source="user")
    once = {"parallel_tool_calls": False}
    turn = await client.create(
        [question], tools=[tool], tool_choice="required", extra_create_args=once
    )
    (call,) = turn.content
    assert turn.finish_reason == "function_calls"
    said = await tool.run_json(json.loads(call.arguments), CancellationToken())
    result = FunctionExecutionResult(content=said, call_id=call.id, name=call.name, is_error=False)
    answer = await client.create(
        [
            question,
            AssistantMessage(content=turn.content, source="helper"),
            FunctionExecutionResultMessage(content=[result]),
        ]
    )
    print(f"tool: {call.arguments}, {said!r}, then {answer.content!r}")
    assert isinstance(answer.content, str)

    # Two agents that alternate.
    other = AssistantAgent("other", client, system_message="You are curious.")
    await helper.on_reset(CancellationToken())
    team = RoundRobinGroupChat([helper, other], termination_condition=MaxMessageTermination(5))
    talk = [message.source for message in (await team.run(task="Hello!")).messages]
    print(f"team: {talk}")
    assert talk == ["user", "helper", "other", "helper", "other"]
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
