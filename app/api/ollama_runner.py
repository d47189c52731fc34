"""The runner dialect: the protocol of the Go client of Ollama's MLX runner.

Knows: POST /completion, which responds with JSON lines, the client's conventions. Must not know:
token generation, the model's own sampling defaults.

The client sends zero for "not set". It applies all defaults itself, so the model's own defaults
must not apply here. It prints the body of every response with a status other than 200. Its
tokenization endpoints are in app/api/tokenization.py.

Wire format: ollama x/mlxrunner/client.go of March 2026 (bbbad9768), and of August 2026 (0436b37a8).
The newer client sends the options of api/types.go unchanged and may request a format and log
probabilities.
"""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from app.api.fields import invalid_request
from app.api.generate_endpoint import JsonLines, ParsedRequest, Progress
from app.api.ollama.options import build_format
from app.api.openai.logprobs import render_token_logprobs
from app.api.openai.sampling import to_tuple
from app.api.schema.base import OBJECT_DECODER
from app.api.schema.ollama_runner import RUNNER, RunnerOptions
from app.core.errors import AppError
from app.core.events import Finish, OutputEvent, TextDelta, TokenLogprob
from app.core.ports import ModelCard
from app.core.requests import GenerateRequest
from app.core.sampling_params import SAMPLING_KNOBS, SamplingValue
from app.http.responses import ERROR_FORMATS, JsonObject
from app.http.streaming import encode_json_line

DONE_REASONS: Mapping[str, int] = {"stop": 0, "length": 1}


def is_runner_request(data: bytes | bytearray) -> bool:
    """Returns whether the body of POST /completion is from Ollama's client, which always sends
    `options`. llama.cpp's clients send options at the top level."""
    try:
        names = OBJECT_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the parser of the body raises the error
    return any(name.lower() == "options" for name in names) or "Prompt" in names


def prepare_runner_request(data: bytes | bytearray, card: ModelCard) -> ParsedRequest:
    """Parses the body of POST /completion. Raises AppError(INVALID) for an invalid request."""
    request = parse(data, card.id)
    return ParsedRequest(
        request=request,
        reply=JsonLines(CompletionLineEncoder(request.top_logprobs is not None)),
    )


def parse(data: bytes | bytearray, model: str) -> GenerateRequest:
    """Parses the body of POST /completion. Raises AppError(INVALID) for an invalid request."""
    body = RUNNER.decode(data)
    if not body.prompt:
        raise invalid_request("prompt", "prompt must not be empty: there is nothing to continue")
    options = body.options or RunnerOptions()
    # every number below one means the rest of the context
    max_tokens = options.max_tokens or options.num_predict or 0
    return GenerateRequest(
        model=model,
        prompt=body.prompt,
        sampling=_build_sampling(options),
        max_tokens=max_tokens if max_tokens > 0 else None,
        stop=to_tuple(options.stop),
        cache_prompt=body.cache_prompt is not False,
        # a negative number means the whole prompt, and zero means "not set"
        num_keep=options.num_keep or options.n_keep or 0,
        grammar=build_format(body.format),
        top_logprobs=(body.toplogprobs or 0) if body.logprobs else None,
    )


def _build_sampling(options: RunnerOptions) -> dict[str, SamplingValue]:
    """Returns all sampling parameters, whether set or not. The client applies its own defaults, so
    the model's defaults do not apply. 0 means "not set"; for the seed, a negative number means "not
    set"."""
    sampling: dict[str, SamplingValue] = {"logit_bias": ()}
    for knob in SAMPLING_KNOBS:
        name = knob.runner_name or knob.name
        value = getattr(options, name)
        if value and value < knob.low:
            path, low, high = f"options.{name}", knob.low, knob.trusted_high
            raise invalid_request(
                path, f"{path} must be a number from {low:g} to {high:g}, not {value}"
            )
        default = knob.default if knob.runner_default is None else knob.runner_default
        sampling[knob.name] = default if not value or value == knob.off else value
    seed = options.seed
    sampling["seed"] = None if seed is None or seed < 0 else seed
    return sampling


class CompletionLineEncoder:
    """Encodes a response: one line per text delta, then one line with the counters. logprobs:
    whether to add the log probabilities of the tokens since the previous line."""

    def __init__(self, logprobs: bool = False) -> None:
        self._finished = False
        self._logprobs = logprobs
        self._pending_logprobs: list[TokenLogprob] = []

    # the client treats the first line as the start of the text
    keep_alive = b""

    def progress(self, event: Progress) -> bytes:
        return b""

    def feed(self, event: OutputEvent) -> bytes:
        if isinstance(event, TextDelta):
            self._pending_logprobs += event.logprobs
            return self._line(Content=event.text) if event.text else b""
        # a prompt without a chat template produces only text
        assert isinstance(event, Finish)
        self._finished = True
        return self._line(
            Done=True,
            DoneReason=DONE_REASONS[event.reason],
            PromptEvalCount=event.usage.prompt_tokens,
            PromptEvalDuration=event.timings.prefill_ns,
            EvalCount=event.usage.completion_tokens,
            EvalDuration=event.timings.estimate_eval_ns(event.usage.completion_tokens),
        )

    def _line(self, **fields: object) -> bytes:
        if not self._logprobs:
            return encode_json_line(_line(**fields))
        scored, self._pending_logprobs = self._pending_logprobs, []
        return encode_json_line(
            _line(**fields, Logprobs=render_token_logprobs(scored) if scored else None)
        )

    def end(self) -> bytes:
        assert self._finished, "a response ended without Finish"
        return b""

    def fail(self, error: AppError) -> bytes:
        status = HTTPStatus(ERROR_FORMATS[error.kind].status)
        details = {
            "StatusCode": status.value,
            "Status": f"{status.value} {status.phrase}",
            "error": error.message,
        }
        return encode_json_line(_line(Error=details))


def _line(**fields: object) -> JsonObject:
    """Renders a line with all keys, as Go's encoder does."""
    return {
        "Content": "",
        "Done": False,
        "DoneReason": 0,
        "PromptEvalCount": 0,
        "PromptEvalDuration": 0,
        "EvalCount": 0,
        "EvalDuration": 0,
        "Error": None,
        **fields,
    }
