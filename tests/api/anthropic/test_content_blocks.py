"""Anthropic's content blocks."""

from typing import Any

import pytest

from app.api.opaque_reasoning import encode_reasoning
from tests.api.anthropic.requests import (
    body,
    call,
    message,
    prompt_of,
    rejection,
    result,
    send,
    turns,
    words,
)
from tests.rows import rows

MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PLAIN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}


def user(*blocks: Any) -> str | None:
    [(role, content)] = turns(message("user", *blocks))
    assert role == "user"
    return content


def test_text_blocks_are_paragraphs_and_empty_ones_are_skipped():
    assert user({**words("a"), **MARK}, words(""), {**words("b"), "citations": None}) == "a\nb"


def test_documents_and_search_results_are_text():
    assert user({**PLAIN, "title": "T", "context": "C"}) == "T\nC\nD"
    parts = {"type": "content", "content": [words("x"), words("y")]}
    assert user({"type": "document", "source": parts}) == "x\ny"
    assert user({"type": "document", "source": {"type": "content", "content": "z"}}) == "z"
    found = {"type": "search_result", "source": "S", "title": "T", "content": [words("x")]}
    assert user(found) == "T\nS\nx"
    assert user({"type": "tool_reference", "tool_name": "f"}) == "Tool: f"


def test_a_compaction_is_its_summary():
    assert user({"type": "compaction", "content": "So far."}, words("x")) == "So far.\nx"
    assert user({"type": "compaction"}, words("x")) == "x"


@rows(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        {"type": "document", "source": {"type": "base64", "data": ""}},
        {"type": "document", "source": {"type": "content", "content": [PLAIN]}},
        {"type": "thinking", "thinking": "x"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        {"type": "hologram"},
        {"text": "no type"},
        {"type": "text"},
        {"type": "tool_result", "content": "x"},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "hologram"}]},
        "text",
    ],
)
def test_a_block_that_is_not_supported_is_rejected_with_its_path(block: Any):
    asked = body(message("user", words("x"), block))
    assert rejection(asked).startswith("messages.0.content.1")


def test_thinking_is_the_reasoning_of_its_message():
    """Whatever its signature; without its text, our signature has it."""
    thoughts = [
        {"type": "thinking", "thinking": "One.", "signature": "EqQBCgIYAh"},
        {"type": "thinking", "thinking": "", "signature": encode_reasoning("Two.")},
        {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAh"},
    ]
    said = prompt_of("hi", message("assistant", *thoughts, words("a"), words("b")), "and?")[1]
    assert (said.reasoning, said.content) == ("One.\nTwo.", "ab")


def test_a_call_keeps_the_order_of_its_arguments_and_its_id():
    """A different order was a different prompt in Ollama, so nothing was cached."""
    asked = {"z": 1, "a": {"y": "ü", "b": None}}
    given = [call("toolu_" + "0a" * 12, "f", **asked), call("toolu_01AbC", "g")]
    said, first, second = prompt_of(
        "hi",
        message("assistant", *given),
        message("user", result("toolu_" + "0a" * 12), result("toolu_01AbC")),
    )[1:]
    assert [one.arguments for one in said.tool_calls] == ['{"z":1,"a":{"y":"ü","b":null}}', "{}"]
    assert [one.id for one in said.tool_calls] == ["call_" + "0a" * 12, "toolu_01AbC"]
    assert [first.tool_call_id, second.tool_call_id] == ["call_" + "0a" * 12, "toolu_01AbC"]
    assert said.content is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("done", "done"),
        ([words("a"), words("b"), PLAIN], "a\nb\nD"),
        ([], ""),
    ],
)
def test_a_result_is_text(content: Any, expected: str):
    [answer] = prompt_of(
        "hi", message("assistant", call()), message("user", result(content=content))
    )[2:]
    assert (answer.role, answer.content, answer.is_error) == ("tool", expected, False)


def test_a_failed_call_is_known_to_have_failed():
    """llama.cpp drops `is_error`."""
    failed = message("user", result(is_error=True))
    assert prompt_of("hi", message("assistant", call()), failed)[2].is_error


def test_blocks_of_anthropics_servers_are_omitted_with_a_notice():
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": []},
        words("Found."),
    ]
    reply, generate = send(body("hi", message("assistant", *blocks), "and?"))
    assert [one.content for one in generate.opened[0].prompt.messages] == ["hi", "Found.", "and?"]  # type: ignore[union-attr]
    notice = reply.headers["x-mlxrunner-notice"]
    assert notice.isascii()
    assert notice.endswith("(redacted_thinking, server_tool_use, web_search_tool_result)")


def test_added_and_removed_tools_become_text():
    inline = {"name": "f", "description": "Does.", "input_schema": {"type": "object"}}
    changes = message(
        "system",
        {"type": "tool_addition", "tool": inline},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "tool_name": "g"}},
        {"type": "tool_addition", "tool": {"name": "h", "input_schema": {}}},
        {"type": "tool_removal", "tool": {"name": "g"}},
    )
    [(role, content)] = turns("hi", changes)[1:]
    assert role == "system"
    assert content == (
        'The tool f is available from here on: Does.\nArguments: {"type":"object"}\n'
        "The tool g is available from here on.\n"
        'The tool h is available from here on.\nArguments: {"type":"object","properties":{}}\n'
        "The tool g is not available from here on."
    )


@pytest.mark.parametrize("content", [1, {}, True])
def test_content_is_a_text_or_blocks(content: Any):
    asked = body({"role": "user", "content": content})
    assert rejection(asked).startswith("messages.0.content")
