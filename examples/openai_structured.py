"""OpenAI's Python library: responses that follow a schema, with any model.

OPENAI_BASE_URL=http://localhost:8080/v1 python examples/openai_structured.py
"""

import asyncio
import json
import os
import re
from typing import Literal

from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel, Field

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server


class Book(BaseModel):
    title: str = Field(max_length=30)
    genre: Literal["novel", "poetry", "science"]
    pages: int = Field(ge=1, le=2000)


MESSAGES = [{"role": "user", "content": "Recommend a book."}]


def main() -> None:
    client = OpenAI()
    model = client.models.list().data[0].id
    asked = {"model": model, "messages": MESSAGES, "seed": 3, "max_tokens": 200}

    # The request takes a pydantic model, and the response is an instance of it.
    parsed = client.chat.completions.parse(**asked, response_format=Book).choices[0].message
    print("parsed:", repr(parsed.parsed))
    assert isinstance(parsed.parsed, Book)

    # The same as a stream.
    with client.beta.chat.completions.stream(**asked, response_format=Book) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    print("pieces:", len(pieces))
    assert "".join(pieces) == parsed.content
    assert final.parsed == parsed.parsed

    # Any JSON object, text that matches a pattern, or one of several strings (vLLM's fields).
    anything = client.chat.completions.create(
        **{**asked, "max_tokens": 150}, response_format={"type": "json_object"}
    ).choices[0]
    print("any object:", anything.message.content)
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.message.content or ""), dict)
    pattern = r"\d{4}-(0[1-9]|1[0-2])"
    month = client.chat.completions.create(**asked, extra_body={"guided_regex": pattern})
    assert re.fullmatch(pattern, month.choices[0].message.content or "")
    moods = ["glad", "sad", "neither"]
    mood = client.chat.completions.create(**asked, extra_body={"guided_choice": moods})
    assert mood.choices[0].message.content in moods
    print("month and mood:", month.choices[0].message.content, mood.choices[0].message.content)

    # A schema that cannot be enforced is rejected with the path of the keyword.
    impossible = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?<n"}}}
    schema = {"name": "impossible", "schema": impossible}
    wanted = {"type": "json_schema", "json_schema": schema}
    try:
        client.chat.completions.create(**asked, response_format=wanted)
    except BadRequestError as error:
        print("refused:", error.param, "·", error.message)
        assert (error.param or "").startswith("response_format.json_schema.schema")
    else:
        raise AssertionError("a broken pattern was accepted")

    asyncio.run(in_parallel(asked))


async def in_parallel(asked: dict) -> None:
    """Schemas are per request, so one batch can contain requests with different schemas."""

    class Color(BaseModel):
        name: Literal["red", "green", "blue"]

    async with AsyncOpenAI() as client:
        answers = await asyncio.gather(
            *(client.chat.completions.parse(**asked, response_format=t) for t in (Book, Color))
        )
    shapes = [type(answer.choices[0].message.parsed).__name__ for answer in answers]
    print("at once:", shapes)
    assert shapes == ["Book", "Color"]


if __name__ == "__main__":
    main()
