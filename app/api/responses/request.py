"""Requests of /v1/responses: from JSON to a generate request and the fields that the response
repeats.

Knows: every field that OpenAI documents for creating a response. Must not know: how responses are
written or stored.

Each field is either supported, or rejected by name where it would have an effect. Fields shared
with chat completions are parsed by the modules in app/api/openai.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from app.api.fields import Fields, as_mapping, drop_nulls, invalid_request
from app.api.openai.common_fields import (
    IDENTIFIER_FIELDS,
    SERVICE_TIER,
    check_identifiers,
    check_metadata,
    check_model,
    read_keep_alive,
    read_service_tier,
)
from app.api.openai.compat_fields import check_compat_fields
from app.api.openai.sampling import (
    REASONING_EFFORTS,
    read_sampling,
    read_stop_conditions,
    read_template_options,
    read_thinking_budget,
)
from app.api.openai.structured_outputs import ANY_OBJECT_SCHEMA, read_schema
from app.api.openai.tools import ToolOptions, read_function, read_tool_choice, read_tools
from app.api.responses.input_items import build_messages, prepend_instructions, read_input
from app.core.requests import (
    Conversation,
    GenerateRequest,
    JsonSchema,
    Message,
    ReasoningOptions,
    Tool,
)
from app.http.responses import JsonObject

MAX_LOGPROBS = 20

# The supported values of OpenAI's `include`; the others concern items of its own tools.
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"


class ResponseHistory(Protocol):
    """Earlier responses that are stored."""

    def get_conversation(self, id_: str) -> Sequence[JsonObject]:
        """Returns the items of a response and of all responses before it, in order. Raises
        AppError."""
        ...

    def get_item(self, id_: str) -> JsonObject | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponsesRequest:
    """A valid request. input_items: its own input, each item with an id. echo: the response fields
    that repeat the request."""

    request: GenerateRequest
    stream: bool
    store: bool
    previous_response_id: str | None
    input_items: Sequence[JsonObject]
    echo: JsonObject


def parse_responses_request(
    body: object, model: str, history: ResponseHistory, *, context_shift: bool
) -> ParsedResponsesRequest:
    """Parses the body of POST /v1/responses. context_shift: whether the server truncates input that
    does not fit, from its start. Raises AppError(INVALID or NOT_FOUND)."""
    fields = Fields.from_value(body)
    check_model(fields)
    previous = fields.string("previous_response_id")
    items = read_input(fields, history.get_item)
    messages = _read_messages(fields, history, previous, items)
    max_tokens = fields.integer("max_output_tokens", 1)
    tool_options = _read_tool_options(fields)
    grammar, text = _text(fields)
    thinking = _read_thinking(fields)
    # a reasoning budget is also enforced by a grammar
    limited = thinking.token_budget is not None
    constrained = grammar is not None or tool_options.constrained or limited
    stop_conditions = read_stop_conditions(fields, max_tokens=max_tokens, constrained=constrained)
    request = GenerateRequest(
        model=model,
        prompt=Conversation(messages=messages, param="input"),
        sampling=read_sampling(fields),
        max_tokens=max_tokens,
        min_tokens=stop_conditions.min_tokens,
        ignore_eos=stop_conditions.ignore_eos,
        stop=stop_conditions.stop,
        top_logprobs=_logprobs(fields),
        cache_prompt=fields.boolean("cache_prompt") is not False,
        keep_alive=read_keep_alive(fields),
        # a response that must be a tool call has no text to constrain
        grammar=None if tool_options.must_call else grammar,
        tools=tool_options.tools,
        tool_choice=tool_options.choice,
        parallel_tool_calls=tool_options.parallel,
        reasoning=thinking,
        chat_template_kwargs=read_template_options(fields, thinking),
    )
    stream = _stream(fields)
    _check_remaining(fields, context_shift=context_shift)
    check_compat_fields(fields, "responses")
    fields.reject_unknown()
    return ParsedResponsesRequest(
        request=request,
        stream=stream,
        store=fields.value("store") is not False,
        previous_response_id=previous,
        input_items=items,
        echo=_echo(fields, request, text=text, truncation="auto" if context_shift else "disabled"),
    )


def _read_messages(
    fields: Fields, history: ResponseHistory, previous: str | None, items: Sequence[JsonObject]
) -> tuple[Message, ...]:
    """The conversation: instructions, the responses before this one, and its own input."""
    earlier = history.get_conversation(previous) if previous is not None else ()
    instructions = fields.string("instructions")
    messages = prepend_instructions(instructions, build_messages((*earlier, *items)))
    if not messages:
        raise invalid_request("input", "input must contain at least one item for the model")
    return messages


def _read_tool_options(fields: Fields) -> ToolOptions:
    """Reads tools as in chat completions, but with each function's fields beside its type. Clients
    also send tool options without tools; only a required call is an error then."""
    given, choice = fields.array("tools"), fields.value("tool_choice")
    parallel = fields.boolean("parallel_tool_calls") is not False
    if not given:
        if choice not in (None, "none", "auto"):
            raise invalid_request(
                "tool_choice", "tool_choice requires a tool, but there are no tools"
            )
        return ToolOptions(parallel=parallel)
    tools = read_tools(given, _function)
    chosen, tools = read_tool_choice(choice, tools, nested=False)
    return ToolOptions(tools=tools, choice=chosen, parallel=parallel)


def _function(fields: Fields) -> Tool:
    fields.reject("allowed_callers", ["direct"])
    fields.reject("async", False)
    fields.reject("defer_loading", False)
    fields.reject("output_schema")
    return read_function(fields, fields.path("").removesuffix("."))


def _text(fields: Fields) -> tuple[JsonSchema | None, JsonObject]:
    """Returns the output format, and the field `text` as the response repeats it."""
    echo: JsonObject = {"format": {"type": "text"}, "verbosity": "medium"}
    text = fields.nested("text")
    if text is None:
        return None, echo
    text.reject("verbosity", "medium")
    format_ = text.nested("format")
    text.reject_unknown()
    if format_ is None:
        return None, echo
    grammar = None
    kind = format_.required_one_of("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        grammar = read_schema(format_)
    elif kind == "json_object":
        grammar = JsonSchema(text=ANY_OBJECT_SCHEMA, param="text.format")
    format_.reject_unknown()
    echo["format"] = dict(format_.items())
    return grammar, echo


def _read_thinking(fields: Fields) -> ReasoningOptions:
    """Reads the reasoning options. A summary replaces reasoning that OpenAI hides; here the
    reasoning is visible and is never summarized. "auto" requests the best available summary, which
    is none."""
    effort = None
    reasoning = fields.nested("reasoning")
    if reasoning is not None:
        effort = reasoning.one_of("effort", REASONING_EFFORTS)
        reasoning.reject("summary", "auto")
        reasoning.reject("generate_summary", "auto")
        reasoning.reject("context", "auto")
        reasoning.reject("mode", "standard")
        reasoning.reject_unknown()
    return ReasoningOptions(effort=effort, token_budget=read_thinking_budget(fields))


def _logprobs(fields: Fields) -> int | None:
    """Returns the number of log-probabilities, requested by `include` or by a number of
    alternatives."""
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    wanted = False
    for place, name in enumerate(fields.array("include") or []):
        path = f"include.{place}"
        # Reasoning is not hidden here, so there is nothing to encrypt: clients that request it in
        # order to send it back receive the text, and may send that.
        Fields({path: name}).required_one_of(path, (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED_REASONING))
        wanted = wanted or name == INCLUDE_LOGPROBS
    return top if wanted or top else None


def _stream(fields: Fields) -> bool:
    stream = fields.boolean("stream") or False
    options = fields.nested("stream_options")
    if options is not None:
        if not stream:
            raise invalid_request(
                "stream_options", "stream_options is only allowed with stream: true"
            )
        options.reject("include_obfuscation", False)
        options.reject_unknown()
    return stream


def _check_remaining(fields: Fields, *, context_shift: bool) -> None:
    """Checks the other fields: those without an effect, those that match what happens anyway, and
    unsupported ones."""
    fields.boolean("store")
    fields.integer("max_tool_calls", 1)  # limits OpenAI's own tools, which are never called here
    check_metadata(fields)
    check_identifiers(fields)
    read_service_tier(fields)
    fields.reject("background", False)
    fields.reject("prompt_cache_retention", "in_memory")
    fields.reject("truncation", "auto" if context_shift else "disabled")
    fields.reject("conversation", instead="use previous_response_id, or send all items")
    fields.reject("prompt", instead="send instructions and input")
    for unsupported in (
        "access_programs",
        "context_management",
        "image",
        "moderation",
        "prompt_cache_options",
    ):
        fields.reject(unsupported)


def _echo(
    fields: Fields, request: GenerateRequest, *, text: JsonObject, truncation: str
) -> JsonObject:
    """Returns the fields that repeat the request, with defaults filled in as OpenAI does. The
    model's recommended sampling values are not known here; null replaces them."""
    choice = drop_nulls(fields.value("tool_choice"))
    tools = [_render_tool(cast("JsonObject", tool)) for tool in fields.array("tools") or []]
    # nested as deeply as in the last event of a stream
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


def _render_tool(tool: JsonObject) -> JsonObject:
    return {
        "type": tool["type"],
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict") or False,
    }
