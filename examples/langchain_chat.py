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
os.environ.setdefault("OPENAI_API_KEY", "any")  # the library wants one, the server does not


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """Today's weather in a city."""
    return f"It is sunny in {city}."


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def main() -> None:
    model = ChatOpenAI(
        model=openai.OpenAI().models.list().data[0].id, temperature=0, max_tokens=200
    )

    # Whole, and streamed through a chain.
    whole = model.invoke("Hello!")
    print("whole:", whole.content)
    assert whole.usage_metadata
    assert whole.usage_metadata["output_tokens"] > 0
    chain = ChatPromptTemplate.from_messages([("user", "{text}")]) | model | StrOutputParser()
    pieces = list(chain.stream({"text": "Hello!"}))
    print("pieces:", pieces)
    assert "".join(pieces) == whole.content

    # A tool that must be called, and the round that follows.
    question = HumanMessage("What is the weather in Oslo?")
    turn = model.bind_tools([get_weather], tool_choice="required").invoke([question])
    results = [get_weather.invoke(call) for call in turn.tool_calls]
    print("calls:", [(call["name"], call["args"]) for call in turn.tool_calls])
    assert results
    assert all(isinstance(result, ToolMessage) for result in results)
    print("answer:", model.invoke([question, turn, *results]).content)

    # Streamed, its arguments come in pieces that add up to the same call.
    total: AIMessageChunk | None = None
    for chunk in model.bind_tools([get_weather], tool_choice="get_weather").stream([question]):
        assert isinstance(chunk, AIMessageChunk)
        total = chunk if total is None else total + chunk
    assert total
    assert [call["name"] for call in total.tool_calls] == ["get_weather"]

    # Structured output in the three ways that LangChain knows.
    for method in ("json_schema", "function_calling", "json_mode"):
        structured = model.with_structured_output(Person, method=method, include_raw=True)
        got = structured.invoke("Ada is 36 years old. Answer in JSON.")
        print(f"{method}:", repr(got["parsed"] or got["parsing_error"]))
        # json_mode promises an object, but no particular one
        assert isinstance(got["parsed"], Person) or method == "json_mode"


if __name__ == "__main__":
    main()
