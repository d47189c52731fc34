"""Messages of every role, and invalid messages."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from app.api.openai.chat import build_conversation, is_new_question
from app.api.schema.openai import CHAT
from app.core.errors import AppError, ErrorKind
from app.core.requests import Message, ToolCall
from tests.rows import rows

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def decode(messages: Any) -> Sequence[Any]:
    return CHAT.decode(json.dumps({"messages": messages}).encode()).messages


def read(*messages: Any) -> tuple[Message, ...]:
    return build_conversation(decode(list(messages))).messages


def assistant_calling(*ids: str) -> Any:
    return {"role": "assistant", "tool_calls": [{**CALL, "id": id_} for id_ in ids]}


def result(id_: str) -> Any:
    return {"role": "tool", "content": "42", "tool_call_id": id_}


USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "So."}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_role_keeps_its_name_and_text(role: str):
    assert read({"role": role, "content": "hi", "name": "ann"}) == (
        Message(role=role, content="hi", name="ann"),
    )


def test_text_parts_are_paragraphs():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert read({"role": "user", "content": parts})[0].content == "one\ntwo"


def test_an_empty_text_is_a_text():
    assert read({"role": "user", "content": ""})[0].content == ""
    assert read({"role": "user", "content": [{"type": "text", "text": ""}]})[0].content == ""


def test_a_refusal_is_content_of_the_assistant():
    parts = [{"type": "refusal", "refusal": "No."}]
    assert read({"role": "assistant", "content": parts})[0].content == "No."
    for content, text in ((None, "No."), ("", "No."), ("Hm.", "Hm.\nNo.")):
        message = {"role": "assistant", "content": content, "refusal": "No."}
        assert read(message)[0].content == text


def test_an_answer_can_be_sent_back_unchanged():
    """The message objects of the SDK and of other servers include their empty fields."""
    message: Any = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert read(message) == (Message(role="assistant", content="hi"),)


@pytest.mark.parametrize(
    ("audio", "text"),
    [
        ({"id": "audio_1"}, "[audio omitted: this model reads text only]"),
        ({"id": "audio_1", "data": "AA==", "expires_at": 1, "transcript": "Hi!"}, "Hi!"),
    ],
)
def test_an_answer_in_audio_is_a_text(audio: dict[str, Any], text: str):
    """Refusing it would end a conversation that began with a model that speaks."""
    assert read({"role": "assistant", "content": None, "audio": audio})[0].content == text


@pytest.mark.parametrize(
    "reasoning_fields",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"reasoning_content": "", "reasoning": "Hm."},
    ],
)
def test_reasoning_is_accepted_under_either_name(reasoning_fields: Any):
    message = Message(role="assistant", content="hi", reasoning="Hm.")
    assert read({"role": "assistant", "content": "hi", **reasoning_fields}) == (message,)


def test_empty_reasoning_is_none():
    message = {"role": "assistant", "content": "hi", "reasoning_content": "", "reasoning": None}
    assert read(message)[0].reasoning is None


def test_parsed_fields_of_the_sdk_are_accepted():
    arguments = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {**CALL, "function": arguments}
    message = {"role": "assistant", "content": "{}", "parsed": {}, "tool_calls": [call]}
    assert read(message, result("c1"))[0].content == "{}"


def test_tool_calls_may_keep_the_index_of_the_stream():
    message, _ = read({"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}, result("c1"))
    assert message.tool_calls == (ToolCall(id="c1", name="f", arguments='{"a": 1}'),)


def test_tool_calls_and_results_are_read():
    assistant, result = read(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    )
    assert assistant.content is None
    assert assistant.tool_calls == (ToolCall(id="c1", name="f", arguments='{"a": 1}'),)
    assert result == Message(role="tool", content="42", tool_call_id="c1")


@pytest.mark.parametrize(
    "messages",
    [
        [assistant_calling("a"), result("a")],
        [assistant_calling("a", "b"), result("b"), result("a"), USER],
        [
            USER,
            assistant_calling("a"),
            result("a"),
            assistant_calling("a"),
            result("a"),
            ASSISTANT,
            USER,
        ],
        [assistant_calling("a"), result("a"), result("a"), ASSISTANT],  # a result in two parts
        [assistant_calling("a", "a"), result("a")],  # a model that repeats its ids
    ],
)
def test_results_follow_their_calls(messages: Any):
    assert len(read(*messages)) == len(messages)


@pytest.mark.parametrize(
    ("messages", "param", "expected"),
    [
        ([result("a")], "messages.0.role", "must be a response to a preceding message"),
        ([USER, result("a")], "messages.1.role", "must be a response to a preceding message"),
        ([ASSISTANT, result("a")], "messages.1.role", "must be a response to a preceding message"),
        (
            [assistant_calling("a"), result("a"), USER, result("a")],
            "messages.3.role",
            "must be a response to a preceding message",
        ),
        ([USER, assistant_calling("a"), result("b")], "messages.2.tool_call_id", "'b' not found"),
        ([assistant_calling("a")], "messages.0.tool_calls", "response messages: a"),
        (
            [assistant_calling("a"), USER, result("a")],
            "messages.0.tool_calls",
            "response messages: a",
        ),
        (
            [USER, assistant_calling("a", "b", "c"), result("b"), ASSISTANT],
            "messages.1.tool_calls",
            "a, c",
        ),
        (
            [assistant_calling("a"), assistant_calling("b"), result("a")],
            "messages.0.tool_calls",
            ": a",
        ),
    ],
)
def test_tool_results_without_calls_and_calls_without_results_are_rejected(
    messages: Any, param: str, expected: str
):
    """With OpenAI's error messages."""
    with pytest.raises(AppError) as caught:
        read(*messages)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
    assert expected in caught.value.message


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "two"])
def test_malformed_arguments_are_kept_in_an_object(arguments):
    """The client replies to such a call with an error, and the call stays in the conversation."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    [message, _] = read({"role": "assistant", "tool_calls": [call]}, result("c1"))
    assert json.loads(message.tool_calls[0].arguments) == {"invalid_arguments": arguments}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_null_missing_and_empty_content_are_the_same(role: str, content: Any):
    [message] = read({"role": role, **content})
    assert message == Message(role=role, content="")


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_null_missing_and_empty_content_are_the_same_around_calls(content: Any):
    called, returned = read(
        {"role": "assistant", "tool_calls": [CALL], **content},
        {"role": "tool", "tool_call_id": "c1", **content},
    )
    assert (called.content, returned.content) == (None, "")


@pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_reasoning_alone_is_a_turn(calls: Any):
    [message] = read({"role": "assistant", "reasoning_content": "Hm.", "content": None, **calls})
    assert message == Message(role="assistant", content="", reasoning="Hm.")


def test_thinking_of_mistral_is_omitted():
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "closed": True}
    content = [thinking, {"type": "text", "text": "hi"}]
    assert read({"role": "assistant", "content": content}) == (
        Message(role="assistant", content="hi"),
    )


def test_a_call_of_mistral_has_no_type():
    call = {name: value for name, value in CALL.items() if name != "type"}
    message, _ = read({"role": "assistant", "tool_calls": [call]}, result("c1"))
    assert message.tool_calls == (ToolCall(id="c1", name="f", arguments='{"a": 1}'),)


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}])
def test_a_call_without_arguments_has_an_empty_object(arguments: dict[str, Any]):
    call = {**CALL, "function": {"name": "f", **arguments}}
    message, _ = read({"role": "assistant", "tool_calls": [call]}, result("c1"))
    assert message.tool_calls[0].arguments == "{}"


def function(**fields: Any) -> Any:
    call = {**CALL, "function": {"name": "f", "arguments": "{}", **fields}}
    return {"role": "assistant", "tool_calls": [call]}


WRONG: list[tuple[Any, str]] = [
    ("hi", "messages.0"),
    (None, "messages.0"),
    ({"content": "hi"}, "messages.0.role"),
    ({"role": 5, "content": "hi"}, "messages.0.role"),
    ({"role": "wizard", "content": "hi"}, "messages.0.role"),
    ({"role": "function", "content": "hi", "name": "f"}, "messages.0.role"),
    ({"role": "user", "content": 5}, "messages.0.content"),
    ({"role": "user", "content": ["hi"]}, "messages.0.content.0"),
    ({"role": "user", "content": [{"text": "hi"}]}, "messages.0.content.0.type"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.0.content.0.text"),
    (
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:,"}},
            ],
        },
        "messages.0.content.1",
    ),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "messages.0.content.0"),
    ({"role": "user", "content": [{"type": "file"}]}, "messages.0.content.0"),
    ({"role": "user", "content": [{"type": "refusal"}]}, "messages.0.content.0"),
    ({"role": "user", "content": "hi", "name": 5}, "messages.0.name"),
    ({"role": "user", "content": "hi", "tool_calls": [CALL]}, "messages.0.tool_calls"),
    ({"role": "assistant", "content": "a", "refusal": 5}, "messages.0.refusal"),
    ({"role": "assistant", "content": "a", "audio": 5}, "messages.0.audio"),
    ({"role": "assistant", "function_call": {}}, "messages.0.function_call"),
    ({"role": "assistant", "content": "a", "reasoning": 5}, "messages.0.reasoning"),
    (
        {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"},
        "messages.0.reasoning",
    ),
    ({"role": "user", "content": "a", "reasoning": "b"}, "messages.0.reasoning"),
    ({"role": "assistant", "tool_calls": {}}, "messages.0.tool_calls"),
    ({"role": "assistant", "tool_calls": [5]}, "messages.0.tool_calls.0"),
    ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls.0.id"),
    (
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
        "messages.0.tool_calls.0.type",
    ),
    (function(name=None), "messages.0.tool_calls.0.function.name"),
    (function(arguments={}), "messages.0.tool_calls.0.function.arguments"),
    ({"role": "tool", "content": "42"}, "messages.0.tool_call_id"),
]


@rows(("message", "param"), WRONG)
def test_an_invalid_message_is_named_in_the_error(message: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(message)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)


@pytest.mark.parametrize("messages", ["hi", {}, 5, []])
def test_messages_must_be_a_non_empty_array(messages: Any):
    with pytest.raises(AppError) as caught:
        decode(messages)
    assert caught.value.param == "messages"


def test_message_indices_in_errors_start_at_zero():
    good = {"role": "user", "content": "hi"}
    with pytest.raises(AppError) as caught:
        read(good, good, {"role": "wizard", "content": "hi"})
    assert caught.value.param == "messages.2.role"


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([], False),
        (["user"], True),
        (["assistant", "user"], True),
        (["user", "assistant"], False),
        (["user", "assistant", "tool"], False),
        (["user", "assistant", "tool", "user"], False),
        (["user", "assistant", "tool", "user", "assistant", "user"], True),
    ],
)
def test_a_question_is_new_unless_a_tool_result_precedes_it(roles: list[str], expected: bool):
    assert is_new_question(roles) is expected
