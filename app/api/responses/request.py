"""Requests of /v1/responses: converts JSON to a generate request and the fields that the response
repeats.

Knows: every field that OpenAI documents for creating a response. Must not know: response formats,
response storage.

Each known field is either supported or, if it would have an effect, rejected with an error that
identifies the field. Unknown fields follow the rule in app/api/unknown_fields.py. The modules in
app/api/openai parse the fields that are shared with chat completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import orjson
from msgspec import Raw

from app.api.fields import Fields, as_mapping, drop_nulls, invalid_request
from app.api.openai.reasoning import build_response_thinking
from app.api.openai.request import check_metadata, check_model, read_keep_alive
from app.api.openai.sampling import (
    build_sampling,
    build_stop_conditions,
    build_template_options,
)
from app.api.openai.structured_outputs import ANY_OBJECT_SCHEMA, build_json_schema
from app.api.responses.input_items import build_messages, prepend_instructions, read_input
from app.api.responses.tools import ResponseTools, read_response_tools, render_tools
from app.api.schema.decode import BodyDecoder
from app.api.schema.fields import decode_fields
from app.api.schema.generation import GenerationFields
from app.api.schema.openai import SERVICE_TIER
from app.api.schema.reasoning import ThinkingFields
from app.api.schema.unsupported_fields import reject_unsupported_fields
from app.core.request_context import add_notice
from app.core.requests import (
    Conversation,
    GenerateRequest,
    JsonSchema,
    Message,
    ReasoningOptions,
    Verbosity,
)
from app.http.responses import JsonObject

MAX_LOGPROBS = 20

IDENTIFIER_FIELDS = ("user", "safety_identifier", "prompt_cache_key")

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# OpenAI's kinds of summaries. None of them has an effect.
SUMMARIES = ("auto", "concise", "detailed")

VERBOSITIES = ("low", "medium", "high")

_GENERATION = BodyDecoder(GenerationFields)
_GENERATION_FIELDS = tuple(
    name for name in GenerationFields.__struct_fields__ if name not in ("model", "stream")
)
_THINKING = BodyDecoder(ThinkingFields)

# The supported values of OpenAI's `include`. The other values concern items of OpenAI's own tools.
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDE_VALUES = (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED_REASONING)


class ResponseHistory(Protocol):
    """Provides access to stored earlier responses."""

    def get_conversation(self, id_: str) -> Sequence[JsonObject]:
        """Returns the items of a response and of all responses before it, in order. Raises AppError
        if one of them is not stored."""
        ...

    def get_item(self, id_: str) -> JsonObject | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponsesRequest:
    """A valid request. tools: the tools that the client declared. encrypted_reasoning: whether the
    reasoning items of the response have `encrypted_content`. input_items: the input items of this
    request, each with an ID. echo: the response fields that repeat the request."""

    request: GenerateRequest
    tools: ResponseTools
    encrypted_reasoning: bool
    stream: bool
    store: bool
    previous_response_id: str | None
    input_items: Sequence[JsonObject]
    echo: JsonObject


def parse_responses_request(
    body: object, model: str, history: ResponseHistory, *, context_shift: bool
) -> ParsedResponsesRequest:
    """Parses the body of POST /v1/responses. context_shift: whether the server truncates input that
    does not fit, from its start. Raises AppError(INVALID) or AppError(NOT_FOUND)."""
    fields = Fields.from_value(body).accept_camel_case()
    check_model(fields)
    previous = fields.string("previous_response_id")
    items = read_input(fields, history.get_item)
    messages = _read_messages(fields, history, previous, items)
    max_tokens = fields.integer("max_output_tokens", 1)
    tools = read_response_tools(fields)
    include = _read_include(fields)
    grammar, verbosity, text = _text(fields)
    thinking = _read_thinking(fields)
    # a reasoning budget is also enforced with a grammar
    limited = thinking.token_budget is not None
    constrained = grammar is not None or tools.options.constrained or limited
    shared = decode_fields(fields, _GENERATION, _GENERATION_FIELDS)
    stop_conditions = build_stop_conditions(shared, max_tokens=max_tokens, constrained=constrained)
    request = GenerateRequest(
        model=model,
        prompt=Conversation(messages=messages, param="input"),
        sampling=build_sampling(shared),
        max_tokens=max_tokens,
        top_logprobs=_read_logprobs(fields, include),
        cache_prompt=fields.boolean("cache_prompt") is not False,
        keep_alive=read_keep_alive(fields),
        # a required tool call leaves no text to constrain
        grammar=None if tools.options.must_call else grammar,
        tools=tools.options.tools,
        tool_choice=tools.options.choice,
        parallel_tool_calls=tools.options.parallel,
        reasoning=thinking,
        verbosity=verbosity,
        chat_template_kwargs=build_template_options(
            Raw(orjson.dumps(fields.mapping("chat_template_kwargs"))), thinking
        ),
    )
    stream = _stream(fields)
    if tools.notice is not None:
        add_notice(tools.notice)
    _check_remaining(fields, context_shift=context_shift)
    reject_unsupported_fields(fields, "responses")
    fields.check_unknown()
    return ParsedResponsesRequest(
        request=stop_conditions.apply(request),
        tools=tools,
        encrypted_reasoning=INCLUDE_ENCRYPTED_REASONING in include,
        stream=stream,
        store=fields.value("store") is not False,
        previous_response_id=previous,
        input_items=items,
        echo=_echo(fields, request, text=text, truncation="auto" if context_shift else "disabled"),
    )


def _read_messages(
    fields: Fields, history: ResponseHistory, previous: str | None, items: Sequence[JsonObject]
) -> tuple[Message, ...]:
    """Returns the conversation, which consists of the instructions, the earlier responses and the
    input of this request."""
    earlier = history.get_conversation(previous) if previous is not None else ()
    instructions = fields.string("instructions")
    messages = prepend_instructions(instructions, build_messages((*earlier, *items)))
    if not messages:
        raise invalid_request("input", "input must contain at least one item for the model")
    return messages


def _text(fields: Fields) -> tuple[JsonSchema | None, Verbosity | None, JsonObject]:
    """Returns the output format, the verbosity, and the field `text` as repeated in the
    response."""
    echo: JsonObject = {"format": {"type": "text"}, "verbosity": "medium"}
    text = fields.nested("text")
    if text is None:
        return None, None, echo
    verbosity = _read_verbosity(text)
    if verbosity is not None:
        echo["verbosity"] = verbosity.level
    format_ = text.nested("format")
    text.check_unknown()
    if format_ is None:
        return None, verbosity, echo
    grammar = None
    kind = format_.required_one_of("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        grammar = _read_schema(format_)
    elif kind == "json_object":
        grammar = _read_object_schema(format_)
    else:
        format_.reject("schema", instead="use the type json_schema")
    format_.check_unknown()
    echo["format"] = dict(format_.items())
    return grammar, verbosity, echo


def _read_thinking(fields: Fields) -> ReasoningOptions:
    """Reads the reasoning options. OpenAI hides reasoning and can return a summary instead; this
    server returns the reasoning itself and never summarizes it."""
    effort, reasoning = None, fields.nested("reasoning")
    if reasoning is not None:
        effort = reasoning.one_of("effort", REASONING_EFFORTS)
        for name in ("summary", "generate_summary"):
            reasoning.one_of(name, SUMMARIES)
        reasoning.reject("context", "auto")
        reasoning.reject("mode", "standard")
        reasoning.check_unknown()
    body = decode_fields(fields, _THINKING, ThinkingFields.__struct_fields__)
    return build_response_thinking(body, effort)


def _read_verbosity(fields: Fields) -> Verbosity | None:
    level = fields.one_of("verbosity", VERBOSITIES)
    return None if level is None else Verbosity(level=level, param=fields.path("verbosity"))


def _read_schema(fields: Fields) -> JsonSchema:
    """Reads OpenAI's named schema. `name` and `description` have no effect, and every schema is
    strict."""
    fields.required_string("name")
    fields.string("description")
    fields.boolean("strict")
    at = fields.path("schema")
    return build_json_schema(as_mapping(fields.required("schema"), at), at)


def _read_object_schema(fields: Fields) -> JsonSchema:
    """Reads the format `json_object`: any object, or as in llama.cpp one that matches `schema`."""
    schema, at = fields.mapping("schema"), fields.path("schema")
    if schema is None:
        return JsonSchema(text=ANY_OBJECT_SCHEMA, param=fields.path("").removesuffix("."))
    return build_json_schema(schema, at)


def _check_identifiers(fields: Fields) -> None:
    """Checks the fields that identify a user or configure OpenAI's prefix cache. They are not used,
    because the prefix cache is indexed by tokens and caches everything."""
    for identifier in IDENTIFIER_FIELDS:
        fields.string(identifier)
    fields.string("prompt_cache_retention")
    fields.nested("prompt_cache_options")
    fields.nested("client_metadata")  # sent by Codex with every request


def _read_include(fields: Fields) -> frozenset[str]:
    names: set[str] = set()
    for place, name in enumerate(fields.array("include") or []):
        path = f"include.{place}"
        names.add(Fields({path: name}).required_one_of(path, INCLUDE_VALUES))
    return frozenset(names)


def _read_logprobs(fields: Fields, include: frozenset[str]) -> int | None:
    """Returns the number of top log probabilities. A client requests them with `include` or
    `top_logprobs`."""
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    return top if INCLUDE_LOGPROBS in include or top else None


def _stream(fields: Fields) -> bool:
    stream = fields.boolean("stream") or False
    options = fields.nested("stream_options")
    if options is not None:
        if not stream:
            raise invalid_request(
                "stream_options", "stream_options is only allowed with stream: true"
            )
        options.reject("include_obfuscation", False)
        options.check_unknown()
    return stream


def _check_remaining(fields: Fields, *, context_shift: bool) -> None:
    """Checks the remaining fields, which have no effect, must match the behavior of this server, or
    are not supported."""
    fields.boolean("store")
    fields.integer("max_tool_calls", 1)  # limits OpenAI's own tools, which this server never calls
    check_metadata(Raw(orjson.dumps(fields.mapping("metadata"))))
    _check_identifiers(fields)
    fields.reject("service_tier", "auto", SERVICE_TIER)
    fields.reject("background", False)
    fields.reject("truncation", "auto" if context_shift else "disabled")
    fields.reject("conversation", instead="use previous_response_id, or send all items")
    fields.reject("prompt", instead="send instructions and input")
    fields.reject("messages", instead="use input")
    fields.reject("max_tokens", instead="use max_output_tokens")
    fields.reject("max_completion_tokens", instead="use max_output_tokens")
    fields.reject("n", 1)
    fields.reject("reasoning_effort", instead="use reasoning.effort")
    fields.reject("response_format", instead="use text.format")
    for unsupported in (
        "access_programs",
        "context_management",
        "image",
        "moderation",
    ):
        fields.reject(unsupported)


def _echo(
    fields: Fields, request: GenerateRequest, *, text: JsonObject, truncation: str
) -> JsonObject:
    """Returns the fields that repeat the request. As in OpenAI's API, defaults are filled in. The
    model's recommended sampling values are not known here, so they are null."""
    choice = drop_nulls(fields.value("tool_choice"))
    tools = render_tools(cast("list[JsonObject]", fields.array("tools") or []))
    # nested as deeply as in the final stream event
    as_mapping({"response": {"tools": tools}}, "tools")
    as_mapping({"response": {"text": text}}, "text.format.schema")
    return {
        "instructions": fields.value("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": fields.value("max_tool_calls"),
        "metadata": drop_nulls(fields.value("metadata")) or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": fields.value("previous_response_id"),
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "service_tier": SERVICE_TIER,
        "store": fields.value("store") is not False,
        "temperature": request.sampling.get("temperature"),
        "text": text,
        "tool_choice": "auto" if choice is None else choice,
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.sampling.get("top_p"),
        "truncation": truncation,
        **{name: fields.value(name) for name in IDENTIFIER_FIELDS},
    }
