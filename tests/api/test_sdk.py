"""OpenAI's client over a real socket: the server understands its requests, and the client
understands the responses."""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Generator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from app.core.errors import AppError, ErrorKind
from app.core.events import ReasoningDelta, ToolCallDelta
from app.core.requests import Conversation, GenerateRequest, JsonSchema, Message, ToolCall
from app.core.settings import Settings
from tests.api.asgi import serve_app
from tests.fakes import (
    FOREVER,
    FakeGenerate,
    Script,
    build_fake_app,
    finish,
    script_greetings,
    text,
)
from tests.server_process import TIMEOUT
from tests.waiting import wait_until

MODEL = "fake/model"
HI: list[Any] = [{"role": "user", "content": "hi"}]


def script(request: GenerateRequest) -> Script:
    """The script that the last message selects."""
    prompt = request.prompt
    content = prompt.messages[-1].content if isinstance(prompt, Conversation) else prompt
    match content:
        case "endless":
            return [text("a "), FOREVER]
        case "break":
            return [text("a "), AppError(ErrorKind.ENGINE, "out of memory")]
        case "call":
            piece = ToolCallDelta(call_index=0, arguments='{"city": ')
            start = ToolCallDelta(call_index=0, id="call_1", name="weather")
            rest = ToolCallDelta(call_index=0, arguments='"Ulm"}')
            return [ReasoningDelta(text="Hm."), start, piece, rest, finish("tool_calls")]
        case "person":
            return [text('{"name": "Ada", '), text('"age": 36}'), finish()]
        case _:
            return script_greetings(request)


@pytest.fixture(scope="module")
def generate() -> FakeGenerate:
    return FakeGenerate(script)


@pytest.fixture(scope="module")
def url(generate: FakeGenerate) -> Generator[str]:
    with serve_app(build_fake_app(generate, Settings())) as url:
        yield url


@pytest.fixture
def client(url: str) -> Generator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: OpenAI, generate: FakeGenerate):
    answer = client.chat.completions.create(model=MODEL, messages=HI, temperature=0.5, seed=3)
    (choice,) = answer.choices
    assert choice.message.content == "Hello"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.model_extra is not None
    assert answer.model_extra["total_duration"] == 35_000_000
    assert generate.opened[-1].sampling == {"temperature": 0.5, "seed": 3}


def test_an_answer_is_sent_back_in_the_conversation(client: OpenAI, generate: FakeGenerate):
    answer: Any = client.chat.completions.create(model=MODEL, messages=HI).choices[0].message
    client.chat.completions.create(model=MODEL, messages=[*HI, answer, *HI])
    prompt = generate.opened[-1].prompt
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1] == Message(role="assistant", content="Hello")


def test_chat_streamed(client: OpenAI):
    with client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, finished, usage = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    assert finished.choices[0].finish_reason == "stop"
    assert usage.usage is not None
    assert usage.usage.total_tokens == 9


def test_the_accumulating_helper(client: OpenAI):
    with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}


def test_a_tool_round(client: OpenAI, generate: FakeGenerate):
    """The helper joins the deltas of the call; its message is sent back unchanged."""
    messages: list[Any] = [{"role": "user", "content": "call"}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        message: Any = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 1
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == {"city": "Ulm"}
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ulm"}')
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    client.chat.completions.create(model=MODEL, messages=[*messages, message, result, *HI])
    prompt = generate.opened[-1].prompt
    assert isinstance(prompt, Conversation)
    called = ToolCall(id="call_1", name="weather", arguments='{"city": "Ulm"}')
    assert prompt.messages[1:3] == (
        Message(role="assistant", content=None, reasoning="Hm.", tool_calls=(called,)),
        Message(role="tool", content="rain", tool_call_id="call_1"),
    )


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # about its own object
def test_a_parsed_message_can_be_sent_back(client: OpenAI, generate: FakeGenerate):
    messages: list[Any] = [{"role": "user", "content": "person"}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
    message: Any = answer.choices[0].message
    assert message.parsed == Person(name="Ada", age=36)
    grammar = generate.opened[-1].grammar
    assert isinstance(grammar, JsonSchema)
    assert json.loads(grammar.text)["required"] == ["name", "age"]
    client.chat.completions.create(model=MODEL, messages=[*messages, message, *HI])
    prompt = generate.opened[-1].prompt
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1].content == '{"name": "Ada", "age": 36}'


def test_several_choices(client: OpenAI):
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=3)
    assert [choice.message.content for choice in answer.choices] == ["Hello"] * 3
    with client.chat.completions.stream(model=MODEL, messages=HI, n=3) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello"] * 3
    texts = client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]


def test_every_response_has_a_request_id(client: OpenAI):
    answer: Any = client.chat.completions.create(model=MODEL, messages=HI)
    assert answer._request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model=MODEL, messages=[], extra_headers={"X-Request-ID": "mine"}
        )
    assert bad.value.request_id == "mine"


def test_completions(client: OpenAI):
    answer = client.completions.create(model=MODEL, prompt=[1, 2, 3], logprobs=0)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].logprobs is not None
    pieces = client.completions.create(model=MODEL, prompt="hi", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "Hello"


def test_models(client: OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL  # the slash goes out as %2F
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_extensions_are_accepted_in_the_extra_body(client: OpenAI, generate: FakeGenerate):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "repeat_last_n": 64}
    client.chat.completions.create(model=MODEL, messages=HI, extra_body=extra)
    assert generate.opened[-1].sampling == extra


def test_errors_become_the_exceptions_of_the_sdk(client: OpenAI):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=HI)
    assert missing.value.code == "model_not_found"


def test_an_error_during_a_stream_is_raised(client: OpenAI):
    messages: list[Any] = [{"role": "user", "content": "break"}]
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "a "]
    with pytest.raises(openai.APIError, match="out of memory"):
        next(stream)


def test_closing_a_stream_cancels(client: OpenAI, generate: FakeGenerate):
    messages: list[Any] = [{"role": "user", "content": "endless"}]
    before = generate.num_closed
    with client.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream:
        assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "a "]
        assert generate.num_closed == before
    wait_until(lambda: generate.num_closed == before + 1)


def test_a_timeout_of_an_unstreamed_answer_cancels(client: OpenAI, generate: FakeGenerate):
    messages: list[Any] = [{"role": "user", "content": "endless"}]
    before = generate.num_closed
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(
            model=MODEL, messages=messages, timeout=openai.Timeout(TIMEOUT, read=0.1)
        )
    wait_until(lambda: generate.num_closed == before + 1)


def test_concurrent_requests(url: str):
    async def run() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=HI) for _ in range(20))
            )
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [answer.choices[0].message.content for answer in answers] + ["".join(streamed)]

    assert asyncio.run(run()) == ["Hello"] * 21


def test_the_client_retries_while_the_model_loads(url: str):
    """The SDK waits for the seconds of Retry-After and then gets its answer."""
    generate = FakeGenerate(open_error=AppError(ErrorKind.LOADING, "the model is loading"))
    with (
        serve_app(build_fake_app(generate, Settings())) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client,
    ):
        threading.Timer(0.2, lambda: setattr(generate, "open_error", None)).start()
        answer = client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Hello"


def test_the_go_client_can_read_the_response(url: str, generate: FakeGenerate):
    """The client's request as on the wire, and the fields that it decodes by name."""
    body = b'{"prompt":"hi","options":{"temperature":0.8,"top_p":0.9,"num_predict":3}}'
    request = urllib.request.Request(
        f"{url}/completion", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        *lines, last = map(json.loads, reply)
    assert "".join(line["Content"] for line in lines) == "Hello"
    assert last["Done"]
    assert last["PromptEvalCount"] == 7
    assert generate.opened[-1].max_tokens == 3
