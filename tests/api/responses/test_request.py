"""Requests of /v1/responses: the meaning of each field, and the rejected ones."""

import json
from typing import Any

import pytest

from app.api.responses.request import ParsedResponsesRequest, parse_responses_request
from app.api.responses.store import ResponseStore, ResponseStores, StoredResponse
from app.core.errors import AppError, ErrorKind
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.requests import (
    Conversation,
    JsonSchema,
    Message,
    NamedToolChoice,
    ReasoningOptions,
    Tool,
    ToolCall,
)
from tests.rows import rows

MODEL = "fake/model"
HI: dict[str, Any] = {"model": MODEL, "input": "hi"}
USER = Message(role="user", content="hi")
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TIME: dict[str, Any] = {"type": "function", "name": "time"}
CALL: dict[str, Any] = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "weather",
    "arguments": '{"city":"Ulm"}',
}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
CALLED = ToolCall(id="call_1", name="weather", arguments='{"city":"Ulm"}')
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(
    responses: ResponseStore | None = None, /, *, context_shift: bool = False, **fields: Any
) -> ParsedResponsesRequest:
    store = ResponseStores().for_caller("") if responses is None else responses
    data = json.dumps(HI | fields).encode()
    return parse_responses_request(data, MODEL, store, context_shift=context_shift)


def messages(responses: ResponseStore | None = None, /, **fields: Any) -> tuple[Message, ...]:
    prompt = read(responses, **fields).request.prompt
    assert isinstance(prompt, Conversation)
    return prompt.messages


def get_error(*, context_shift: bool = False, **fields: Any) -> AppError:
    with pytest.raises(AppError) as raised:
        read(context_shift=context_shift, **fields)
    assert raised.value.kind is ErrorKind.INVALID
    return raised.value


# Input


def test_a_string_input_is_a_user_message():
    assert messages() == (USER,)


def test_a_string_input_becomes_a_message_item():
    (item,) = read().input_items
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    }


def test_messages_need_no_type_and_their_parts_are_joined_by_newlines():
    items = [
        {"role": "developer", "content": "Be kind."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    assert messages(input=items) == (
        Message(role="developer", content="Be kind."),
        Message(role="user", content="a\nb"),
    )


def test_the_output_items_of_an_answer_are_one_assistant_message():
    answer = [
        {
            "id": "rs_1",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "phase": None,
            "content": [
                {"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}
            ],
        },
        {"id": "fc_1", "status": "completed", **CALL},
    ]
    turn = Message(role="assistant", content="Wait.", reasoning="Hm.", tool_calls=(CALLED,))
    tool_result = Message(role="tool", content="rain", tool_call_id="call_1", name="weather")
    assert messages(input=[{"role": "user", "content": "hi"}, *answer, OUTPUT]) == (
        USER,
        turn,
        tool_result,
    )


def test_parallel_calls_are_one_message_and_a_call_after_their_outputs_is_another():
    second = CALL | {"call_id": "call_2", "arguments": ""}
    two = ToolCall(id="call_2", name="weather", arguments="{}")
    third = CALL | {"call_id": "call_3"}
    out2, out3 = (OUTPUT | {"call_id": f"call_{n}"} for n in (2, 3))
    sent_messages = messages(input=[CALL, second, OUTPUT, out2, third, out3])
    assert [message.role for message in sent_messages] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]
    assert sent_messages[0].tool_calls == (CALLED, two)
    assert [call.id for call in sent_messages[3].tool_calls] == ["call_3"]


def test_reasoning_without_text_is_dropped():
    """Clients that keep only encrypted reasoning send it so; this server encrypts nothing."""
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "I thought."}],
        "encrypted_content": None,
    }
    assert messages(input=[{"role": "user", "content": "hi"}, reasoning]) == (USER,)


def test_an_incomplete_call_is_dropped():
    cut = CALL | {"status": "incomplete", "arguments": '{"ci'}
    user = {"role": "user", "content": "hi"}
    assert messages(input=[user, cut, user]) == (USER, USER)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
def test_null_missing_and_empty_content_are_the_same(role: str, content: Any):
    assert messages(input=[{"role": role, **content}]) == (Message(role=role, content=""),)


@pytest.mark.parametrize("output", [{}, {"output": None}, {"output": ""}, {"output": []}])
def test_null_missing_and_empty_output_are_the_same(output: Any):
    given = {"type": "function_call_output", "call_id": CALL["call_id"], **output}
    assert messages(input=[CALL, given])[1].content == ""


def test_reasoning_alone_is_a_turn():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert messages(input=[thought]) == (Message(role="assistant", content="", reasoning="Hm."),)


def test_a_call_output_may_consist_of_parts():
    parts = [{"type": "input_text", "text": "rain"}, {"type": "input_text", "text": "wind"}]
    assert messages(input=[CALL, OUTPUT | {"output": parts}])[1].content == "rain\nwind"


def test_a_call_of_a_custom_tool_and_its_output_are_a_call_of_a_function():
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** End"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"}
    made = ToolCall(id="c", name="patch", arguments='{"input":"*** End"}')
    assert messages(input=[call, output]) == (
        Message(role="assistant", content=None, tool_calls=(made,)),
        Message(role="tool", content="Done", tool_call_id="c", name="patch"),
    )


def test_a_call_of_a_namespace_has_the_name_that_the_model_saw():
    [turn] = messages(input=[CALL | {"namespace": "sky"}])
    assert [call.name for call in turn.tool_calls] == ["sky__weather"]


def test_a_refusal_is_content_of_the_assistant():
    content = [{"type": "refusal", "refusal": "No."}]
    assert messages(input=[{"role": "assistant", "content": content}])[0].content == "No."


@rows(
    ("item", "param"),
    [
        ({"type": "compaction", "encrypted_content": "x"}, "input.0.type"),
        ({"role": "tool", "content": "x"}, "input.0.role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input.0.content.0"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input.0.content.0.type"),
        ({"role": "user", "content": [{"type": "output_text", "text": ""}]}, None),
        ({"role": "user", "content": 5}, "input.0.content"),
        (CALL | {"arguments": {}}, "input.0.arguments"),
        (CALL | {"namespace": 5}, "input.0.namespace"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "n"}, "input.0.input"),
        (CALL | {"status": "late"}, "input.0.status"),
        ({"type": "function_call_output", "output": "x"}, "input.0.call_id"),
        ({"type": "reasoning", "encrypted_content": 5}, "input.0.encrypted_content"),
        ({"type": "reasoning", "content": [{"type": "x", "text": ""}]}, "input.0.content.0.type"),
        ("hi", "input.0"),
        ({}, "input.0.id"),
    ],
)
def test_an_invalid_item_is_named_by_its_index(item: Any, param: str | None):
    assert get_error(input=[item]).param == (param or "input.0.content.0.type")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "searching", "action": {"query": "x"}},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x"}]},
        {
            "type": "tool_search_call",
            "call_id": "c",
            "arguments": {},
            "caller": {"type": "program"},
        },
        {"type": "mcp_call", "id": 5, "name": None, "role": "tool"},
    ],
)
def test_an_item_of_a_tool_of_openai_is_omitted(item: dict[str, Any]):
    """Codex and OpenAI's agents SDK send a conversation with OpenAI's models to this server."""
    question = {"role": "user", "content": "hi"}
    context = RequestContext(id="")
    token = REQUEST_CONTEXT.set(context)
    try:
        assert messages(input=[question, item, question]) == (USER, USER)
    finally:
        REQUEST_CONTEXT.reset(token)
    [notice] = context.notices
    assert notice == f"items of OpenAI's tools are omitted from the prompt: {item['type']}"
    assert context.ignored_fields == 0
    assert get_error(input=[item]).param == "input"
    assert get_error(input=[item, {"role": "user", "content": 5}]).param == "input.1.content"


@pytest.mark.parametrize("nothing", [[], [{"type": "reasoning"}]])
def test_empty_input_is_rejected(nothing: Any):
    assert get_error(input=nothing).param == "input"


# Instructions


def test_instructions_are_the_first_message():
    assert messages(instructions="Be brief.")[0] == Message(role="system", content="Be brief.")


def test_instructions_and_a_leading_developer_message_are_merged():
    """Many templates accept one system message at the start and reject or drop a second one."""
    items = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "Now hurry."},
    ]
    assert messages(instructions="Be brief.", input=items) == (
        Message(role="system", content="Be brief.\n\nUse tools."),
        USER,
        Message(role="developer", content="Now hurry."),
    )


# Stored responses


def build_store() -> ResponseStore:
    """A store with two responses; the second one ends with a tool call."""
    store = ResponseStores().for_caller("")
    first = StoredResponse(
        id="resp_1",
        previous_response_id=None,
        input=b'[{"type":"message","id":"m1","role":"user","content":[{"text":"a"}]}]',
        body=b'{"output":[{"type":"message","id":"m2","role":"assistant",'
        b'"content":[{"text":"b"}]}],"instructions":"Forgotten."}',
        items=("m1", "m2"),
    )
    second = StoredResponse(
        id="resp_2",
        previous_response_id="resp_1",
        input=b'[{"type":"message","id":"m3","role":"user","content":[{"text":"c"}]}]',
        body=b'{"output":[{"type":"function_call","id":"fc","call_id":"call_1","name":"weather",'
        b'"arguments":"{\\"city\\":\\"Ulm\\"}","status":"completed"}]}',
        items=("m3", "fc"),
    )
    store.add(first)
    store.add(second)
    return store


def test_a_response_is_continued_without_its_instructions():
    sent_messages = messages(build_store(), previous_response_id="resp_2", input=[OUTPUT])
    assert [(message.role, message.content) for message in sent_messages] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", None),
        ("tool", "rain"),
    ]
    assert sent_messages[3].tool_calls == (CALLED,)


def test_a_response_may_be_continued_without_new_input():
    parsed = read(build_store(), previous_response_id="resp_1", input=[])
    assert parsed.input_items == []
    assert isinstance(parsed.request.prompt, Conversation)
    assert len(parsed.request.prompt.messages) == 2


def test_only_the_new_items_are_stored():
    parsed = read(build_store(), previous_response_id="resp_2", input=[OUTPUT])
    assert [item["type"] for item in parsed.input_items] == ["function_call_output"]
    assert parsed.previous_response_id == "resp_2"


def test_malformed_arguments_of_a_stored_call_are_kept_in_an_object():
    store = ResponseStores().for_caller("")
    body = (
        b'{"output":[{"type":"function_call","id":"f","call_id":"c","name":"n",'
        b'"arguments":"{oops","status":"completed"}]}'
    )
    store.add(
        StoredResponse(id="r", previous_response_id=None, input=b"[]", body=body, items=("f",))
    )
    parsed = read(store, previous_response_id="r")
    assert isinstance(parsed.request.prompt, Conversation)
    [called] = parsed.request.prompt.messages[0].tool_calls
    assert called.arguments == '{"invalid_arguments":"{oops"}'


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "m2"}, {"id": "m2"}])
def test_an_item_may_be_referenced(reference: Any):
    sent_messages = messages(build_store(), input=[reference, {"role": "user", "content": "hi"}])
    assert sent_messages == (Message(role="assistant", content="b"), USER)


def test_an_unknown_item_reference_is_not_found():
    with pytest.raises(AppError) as raised:
        read(input=[{"type": "item_reference", "id": "none"}])
    assert (raised.value.kind, raised.value.param) == (ErrorKind.NOT_FOUND, "input.0.id")


# Tools


def test_function_definitions_are_flat():
    tool, other = read(tools=[WEATHER, TIME]).request.tools
    assert tool == Tool(
        name="weather",
        description="Tells it.",
        parameters=WEATHER["parameters"],
        strict=True,
        param="tools.0",
    )
    assert other.strict is False


def test_tool_options_are_accepted_without_tools():
    request = read(tools=[], tool_choice="auto", parallel_tool_calls=False).request
    assert request.tools == ()
    assert read(tool_choice="none").echo["tool_choice"] == "none"


@pytest.mark.parametrize(
    ("choice", "expected", "num_left"),
    [
        (None, "auto", 2),
        ("none", "none", 2),
        ("required", "required", 2),
        ({"type": "function", "name": "time"}, NamedToolChoice(name="time"), 2),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "time"}],
            },
            "required",
            1,
        ),
    ],
)
def test_tool_choice_is_applied_and_echoed(choice: Any, expected: Any, num_left: int):
    parsed = read(tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False)
    assert parsed.request.tool_choice == expected
    assert len(parsed.request.tools) == num_left
    assert parsed.request.parallel_tool_calls is False
    assert parsed.echo["tool_choice"] == (choice or "auto")
    assert len(parsed.echo["tools"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "invented"}]}, "tools.0.type"),
        ({"tools": [WEATHER | {"output_schema": {}}]}, "tools.0.output_schema"),
        ({"tools": [WEATHER | {"defer_loading": "yes"}]}, "tools.0.defer_loading"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
        ({"tools": [{"type": "function", "function": WEATHER}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
        ),
    ],
)
def test_unsupported_tools_are_rejected(fields: Any, param: str):
    assert get_error(**fields).param == param


def test_parameters_may_be_as_deep_as_the_final_event_can_echo():
    def deep(levels: int) -> Any:
        return {"not": deep(levels - 1)} if levels else {}

    read(tools=[TIME | {"parameters": deep(200)}])
    assert get_error(tools=[TIME | {"parameters": deep(251)}]).param == "tools"


# Text formats


def test_a_text_format_may_be_a_schema():
    format_ = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    parsed = read(text={"format": format_})
    assert parsed.request.grammar == JsonSchema(
        text='{"type":"object","properties":{"a":{"type":"integer"}}}', param="text.format.schema"
    )
    assert parsed.echo["text"] == {"format": format_, "verbosity": "medium"}


def test_a_text_format_may_be_any_json_object():
    parsed = read(text={"format": {"type": "json_object"}})
    assert parsed.request.grammar == JsonSchema(text='{"type":"object"}', param="text.format")


def test_the_text_format_is_ignored_if_a_tool_call_is_required():
    form = {"format": {"type": "json_object"}}
    assert read(tools=[TIME], tool_choice="required", text=form).request.grammar is None


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ({"verbosity": "loud"}, "text.verbosity"),
        ({"format": {"type": "grammar"}}, "text.format.type"),
        ({"format": {"type": "text", "schema": {}}}, "text.format.schema"),
        ({"format": {"type": "json_schema", "schema": {}}}, "text.format.name"),
        ({"format": {"type": "json_schema", "name": "n"}}, "text.format.schema"),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {}, "nam": 1}},
            "text.format.nam",
        ),
    ],
)
def test_an_unsupported_text_format_is_rejected(text: Any, param: str):
    assert get_error(text=text).param == param


# Everything else


def test_sampling_fields_reach_the_sampler():
    parsed = read(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, stop="END")
    assert parsed.request.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
    }
    assert parsed.request.stop == ("END",)
    assert (parsed.echo["temperature"], parsed.echo["top_p"]) == (0.5, 0.9)
    assert read().echo["temperature"] is None


def test_max_output_tokens_is_read():
    assert read(max_output_tokens=20).request.max_tokens == 20
    assert read().request.max_tokens is None


def test_reasoning_effort_and_budget_are_read():
    parsed = read(reasoning={"effort": "low", "summary": "auto"}, thinking_budget=100)
    assert parsed.request.reasoning == ReasoningOptions(
        effort="low", token_budget=100, param="reasoning.effort"
    )
    assert parsed.echo["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 5}, 5),
        ({"top_logprobs": 5}, 5),
    ],
)
def test_either_field_requests_logprobs(fields: Any, expected: int | None):
    assert read(**fields).request.top_logprobs == expected


def test_informational_fields_are_echoed():
    fields: dict[str, Any] = {
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "max_tool_calls": 3,
        "store": False,
    }
    echo = read(**fields).echo
    assert {name: echo[name] for name in fields} == fields


def test_store_is_true_by_default():
    assert read().store
    assert read(store=None).store
    assert not read(store=False).store


def test_neutral_values_are_accepted():
    read(
        background=False,
        truncation="disabled",
        service_tier="auto",
        conversation=None,
        prompt=None,
        text={"verbosity": "medium"},
        reasoning={"context": "auto", "mode": "standard"},
        prompt_cache_retention="in_memory",
        stream=True,
        stream_options={"include_obfuscation": False},
    )


def test_truncation_must_match_the_setting_of_the_server():
    assert read(context_shift=True, truncation="auto").echo["truncation"] == "auto"
    assert read().echo["truncation"] == "disabled"
    assert get_error(truncation="auto").param == "truncation"
    assert get_error(context_shift=True, truncation="disabled").param == "truncation"


@rows(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": []}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"image": {}}, "image"),
        ({"access_programs": {}}, "access_programs"),
        ({"prompt_cache_options": "all"}, "prompt_cache_options"),
        ({"prompt_cache_retention": 24}, "prompt_cache_retention"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"include": [None]}, "include.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, None),
        ({"instructions": ["x"]}, "instructions"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"thinking_budget": 9, "min_tokens": 1}, "min_tokens"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
    ],
)
def test_unsupported_fields_are_named_in_the_error(fields: Any, param: str | None):
    assert get_error(**fields).param == (param or "stream_options.include_obfuscation")


def test_a_request_has_the_canonical_name_of_its_model():
    """Whatever the body names, the model was resolved before the body is parsed."""
    parsed = read(model=f"{MODEL}:latest")
    assert (parsed.request.model, parsed.echo["model"]) == (MODEL, MODEL)
