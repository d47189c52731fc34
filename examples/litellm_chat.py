"""LiteLLM: one API for many providers. This server is an OpenAI-compatible provider.

pip install litellm
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/litellm_chat.py
"""

import json
import os

import openai
from pydantic import BaseModel, Field

# use the price list of the package, without a download
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server

import litellm  # it reads the environment on import


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Today's weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    served = openai.OpenAI().models.list().data[0].id
    asked = {
        "model": f"openai/{served}",
        "api_base": os.environ["OPENAI_BASE_URL"],
        "messages": [{"role": "user", "content": "Hello! How warm is it?"}],
        "temperature": 0,
        "max_tokens": 200,
    }

    whole = litellm.completion(**asked)
    said = whole.choices[0].message.content
    print("whole:", said)
    assert said
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)
    ]
    print("pieces:", pieces)
    assert "".join(pieces) == said

    # A tool call, non-streamed and assembled from a stream.
    tools = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    chunks = list(litellm.completion(**asked, **tools, stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=asked["messages"])
    for answer in (litellm.completion(**asked, **tools), rebuilt):
        assert answer
        [call, *_] = answer.choices[0].message.tool_calls
        print(f"{call.function.name}({call.function.arguments})")
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome", "Oslo")

    # A pydantic model as the response schema.
    content = litellm.completion(**asked, response_format=Person).choices[0].message.content
    print("person:", repr(Person.model_validate_json(content)))

    # Embeddings.
    vectors = litellm.embedding(
        model=f"openai/{served}",
        api_base=os.environ["OPENAI_BASE_URL"],
        input=["a text", "another"],
    )
    print("vectors:", len(vectors.data))
    assert len(vectors.data) == 2


if __name__ == "__main__":
    main()
