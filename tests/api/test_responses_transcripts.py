"""Whole answers of /v1/responses, byte for byte. `make transcripts` writes them again.

What differs from run to run (ids and the clock) is replaced by constants before comparing.
"""

import re
from typing import Any

import pytest

from app.core.errors import AppError, Kind
from app.core.events import CallDelta, Progress, ReasoningDelta, TokenLogprob, TopLogprob
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
    said = TopLogprob(text=raw.decode(errors="replace"), raw=raw, logprob=logprob)
    other = TopLogprob(text="?", raw=b"?", logprob=logprob - 1)
    return TokenLogprob(text=said.text, raw=raw, logprob=logprob, top=(said, other))


LOGPROBS: Script = (
    text("Hi ", token(b"Hi", -0.25), token(b" ", -0.5)),
    text("", token(b"\xe4\xbd", -0.75)),
    text("你", token(b"\xa0", -0.125)),
    finish(tokens=4),
)
CALLS: Script = (
    Progress(done=512, total=1500),
    ReasoningDelta(text="They want"),
    ReasoningDelta(text=" weather."),
    text("One moment."),
    CallDelta(call=0, id="call_a", name="weather"),
    CallDelta(call=0, arguments='{"city":'),
    CallDelta(call=0, arguments='"Ulm"}'),
    CallDelta(call=1, id="call_b", name="weather"),
    CallDelta(call=1, arguments='{"city":"Aden"}'),
    finish("tool_calls", 20),
)
CUT: Script = (ReasoningDelta(text="Hm."), text("Hel"), finish("length", 4))
BROKEN: Script = (text("Hel"), AppError(Kind.ENGINE, "the engine ran out of memory"))
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
def test_a_response_reads_as_it_always_did(
    call: Any, generate: FakeGenerate, transcript: Any, name: str, script: Script, body: Any
):
    generate.script = script
    got = call("POST", "/v1/responses", body).body
    got = re.sub(rb'(?<=")(resp|msg|rs|fc)_[0-9a-f]{48}(?=")', rb"\1_0", got)
    transcript(name, re.sub(rb'(?<=ed_at":)[0-9]{10}', b"0", got))
