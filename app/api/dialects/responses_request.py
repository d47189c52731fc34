"""Requests of /v1/responses: from JSON to what is wanted, and to what the answer repeats of it.

Knows every field that OpenAI documents for creating a response. Each is honoured, or refused by
name where it would have had an effect; what chat completions have too is read by their readers.
Must not know: how answers are written, or how responses are kept.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from app.api.dialects.openai_caller import (
    IDENTIFIERS,
    TIER,
    check_caller,
    check_metadata,
    read_keep_alive,
    read_model,
    read_tier,
)
from app.api.dialects.openai_format import ANY_OBJECT, read_schema
from app.api.dialects.openai_sampling import read_ending, read_sampling
from app.api.dialects.openai_thinking import EFFORTS, read_budget, read_template_options
from app.api.dialects.openai_tools import Toolbox, read_choice, read_function, read_tools
from app.api.dialects.other_servers import check_other_fields
from app.api.dialects.responses_items import read_input
from app.api.dialects.responses_turns import messages_of, with_instructions
from app.api.fields import Fields, as_mapping, invalid, without_nulls
from app.api.wire import JsonObject
from app.core.requests import Conversation, GenerateRequest, JsonSchema, Thinking, Tool

MOST_LOGPROBS = 20

# What OpenAI can add to an answer; all else is about items that only its own tools make.
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


class History(Protocol):
    """What was kept of earlier responses."""

    def conversation(self, id_: str) -> Sequence[JsonObject]:
        """The items of a response and of all that it continues, in order. Raises AppError."""
        ...

    def item(self, id_: str) -> JsonObject | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A valid request. items: its own input, each with an id. echo: the fields of the response that
    repeat the request."""

    request: GenerateRequest
    stream: bool
    store: bool
    previous: str | None
    items: Sequence[JsonObject]
    echo: JsonObject


def parse(body: object, models: Collection[str], history: History, *, shifts: bool) -> Wish:
    """The body of POST /v1/responses. shifts: the server drops the beginning of what does not fit.
    Raises AppError(INVALID, MODEL_NOT_FOUND or NOT_FOUND)."""
    fields = Fields.of(body)
    model = read_model(fields, models)
    previous = fields.string("previous_response_id")
    earlier = history.conversation(previous) if previous is not None else ()
    items = read_input(fields, history.item)
    instructions = fields.string("instructions")
    messages = with_instructions(instructions, messages_of((*earlier, *items)))
    if not messages:
        raise invalid("input", "input must contain at least one item for the model")
    max_tokens = fields.integer("max_output_tokens", 1)
    toolbox = _toolbox(fields)
    grammar, text = _text(fields)
    thinking = _thinking(fields)
    # a budget is kept by a grammar as well
    limited = thinking.budget is not None
    constrained = grammar is not None or toolbox.constrained or limited
    ending = read_ending(fields, max_tokens=max_tokens, constrained=constrained)
    request = GenerateRequest(
        model=model,
        prompt=Conversation(messages=messages, at="input"),
        sampling=read_sampling(fields),
        max_tokens=max_tokens,
        min_tokens=ending.min_tokens,
        ignore_eos=ending.ignore_eos,
        stop=ending.stop,
        top_logprobs=_logprobs(fields),
        reuse=fields.boolean("cache_prompt") is not False,
        keep_alive=read_keep_alive(fields),
        # an answer that must call holds no text which could have a form
        grammar=None if toolbox.must_call else grammar,
        tools=toolbox.tools,
        tool_choice=toolbox.choice,
        parallel_tool_calls=toolbox.parallel,
        thinking=thinking,
        template_options=read_template_options(fields, thinking),
    )
    stream = _stream(fields)
    _check_rest(fields, shifts=shifts)
    check_other_fields(fields, "responses")
    fields.close()
    return Wish(
        request=request,
        stream=stream,
        store=fields.value("store") is not False,
        previous=previous,
        items=items,
        echo=_echo(fields, request, text=text, truncation="auto" if shifts else "disabled"),
    )


def _toolbox(fields: Fields) -> Toolbox:
    """As in chat completions, with each function's fields beside its type. Clients also speak of
    tools where there are none; only a call that must be made needs one."""
    given, choice = fields.array("tools"), fields.value("tool_choice")
    parallel = fields.boolean("parallel_tool_calls") is not False
    if not given:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice requires a tool, but there are no tools")
        return Toolbox(parallel=parallel)
    tools = read_tools(given, _function)
    chosen, tools = read_choice(choice, tools, nested=False)
    return Toolbox(tools=tools, choice=chosen, parallel=parallel)


def _function(fields: Fields) -> Tool:
    fields.refuse("allowed_callers", ["direct"])
    fields.refuse("async", False)
    fields.refuse("defer_loading", False)
    fields.refuse("output_schema")
    return read_function(fields, fields.path("").removesuffix("."))


def _text(fields: Fields) -> tuple[JsonSchema | None, JsonObject]:
    """The form of the answer, and the field `text` as the response repeats it."""
    echo: JsonObject = {"format": {"type": "text"}, "verbosity": "medium"}
    text = fields.nested("text")
    if text is None:
        return None, echo
    text.refuse("verbosity", "medium")
    format_ = text.nested("format")
    text.close()
    if format_ is None:
        return None, echo
    grammar = None
    kind = format_.required_word("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        grammar = read_schema(format_)
    elif kind == "json_object":
        grammar = JsonSchema(text=ANY_OBJECT, at="text.format")
    format_.close()
    echo["format"] = dict(format_.items())
    return grammar, echo


def _thinking(fields: Fields) -> Thinking:
    """A summary is of a model that OpenAI does not let be read; ours can be, and nobody sums them
    up. "auto" asks for the best summary there is, which is none."""
    effort = None
    reasoning = fields.nested("reasoning")
    if reasoning is not None:
        effort = reasoning.word("effort", EFFORTS)
        reasoning.refuse("summary", "auto")
        reasoning.refuse("generate_summary", "auto")
        reasoning.refuse("context", "auto")
        reasoning.refuse("mode", "standard")
        reasoning.close()
    return Thinking(effort=effort, budget=read_budget(fields))


def _logprobs(fields: Fields) -> int | None:
    """They are asked for by `include`, or by a number of rivals."""
    top = fields.integer("top_logprobs", 0, MOST_LOGPROBS) or 0
    wanted = False
    for place, name in enumerate(fields.array("include") or []):
        path = f"include.{place}"
        # Reasoning is not hidden here, so that there is nothing to encrypt: clients that ask for
        # it, to send it back, get the text and may send that.
        Fields({path: name}).required_word(path, (LOGPROBS, ENCRYPTED))
        wanted = wanted or name == LOGPROBS
    return top if wanted or top else None


def _stream(fields: Fields) -> bool:
    stream = fields.boolean("stream") or False
    options = fields.nested("stream_options")
    if options is not None:
        if not stream:
            raise invalid("stream_options", "stream_options is only allowed with stream: true")
        options.refuse("include_obfuscation", False)
        options.close()
    return stream


def _check_rest(fields: Fields, *, shifts: bool) -> None:
    """What is only noted, what says what happens anyway, and what this server does not do."""
    fields.boolean("store")
    fields.integer("max_tool_calls", 1)  # of OpenAI's own tools, which are never called here
    check_metadata(fields)
    check_caller(fields)
    read_tier(fields)
    fields.refuse("background", False)
    fields.refuse("prompt_cache_retention", "in_memory")
    fields.refuse("truncation", "auto" if shifts else "disabled")
    fields.refuse("conversation", instead="use previous_response_id, or send all items")
    fields.refuse("prompt", instead="send instructions and input")
    for unsupported in (
        "access_programs",
        "context_management",
        "image",
        "moderation",
        "prompt_cache_options",
    ):
        fields.refuse(unsupported)


def _echo(
    fields: Fields, request: GenerateRequest, *, text: JsonObject, truncation: str
) -> JsonObject:
    """As OpenAI repeats a request: with what was assumed where nothing was said. What the model
    itself recommends is not known here, and null stands for it."""
    choice = without_nulls(fields.value("tool_choice"))
    tools = [_shown(cast("JsonObject", tool)) for tool in fields.array("tools") or []]
    # as deep as they lie in the last event of a stream
    as_mapping({"response": {"tools": tools}}, "tools")
    as_mapping({"response": {"text": text}}, "text.format.schema")
    return {
        "instructions": fields.value("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": fields.value("max_tool_calls"),
        "metadata": without_nulls(fields.value("metadata")) or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": fields.value("previous_response_id"),
        "reasoning": {"effort": request.thinking.effort, "summary": None},
        "service_tier": TIER,
        "store": fields.value("store") is not False,
        "temperature": request.sampling.get("temperature"),
        "text": text,
        "tool_choice": "auto" if choice is None else choice,
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.sampling.get("top_p"),
        "truncation": truncation,
        **{name: fields.value(name) for name in IDENTIFIERS},
    }


def _shown(tool: JsonObject) -> JsonObject:
    return {
        "type": tool["type"],
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict") or False,
    }
