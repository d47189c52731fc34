"""POST /api/chat: what clients send, and the lines that they read."""

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.events import PrefillProgress, ReasoningDelta, TokenLogprob, ToolCallDelta
from app.core.requests import Conversation, GenerateRequest, JsonSchema, ReasoningOptions
from app.core.settings import Settings
from app.http.api_keys import ApiKey, Keyring, generate_key, hash_key
from tests.api.asgi import Conversation as Exchange
from tests.api.asgi import Reply
from tests.fakes import CARD, DETAILS, FOREVER, FakeGenerate, build_fake_app, finish, text
from tests.rows import rows

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def lines(reply: Reply) -> list[Any]:
    """The objects of a stream. Fails for an empty line, which ollama-python cannot parse."""
    assert reply.body.endswith(b"\n")
    return [json.loads(line) for line in reply.body.removesuffix(b"\n").split(b"\n")]


def chat(call: Any, **fields: Any) -> Reply:
    return call("POST", "/api/chat", {"model": CARD.id, "messages": HI, **fields})


def get_sent_request(generate: FakeGenerate) -> GenerateRequest:
    return generate.opened[-1]


def messages(generate: FakeGenerate) -> Any:
    prompt = get_sent_request(generate).prompt
    assert isinstance(prompt, Conversation)
    return prompt.messages


def test_a_stream_is_lines_and_the_last_one_has_the_figures(call):
    reply = chat(call)
    assert reply.headers["content-type"] == "application/x-ndjson"
    first, second, last = lines(reply)
    assert first["message"] == {"role": "assistant", "content": "Hel"}
    assert (first["model"], first["done"], second["message"]["content"]) == (CARD.id, False, "lo")
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (7, 2)
    # two tokens in one step of 30 ms
    assert last["eval_duration"] == 60_000_000
    assert last["total_duration"] >= last["load_duration"] + 35_000_000


def test_without_a_stream_the_lines_are_one_object(call):
    reply = chat(call, stream=False)
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["message"] == {"role": "assistant", "content": "Hello"}
    assert reply.json["done"] is True


def test_no_content_type_is_needed(generate: FakeGenerate, call):
    body = json.dumps({"model": CARD.id, "messages": HI}).encode()
    for kind in ("", "application/x-www-form-urlencoded"):
        assert call("POST", "/api/chat", body, {"content-type": kind}).status == 200


def test_the_name_is_echoed_and_found_by_every_spelling(call):
    for name in ("fake/model:latest", "FAKE/Model", "hf.co/fake/model"):
        assert lines(chat(call, model=name))[0]["model"] == name


def test_a_call_is_one_whole_line_with_an_object(generate: FakeGenerate, call):
    generate.script = [
        ReasoningDelta(text="Let me"),
        ToolCallDelta(call_index=0, id="call_1", name="add", arguments='{"a":'),
        ToolCallDelta(call_index=0, arguments=" 1}"),
        ToolCallDelta(call_index=1, id="call_2", name="now"),
        finish("tool_calls"),
    ]
    thought, first, second, last = lines(chat(call, tools=[TOOL]))
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "Let me"}
    function = {"index": 0, "name": "add", "arguments": {"a": 1}}
    assert first["message"]["tool_calls"] == [{"id": "call_1", "function": function}]
    assert second["message"]["tool_calls"][0]["function"]["arguments"] == {}
    assert last["done_reason"] == "stop"
    whole = chat(call, tools=[TOOL], stream=False).json["message"]
    assert whole["thinking"] == "Let me"
    assert [one["id"] for one in whole["tool_calls"]] == ["call_1", "call_2"]


def test_an_incomplete_call_is_omitted(generate: FakeGenerate, call):
    """Clients run a call as soon as they read it."""
    begun = ToolCallDelta(call_index=0, id="call_1", name="add", arguments='{"a":')
    generate.script = [text("So"), begun, finish("length")]
    first, last = lines(chat(call))
    assert (first["message"]["content"], last["done_reason"]) == ("So", "length")


def test_results_find_their_calls_by_id_or_by_name_in_order(generate: FakeGenerate, call):
    called = [
        {"function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "mine", "function": {"name": "now", "arguments": {}}},
        {"function": {"name": "add", "arguments": {"a": 2}}},
    ]
    results = [
        {"role": "tool", "tool_name": "add", "content": "1"},
        {"role": "tool", "tool_call_id": "mine", "content": "2"},
        {"role": "Tool", "tool_name": "add", "content": "3"},
        {"role": "tool", "content": "of no call"},
    ]
    conversation = [*HI, {"role": "assistant", "tool_calls": called}, *results]
    assert chat(call, messages=conversation).status == 200
    _, assistant, *matched = messages(generate)
    ids = [one.id for one in assistant.tool_calls]
    assert [one.tool_call_id for one in matched[:3]] == ids
    assert ids[1] == "mine"
    assert assistant.tool_calls[0].arguments == '{"a":1}'
    assert [one.name for one in matched[:3]] == ["add", "now", "add"]


@pytest.mark.parametrize(
    ("think", "reasoning", "effort", "budget"),
    [
        (None, "optional", "medium", None),
        (True, "optional", "medium", None),
        (False, "optional", "none", None),
        ("high", "optional", "high", None),
        (None, "none", None, None),
        (False, "none", None, None),
        (None, "always", None, None),
        (False, "always", None, 0),
    ],
)
def test_a_model_reasons_unless_think_is_false(
    generate: FakeGenerate, call, think: Any, reasoning: Any, effort: Any, budget: Any
):
    generate.details = replace(DETAILS, reasoning=reasoning)
    assert chat(call, think=think).status == 200
    assert get_sent_request(generate).reasoning == ReasoningOptions(
        effort=effort, token_budget=budget
    )


def test_an_error_names_the_capability_that_a_model_does_not_have(generate: FakeGenerate, call):
    generate.details = replace(DETAILS, reasoning="none", capabilities=frozenset({"completion"}))
    generate_body = {"model": CARD.id, "prompt": "a", "suffix": "b"}
    for reply, name in (
        (chat(call, think=True), "thinking"),
        (chat(call, tools=[TOOL]), "tools"),
        (call("POST", "/api/generate", generate_body), "insert"),
    ):
        assert reply.status == 400
        assert f"does not support {name}" in reply.json["error"]
    generate.details = replace(DETAILS, capabilities=frozenset({"embedding"}))
    assert '"fake/model" does not support chat' in chat(call).json["error"]


def test_options_have_ollamas_defaults_after_the_models_own(generate: FakeGenerate, call):
    generate.details = replace(DETAILS, defaults={"temperature": 0.6, "seed": 3})
    chat(call)
    assert get_sent_request(generate).sampling == {
        "temperature": 0.6, "seed": 3, "top_k": 40, "top_p": 0.9, "repeat_last_n": 64,
    }  # fmt: skip
    options = {
        "temperature": 0.1, "top_k": 7.9, "repeat_penalty": 0, "seed": -1, "num_predict": -2,
        "num_ctx": 2**53, "stop": "x", "mirostat": 2, "num_gpu": None, "num_keep": 4,
    }  # fmt: skip
    reply = chat(call, options=options)
    got = get_sent_request(generate)
    assert (got.sampling["temperature"], got.sampling["top_k"]) == (0.1, 7)
    assert (got.sampling["repetition_penalty"], got.sampling["seed"]) == (1.0, None)
    assert (got.max_tokens, got.max_context, got.stop, got.num_keep) == (None, None, ("x",), 4)
    assert "x-mlxrunner-notice" not in reply.headers
    assert "x-mlxrunner-notice" in chat(call, options={"of_tomorrow": 1}).headers
    chat(call, options={"num_ctx": 2048, "num_predict": 5})
    assert (get_sent_request(generate).max_context, get_sent_request(generate).max_tokens) == (
        2048,
        5,
    )


@rows(
    ("fields", "message"),
    [
        ({"options": {"temperature": "hot"}}, 'option "temperature" must be of type float32'),
        ({"options": {"num_ctx": True}}, 'option "num_ctx"'),
        ({"options": {"repeat_penalty": 1e-46}}, 'option "repeat_penalty" must be from 0.01 to 10'),
        ({"options": {"num_predict": -(2**53) - 1}}, 'option "num_predict" must be of type'),
        ({"options": {"seed": 2**63}}, 'option "seed" must be of type integer'),
        ({"think": "hard"}, "think must be"),
        ({"format": "xml"}, 'expected "json" or a valid JSON Schema object'),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be between 0 and 20"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"messages": [{"role": "boss", "content": ""}]}, "invalid role"),
        ({"messages": "hi"}, "messages must be an array"),
        ({"tools": [{"type": "retrieval"}]}, "must be 'function'"),
    ],
)
def test_an_invalid_field_is_an_error_before_the_first_line(call, fields: Any, message: str):
    reply = chat(call, **fields)
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/json"
    assert message in reply.json["error"]


def test_a_format_is_a_grammar(generate: FakeGenerate, call):
    chat(call, format="json")
    assert isinstance(get_sent_request(generate).grammar, JsonSchema)
    chat(call, format={"type": "array"})
    assert get_sent_request(generate).grammar == JsonSchema(text='{"type":"array"}', param="format")
    chat(call, format="")
    assert get_sent_request(generate).grammar is None


def test_a_line_has_the_log_probabilities_of_its_text(generate: FakeGenerate, call):
    token = TokenLogprob(text="Hi", token_bytes=b"Hi", logprob=-0.5, top_logprobs=())
    generate.script = [text("Hi", token), finish()]
    first, _ = lines(chat(call, logprobs=True, top_logprobs=1))
    entry = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    assert first["logprobs"] == [entry]
    assert chat(call, logprobs=True, stream=False).json["logprobs"] == [entry]
    assert "logprobs" not in lines(chat(call))[0]


def test_a_request_without_messages_loads_or_unloads_the_model(generate: FakeGenerate, call):
    [line] = lines(chat(call, messages=[], keep_alive="5m"))
    assert (line["done"], line["done_reason"], line["message"]["content"]) == (True, "load", "")
    assert generate.loaded == [(CARD.id, 300.0)]
    reply = chat(call, messages=[], keep_alive=0, stream=False)
    assert reply.json["done_reason"] == "unload"
    assert generate.unloaded == [CARD.id]
    assert not generate.opened


def test_a_status_for_each_error_before_the_first_line(generate: FakeGenerate, call):
    assert call("POST", "/api/chat", b"").json == {"error": "missing request body"}
    assert call("POST", "/api/chat", b"{").status == 400
    assert chat(call, model="no").json == {"error": "model 'no' not found"}
    assert chat(call, model="").json == {"error": "model is required"}
    for kind, status, message in (
        (ErrorKind.BUSY, 503, "server busy, please try again.  maximum pending requests exceeded"),
        (ErrorKind.CONTEXT_LENGTH, 400, "the input length exceeds the context length"),
        (ErrorKind.MODEL_FILES, 500, "what"),
    ):
        generate.open_error = AppError(kind, "what")
        reply = chat(call)
        assert reply.status == status
        assert message in reply.json["error"]


def test_an_error_in_a_stream_is_its_last_line(generate: FakeGenerate, call):
    generate.script = [text("Hel"), AppError(ErrorKind.ENGINE, "it broke")]
    first, last = lines(chat(call))
    assert first["message"]["content"] == "Hel"
    assert last == {"error": "it broke"}


def test_a_silent_stream_sends_lines_without_content():
    """An empty line would be a JSONDecodeError in ollama-python."""
    progress = PrefillProgress(computed_tokens=0, total_tokens=9)

    async def run() -> Reply:
        app = build_fake_app(FakeGenerate(script=[progress, FOREVER]), Settings(ping=0.02))
        body = json.dumps({"model": CARD.id, "messages": HI}).encode()
        exchange = Exchange(app, "POST", "/api/chat", body)
        reply = await exchange.until(lambda reply: reply.body.count(b"\n") >= 3)
        exchange.disconnect()
        await exchange.end()
        return reply

    for line in lines(asyncio.run(run())):
        assert (line["message"]["content"], line["done"]) == ("", False)


USER, ADMIN = generate_key(), generate_key()


def ask_with_key(generate: FakeGenerate, key: str, **fields: Any) -> Reply:
    keys = (
        ApiKey(name="laptop", digest=hash_key(USER)),
        ApiKey(name="boss", digest=hash_key(ADMIN), admin=True),
    )

    async def run() -> Reply:
        app = build_fake_app(generate, Settings(), keyring=Keyring(keys))
        body = json.dumps({"model": CARD.id, "messages": HI, **fields}).encode()
        headers = {"authorization": f"Bearer {key}"}
        return await Exchange(app, "POST", "/api/chat", body, headers).end()

    return asyncio.run(run())


def test_other_keys_extend_the_keep_alive_up_to_the_operators_setting(generate: FakeGenerate):
    """The operator's setting is 300 seconds."""
    for asked, given in ((0, None), ("1m", None), ("10m", 300.0), (-1, 300.0), (None, None)):
        assert ask_with_key(generate, USER, keep_alive=asked).status == 200
        assert get_sent_request(generate).keep_alive == given
    assert ask_with_key(generate, ADMIN, keep_alive=-1).status == 200
    assert get_sent_request(generate).keep_alive == math.inf


def test_only_an_admin_may_unload(generate: FakeGenerate):
    refused = ask_with_key(generate, USER, messages=[], keep_alive=0)
    assert refused.status == 403
    assert "admin" in refused.json["error"]
    assert ask_with_key(generate, USER, messages=[]).status == 200
    assert not generate.unloaded
    assert ask_with_key(generate, ADMIN, messages=[], keep_alive=0).status == 200
    assert generate.unloaded == [CARD.id]
