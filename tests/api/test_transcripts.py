"""Complete answers, byte for byte, in tests/transcripts. `make transcripts` writes them again.

Ids and times, which differ from run to run, are replaced by constants before the comparison.
"""

import re
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.events import (
    PrefillProgress,
    PromptTokenIds,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
)
from tests.fakes import HELLO, FakeGenerate, Script, finish, script_greetings, text

CHAT, COMPLETIONS, RUNNER = "/v1/chat/completions", "/v1/completions", "/completion"
HI: dict[str, Any] = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": "fake/model", "prompt": "hi"}


def token(raw: bytes, logprob: float) -> TokenLogprob:
    candidate = TopLogprob(text=raw.decode(errors="replace"), token_bytes=raw, logprob=logprob)
    other = TopLogprob(text="?", token_bytes=b"?", logprob=logprob - 1)
    return TokenLogprob(
        text=candidate.text, token_bytes=raw, logprob=logprob, top_logprobs=(candidate, other)
    )


# A character of two tokens, and a stop string that was held back and then cut off.
LOGPROBS: Script = (
    text("Hi ", token(b"Hi", -0.25), token(b" ", -0.5)),
    text("", token(b"\xe4\xbd", -0.75)),
    text("你", token(b"\xa0", -0.125)),
    text("", token(b"END", -0.0625)),
    finish(tokens=5),
)
# Reasoning, text, and two parallel calls.
CALLS: Script = (
    ReasoningDelta(text="Two "),
    ReasoningDelta(text="cities."),
    text("I'll look."),
    ToolCallDelta(call_index=0, id="call_1", name="weather"),
    ToolCallDelta(call_index=0, arguments='{"city": '),
    ToolCallDelta(call_index=0, arguments='"Ulm"}'),
    ToolCallDelta(call_index=1, id="call_2", name="weather", arguments="{}"),
    finish("tool_calls", 12),
)
IDS: Script = (
    PromptTokenIds(token_ids=(104, 105)),
    TextDelta(text="", token_ids=(228,)),
    TextDelta(text="ä!", token_ids=(164, 33)),
    finish(tokens=3),
)
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
PREFILL: Script = (
    PrefillProgress(computed_tokens=512, total_tokens=1500),
    PrefillProgress(computed_tokens=1024, total_tokens=1500),
    *HELLO,
)
BROKEN: Script = (text("Hel"), AppError(ErrorKind.ENGINE, "the engine ran out of memory"))
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
        ("openai_chat_choices.json", script_greetings, CHAT, {**HI, "n": 2}),
        ("openai_chat_stream_choices.sse", script_greetings, CHAT, {**HI, **USAGE, "n": 2}),
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
        ("runner.jsonl", PREFILL, RUNNER, {"prompt": "hi", "options": {}}),
        ("runner_broken.jsonl", BROKEN, RUNNER, {"prompt": "hi", "options": {}}),
    ],
)
def test_an_answer_equals_its_transcript(
    call: Any,
    generate: FakeGenerate,
    transcript: Any,
    name: str,
    script: Any,
    path: str,
    body: Any,
):
    generate.script = script
    response = call("POST", path, body).body
    response = re.sub(rb'(?<="id":")(chatcmpl|cmpl)-[0-9a-f]{24}(?=")', rb"\1-0", response)
    transcript(name, re.sub(rb'(?<="created":)[0-9]{10}', b"0", response))
