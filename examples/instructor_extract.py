"""Instructor: pydantic objects extracted from text, through tools or through a schema.

pip install instructor
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/instructor_extract.py
"""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server


class Ticket(BaseModel):
    """What a customer wants."""

    model_config = ConfigDict(extra="forbid")  # no other fields; small models may add some

    kind: Literal["question", "complaint", "order"]
    summary: str = Field(max_length=40)
    urgency: int = Field(ge=1, le=5)


MAIL = [{"role": "user", "content": "My parcel is late again! Where is it?"}]


def main() -> None:
    plain = OpenAI()
    model = plain.models.list().data[0].id
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        # no retries are needed, because the schema is enforced
        asked = {"model": model, "messages": MAIL, "max_retries": 0, "max_tokens": 200}
        ticket = client.chat.completions.create(**asked, response_model=Ticket)
        print(f"{mode.name}:", repr(ticket))
        assert isinstance(ticket, Ticket)

        # During the stream, each state is an object with the fields received so far.
        states = list(client.chat.completions.create_partial(**asked, response_model=Ticket))
        print(f"{mode.name}: {len(states)} states, the last one", repr(states[-1]))
        assert Ticket.model_validate(states[-1].model_dump())


if __name__ == "__main__":
    main()
