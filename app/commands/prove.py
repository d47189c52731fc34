"""`mlxrunner prove`: shows that no speedup changes the answers of a model on this machine.

Knows: the report as a table and as JSON; the condition "streamed": the requests over HTTP to a
server, each with and without `stream`. Must not know: the other conditions.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

from app import store
from app.commands.chat_client import read_error
from app.commands.chat_engine import open_own_server
from app.commands.client_programs import Endpoint
from app.commands.servers import send_json, stream_events
from app.config.precedence import ResolvedConfig
from app.core.errors import AppError, ErrorKind, escape_control_characters
from app.core.jobs import Capacity, EndReason, Token
from app.core.requests import Conversation, GenerateRequest, JsonSchema
from app.core.settings import ModelSettings
from app.core.terminal import ProgressLine, print_message
from app.core.units import pluralize
from app.engine.model_info import complete_config
from app.prove.comparison import Answer, Comparison, compare
from app.prove.proof import ConditionReport, Proof, ProofOptions, ProofRequest, Reference

# of the JSON report; changes with an incompatible change
SCHEMA = 1

_HEADER = ("condition", "answers", "equal", "near-tie", "different")

_PATH = "/v1/chat/completions"

# the number of concurrent clients
_CLIENTS = 4

Choice = Mapping[str, Any]


class ProofCommand:
    """One proof. configuration: names at most one model."""

    def __init__(self, configuration: ResolvedConfig, options: ProofOptions) -> None:
        settings = configuration.settings
        if len(settings.models) > 1 or settings.installed:
            raise AppError(ErrorKind.INVALID, "prove needs exactly one model: name one")
        self._configuration = configuration
        self._model: ModelSettings | None = settings.models[0] if settings.models else None
        self._files = complete_config(store.find(self._model.name if self._model else None))
        own = settings if self._model is None else settings.for_model(self._model)
        if warning := self._files.describe_excess(own.context):
            print_message(warning)
        self._options = options
        self._proof = Proof(self._files, own, options)
        self._progress = ProgressLine(sys.stderr)

    def run(self, *, as_json: bool) -> int:
        """Prints the report, and returns the exit status: 0 if all answers are equal where they
        must be, otherwise 1. Raises AppError if the model cannot be run."""
        started = time.monotonic()
        self._show("reference")
        reference = self._proof.compute_reference()
        self._progress.erase()
        if not as_json:
            name = escape_control_characters(self._files.name)
            _print_lines(render_head(name, reference, self._options.seed))
        reports: list[ConditionReport] = []
        for report in self._iterate(reference):
            self._progress.erase()
            reports.append(report)
            if not as_json:
                _print_lines(iter([render_row(report)]))
        self._progress.erase()
        seconds = time.monotonic() - started
        if as_json:
            document = make_json(self._files.name, reference, reports, self._options.seed, seconds)
            print(json.dumps(document, indent=2))
        else:
            _print_lines(render_verdict(reports, seconds))
        return 0 if all(report.passed for report in reports) else 1

    def _iterate(self, reference: Reference) -> Iterator[ConditionReport]:
        yield from self._proof.run(reference, self._show)
        self._show("streamed")
        yield self._run_streamed(reference)

    def _run_streamed(self, reference: Reference) -> ConditionReport:
        tolerance = self._proof.tolerance(reference)
        name, cause = "streamed", "the path from the engine to the client"
        cut = self._proof.cut_at_stop_string
        requests = [replace(one, expected=cut(one.expected)) for one in reference.requests]
        try:
            with open_own_server(self._configuration, self._model, lambda _: None) as endpoint:
                pairs = compare_streams(endpoint, requests, tolerance)
        except AppError as error:
            failed = Proof.make_failure(error.message)
            return Proof.make_report(name, cause, [failed], "no server", tolerance)
        detail = "over HTTP, and without `stream`"
        return Proof.make_report(name, cause, pairs, detail, tolerance)

    def _show(self, condition: str) -> None:
        self._progress.show(f"{self._files.name}: {condition}")


def render_head(model: str, reference: Reference, seed: int) -> Iterator[str]:
    tokens = sum(len(one.expected.tokens) for one in reference.requests)
    yield (
        f"{model} on {describe_backend(reference.capacity)}: "
        f"{pluralize(len(reference.chains), 'conversation')}, "
        f"{pluralize(len(reference.requests), 'answer')} with {tokens} tokens, seed {seed}"
    )
    yield "Reference: one request at a time, without cached prefixes. Compared: IDs and the bits"
    yield f"of log probabilities. KV cache: {reference.capacity.kv_dtype or 'none'}."
    yield ""
    yield _format_cells(_HEADER)


def describe_backend(capacity: Capacity) -> str:
    backend = capacity.backend
    if backend is None:
        return "an unknown device"
    parts = [
        backend.device.upper(),
        f"{backend.kernels} kernels" if backend.kernels else "MLX's operations",
    ]
    if backend.activations is not None:
        parts[1] += f" with {backend.activations}-bit activations"
    with suppress(TypeError):
        parts.append(pluralize(int(backend.threads or 0), "thread"))
    return ", ".join(parts if backend.threads else parts[:2])


def render_row(report: ConditionReport) -> str:
    if not report.answers:
        return f"{report.name:<18}  not run: {report.detail}"
    counts = (report.answers, report.equal, report.near_ties, report.different)
    largest = f"; differs by up to {report.largest:.1e}" if report.largest else ""
    return f"{_format_cells((report.name, *map(str, counts)))}  {report.detail}{largest}"


def render_verdict(reports: Sequence[ConditionReport], seconds: float) -> Iterator[str]:
    yield ""
    for report in reports:
        if report.first_difference is not None:
            kind = "difference" if report.different else "near-tie"
            yield f"{report.name} ({report.cause}): first {kind} in {report.first_difference}"
    failed = [report.name for report in reports if not report.passed]
    if failed:
        yield f"FAILED in {seconds:.0f} s: {', '.join(failed)}"
        return
    exact = [report.name for report in reports if report.answers and report.tolerance is None]
    if exact:
        yield f"passed in {seconds:.0f} s: equal bits for {', '.join(exact)}"
    else:
        yield (
            f"passed in {seconds:.0f} s, within the rounding of this device, which does not give "
            "equal bits; see --exact"
        )


def make_json(
    model: str,
    reference: Reference,
    reports: Sequence[ConditionReport],
    seed: int,
    seconds: float,
) -> Mapping[str, Any]:
    backend = reference.capacity.backend
    return {
        "schema": SCHEMA,
        "model": model,
        "backend": None if backend is None else asdict(backend),
        "kv": reference.capacity.kv_dtype,
        "seed": seed,
        "conversations": len(reference.chains),
        "answers": len(reference.requests),
        "tokens": sum(len(one.expected.tokens) for one in reference.requests),
        "seconds": round(seconds, 1),
        "passed": all(report.passed for report in reports),
        "conditions": [{**asdict(report), "passed": report.passed} for report in reports],
    }


def _format_cells(cells: Sequence[str]) -> str:
    first, *rest = cells
    widths = [len(name) for name in _HEADER[1:]]
    columns = (f"{cell:>{width}}" for cell, width in zip(rest, widths, strict=True))
    return "  ".join([f"{first:<18}", *columns])


def _print_lines(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HttpAnswer:
    """text: the content. answer: the IDs and their log probabilities, without alternatives."""

    text: str
    answer: Answer


def compare_streams(
    endpoint: Endpoint, requests: Sequence[ProofRequest], tolerance: float | None
) -> Sequence[tuple[str, Comparison]]:
    """Sends every request twice, with several clients at a time, and compares the streamed and the
    non-streamed answer with the reference. Returns a label and a comparison per answer."""
    with ThreadPoolExecutor(_CLIENTS) as clients:
        pairs = clients.map(partial(_compare_request, endpoint, tolerance), requests)
        return [pair for found in pairs for pair in found]


def _compare_request(
    endpoint: Endpoint, tolerance: float | None, request: ProofRequest
) -> Sequence[tuple[str, Comparison]]:
    adapter = request.request.adapter
    model = f"{endpoint.model}:{adapter}" if adapter else endpoint.model
    body = build_body(model, request.request)
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
