"""The request and the stream of a chat completion."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.commands.chat_client import (
    ChatMessage,
    ChatOptions,
    build_request,
    read_events,
    read_format,
)
from app.commands.chat_commands import parse_parameter
from app.core.errors import AppError
from app.core.events import Finish, ModelLoading, PrefillProgress, ReasoningDelta, TextDelta

HELLO = [ChatMessage(role="user", content="Hello")]


def encode(*chunks: object) -> Iterator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}"
        yield ""


def delta(**fields: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def test_a_stream_becomes_events():
    finish = {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "prompt_eval_count": 5,
        "eval_count": 3,
        "prompt_eval_duration": 7,
        "eval_duration": 8,
        "total_duration": 20,
        "timings": {"cache_n": 2, "predicted_ms": 6e-6},
    }
    lines = [
        *(": waiting to load", ": loading 40 %", ": ping", ": prefill 3/5", ""),
        *encode(delta(reasoning_content="hm"), delta(content="yes"), finish),
        "data: [DONE]",
    ]
    *events, end = read_events(iter(lines))
    assert events == [
        ModelLoading(progress=0, queued=True),
        ModelLoading(progress=40),
        PrefillProgress(computed_tokens=3, total_tokens=5),
        ReasoningDelta(text="hm"),
        TextDelta(text="yes"),
    ]
    assert isinstance(end, Finish)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (
        *(5, 3),
        2,
    )
    assert (end.timings.prefill_ns, end.timings.decode_ns, end.timings.total_ns) == (7, 6, 20)


def test_an_error_in_the_stream_is_raised():
    with pytest.raises(AppError, match=r"^the engine failed$"):
        list(read_events(encode({"error": {"message": "the engine\nfailed"}})))


def test_a_stream_that_breaks_off_is_an_error():
    with pytest.raises(AppError, match="closed the connection before the answer ended"):
        list(read_events(encode(delta(content="ye"))))


def test_options_become_fields():
    options = ChatOptions(
        system="Be brief.", think=False, output_format="json", parameters={"top_k": 3}, keep_alive=9
    )
    body = build_request("m", HELLO, options)
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "stream": True,
        "top_k": 3,
        "enable_thinking": False,
        "response_format": {"type": "json_object"},
        "keep_alive": 9,
    }
    assert build_request("m", HELLO, ChatOptions(think="high"))["reasoning_effort"] == "high"


@pytest.mark.parametrize("text", ["[1]", "{", None])
def test_a_schema_is_an_object_in_a_file(tmp_path: Path, text: str | None):
    file = tmp_path / "schema.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(AppError, match=r"--format is json or a file with a JSON schema: .*schema"):
        read_format(str(file))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("temperature", "0.5", ("temperature", 0.5)),
        ("repeat_penalty", "1.5", ("repetition_penalty", 1.5)),
        ("num_predict", "9", ("max_tokens", 9)),
        ("stop", "'a b' c", ("stop", ["a b", "c"])),
        ("seed", "default", ("seed", None)),
    ],
)
def test_a_parameter_has_its_name_in_a_request(name: str, text: str, expected: object):
    assert parse_parameter(name, text) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temperature", "hot", "must be a number from 0 to 2, not hot"),
        ("top_k", "1.5", "must be a whole number from"),
        ("num_predict", "0", "must be a whole number from 1, not 0"),
        ("repeat_penalty", "0", "must be a number from 0.01"),
        ("num_ctx", "8192", "fixed when a model is loaded"),
        ("tempratur", "1", "did you mean temperature?"),
    ],
)
def test_an_invalid_parameter_is_refused(name: str, text: str, message: str):
    with pytest.raises(AppError) as caught:
        parse_parameter(name, text)
    assert message in caught.value.message
