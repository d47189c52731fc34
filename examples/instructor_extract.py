"""Instructor: pydantic objects out of text, through tools or through a schema.

pip install instructor
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/instructor_extract.py
"""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # the library wants one, the server does not


class Ticket(BaseModel):
    """What a customer wants."""

    model_config = ConfigDict(extra="forbid")  # nothing but this: small models like to go on

    kind: Literal["question", "complaint", "order"]
    summary: str = Field(max_length=40)
    urgency: int = Field(ge=1, le=5)


MAIL = [{"role": "user", "content": "My parcel is late again! Where is it?"}]


def main() -> None:
    plain = OpenAI()
    model = plain.models.list().data[0].id
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        # no second try: the schema is kept at the first
        asked = {"model": model, "messages": MAIL, "max_retries": 0, "max_tokens": 200}
        ticket = client.chat.completions.create(**asked, response_model=Ticket)
        print(f"{mode.name}:", repr(ticket))
        assert isinstance(ticket, Ticket)

        # While it is written, each state of it is an object with what is known so far.
        states = list(client.chat.completions.create_partial(**asked, response_model=Ticket))
        print(f"{mode.name}: {len(states)} states, the last one", repr(states[-1]))
        assert Ticket.model_validate(states[-1].model_dump())


if __name__ == "__main__":
    main()
