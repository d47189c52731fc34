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

from app.api.fields import Fields, as_mapping, drop_nulls, invalid_request
from app.api.openai.reasoning import read_response_thinking
from app.api.openai.request import (
    IDENTIFIER_FIELDS,
    SERVICE_TIER,
    check_identifiers,
    check_metadata,
    check_model,
    read_keep_alive,
    read_service_tier,
)
from app.api.openai.sampling import (
    read_sampling,
    read_stop_conditions,
    read_template_options,
    read_verbosity,
)
from app.api.openai.structured_outputs import read_object_schema, read_schema
from app.api.openai.unsupported_fields import reject_unsupported_fields
from app.api.responses.input_items import build_messages, prepend_instructions, read_input
from app.api.responses.tools import ResponseTools, read_response_tools, render_tools
from app.core.request_context import add_notice
from app.core.requests import (
    Conversation,
    GenerateRequest,
    JsonSchema,
    Message,
    Verbosity,
)
from app.http.responses import JsonObject

MAX_LOGPROBS = 20

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
    thinking = read_response_thinking(fields)
    # a reasoning budget is also enforced with a grammar
    limited = thinking.token_budget is not None
    constrained = grammar is not None or tools.options.constrained or limited
    stop_conditions = read_stop_conditions(fields, max_tokens=max_tokens, constrained=constrained)
    request = GenerateRequest(
        model=model,
        prompt=Conversation(messages=messages, param="input"),
        sampling=read_sampling(fields),
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
        chat_template_kwargs=read_template_options(fields, thinking),
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
    verbosity = read_verbosity(text)
    if verbosity is not None:
        echo["verbosity"] = verbosity.level
    format_ = text.nested("format")
    text.check_unknown()
    if format_ is None:
        return None, verbosity, echo
    grammar = None
    kind = format_.required_one_of("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        grammar = read_schema(format_)
    elif kind == "json_object":
        grammar = read_object_schema(format_)
    else:
        format_.reject("schema", instead="use the type json_schema")
    format_.check_unknown()
    echo["format"] = dict(format_.items())
    return grammar, verbosity, echo


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
    check_metadata(fields)
    check_identifiers(fields)
    read_service_tier(fields)
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
