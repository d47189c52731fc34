"""OpenAI's requests: from JSON to what is wanted.

Knows every request field that OpenAI documents for chat completions and completions. Each is
honoured, or refused by name where it would have had an effect. Must not know: how answers are
written, or what the model's vocabulary and context are (that is checked where they are known).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import orjson

from app.api.dialects.openai_messages import read_conversation
from app.api.fields import INT32_MAX, INT64, Fields, as_array, as_ids, as_number, invalid, shown
from app.core.errors import AppError, Kind
from app.core.requests import GenerateRequest, JsonSchema, Prompt, SamplingValue

MOST_STOPS = 16  # OpenAI allows four, which few local clients keep to
COMPLETION_MAX_TOKENS = 16  # OpenAI's default, for completions only


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A valid request. include_usage: end the stream with a chunk of token counts."""

    request: GenerateRequest
    stream: bool
    include_usage: bool


def parse_chat(body: object, models: Collection[str]) -> Wish:
    """The body of POST /v1/chat/completions. Raises AppError(INVALID or MODEL_NOT_FOUND)."""
    fields = Fields.of(body)
    model = _model(fields, models)
    conversation = read_conversation(fields)
    newer = fields.integer("max_completion_tokens", 1)
    older = fields.integer("max_tokens", 1)
    wish = _wish(
        fields,
        model=model,
        prompt=conversation,
        max_tokens=newer if newer is not None else older,
        top_logprobs=_chat_logprobs(fields),
    )
    _check_tools(fields)
    _check_metadata(fields)
    for identifier in ("user", "safety_identifier", "prompt_cache_key"):
        fields.string(identifier)
    grammar = _grammar(fields)
    # What these say is what happens anyway.
    fields.refuse("modalities", ["text"])
    fields.refuse("service_tier", "auto", "default")
    fields.refuse("store", False)
    fields.refuse("prompt_cache_retention", "in_memory")
    for unsupported in (
        "audio",
        "function_call",
        "functions",
        "moderation",
        "prediction",
        "prompt_cache_options",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
    ):
        fields.refuse(unsupported)
    fields.close()
    return replace(wish, request=replace(wish.request, grammar=grammar))


def parse_completion(body: object, models: Collection[str]) -> Wish:
    """The body of POST /v1/completions. Raises AppError(INVALID or MODEL_NOT_FOUND)."""
    fields = Fields.of(body)
    max_tokens = fields.integer("max_tokens", 1)
    wish = _wish(
        fields,
        model=_model(fields, models),
        prompt=_prompt(fields),
        max_tokens=COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens,
        top_logprobs=fields.integer("logprobs", 0, 5),
    )
    fields.string("user")
    fields.refuse("best_of", 1)
    fields.refuse("echo", False)
    fields.refuse("suffix", "")
    fields.close()
    return wish


def _wish(
    fields: Fields,
    *,
    model: str,
    prompt: Prompt,
    max_tokens: int | None,
    top_logprobs: int | None,
) -> Wish:
    """What both endpoints share."""
    fields.refuse("n", 1)
    stream = fields.boolean("stream") or False
    return Wish(
        request=GenerateRequest(
            model=model,
            prompt=prompt,
            sampling=_sampling(fields),
            max_tokens=max_tokens,
            stop=fields.strings("stop", MOST_STOPS),
            top_logprobs=top_logprobs,
            reuse=fields.boolean("cache_prompt") is not False,
        ),
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def _model(fields: Fields, models: Collection[str]) -> str:
    model = fields.required_string("model")
    if model not in models:
        raise unknown_model(model)
    return model


def unknown_model(model: str) -> AppError:
    return AppError(
        Kind.MODEL_NOT_FOUND,
        f"the model {shown(model)} is not served here: GET /v1/models lists what is",
        param="model",
    )


def _sampling(fields: Fields) -> dict[str, SamplingValue]:
    """Only what the client set, so that the model's defaults can stand beneath it."""
    top_k = fields.integer("top_k", -1, INT32_MAX)
    read: dict[str, SamplingValue] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": 0 if top_k == -1 else top_k,  # two ways to say "off"
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0, 10, above=True),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repeat_last_n": fields.integer("repeat_last_n", -1, INT32_MAX),
        "logit_bias": _logit_bias(fields),
        "seed": fields.integer("seed", *INT64),
    }
    return {name: value for name, value in read.items() if value is not None}


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    biases = fields.nested("logit_bias")
    if biases is None:
        return None
    read: list[tuple[int, float]] = []
    for key, value in biases.items():
        path = biases.path(key[:20])
        # One spelling per id: "7" and "07" would be two biases for one token.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
            raise invalid(path, f"{path}: keys are token ids, such as '42', not {shown(key)}")
        bias = as_number(value)
        if bias is None or not -100 <= bias <= 100:
            raise invalid(path, f"{path} must be a number from -100 to 100, not {shown(value)}")
        read.append((int(key), bias))
    return tuple(read)


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.nested("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true")
    options.refuse("include_obfuscation", False)
    include_usage = options.boolean("include_usage") or False
    options.close()
    return include_usage


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, 20)
    if wanted:
        return top or 0
    if top is not None:
        raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs: true")
    return None


def _grammar(fields: Fields) -> JsonSchema | None:
    """What `response_format` asks for. Whether the schema can be followed is not known here."""
    response_format = fields.nested("response_format")
    if response_format is None:
        return None
    kind = response_format.required_string("type")
    grammar = None
    match kind:
        case "text":
            response_format.refuse("json_schema")
        case "json_object":
            response_format.refuse("json_schema")
            grammar = JsonSchema(text='{"type":"object"}')
        case "json_schema":
            path = response_format.path("json_schema")
            grammar = _schema(Fields.of(response_format.required("json_schema"), path))
        case _:
            raise invalid(
                "response_format.type",
                "response_format.type must be 'text', 'json_object' or 'json_schema', "
                f"not {shown(kind)}",
            )
    response_format.close()
    return grammar


def _schema(described: Fields) -> JsonSchema:
    """`name` and `description` change no answer, and every answer is strict."""
    described.required_string("name")
    described.string("description")
    described.boolean("strict")
    schema = described.required("schema")
    path = described.path("schema")
    Fields.of(schema, path)
    described.close()
    try:
        return JsonSchema(text=orjson.dumps(schema).decode())
    except orjson.JSONEncodeError as error:
        raise invalid(path, f"{path} is nested too deeply") from error


def _check_tools(fields: Fields) -> None:
    tools = fields.array("tools")
    if tools is not None and not tools:
        raise invalid("tools", "tools must hold at least one tool: leave it out for none")
    if tools:
        raise invalid("tools", "tools are not supported yet: leave tools out")
    fields.refuse("tool_choice", "none")
    if fields.boolean("parallel_tool_calls") is not None:
        raise invalid("parallel_tool_calls", "parallel_tool_calls is only allowed with tools")


def _check_metadata(fields: Fields) -> None:
    """Notes to oneself, for lists of stored answers. We store none, and OpenAI's answers do not
    depend on them either; so they are only held to OpenAI's limits."""
    metadata = fields.nested("metadata")
    if metadata is None:
        return
    pairs = list(metadata.items())
    if len(pairs) > 16:
        raise invalid("metadata", f"metadata must hold at most 16 pairs, not {len(pairs)}")
    for key, value in pairs:
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise invalid(
                metadata.path(key[:64]),
                "metadata maps keys of up to 64 characters to strings of up to 512 characters",
            )


def _prompt(fields: Fields) -> Prompt:
    """A string, token ids, or an array of exactly one of these."""
    value: object = fields.required("prompt")
    if isinstance(value, str):
        return value
    items = as_array(value)
    if not items:
        wanted = "a string or an array of token ids"
        raise invalid("prompt", f"prompt must be {wanted}, not {shown(value)}")
    first: object = items[0]
    ids = as_array(first)
    if ids is None and not isinstance(first, str):
        return as_ids(items, "prompt")
    if len(items) > 1:
        raise invalid("prompt", f"prompt must hold one prompt, not {len(items)}")
    if isinstance(first, str):
        return first
    if not ids:
        raise invalid("prompt.0", "prompt.0 must hold at least one token id")
    return as_ids(ids, "prompt.0")
