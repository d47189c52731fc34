"""LangChain: a chat model, a chain that streams, tools and structured output.

pip install langchain-openai
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/langchain_chat.py
"""

import os
from typing import Literal

import openai
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """Today's weather in a city."""
    return f"It is sunny in {city}."


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def main() -> None:
    model = ChatOpenAI(
        model=openai.OpenAI().models.list().data[0].id, temperature=0, max_tokens=200
    )

    # Non-streamed, and streamed through a chain.
    whole = model.invoke("Hello!")
    print("whole:", whole.content)
    assert whole.usage_metadata
    assert whole.usage_metadata["output_tokens"] > 0
    chain = ChatPromptTemplate.from_messages([("user", "{text}")]) | model | StrOutputParser()
    pieces = list(chain.stream({"text": "Hello!"}))
    print("pieces:", pieces)
    assert "".join(pieces) == whole.content

    # A required tool call, and the response to its result.
    question = HumanMessage("What is the weather in Oslo?")
    forced = model.bind_tools(
        [get_weather], tool_choice="required", parallel_tool_calls=False, strict=True
    )
    turn = forced.invoke([question])
    results = [get_weather.invoke(call) for call in turn.tool_calls]
    print("calls:", [(call["name"], call["args"]) for call in turn.tool_calls])
    assert [type(result) for result in results] == [ToolMessage]
    print("answer:", model.invoke([question, turn, *results]).content)

    # In a stream, the arguments arrive in chunks that form the same call.
    total: AIMessageChunk | None = None
    for chunk in forced.stream([question]):
        assert isinstance(chunk, AIMessageChunk)
        total = chunk if total is None else total + chunk
    assert total
    assert [call["args"] for call in total.tool_calls] == [call["args"] for call in turn.tool_calls]

    # Structured output, with a schema for the response and with a required function call.
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Person, method=method, strict=True)
        person = structured.invoke("Ada is 36 years old.")
        print(f"{method}:", repr(person))
        assert isinstance(person, Person)


if __name__ == "__main__":
    main()
