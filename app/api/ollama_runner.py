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
from typing import cast

import orjson

from app.api.fields import INT64, Fields, as_number, invalid_request, quote_value
from app.api.generate_endpoint import JsonLines, ParsedRequest, Progress
from app.api.openai.logprobs import render_token_logprobs
from app.api.openai.sampling import read_knob
from app.api.openai.structured_outputs import ANY_OBJECT_SCHEMA
from app.core.errors import AppError
from app.core.events import Finish, OutputEvent, TextDelta, TokenLogprob
from app.core.ports import ModelCard
from app.core.requests import GenerateRequest, JsonSchema
from app.core.sampling_params import SAMPLING_KNOBS, SamplingValue
from app.http.errors import ERROR_FORMATS
from app.http.responses import JsonObject
from app.http.streaming import encode_json_line

MAX_LOGPROBS = 20

DONE_REASONS: Mapping[str, int] = {"stop": 0, "length": 1}

# Options that the client sends with every request and that Ollama's own runner also ignores: load
# options and one filter.
IGNORED_INTEGERS = (
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "draft_num_predict",
)


def is_runner_request(body: object) -> bool:
    """Returns whether the body of POST /completion is from Ollama's client, which always sends
    `options`. llama.cpp's clients send options at the top."""
    if not isinstance(body, dict):
        return False
    return any(key.lower() == "options" for key in cast(JsonObject, body)) or "Prompt" in body


def prepare_runner_request(body: object, card: ModelCard) -> ParsedRequest:
    """Parses the body of POST /completion. Raises AppError(INVALID) for an invalid request."""
    request = parse(body, card.id)
    return ParsedRequest(
        request=request,
        reply=JsonLines(CompletionLineEncoder(request.top_logprobs is not None)),
    )


def parse(body: object, model: str) -> GenerateRequest:
    """Parses the body of POST /completion. Raises AppError(INVALID) for an invalid request."""
    # Go's decoder ignores case, and newer versions of the client send capital letters.
    fields = Fields.from_value(body).case_insensitive()
    prompt = fields.required_string("prompt")
    if not prompt:
        raise invalid_request("prompt", "prompt must not be empty: there is nothing to continue")
    for images in ("media", "images"):  # this server's models accept only text
        fields.reject(images, [])
    options = (fields.nested("options") or Fields({}, "options")).case_insensitive()
    request = GenerateRequest(
        model=model,
        prompt=prompt,
        sampling=_read_sampling(options),
        max_tokens=_max_tokens(options),
        stop=options.strings("stop", 16),
        cache_prompt=fields.boolean("cache_prompt") is not False,
        num_keep=_keep(options),
        grammar=_format(fields),
        top_logprobs=_top_logprobs(fields),
    )
    _check_ignored(options)
    options.check_unknown()
    fields.check_unknown()
    return request


def _read_sampling(options: Fields) -> dict[str, SamplingValue]:
    """Returns all sampling parameters, whether set or not. The client applies its own defaults, so
    the model's defaults do not apply. 0 means "not set"; for the seed, a negative number means "not
    set"."""
    read: dict[str, SamplingValue] = {"logit_bias": ()}
    for knob in SAMPLING_KNOBS:
        name = knob.runner_name or knob.name
        # 0 is accepted even if it is outside the range of the parameter
        is_zero = as_number(options.value(name)) == 0
        value = None if is_zero else read_knob(options, knob, name, knob.trusted_high)
        default = knob.default if knob.runner_default is None else knob.runner_default
        read[knob.name] = value or default
    seed = options.integer("seed", *INT64)
    read["seed"] = None if seed is None or seed < 0 else seed
    return read


def _max_tokens(options: Fields) -> int | None:
    """Returns the maximum number of tokens. Returns None, the rest of the context, for every number
    below one."""
    max_tokens = options.integer("max_tokens", *INT64)
    num_predict = options.integer("num_predict", *INT64)
    limit = max_tokens or num_predict or 0
    return limit if limit > 0 else None


def _keep(options: Fields) -> int:
    """Returns the number of tokens to keep. A negative number means the whole prompt, and zero
    means "not set"."""
    num_keep = options.integer("num_keep", *INT64)
    n_keep = options.integer("n_keep", *INT64)
    return num_keep or n_keep or 0


def _format(fields: Fields) -> JsonSchema | None:
    """Reads Ollama's `format`: "json" or a JSON schema."""
    value = fields.value("format")
    if value is None or value == "":
        return None
    if value == "json":
        return JsonSchema(text=ANY_OBJECT_SCHEMA, param="format")
    if isinstance(value, str):
        raise invalid_request(
            "format", f"format must be 'json' or a JSON schema, not {quote_value(value)}"
        )
    return JsonSchema(text=orjson.dumps(fields.mapping("format")).decode(), param="format")


def _top_logprobs(fields: Fields) -> int | None:
    enabled = fields.boolean("logprobs")
    top = fields.integer("toplogprobs", 0, MAX_LOGPROBS) or 0
    return top if enabled else None


def _check_ignored(options: Fields) -> None:
    for name in IGNORED_INTEGERS:
        options.integer(name, *INT64)
    options.boolean("use_mmap")
    options.number("typical_p", 0, 1)


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
