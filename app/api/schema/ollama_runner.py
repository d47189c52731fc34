"""The request body of Ollama's client for its MLX runner: POST /completion with `options`.

Knows: its fields, the case of their names. Must not know: how the values are used.

Format: ollama x/mlxrunner/client.go of March 2026 (bbbad9768), and of August 2026 (0436b37a8).
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from app.api.schema.base import (
    NULL,
    OBJECT_DECODER,
    Options,
    describe,
    refer,
    reject_fields,
)
from app.api.schema.decode import BodyDecoder, Data, is_null
from app.api.schema.generation import CachePrompt, MinP, Penalty, RepeatLastN, Stop, TopK, TopP
from app.core.sampling_params import INT64_MAX, INT64_MIN

MAX_LOGPROBS = 20

Integer = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]


_Ignored = Annotated[
    Integer | None,
    describe(
        "A model loading option in Ollama. Ollama's own runner ignores it too.",
        component="RunnerIgnored",
    ),
]


class RunnerOptions(Options, kw_only=True, frozen=True):
    """An option that is absent, null or zero is off."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=100)] | None, describe("0 means greedy sampling.")
    ] = None
    top_p: TopP = None
    min_p: MinP = None
    top_k: TopK = None
    repeat_last_n: RepeatLastN = None
    # 0 is off; a smaller penalty than 0.01 would take logits out of the range of float32
    repeat_penalty: Annotated[
        Annotated[float, Meta(ge=0, le=10)] | None,
        describe("0 and 1 turn the penalty off.", exact=refer("OllamaRepeatPenalty")[0]),
    ] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    max_tokens: Annotated[
        Integer | None,
        describe(
            "The maximum number of output tokens: the first nonzero value of `max_tokens` and "
            "`num_predict`. If the value is negative or absent, the limit is the remaining "
            "context. With `--context-shift`, it is then ten times the context."
        ),
    ] = None
    num_predict: Integer | None = None
    seed: Annotated[
        Integer | None, describe("If negative or absent, the server picks a random seed.")
    ] = None
    stop: Stop = None
    num_keep: Annotated[
        Integer | None,
        describe(
            "The number of tokens at the beginning of the prompt that a context shift never "
            "discards. The BOS token is always kept as well. A negative number keeps as much of "
            "the prompt as fits. The first nonzero value of `num_keep` and `n_keep` is used."
        ),
    ] = None
    n_keep: Integer | None = None
    num_ctx: _Ignored = None
    num_batch: _Ignored = None
    num_gpu: _Ignored = None
    main_gpu: _Ignored = None
    num_thread: _Ignored = None
    draft_num_predict: _Ignored = None
    use_mmap: Annotated[bool | None, describe("No effect.")] = None
    typical_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        describe("No effect, as in Ollama's own runner."),
    ] = None


class RunnerBody(Options, kw_only=True, frozen=True):
    """The body of POST /completion with `options`."""

    unsupported = reject_fields(media=([],), images=([],))

    prompt: Annotated[str, describe("The rendered prompt.", schema={"minLength": 1})]
    options: RunnerOptions | None = None
    cache_prompt: CachePrompt = None
    format: Annotated[
        Raw,
        describe(
            "A JSON schema that constrains the output, or `json` for any object.",
            schema={"anyOf": [{"enum": ["json", "", None]}, {"type": "object"}]},
        ),
    ] = NULL
    logprobs: Annotated[
        bool | None, describe("Add the log-probabilities of the tokens to each line.")
    ] = None
    toplogprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        describe("The number of most likely tokens to return for each position."),
    ] = None


def normalize_names(data: Data) -> bytes:
    """Returns a body with names in lower case, because Go's decoder ignores case, and newer
    versions of the client send capital letters."""
    fields = _lower_names(data)
    options = fields.get("options")
    if options is not None and bytes(memoryview(options)[:1]) == b"{":
        fields["options"] = Raw(msgspec.json.encode(_lower_names(options)))
    return msgspec.json.encode(fields)


def _lower_names(data: Data) -> dict[str, Raw]:
    """If two names differ only in case, the last value that is not null is used."""
    fields = OBJECT_DECODER.decode(data)
    return {name.lower(): value for name, value in fields.items() if not is_null(value)}


RUNNER = BodyDecoder(RunnerBody, normalize=normalize_names)
