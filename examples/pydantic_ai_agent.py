"""Pydantic AI: an agent with a tool and a typed result, over both of OpenAI's APIs.

pip install 'pydantic-ai-slim[openai]'
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/pydantic_ai_agent.py
"""

import asyncio
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server


class City(BaseModel):
    """The answer."""

    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


async def main() -> None:
    served = OpenAI().models.list().data[0].id
    settings = {"temperature": 0, "max_tokens": 200}
    for model in (OpenAIChatModel(served), OpenAIResponsesModel(served)):
        kind = type(model).__name__

        # Text, non-streamed and streamed.
        agent = Agent(model, model_settings=settings)
        whole = await agent.run("Hello!")
        async with agent.run_stream("Hello!") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        print(f"{kind}: {whole.output!r} in {len(pieces)} pieces")
        assert "".join(pieces) == whole.output

        # A typed result, which the agent requests as a required tool call or with a schema.
        for output in (ToolOutput(City), NativeOutput(City)):
            typed = Agent(model, output_type=output, model_settings=settings, retries=0)
            result = await typed.run("Where were the Olympic Games of 1896?")
            print(f"{kind}: {type(output).__name__}: {result.output!r}")
            assert isinstance(result.output, City)


if __name__ == "__main__":
    asyncio.run(main())
