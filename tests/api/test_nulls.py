"""null means that a field is absent: in every dialect, at every level, known or not."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.api.asgi import Reply, ask
from tests.api.test_fields_table import FRESH, PATHS, fields_of_schema
from tests.fakes import CARD, FakeGenerate

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "It does.", "parameters": SCHEMA, "strict": True}
MODEL = {"model": CARD.id}

# of each path a body with objects at every level that the dialect has
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
    "/v1/embeddings": {**MODEL, "input": "hi"},
    "/v1/models/load": MODEL,
    "/v1/models/unload": MODEL,
    "/v1/detokenize": {"tokens": [104]},
    "/completion": {"prompt": "hi", "options": {"temperature": 1}},
}
# objects of a request that are data: what null means in them is not ours to say
DATA = ("schema", "parameters", "chat_template_kwargs")


def objects(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the objects of a body are that have fields."""
    if isinstance(node, dict):
        yield path
    children: Any = node.items() if isinstance(node, dict) else enumerate(node)
    for name, child in children:
        if isinstance(child, dict | list) and name not in DATA:
            yield from objects(child, (*path, name))


PLACES = [(path, place) for path, body in BODIES.items() for place in objects(body)]


def with_field(body: Any, place: tuple[str | int, ...], name: str, value: object) -> Any:
    changed = node = deepcopy(body)
    for step in place:
        node = node[step]
    node[name] = value
    return changed


def send(path: str, body: Any) -> tuple[Reply, list[Any]]:
    generate = FakeGenerate()
    reply = ask(generate, "POST", path, body)
    done = [*generate.opened, *generate.embedded, *generate.loaded, *generate.unloaded]
    return reply, done


def assert_same(path: str, body: Any, plain: Any) -> None:
    reply, done = send(path, body)
    wanted, done_before = send(path, plain)
    assert (reply.status, wanted.status) == (200, 200), reply.body
    assert FRESH.sub(b"", reply.body) == FRESH.sub(b"", wanted.body)
    # the text of a schema is sent on as it came, and so is any other data
    assert done == done_before


@pytest.mark.parametrize(("path", "place"), PLACES, ids=str)
def test_an_unknown_field_that_is_null_is_absent(path: str, place: tuple[str | int, ...]):
    assert_same(path, with_field(BODIES[path], place, "flux_capacitor", None), BODIES[path])


@pytest.mark.parametrize(("path", "place"), PLACES, ids=str)
def test_an_unknown_field_that_is_not_null_is_named(path: str, place: tuple[str | int, ...]):
    """So that the test above says something."""
    if place[-1:] == ("metadata",):
        pytest.skip("its keys are the client's")
    reply, done = send(path, with_field(BODIES[path], place, "flux_capacitor", 1))
    dotted = ".".join(map(str, (*place, "flux_capacitor")))
    assert (reply.status, reply.error["param"], done) == (400, dotted, [])


@pytest.mark.parametrize(("endpoint", "path"), PATHS.items())
def test_every_known_field_may_be_null(endpoint: str, path: str):
    needed = ("model", "messages", "prompt", "input")
    plain = {name: value for name, value in BODIES[path].items() if name in needed}
    nulls = dict.fromkeys(fields_of_schema(endpoint) - plain.keys())
    assert len(nulls) >= 5
    assert_same(path, {**plain, **nulls}, plain)


def test_of_two_spellings_of_an_option_the_one_that_is_not_null_counts():
    body = json.loads('{"prompt": "hi", "options": {"Temperature": 1, "temperature": null}}')
    assert_same("/completion", body, {"prompt": "hi", "options": {"temperature": 1}})
