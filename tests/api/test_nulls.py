"""A null field is treated as absent: in every dialect, at every level, known or unknown."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.api.asgi import Reply, send_request
from tests.api.test_fields_table import FRESH, MINIMAL, PATHS, read_schema_fields
from tests.fakes import CARD, FakeGenerate
from tests.rows import rows

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "It does.", "parameters": SCHEMA, "strict": True}
MODEL = {"model": CARD.id}

# for each path, a body with objects at every level of the dialect
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        **MODEL,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": "So.",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "4"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
        },
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
        },
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {"4": 1},
        "metadata": {"topic": "tides"},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {
        **MODEL,
        "prompt": "hi",
        "structured_outputs": {"regex": "a"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {"4": 1},
    },
    "/v1/responses": {
        **MODEL,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "4"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "metadata": {"topic": "tides"},
        "logit_bias": {"4": 1},
    },
    "/v1/messages": {
        **MODEL,
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"}],
            },
        ],
        "tools": [{"name": "f", "description": "It does.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u-17"},
        "stream": True,
    },
    "/v1/embeddings": {**MODEL, "input": "hi"},
    "/v1/models/load": MODEL,
    "/v1/models/preview": MODEL,
    "/v1/models/defaults": {**MODEL, "defaults": {"aliases": ["m"]}},
    "/v1/models/unload": MODEL,
    "/v1/load_lora_adapter": {**MODEL, "lora_name": "a", "lora_path": "/a"},
    "/v1/unload_lora_adapter": {**MODEL, "lora_name": "a"},
    "/v1/detokenize": {"tokens": [104]},
    "/completion": {"prompt": "hi", "options": {"temperature": 1}},
}
# objects in a request that contain data, where null has its own meaning
DATA = ("schema", "parameters", "input", "input_schema", "chat_template_kwargs")


def iter_object_paths(
    node: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    """The paths of the objects in a body that have fields."""
    if isinstance(node, dict):
        yield path
    children: Any = node.items() if isinstance(node, dict) else enumerate(node)
    for name, child in children:
        if isinstance(child, dict | list) and name not in DATA:
            yield from iter_object_paths(child, (*path, name))


OBJECT_PATHS = [
    (path, object_path) for path, body in BODIES.items() for object_path in iter_object_paths(body)
]


def with_field(body: Any, object_path: tuple[str | int, ...], name: str, value: object) -> Any:
    changed = node = deepcopy(body)
    for step in object_path:
        node = node[step]
    node[name] = value
    return changed


def send(path: str, body: Any) -> tuple[Reply, list[Any]]:
    generate = FakeGenerate()
    reply = send_request(generate, "POST", path, body)
    calls = [*generate.opened, *generate.embedded, *generate.loaded, *generate.unloaded]
    return reply, calls


def assert_same(path: str, body: Any, plain: Any) -> None:
    reply, calls = send(path, body)
    expected, plain_calls = send(path, plain)
    assert (reply.status, expected.status) == (200, 200), reply.body
    assert FRESH.sub(b"", reply.body) == FRESH.sub(b"", expected.body)
    # schemas and other data are passed on unchanged
    assert calls == plain_calls


@rows(("path", "object_path"), OBJECT_PATHS, ids=str)
def test_an_unknown_null_field_is_ignored(path: str, object_path: tuple[str | int, ...]):
    assert_same(path, with_field(BODIES[path], object_path, "flux_capacitor", None), BODIES[path])


@pytest.mark.parametrize(("endpoint", "path"), PATHS.items())
def test_every_known_field_may_be_null(endpoint: str, path: str):
    plain = MINIMAL[endpoint]
    nulls = dict.fromkeys(read_schema_fields(path) - plain.keys())
    assert len(nulls) >= 5
    assert_same(path, {**plain, **nulls}, plain)


def test_of_two_spellings_of_an_option_the_non_null_one_is_used():
    body = json.loads('{"prompt": "hi", "options": {"Temperature": 1, "temperature": null}}')
    assert_same("/completion", body, {"prompt": "hi", "options": {"temperature": 1}})
