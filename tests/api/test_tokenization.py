"""Tokenization and detokenization, for three kinds of clients."""

from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.requests import Message, ReasoningOptions
from tests.fakes import CARD, FakeGenerate
from tests.rows import rows

TOKENIZE = ("/v1/tokenize", "/tokenize")
DETOKENIZE = ("/v1/detokenize", "/detokenize")
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", TOKENIZE)
@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", "text/json", ""])
def test_a_plain_text_body_returns_a_bare_array(call: Any, path: str, kind: str):
    """The format of Ollama's client for its runner."""
    content = 'hé {"prompt": "x"}'
    reply = call("POST", path, content.encode(), {"content-type": kind})
    assert reply.json == list(content.encode())


@pytest.mark.parametrize("path", TOKENIZE)
@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
@pytest.mark.parametrize("name", ["prompt", "content", "text"])
def test_a_json_body_returns_the_format_of_vllm_and_llama_cpp(
    call: Any, path: str, kind: str, name: str
):
    reply = call("POST", path, {name: "hé"}, {"content-type": kind})
    assert reply.json == {
        "count": 3,
        "max_model_len": CARD.context_length,
        "tokens": [*"hé".encode()],
        "token_strs": None,
    }


@pytest.mark.parametrize(
    ("body", "special"),
    [
        ({"prompt": "x"}, True),
        ({"text": "x"}, True),
        ({"content": "x"}, False),
        ({"prompt": "x", "add_special_tokens": False}, False),
        ({"content": "x", "add_special": True}, True),
        ({"prompt": "x", "add_special": False, "add_special_tokens": False}, False),
        ({"content": "x", "parse_special": True}, False),
    ],
)
def test_the_name_of_the_text_field_selects_the_default_of_special_tokens(
    call: Any, generate: FakeGenerate, body: Any, special: bool
):
    assert call("POST", "/tokenize", body).status == 200
    assert generate.tokenized == [("x", CARD.id, special)]


def test_the_model_is_named_in_the_body(call: Any, generate: FakeGenerate):
    assert call("POST", "/tokenize", {"prompt": "x", "model": CARD.id}).status == 200
    assert generate.tokenized == [("x", CARD.id, True)]
    assert generate.resolved == [CARD.id]
    missing = call("POST", "/tokenize", {"prompt": "x", "model": "none"})
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_token_strings_and_pieces_are_returned_on_request(call: Any):
    body = {"prompt": "hé", "return_token_strs": True}
    assert call("POST", "/tokenize", body).json["token_strs"] == ["h", "\ufffd", "\ufffd"]
    pieces = call("POST", "/tokenize", {"content": "hé", "with_pieces": True}).json
    assert pieces["tokens"] == [
        {"id": 104, "piece": "h"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]
    assert pieces["count"] == 3


def test_a_conversation_is_tokenized_with_the_chat_template(call: Any, generate: FakeGenerate):
    body = {
        "model": CARD.id,
        "messages": HI,
        "add_special_tokens": False,
        "add_generation_prompt": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    assert call("POST", "/tokenize", body).json["tokens"] == [*b"hi"]
    (request,) = generate.tokenized_chats
    assert request.model == CARD.id
    assert request.prompt.messages == (Message(role="user", content="hi"),)  # pyright: ignore
    assert request.reasoning == ReasoningOptions(effort="low")
    assert [tool.name for tool in request.tools] == ["f"]
    assert request.chat_template_kwargs == {"enable_thinking": False}


def test_the_generation_prompt_can_be_disabled(call: Any, generate: FakeGenerate):
    body = {"messages": HI, "add_generation_prompt": False}
    assert call("POST", "/v1/tokenize", body).status == 200
    assert generate.tokenized_chats[0].chat_template_kwargs == {"add_generation_prompt": False}
    assert generate.tokenized_chats[0].model == CARD.id


def test_a_conversation_that_the_template_rejects_is_a_400(call: Any, generate: FakeGenerate):
    generate.open_error = AppError(ErrorKind.INVALID, "the template refuses it", param="messages")
    reply = call("POST", "/tokenize", {"messages": HI})
    assert (reply.status, reply.error["param"]) == (400, "messages")


@rows(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"content": 5}, "content"),
        ({"prompt": "a", "content": "a"}, "content"),
        ({"prompt": "a", "messages": HI}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HI, "chat_template": "x"}, "chat_template"),
        ({"messages": HI, "add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"prompt": "a", "add_special": True, "add_special_tokens": False}, "add_special"),
        ({"prompt": "a", "parse_special": False}, "parse_special"),
        ({"prompt": "a", "with_pieces": 1}, "with_pieces"),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ({"prompt": "a", "model": 5}, "model"),
        ({"prompt": "a", "modell": "x"}, "modell"),
        ("a", None),
        (b"{", None),
        (b"", None),
    ],
)
def test_an_invalid_field_of_tokenize_is_named(call: Any, body: Any, param: str | None):
    reply = call("POST", "/tokenize", body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_tokenize_without_a_model_is_a_503(call: Any, generate: FakeGenerate):
    generate.cards = ()
    assert call("POST", "/tokenize", {"prompt": "a"}).status == 503


@pytest.mark.parametrize("path", DETOKENIZE)
def test_detokenize_returns_the_text_under_the_names_of_both_servers(call: Any, path: str):
    ids = [*"hé {}".encode()]
    for body in (ids, {"tokens": ids}, {"tokens": ids, "model": CARD.id}):
        assert call("POST", path, body).json == {"content": "hé {}", "prompt": "hé {}"}


def test_empty_text_and_empty_ids(call: Any):
    assert call("POST", "/v1/tokenize", b"", {"content-type": "text/plain"}).body == b"[]"
    assert call("POST", "/tokenize", {"prompt": ""}).json["tokens"] == []
    assert call("POST", "/v1/detokenize", []).json == {"content": "", "prompt": ""}


def test_invalid_utf8_is_rejected(call: Any):
    for kind in ("text/plain", "application/json"):
        assert call("POST", "/v1/tokenize", b"\xff", {"content-type": kind}).status == 400


@rows(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"tokens": "a"}, "tokens"),
        ({"tokens": ["a"]}, "tokens.0"),
        ({"tokens": [1, True]}, "tokens.1"),
        ({"tokens": [-1]}, "tokens.0"),
        ({"tokens": [256]}, "tokens"),
        ({"tokens": [1], "token": 1}, "token"),
        ([1, 2.5], "tokens.1"),
        ("a", None),
    ],
)
def test_an_invalid_token_id_is_named(call: Any, body: Any, param: str | None):
    reply = call("POST", "/v1/detokenize", body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_the_tokenizer_is_described(call: Any):
    assert call("GET", "/tokenizer_info").json["eos_token"] is None
