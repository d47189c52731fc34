"""Whatever a client sends, it gets a result or an error in Ollama's format, and never an empty
line."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.asgi import send_request
from tests.fakes import CARD, FakeGenerate

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["json", "5m", "user", "tool", "assistant", "add", "high", "../x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "function", "name", "arguments", "type", "stop"])
            | st.text(max_size=6),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = [
    "messages",
    "prompt",
    "stream",
    "format",
    "options",
    "keep_alive",
    "tools",
    "think",
    "raw",
    "context",
    "suffix",
    "system",
    "template",
    "images",
    "logprobs",
    "top_logprobs",
    "truncate",
    "shift",
    "input",
    "dimensions",
    "name",
    "from",
    "files",
    "parameters",
    "license",
    "source",
    "destination",
    "verbose",
    "insecure",
]
OPTIONS = [
    "temperature",
    "top_k",
    "seed",
    "stop",
    "num_ctx",
    "num_predict",
    "num_keep",
    "repeat_penalty",
    "mirostat",
]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "x"])},
        optional={
            "content": st.text(max_size=5),
            "tool_calls": VALUES,
            "images": VALUES,
            "tool_name": VALUES,
            "tool_call_id": VALUES,
            "thinking": VALUES,
        },
    ),
    max_size=4,
)
BODIES = st.fixed_dictionaries(
    {"model": st.just(CARD.id) | VALUES},
    optional={
        **dict.fromkeys(FIELDS, VALUES),
        "messages": MESSAGES | VALUES,
        "prompt": st.text(max_size=5),
        "options": st.dictionaries(st.sampled_from(OPTIONS), VALUES, max_size=3) | VALUES,
    },
)
PATHS = [
    *(("POST", f"/api/{name}") for name in ("chat", "generate", "embed", "embeddings", "show")),
    *(("POST", f"/api/{name}") for name in ("pull", "create", "copy")),
    ("DELETE", "/api/delete"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("method", "path"), PATHS)
@given(body=BODIES | VALUES)
@settings(max_examples=60, deadline=None)
def test_no_body_breaks_the_server(method: str, path: str, body: Any):
    try:
        data = json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        data = json.dumps(body).encode()
    reply = send_request(FakeGenerate(), method, path, data, {"content-type": "text/plain"})
    assert reply.status == 200 or 400 <= reply.status < 500, reply.body
    if reply.status != 200:
        assert isinstance(reply.json["error"], str)
        assert reply.json["error"]
    elif reply.headers.get("content-type") == "application/x-ndjson":
        assert all(json.loads(line) for line in reply.body.removesuffix(b"\n").split(b"\n"))
