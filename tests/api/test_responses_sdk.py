"""OpenAI's client and /v1/responses, over a socket: with scripted answers, and with the built-in
model."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel

from app.core.errors import AppError, ErrorKind
from app.core.events import ReasoningDelta, ToolCallDelta
from app.core.requests import Conversation, GenerateRequest, Message, ToolCall
from app.core.settings import Settings
from tests.api.asgi import serve_app
from tests.fakes import FakeGenerate, Script, build_fake_app, finish, text
from tests.server_process import run_server

MODEL = "fake/model"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def script(request: GenerateRequest) -> Script:
    """Calls a tool if there is one and the conversation does not end with its output."""
    prompt = request.prompt
    assert isinstance(prompt, Conversation)
    last = prompt.messages[-1]
    if last.content == "break":
        return [text("a "), AppError(ErrorKind.ENGINE, "out of memory")]
    if request.tools and last.role != "tool":
        called = ToolCallDelta(call_index=0, id="call_1", name="weather")
        arguments = ToolCallDelta(call_index=0, arguments='{"city":"Ulm"}')
        return [ReasoningDelta(text="Ask."), called, arguments, finish("tool_calls")]
    if request.grammar is not None:
        return [text('{"city":'), text('"Ulm"}'), finish()]
    return [text("Hel"), text("lo"), finish()]


@pytest.fixture(scope="module")
def generate() -> FakeGenerate:
    return FakeGenerate(script)


@pytest.fixture(scope="module")
def client(generate: FakeGenerate) -> Iterator[OpenAI]:
    with (
        serve_app(build_fake_app(generate, Settings())) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def conversation(generate: FakeGenerate) -> tuple[Message, ...]:
    prompt = generate.opened[-1].prompt
    assert isinstance(prompt, Conversation)
    return prompt.messages


def test_a_response(client: OpenAI):
    response = client.responses.create(model=MODEL, input="hi", instructions="Be brief.")
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.instructions == "Be brief."
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 3


def test_a_streamed_response(client: OpenAI):
    with client.responses.stream(model=MODEL, input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert deltas == ["Hel", "lo"]
    assert final.output_text == "Hello"
    assert client.responses.retrieve(final.id).output_text == "Hello"


def test_a_conversation_by_response_ids(client: OpenAI, generate: FakeGenerate):
    first = client.responses.create(model=MODEL, input="hi")
    client.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
    assert [message.content for message in conversation(generate)] == ["hi", "Hello", "and?"]


def test_a_tool_round_with_the_conversation_in_the_client(client: OpenAI, generate: FakeGenerate):
    items: list[Any] = [{"role": "user", "content": "rain?"}]
    first = client.responses.create(model=MODEL, input=items, tools=[WEATHER], store=False)
    items += first.output
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments) == {"city": "Ulm"}
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    second = client.responses.create(model=MODEL, input=items, tools=[WEATHER])
    assert second.output_text == "Hello"
    _, turn, _ = conversation(generate)
    called = ToolCall(id="call_1", name="weather", arguments='{"city":"Ulm"}')
    assert turn == Message(role="assistant", content=None, reasoning="Ask.", tool_calls=(called,))


def test_a_tool_round_with_the_conversation_on_the_server(client: OpenAI, generate: FakeGenerate):
    with client.responses.stream(model=MODEL, input="rain?", tools=[WEATHER]) as stream:
        first = stream.get_final_response()
    client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": "call_1", "output": "rain"}],
        tools=[WEATHER],
    )
    assert [message.role for message in conversation(generate)] == ["user", "assistant", "tool"]


class City(BaseModel):
    city: str


def test_a_parsed_answer(client: OpenAI):
    response = client.responses.parse(model=MODEL, input="where?", text_format=City)
    assert response.output_parsed == City(city="Ulm")
    with client.responses.stream(model=MODEL, input="where?", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(city="Ulm")


def test_a_parsed_tool_call(client: OpenAI):
    tool: Any = openai.pydantic_function_tool(City, name="weather")["function"]
    flat: Any = {"type": "function", **tool}
    response = client.responses.parse(model=MODEL, input="rain?", tools=[flat])
    call: Any = response.output[-1]
    assert call.parsed_arguments == {"city": "Ulm"}


def test_stored_responses_can_be_listed_and_deleted(client: OpenAI):
    items: list[Any] = [{"role": "user", "content": str(n)} for n in range(5)]
    response = client.responses.create(model=MODEL, input=items)
    items = list(client.responses.input_items.list(response.id, limit=2, order="asc"))
    texts = [item.content[0].text for item in items if item.type == "message"]  # pyright: ignore[reportAttributeAccessIssue]  # all parts are texts
    assert texts == ["0", "1", "2", "3", "4"]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model=MODEL, input="hi", previous_response_id=response.id)
    assert unknown.value.code == "previous_response_not_found"


def test_a_response_cannot_be_cancelled(client: OpenAI):
    response = client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError, match="only background responses can be cancelled"):
        client.responses.cancel(response.id)


def test_an_error_during_a_stream_is_raised(client: OpenAI):
    with (
        pytest.raises(openai.APIError, match="out of memory"),
        client.responses.stream(model=MODEL, input="break") as stream,
    ):
        stream.until_done()


def test_requests_of_codex_are_accepted(client: OpenAI):
    """The request of Codex for a model that it does not know, and for a reasoning model."""
    parts = [{"type": "input_text", "text": "hi"}]
    sent: Any = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [{"type": "message", "role": "user", "content": parts}],
        "tools": [{**WEATHER, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198",
    }
    stream = client.responses.create(**sent)
    assert [event.type for event in stream][-1] == "response.completed"


# The built-in model


@pytest.fixture(scope="module")
def builtin_url() -> Iterator[str]:
    with run_server() as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def builtin_client(builtin_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=builtin_url, api_key="none", max_retries=0) as client:
        yield client


KNOBS: Any = {"model": "builtin", "temperature": 0, "max_output_tokens": 40}


def test_the_built_in_model_answers_and_streams_the_same(builtin_client: OpenAI):
    response = builtin_client.responses.create(input="Hello!", **KNOBS)
    with builtin_client.responses.stream(input="Hello!", **KNOBS) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == response.output_text != ""


def test_the_built_in_model_continues_a_response(builtin_client: OpenAI):
    first = builtin_client.responses.create(input="Hello!", **KNOBS)
    second = builtin_client.responses.create(input="Why?", previous_response_id=first.id, **KNOBS)
    stateless: Any = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Why?"},
    ]
    assert (
        second.output_text == builtin_client.responses.create(input=stateless, **KNOBS).output_text
    )
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_the_built_in_model_follows_a_schema(builtin_client: OpenAI):
    class Answer(BaseModel):
        yes: bool

    response = builtin_client.responses.parse(input="Is it?", text_format=Answer, **KNOBS)
    assert isinstance(response.output_parsed, Answer)


def test_the_built_in_model_makes_a_required_call(builtin_client: OpenAI):
    options: Any = {"input": "Rain?", "tools": [WEATHER], "tool_choice": "required"}
    options |= KNOBS | {"max_output_tokens": 400, "parallel_tool_calls": False}
    response = builtin_client.responses.create(**options)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert isinstance(json.loads(call.arguments)["city"], str)
    with builtin_client.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    (same,) = [item for item in streamed.output if item.type == "function_call"]
    assert same.arguments == call.arguments
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Yes."}
    after = builtin_client.responses.create(
        input=[output], previous_response_id=response.id, tools=[WEATHER], **KNOBS
    )
    assert after.status in ("completed", "incomplete")


def test_the_built_in_model_gives_logprobs(builtin_client: OpenAI):
    response = builtin_client.responses.create(
        input="Hello!", include=["message.output_text.logprobs"], top_logprobs=2, **KNOBS
    )
    message: Any = response.output[0]
    scored = message.content[0].logprobs
    assert bytes(b for entry in scored for b in entry.bytes).decode() == response.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in scored)


def test_the_built_in_model_stops_at_max_output_tokens(builtin_client: OpenAI):
    response = builtin_client.responses.create(input="Hello!", **{**KNOBS, "max_output_tokens": 1})
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 1


def test_concurrent_requests(builtin_url: str):
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=builtin_url, api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.responses.create(input="Hello!", **KNOBS) for _ in range(6))
            )
            return [answer.output_text for answer in answers]

    answers = asyncio.run(run())
    assert len(answers) == 6
    assert len({*answers}) == 1


def test_an_input_that_exceeds_the_context_is_rejected(builtin_client: OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        builtin_client.responses.create(input="why " * 20_000, **KNOBS)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
