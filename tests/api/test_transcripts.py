"""Whole answers, byte for byte, in tests/transcripts. `make transcripts` writes them again.

What differs from run to run (ids and the clock) is replaced by constants before comparing.
"""

import re
from typing import Any

import pytest

from app.core.errors import AppError, Kind
from app.core.events import (
    CallDelta,
    Progress,
    Prompt,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    TopLogprob,
)
from tests.fakes import HELLO, FakeGenerate, Script, finish, greetings, text

CHAT, COMPLETIONS, RUNNER = "/v1/chat/completions", "/v1/completions", "/completion"
HI: dict[str, Any] = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": "fake/model", "prompt": "hi"}


def token(raw: bytes, logprob: float) -> TokenLogprob:
    said = TopLogprob(text=raw.decode(errors="replace"), raw=raw, logprob=logprob)
    other = TopLogprob(text="?", raw=b"?", logprob=logprob - 1)
    return TokenLogprob(text=said.text, raw=raw, logprob=logprob, top=(said, other))


# A character of two tokens, and a stop string that was held back and then cut off.
LOGPROBS: Script = (
    text("Hi ", token(b"Hi", -0.25), token(b" ", -0.5)),
    text("", token(b"\xe4\xbd", -0.75)),
    text("你", token(b"\xa0", -0.125)),
    text("", token(b"END", -0.0625)),
    finish(tokens=5),
)
# Thought, said, and called twice at once.
CALLS: Script = (
    ReasoningDelta(text="Two "),
    ReasoningDelta(text="cities."),
    text("I'll look."),
    CallDelta(call=0, id="call_1", name="weather"),
    CallDelta(call=0, arguments='{"city": '),
    CallDelta(call=0, arguments='"Ulm"}'),
    CallDelta(call=1, id="call_2", name="weather", arguments="{}"),
    finish("tool_calls", 12),
)
IDS: Script = (
    Prompt(ids=(104, 105)),
    TextDelta(text="", ids=(228,)),
    TextDelta(text="ä!", ids=(164, 33)),
    finish(tokens=3),
)
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
PREFILL: Script = (Progress(done=512, total=1500), Progress(done=1024, total=1500), *HELLO)
BROKEN: Script = (text("Hel"), AppError(Kind.ENGINE, "the engine ran out of memory"))
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("name", "script", "path", "body"),
    [
        ("openai_chat.json", HELLO, CHAT, HI),
        ("openai_chat_empty.json", [finish("length", 0)], CHAT, HI),
        (
            "openai_chat_logprobs.json",
            LOGPROBS,
            CHAT,
            {**HI, "logprobs": True, "top_logprobs": 2},
        ),
        ("openai_chat_stream.sse", HELLO, CHAT, {**HI, **STREAM}),
        ("openai_chat_stream_usage.sse", PREFILL, CHAT, {**HI, **USAGE}),
        ("openai_chat_stream_empty.sse", [finish("length", 0)], CHAT, {**HI, **STREAM}),
        ("openai_chat_stream_broken.sse", BROKEN, CHAT, {**HI, **STREAM}),
        (
            "openai_chat_stream_logprobs.sse",
            LOGPROBS,
            CHAT,
            {**HI, **STREAM, "logprobs": True, "top_logprobs": 2},
        ),
        ("openai_chat_calls.json", CALLS, CHAT, {**HI, **TOOLS}),
        ("openai_chat_stream_calls.sse", CALLS, CHAT, {**HI, **TOOLS, **STREAM}),
        ("openai_chat_choices.json", greetings, CHAT, {**HI, "n": 2}),
        ("openai_chat_stream_choices.sse", greetings, CHAT, {**HI, **USAGE, "n": 2}),
        ("openai_chat_stream_ids.sse", IDS, CHAT, {**HI, **STREAM, "return_token_ids": True}),
        ("openai_completion_ids.json", IDS, COMPLETIONS, {**PROMPT, "return_token_ids": True}),
        ("openai_completion.json", HELLO, COMPLETIONS, PROMPT),
        ("openai_completion_logprobs.json", LOGPROBS, COMPLETIONS, {**PROMPT, "logprobs": 2}),
        ("openai_completion_stream.sse", HELLO, COMPLETIONS, {**PROMPT, **USAGE}),
        (
            "openai_completion_stream_logprobs.sse",
            LOGPROBS,
            COMPLETIONS,
            {**PROMPT, **STREAM, "logprobs": 2},
        ),
        ("openai_error.json", HELLO, CHAT, {**HI, "temperature": 3}),
        ("runner.jsonl", PREFILL, RUNNER, {"prompt": "hi"}),
        ("runner_broken.jsonl", BROKEN, RUNNER, {"prompt": "hi"}),
    ],
)
def test_an_answer_reads_as_it_always_did(
    call: Any,
    generate: FakeGenerate,
    transcript: Any,
    name: str,
    script: Any,
    path: str,
    body: Any,
):
    generate.script = script
    got = call("POST", path, body).body
    got = re.sub(rb'(?<="id":")(chatcmpl|cmpl)-[0-9a-f]{24}(?=")', rb"\1-0", got)
    transcript(name, re.sub(rb'(?<="created":)[0-9]{10}', b"0", got))
