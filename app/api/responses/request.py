"""Requests of /v1/responses: converts their struct to a generate request and the fields that the
response repeats.

Knows: the fields of a response's request. Must not know: response formats, response storage. The
modules in app/api/openai convert the fields that are shared with chat completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Raw

from app.api.fields import as_mapping, drop_nulls, invalid_request, quote_value
from app.api.openai.request import check_metadata, get_keep_alive
from app.api.openai.sampling import (
    build_response_thinking,
    build_sampling,
    build_stop_conditions,
    build_template_options,
)
from app.api.openai.structured_outputs import build_named_schema, build_object_schema
from app.api.responses.input_items import (
    build_input,
    build_messages,
    find_question,
    prepend_instructions,
)
from app.api.responses.tools import ResponseTools, build_response_tools, render_tools
from app.api.schema.base import NULL
from app.api.schema.decode import BodyDecoder, decode_json
from app.api.schema.openai import SERVICE_TIER
from app.api.schema.responses import (
    INCLUDE_ENCRYPTED_REASONING,
    INCLUDE_LOGPROBS,
    RESPONSE,
    ResponseBody,
    ResponseJsonObject,
    ResponseJsonSchema,
    TextOptions,
)
from app.core.request_context import add_notice
from app.core.requests import Conversation, GenerateRequest, JsonSchema, Message, Verbosity
from app.core.sampling_params import USUAL_LOGPROBS_LIMIT, LogprobsLimit
from app.http.responses import JsonObject


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
    data: bytes | bytearray,
    model: str,
    history: ResponseHistory,
    *,
    context_shift: bool,
    decoder: BodyDecoder[ResponseBody] = RESPONSE,
    limit: LogprobsLimit = USUAL_LOGPROBS_LIMIT,
) -> ParsedResponsesRequest:
    """Parses the body of POST /v1/responses. context_shift: whether the server truncates input that
    does not fit, from its start. Raises AppError(INVALID) or AppError(NOT_FOUND)."""
    body, sent = decoder.decode_with_fields(data)
    items = build_input(body.input or [], history.get_item)
    messages = _build_messages(body, history, items)
    tools = build_response_tools(body)
    text = body.text or TextOptions()
    grammar = _build_grammar(text)
    effort = None if body.reasoning is None else body.reasoning.effort
    thinking = build_response_thinking(body, effort)
    # a reasoning budget is also enforced with a grammar
    limited = thinking.token_budget is not None
    constrained = grammar is not None or tools.options.constrained or limited
    stop_conditions = build_stop_conditions(
        body, max_tokens=body.max_output_tokens, constrained=constrained
    )
    include = body.include or ()
    top_logprobs = limit.resolve("top_logprobs", body.top_logprobs) or 0
    verbosity = None
    if text.verbosity is not None:
        verbosity = Verbosity(level=text.verbosity, param="text.verbosity")
    request = GenerateRequest(
        model=model,
        prompt=Conversation(messages=messages, param="input"),
        sampling=build_sampling(body),
        max_tokens=body.max_output_tokens,
        # a client requests log probabilities with `include` or `top_logprobs`
        top_logprobs=top_logprobs if INCLUDE_LOGPROBS in include or top_logprobs else None,
        cache_prompt=body.cache_prompt is not False,
        keep_alive=get_keep_alive(body.keep_alive, body.ttl),
        # a required tool call leaves no text to constrain
        grammar=None if tools.options.must_call else grammar,
        tools=tools.options.tools,
        tool_choice=tools.options.choice,
        parallel_tool_calls=tools.options.parallel,
        reasoning=thinking,
        verbosity=verbosity,
        chat_template_kwargs=build_template_options(body.chat_template_kwargs, thinking),
        **stop_conditions,
    )
    if body.stream_options is not None and not body.stream:
        raise invalid_request("stream_options", "stream_options is only allowed with stream: true")
    if tools.notice is not None:
        add_notice(tools.notice)
    check_metadata(body.metadata)
    truncation = "auto" if context_shift else "disabled"
    if body.truncation not in (None, truncation):
        raise invalid_request(
            "truncation",
            f"truncation does not support {quote_value(body.truncation)}: leave it out, or use "
            f'"{truncation}"',
        )
    return ParsedResponsesRequest(
        request=request,
        tools=tools,
        encrypted_reasoning=INCLUDE_ENCRYPTED_REASONING in include,
        stream=body.stream or False,
        store=body.store is not False,
        previous_response_id=body.previous_response_id,
        input_items=items,
        echo=_build_echo(body, sent, request, truncation),
    )


def _build_messages(
    body: ResponseBody, history: ResponseHistory, items: Sequence[JsonObject]
) -> tuple[Message, ...]:
    """Returns the conversation, which consists of the instructions, the earlier responses and the
    input of this request."""
    previous = body.previous_response_id
    earlier = history.get_conversation(previous) if previous is not None else ()
    question = find_question(body.input or [])
    messages = build_messages(earlier, items, question)
    messages = prepend_instructions(body.instructions, messages)
    if not messages:
        raise invalid_request("input", "input must contain at least one item for the model")
    return messages


def _build_grammar(text: TextOptions) -> JsonSchema | None:
    match text.format:
        case ResponseJsonSchema(schema=schema):
            return build_named_schema(schema, "text.format")
        case ResponseJsonObject(schema=schema):
            return build_object_schema(schema, "text.format")
        case _:
            return None


def _build_echo(
    body: ResponseBody, sent: Mapping[str, Raw], request: GenerateRequest, truncation: str
) -> JsonObject:
    """Returns the fields that repeat the request. As in OpenAI's API, defaults are filled in. The
    model's recommended sampling values are not known here, so they are null. sent: the fields of
    the body."""
    choice = drop_nulls(decode_json(sent.get("tool_choice", NULL)))
    tools = render_tools(decode_json(sent.get("tools", NULL)) or [])
    text: JsonObject = {"format": {"type": "text"}, "verbosity": "medium"}
    text |= _drop_null_fields(decode_json(sent.get("text", NULL)))
    text["format"] = _drop_null_fields(text["format"])
    # nested as deeply as in the final stream event
    as_mapping({"response": {"tools": tools}}, "tools")
    as_mapping({"response": {"text": text}}, "text.format.schema")
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": drop_nulls(decode_json(body.metadata)) or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "service_tier": SERVICE_TIER,
        "store": body.store is not False,
        "temperature": request.sampling.get("temperature"),
        "text": {name: text[name] for name in ("format", "verbosity")},
        "tool_choice": "auto" if choice is None else choice,
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.sampling.get("top_p"),
        "truncation": truncation,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _drop_null_fields(value: JsonObject | None) -> JsonObject:
    return {name: one for name, one in (value or {}).items() if one is not None}
