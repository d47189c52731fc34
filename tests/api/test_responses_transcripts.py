"""Complete answers of /v1/responses, byte for byte. `make transcripts` writes them again.

Ids and times, which differ between runs, are replaced with constants before the comparison.
"""

import re
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.events import PrefillProgress, ReasoningDelta, TokenLogprob, ToolCallDelta, TopLogprob
from tests.fakes import HELLO, FakeGenerate, Script, finish, text

HI: dict[str, Any] = {"model": "fake/model", "input": "hi"}
STREAM = {"stream": True}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "What the sky does.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def token(raw: bytes, logprob: float) -> TokenLogprob:
    candidate = TopLogprob(text=raw.decode(errors="replace"), token_bytes=raw, logprob=logprob)
    other = TopLogprob(text="?", token_bytes=b"?", logprob=logprob - 1)
    return TokenLogprob(
        text=candidate.text, token_bytes=raw, logprob=logprob, top_logprobs=(candidate, other)
    )


LOGPROBS: Script = (
    text("Hi ", token(b"Hi", -0.25), token(b" ", -0.5)),
    text("", token(b"\xe4\xbd", -0.75)),
    text("你", token(b"\xa0", -0.125)),
    finish(tokens=4),
)
CALLS: Script = (
    PrefillProgress(computed_tokens=512, total_tokens=1500),
    ReasoningDelta(text="They want"),
    ReasoningDelta(text=" weather."),
    text("One moment."),
    ToolCallDelta(call_index=0, id="call_a", name="weather"),
    ToolCallDelta(call_index=0, arguments='{"city":'),
    ToolCallDelta(call_index=0, arguments='"Ulm"}'),
    ToolCallDelta(call_index=1, id="call_b", name="weather"),
    ToolCallDelta(call_index=1, arguments='{"city":"Aden"}'),
    finish("tool_calls", 20),
)
CUT: Script = (ReasoningDelta(text="Hm."), text("Hel"), finish("length", 4))
BROKEN: Script = (text("Hel"), AppError(ErrorKind.ENGINE, "the engine ran out of memory"))
TOOLS = {"tools": [WEATHER], "instructions": "Be brief."}
SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize(
    ("name", "script", "body"),
    [
        ("responses.json", HELLO, HI),
        ("responses_calls.json", CALLS, HI | TOOLS),
        ("responses_cut.json", CUT, HI | {"max_output_tokens": 4}),
        ("responses_logprobs.json", LOGPROBS, HI | SCORED),
        ("responses_error.json", HELLO, HI | {"background": True}),
        ("responses_stream.sse", HELLO, HI | STREAM),
        ("responses_stream_calls.sse", CALLS, HI | TOOLS | STREAM),
        ("responses_stream_cut.sse", CUT, HI | STREAM),
        ("responses_stream_empty.sse", [finish(tokens=0)], HI | STREAM),
        ("responses_stream_logprobs.sse", LOGPROBS, HI | SCORED | STREAM),
        ("responses_stream_broken.sse", BROKEN, HI | STREAM),
    ],
)
def test_a_response_equals_its_transcript(
    call: Any, generate: FakeGenerate, transcript: Any, name: str, script: Script, body: Any
):
    generate.script = script
    response = call("POST", "/v1/responses", body).body
    response = re.sub(rb'(?<=")(resp|msg|rs|fc)_[0-9a-f]{48}(?=")', rb"\1_0", response)
    transcript(name, re.sub(rb'(?<=ed_at":)[0-9]{10}', b"0", response))
