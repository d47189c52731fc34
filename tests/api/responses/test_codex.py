"""The requests of Codex CLI 0.169: the first one of a session as it was recorded, and the second
one as Codex builds it from the stream of the first."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import responses as sdk

from app.core.events import PrefillProgress, ReasoningDelta, ToolCallDelta
from app.core.requests import Conversation, GenerateRequest, ToolCall
from app.core.settings import Settings
from tests.api.asgi import Conversation as Exchange
from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, FOREVER, FakeGenerate, Pause, Script, build_fake_app, finish, text
from tests.image_files import make_data_url

SPAWN = '{"message":"look","model":"m"}'
FIRST_TURN: Script = (
    PrefillProgress(computed_tokens=0, total_tokens=9000),
    ReasoningDelta(text="A helper"),
    ReasoningDelta(text=" can look."),
    text("I start a helper."),
    ToolCallDelta(call_index=0, id="call_1", name="exec_command"),
    ToolCallDelta(call_index=0, arguments='{"cmd":"ls"}'),
    ToolCallDelta(call_index=1, id="call_2", name="multi_agent_v1__spawn_agent"),
    ToolCallDelta(call_index=1, arguments=SPAWN),
    finish("tool_calls", 20),
)


@pytest.fixture(scope="module")
def recorded(shared: Path) -> Any:
    body = json.loads((shared / "agents/codex-0.169.0.responses.json").read_text("utf-8"))
    return body | {"model": CARD.id}


def post(generate: FakeGenerate, body: Any) -> Reply:
    reply = send_request(generate, "POST", "/v1/responses", body)
    assert reply.status == 200, reply.body
    return reply


def read_events(reply: Reply) -> list[Any]:
    frames = reply.body.decode().removesuffix("\n\n").split("\n\n")
    assert not any(frame.startswith(":") for frame in frames), "Codex does not count comments"
    return [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]


def send_second_turn(recorded: Any, events: list[Any]) -> dict[str, Any]:
    """Codex stores nothing: it sends the input, all items of the stream and its results."""
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    results = [
        {"type": "function_call_output", "call_id": "call_1", "output": "README.md"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [
                {"type": "input_text", "text": "agent 7"},
                {"type": "input_image", "image_url": make_data_url()},
            ],
        },
    ]
    return recorded | {"input": [*recorded["input"], *items, *results]}


def prompt_of(generate: FakeGenerate) -> tuple[GenerateRequest, Conversation]:
    request = generate.opened[-1]
    assert isinstance(request.prompt, Conversation)
    return request, request.prompt


def test_the_recorded_request_is_accepted(recorded: Any):
    generate = FakeGenerate(FIRST_TURN)
    reply = post(generate, recorded)
    request, prompt = prompt_of(generate)
    assert [message.role for message in prompt.messages] == [
        "developer",
        "developer",
        "user",
        "user",
    ]
    names = [tool.name for tool in request.tools]
    assert len(names) == 12
    assert "multi_agent_v1__spawn_agent" in names
    assert "exec_command" in names
    assert reply.headers["x-mlxrunner-notice"] == (
        "omitted tools that this server does not run: web_search"
    )


def test_a_call_of_a_namespace_has_both_names_and_the_items_have_opaque_reasoning(recorded: Any):
    events = read_events(post(FakeGenerate(FIRST_TURN), recorded))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = sdk.ResponseCompletedEvent.model_validate(events[-1])
    reasoning, message, command, spawned = last.response.output
    assert isinstance(reasoning, sdk.ResponseReasoningItem)
    assert reasoning.encrypted_content
    assert isinstance(message, sdk.ResponseOutputMessage)
    assert isinstance(command, sdk.ResponseFunctionToolCall)
    assert isinstance(spawned, sdk.ResponseFunctionToolCall)
    assert (command.name, command.namespace) == ("exec_command", None)
    assert (spawned.name, spawned.namespace) == ("spawn_agent", "multi_agent_v1")
    assert spawned.arguments == SPAWN
    assert [tool["type"] for tool in events[-1]["response"]["tools"]].count("namespace") == 1


@pytest.mark.parametrize("kept", ["content", "encrypted_content"])
def test_the_second_turn_gives_the_model_its_own_turn_again(recorded: Any, kept: str):
    """Codex keeps both forms of the reasoning, other clients one of them."""
    events = read_events(post(FakeGenerate(FIRST_TURN), recorded))
    body = send_second_turn(recorded, events)
    for item in body["input"]:
        if item["type"] == "reasoning":
            del item[{"content": "encrypted_content", "encrypted_content": "content"}[kept]]
    generate = FakeGenerate()
    post(generate, body)
    request, prompt = prompt_of(generate)
    turn, listed, spawned = prompt.messages[-3:]
    assert (turn.reasoning, turn.content) == ("A helper can look.", "I start a helper.")
    assert turn.tool_calls == (
        ToolCall(id="call_1", name="exec_command", arguments='{"cmd":"ls"}'),
        ToolCall(id="call_2", name="multi_agent_v1__spawn_agent", arguments=SPAWN),
    )
    assert (listed.role, listed.content) == ("tool", "README.md")
    assert spawned.content == "agent 7"
    assert [placed.offset for placed in spawned.images] == [7]
    assert {call.name for call in turn.tool_calls} <= {tool.name for tool in request.tools}


def test_reasoning_that_another_server_encrypted_has_no_effect(recorded: Any):
    """A session that began at OpenAI continues here."""
    opaque = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB"}
    generate, plain = FakeGenerate(), FakeGenerate()
    post(generate, recorded | {"input": [*recorded["input"][:-1], opaque, recorded["input"][-1]]})
    post(plain, recorded)
    assert prompt_of(generate)[1] == prompt_of(plain)[1]


def test_a_slow_prompt_sends_events_because_codex_does_not_count_comments(recorded: Any):
    async def run() -> Reply:
        generate = FakeGenerate([PrefillProgress(computed_tokens=0, total_tokens=9), FOREVER])
        app = build_fake_app(generate, Settings(ping=0.02))
        exchange = Exchange(app, "POST", "/v1/responses", json.dumps(recorded).encode())
        reply = await exchange.until(lambda r: r.body.count(b"event: response.in_progress") >= 4)
        exchange.disconnect()
        await exchange.end()
        return reply

    body = asyncio.run(run()).body.rpartition(b"\n\n")[0] + b"\n\n"
    events = read_events(Reply(body=body))
    assert events[0]["type"] == "response.created"
    assert {event["type"] for event in events[1:]} == {"response.in_progress"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_queued_request_begins_with_the_event_that_clients_expect_first(recorded: Any):
    """OpenAI's library raises an error if a stream begins with anything else."""
    generate = FakeGenerate([Pause(0.1), text("Hi"), finish()])
    reply = send_request(generate, "POST", "/v1/responses", recorded, ping=0.02)
    events = read_events(reply)
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
