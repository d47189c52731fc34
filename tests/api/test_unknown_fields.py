"""One rule for fields that the server does not know, in every dialect: ignored and reported, unless
the name is a misspelled known one or the server is strict."""

import asyncio
import json
import string
from copy import deepcopy
from functools import cache, reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.schema.decode import check_unknown, find_misspelled, is_one_edit
from app.core.errors import AppError
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.settings import Settings
from tests.api.asgi import Conversation, Reply, send_request
from tests.api.test_fields_table import FRESH
from tests.api.test_nulls import BODIES as NULL_BODIES
from tests.api.test_nulls import DATA, iter_object_paths, with_field
from tests.fakes import CARD, DETAILS, FakeGenerate, build_fake_app
from tests.rows import rows

MODEL = {"model": CARD.id}
OLLAMA = {"model": DETAILS.name}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# for each path, a body with objects at every level of the dialect
BODIES: dict[str, Any] = {
    **NULL_BODIES,
    "/v1/tokenize": {**MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {
        name: value
        for name, value in NULL_BODIES["/v1/messages"].items()
        if name not in ("max_tokens", "stream")
    },
    "/v1/responses/input_tokens": {**MODEL, "input": "hi"},
    "/api/chat": {
        **OLLAMA,
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "So.",
                "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
            },
            {"role": "tool", "content": "4", "tool_name": "f"},
        ],
        "tools": [TOOL],
        "options": {"temperature": 1},
        "stream": False,
    },
    "/api/generate": {**OLLAMA, "prompt": "hi", "options": {"temperature": 1}, "stream": False},
    "/api/embed": {**OLLAMA, "input": "hi"},
    "/api/embeddings": {**OLLAMA, "prompt": "hi"},
    "/api/show": OLLAMA,
}
# objects whose keys are the client's
OWN_KEYS = (*DATA, "metadata", "logit_bias", "arguments", "cache_control")
OBJECT_PATHS = [
    (path, object_path)
    for path, body in BODIES.items()
    for object_path in iter_object_paths(body)
    if object_path[-1:] not in [(name,) for name in OWN_KEYS]
]
# fields that other servers and clients add, at the top level and in the parts of a conversation
OTHERS = {
    "provider_specific_fields": {"thought_signature": "c2ln"},
    "cot_id": "9b1f",
    "cot_summary": "Thinks.",
    "copilot_cache_control": {"type": "ephemeral"},
    "reasoning_opaque": "x",
    "flux_capacitor": 1.21,
}


def send(path: str, body: Any, **options: Any) -> tuple[Reply, list[Any]]:
    generate = FakeGenerate()
    reply = send_request(generate, "POST", path, body, **options)
    return reply, [*generate.opened, *generate.embedded, *generate.loaded, *generate.unloaded]


@cache
def send_plain(path: str) -> tuple[Reply, list[Any]]:
    return send(path, BODIES[path])


def notice_of(reply: Reply) -> str:
    return reply.headers.get("x-mlxrunner-notice", "")


@rows(("path", "object_path"), OBJECT_PATHS, ids=str, parts=3)
def test_an_unknown_field_is_ignored_and_named_in_the_notice(
    path: str, object_path: tuple[str | int, ...]
):
    body = deepcopy(BODIES[path])
    reduce(lambda node, step: node[step], object_path, body).update(OTHERS)
    reply, calls = send(path, body)
    plain, plain_calls = send_plain(path)
    assert (reply.status, plain.status) == (200, 200), reply.body
    assert calls == plain_calls
    at = "".join(f"{step}." for step in object_path if isinstance(step, str))
    names = ", ".join(f"{at}{name}" for name in OTHERS)
    assert f"ignored unknown fields: {names}" in notice_of(reply)
    assert "ignored" not in notice_of(plain)
    # Ollama's responses contain durations; a response of OpenAI's repeats two objects
    if not (path.startswith("/api/") or object_path[:1] in (("tool_choice",), ("text",))):
        assert FRESH.sub(b"", reply.body) == FRESH.sub(b"", plain.body)


@rows("path", list(BODIES))
def test_a_misspelled_name_of_a_known_field_is_an_error(path: str):
    known = list(BODIES[path])
    assert known
    for name in known:
        for wrong in (name[:-1], f"{name}s", f"x{name}", name[1:]):
            reply, calls = send(path, {**BODIES[path], wrong: BODIES[path][name]})
            assert reply.status == 400, (wrong, reply.body)
            assert calls == []
            assert f"'{wrong}'" in reply.body.decode()
            assert "did you mean" in reply.body.decode()


def test_the_error_for_a_misspelled_field_says_what_was_meant():
    reply, _ = send("/v1/chat/completions", {**CHAT, "temprature": 0.5})
    assert reply.error["param"] == "temprature"
    assert reply.error["message"] == "unknown field 'temprature': did you mean 'temperature'?"
    reply, _ = send("/v1/messages", {**BODIES["/v1/messages"], "sytem": "Be brief."})
    assert reply.json["error"]["message"] == "sytem: unknown field 'sytem': did you mean 'system'?"


CHAT: Any = {**MODEL, "messages": [{"role": "user", "content": "hi"}]}


def test_a_name_like_a_known_one_is_ignored_in_a_message():
    body = deepcopy(CHAT)
    body["messages"][0]["names"] = "ada"
    reply, _ = send("/v1/chat/completions", body)
    assert (reply.status, notice_of(reply)) == (200, "ignored unknown fields: messages.names")


def test_a_misspelled_option_of_an_output_format_is_an_error():
    body = {**CHAT, "response_format": {"type": "json_object", "json_schemas": {}}}
    reply, _ = send("/v1/chat/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "response_format.json_schemas")


@rows("path", list(BODIES))
def test_a_strict_server_rejects_unknown_fields_at_the_top_only(path: str):
    body = {**BODIES[path], "flux_capacitor": 1}
    reply, calls = send(path, body, strict_fields=True)
    assert (reply.status, calls) == (400, [])
    assert "unknown field 'flux_capacitor'" in reply.body.decode()
    assert "--strict-fields" in reply.body.decode()
    inner = next((each for at, each in OBJECT_PATHS if at == path and each), None)
    if inner is not None:
        body = with_field(BODIES[path], inner, "flux_capacitor", 1)
        assert send(path, body, strict_fields=True)[0].status == 200


def test_a_stream_reports_unknown_fields_as_well():
    reply, _ = send("/v1/chat/completions", {**CHAT, "stream": True, "cot_id": "x"})
    assert notice_of(reply) == "ignored unknown fields: cot_id"


def test_the_notice_is_short_and_printable_whatever_the_names_are():
    names = ["a b", "é", "x\r\nset-cookie: a", "y" * 5000, *(f"field_{n}" for n in range(500))]
    body = {**CHAT, **dict.fromkeys(names, 1)}
    reply, _ = send("/v1/chat/completions", body)
    notice = notice_of(reply)
    assert reply.status == 200
    assert len(notice) <= 1000
    assert notice.isascii()
    assert notice.isprintable()
    assert notice.endswith("…".encode("ascii", "backslashreplace").decode())


def test_a_long_conversation_names_a_field_once():
    turns = [{"role": "user", "content": "hi", "cot_id": str(n)} for n in range(50)]
    reply, _ = send("/v1/chat/completions", {**CHAT, "messages": turns})
    assert notice_of(reply) == "ignored unknown fields: messages.cot_id"


def test_ignored_fields_are_counted_by_route():
    async def run() -> bytes:
        app = build_fake_app(FakeGenerate(), Settings())
        for body in ({**CHAT, "cot_id": 1, "cot_summary": 2}, CHAT):
            data = json.dumps(body).encode()
            await Conversation(app, "POST", "/v1/chat/completions", data, None).end()
        return (await Conversation(app, "GET", "/metrics", b"", None).end()).body

    text = asyncio.run(run()).decode()
    assert 'mlxrunner_unknown_fields_total{handler="/v1/chat/completions"} 2.0' in text


NAMES = st.text(string.ascii_lowercase[:4], max_size=6)


def count_edits(a: str, b: str) -> int:
    """The distance with insertions, deletions, replacements and swapped neighbors."""
    table = [
        [max(i, j) if 0 in (i, j) else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)
    ]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            table[i][j] = min(
                table[i - 1][j] + 1,
                table[i][j - 1] + 1,
                table[i - 1][j - 1] + (a[i - 1] != b[j - 1]),
            )
            if i > 1 and j > 1 and a[i - 2 : i] == b[j - 2 : j][::-1]:
                table[i][j] = min(table[i][j], table[i - 2][j - 2] + 1)
    return table[-1][-1]


@given(NAMES, NAMES)
@settings(max_examples=300, deadline=None)
def test_one_edit_is_an_edit_distance_of_one(a: str, b: str):
    assert is_one_edit(a, b) == (count_edits(a, b) == 1)


@given(st.sampled_from(["temperature", "max_tokens", "stop"]), st.data())
@settings(max_examples=100, deadline=None)
def test_each_edit_of_a_name_is_found(name: str, data: Any):
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from(string.ascii_lowercase))
    edits = {name[:at] + name[at + 1 :], name[:at] + letter + name[at:]}
    edits.add(name[:at] + letter + name[at + 1 :])
    for edit in edits - {name}:
        assert find_misspelled(edit, {"temperature", "max_tokens", "stop"}) == name


def test_many_unknown_names_are_not_all_compared():
    known = {"temperature"}
    check_unknown([*(f"a{n}b" for n in range(100)), "temprature"], known)
    with pytest.raises(AppError):
        check_unknown(["temprature"], known)


def test_a_log_has_only_names_that_look_like_names():
    context = RequestContext(id="r")
    token = REQUEST_CONTEXT.set(context)
    try:
        check_unknown(["cot_id", "what nobody may read"], ())
    finally:
        REQUEST_CONTEXT.reset(token)
    assert context.build_notice() == "ignored unknown fields: cot_id, 'what nobody may read'"
    redacted = context.build_notice(redact=True)
    assert redacted == "ignored unknown fields: cot_id, \\u2026"
    assert context.ignored_fields == 2
