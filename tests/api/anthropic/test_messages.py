"""Anthropic's messages."""

from typing import Any

import pytest

from tests.api.anthropic.requests import (
    body,
    call,
    conversation,
    message,
    parse_body,
    prompt_of,
    rejection,
    result,
    turns,
    words,
)
from tests.rows import rows

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.84c; cc_entrypoint=cli; cch=a1b2c;"


THOUGHT = {"type": "thinking", "thinking": "Hm", "signature": "x"}


def test_the_blocks_of_the_system_prompt_are_paragraphs():
    """llama.cpp, vLLM and Ollama joined them without any separator."""
    assert turns("hi", system=[words("a"), words(""), words("b")])[0] == ("system", "a\n\nb")
    assert turns("hi", system="a") == [("system", "a"), ("user", "hi")]
    assert turns("hi", system="") == [("user", "hi")]
    assert turns("hi", system=[]) == [("user", "hi")]


def test_the_billing_header_of_claude_code_is_removed():
    assert turns("hi", system=[words(BILLING), words("a")])[0] == ("system", "a")
    assert turns("hi", system=BILLING) == [("user", "hi")]


def test_consecutive_messages_of_one_role_are_merged():
    said = turns("a", "b", message("assistant", words("c")), message("assistant", words("d")), "e")
    assert said == [("user", "a\nb"), ("assistant", "cd"), ("user", "e")]


def test_system_messages_stay_in_place():
    """Others hoisted them to the front, so that nothing was cached, or rejected the session."""
    later = {"role": "system", "content": "new"}
    said = turns("a", later, later, message("assistant", words("b")), "c", system="old")
    assert [role for role, _ in said] == ["system", "user", "system", "system", "assistant", "user"]


def test_results_come_before_text_beside_them():
    """llama.cpp put the text between the call and its result."""
    beside = message("user", words("<reminder>"), result("1"), words("b"), result("2"))
    said = turns("hi", message("assistant", call("1"), call("2")), beside, "c")[2:]
    assert said == [("tool", "done"), ("tool", "done"), ("user", "<reminder>\nb\nc")]


def test_a_system_message_may_come_between_results():
    later = {"role": "system", "content": "s"}
    asked = [message("assistant", call("1"), call("2")), message("user", result("1")), later]
    said = turns("hi", *asked, message("user", result("2")))[2:]
    assert said == [("tool", "done"), ("system", "s"), ("tool", "done")]


def test_the_result_of_an_unknown_call_becomes_text():
    assert turns(message("user", result("x"), words("b"))) == [
        ("user", "Result of the tool call x:\ndone\nb")
    ]
    again = message("user", result("1"), result("1", "twice"), result("1", ""))
    said = turns("hi", message("assistant", call("1")), again)[2:]
    assert said == [("tool", "done"), ("user", "Result of the tool call 1:\ntwice")]


def test_a_last_message_of_the_assistant_is_continued():
    prompt = conversation("hi", message("assistant", words("Hel")))
    assert prompt.continue_final
    assert prompt.messages[-1].content == "Hel"
    assert conversation("hi", message("assistant", THOUGHT)).continue_final
    assert not conversation("hi").continue_final
    assert not conversation("hi", {"role": "assistant", "content": ""}).continue_final


def test_a_temporary_message_is_omitted_after_the_next_user_message():
    now = {"role": "system", "content": "left: 9", "clear_at": "next_user_message"}
    [*_, last] = prompt_of("a", now)
    assert (last.content, last.is_temporary) == ("left: 9", True)
    assert turns("a", now, "b") == [("user", "a\nb")]
    assert turns("a", now, message("assistant", words("b")))[1] == ("system", "left: 9")
    kept = {**now, "clear_at": "never"}
    assert turns("a", kept, "b")[1] == ("system", "left: 9")


def test_a_system_message_sets_the_effort_of_its_turn():
    low = {"role": "system", "content": "x", "output_config": {"effort": "low"}}
    high = {"output_config": {"effort": "high"}}
    assert parse_body(body("a", low, **high)).reasoning.effort == "low"
    loop = [message("assistant", call("1")), message("user", result("1"), words("reminder"))]
    assert parse_body(body("a", low, *loop, **high)).reasoning.effort == "low"
    later = [message("assistant", words("b")), "c"]
    assert parse_body(body("a", low, *later, **high)).reasoning.effort == "high"


@pytest.mark.parametrize("role", ["ctx", "msg"])
def test_unusual_roles_of_claude_code_become_user(role: str):
    assert turns({"role": role, "content": "x"}) == [("user", "x")]


@rows(
    ("messages", "path"),
    [
        ([], "messages"),
        (["x"], "messages.0"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages"),
        ([{"role": "user", "content": None}], "messages"),
        ([{"role": "user", "content": ""}], "messages"),
        ([{"role": "user", "content": []}, message("assistant")], "messages"),
        ([{"role": "user", "content": "x"}, message("assistant", call())], "messages.1"),
        ([{"role": "system", "content": "x", "clear_at": "later"}], "messages.0.clear_at"),
        ([{"role": "system", "content": "x", "output_config": 1}], "messages.0.output_config"),
        ([message("system", {"type": "tool_result"})], "messages.0.content.0"),
    ],
)
def test_an_invalid_conversation_is_rejected_with_its_path(messages: Any, path: str):
    assert rejection({**body(), "messages": messages}).startswith(path)
