"""The condition "streamed" of a proof: the requests over HTTP, each with and without `stream`.

Knows: OpenAI's chat completions. Must not know: engines.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from app.commands.chat_client import read_error
from app.commands.client_programs import Endpoint
from app.commands.server_client import send_json, stream_events
from app.core.errors import AppError
from app.core.jobs import EndReason, Token
from app.core.requests import Conversation, GenerateRequest, JsonSchema
from app.prove.comparison import Answer, Comparison, compare
from app.prove.proof import ProofRequest

_PATH = "/v1/chat/completions"

# the number of concurrent clients
_CLIENTS = 4

Choice = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _HttpAnswer:
    """text: the content. answer: the IDs and their log probabilities, without alternatives."""

    text: str
    answer: Answer


def compare_streams(
    endpoint: Endpoint, requests: Sequence[ProofRequest], tolerance: float | None
) -> Sequence[tuple[str, Comparison]]:
    """Sends every request twice, with several clients at a time, and compares the streamed answer
    and the other one with the reference. Returns a label and a comparison per answer."""
    with ThreadPoolExecutor(_CLIENTS) as clients:
        pairs = clients.map(partial(_compare_request, endpoint, tolerance), requests)
        return [pair for found in pairs for pair in found]


def _compare_request(
    endpoint: Endpoint, tolerance: float | None, request: ProofRequest
) -> Sequence[tuple[str, Comparison]]:
    body = build_body(endpoint.model, request.request)
    expected = _strip_alternatives(request.expected)
    try:
        collected, streamed = _collect(endpoint, body), _stream(endpoint, body)
    except AppError as error:
        return [(request.label, Comparison(verdict="different", difference=error.message))]
    results = [
        (request.label, compare(expected, got.answer, tolerance)) for got in (collected, streamed)
    ]
    if streamed.answer.ids == collected.answer.ids and streamed.text != collected.text:
        difference = f"the streamed text is {streamed.text!r} instead of {collected.text!r}"
        results[-1] = (request.label, Comparison(verdict="different", difference=difference))
    return results


def build_body(model: str, request: GenerateRequest) -> dict[str, Any]:
    """Returns the body of the request, without `stream`."""
    assert isinstance(request.prompt, Conversation)
    sampling = dict(request.sampling)
    bias = cast("Iterable[tuple[int, float]]", sampling.pop("logit_bias", ()))
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.role, "content": m.content} for m in request.prompt.messages],
        "max_tokens": request.max_tokens,
        "logprobs": True,
        "return_token_ids": True,
        "logit_bias": {str(token): value for token, value in bias},
        **sampling,
    }
    if isinstance(request.grammar, JsonSchema):
        schema = {"name": "answer", "strict": True, "schema": json.loads(request.grammar.text)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _collect(endpoint: Endpoint, body: Mapping[str, Any]) -> _HttpAnswer:
    status, reply = send_json("POST", endpoint.url, _PATH, body, endpoint.api_key, None)
    if status != 200:
        raise read_error(status, reply)
    [choice] = reply["choices"]
    return _read_answer([{**choice, "delta": choice["message"]}])


def _stream(endpoint: Endpoint, body: Mapping[str, Any]) -> _HttpAnswer:
    streaming = {**body, "stream": True}
    choices: list[Choice] = []
    with stream_events(endpoint.url, _PATH, streaming, endpoint.api_key) as lines:
        for line in lines:
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = cast("Mapping[str, Any]", json.loads(data))
            if chunk.get("error"):
                raise read_error(500, chunk)
            choices += chunk.get("choices") or ()
    return _read_answer(choices)


def _read_answer(choices: Sequence[Choice]) -> _HttpAnswer:
    ids: list[int] = []
    logprobs: list[float] = []
    text, reason = "", "error"
    for choice in choices:
        ids += choice.get("token_ids") or ()
        scored: Mapping[str, Any] = choice.get("logprobs") or {}
        content: Sequence[Mapping[str, Any]] = scored.get("content") or ()
        logprobs += (entry["logprob"] for entry in content)
        text += choice["delta"].get("content") or ""
        reason = choice.get("finish_reason") or reason
    tokens = tuple(
        Token(job_id="", id=id_, timestamp_ns=0, logprob=logprob)
        for id_, logprob in zip(ids, logprobs, strict=True)
    )
    return _HttpAnswer(text=text, answer=Answer(tokens=tokens, reason=cast("EndReason", reason)))


def _strip_alternatives(answer: Answer) -> Answer:
    tokens = (
        Token(job_id=token.job_id, id=token.id, timestamp_ns=0, logprob=token.logprob)
        for token in answer.tokens
    )
    return replace(answer, tokens=tuple(tokens))
