"""Requests of /v1/messages: converts JSON to a generate request.

Knows: every field of Anthropic's API and its betas, the sampling fields shared by all generation
endpoints. Must not know: response formats.

Each field has an effect, is listed in ACCEPTED_FIELDS because it cannot change a response, or is
rejected with an error that identifies it. Unknown fields follow the rule in
app/api/unknown_fields.py. `metadata` and `context_management` may have any attributes.

Format: Anthropic's API reference, "Create a Message" and "Count tokens in a Message".
"""

from dataclasses import dataclass

from app.api.anthropic.errors import THREAD_UNSUPPORTED
from app.api.anthropic.messages import EFFORTS, read_messages
from app.api.anthropic.tools import read_tools
from app.api.fields import Fields, as_mapping, invalid_request
from app.api.openai.request import check_model, read_keep_alive
from app.api.openai.sampling import build_sampling
from app.api.openai.structured_outputs import build_json_schema
from app.api.schema.decode import BodyDecoder
from app.api.schema.fields import decode_fields
from app.api.schema.generation import MAX_STOP_STRINGS, SAMPLING_FIELDS, SamplingFields
from app.core.errors import AppError, ErrorKind
from app.core.ports import ModelCard
from app.core.request_context import add_notice
from app.core.requests import GenerateRequest, JsonSchema, ReasoningOptions
from app.core.sampling_params import INT32_MAX

# Fields that cannot change a response here. They concern the location and price of Anthropic's
# service, the user, or features of Anthropic's servers. `cache_control` is not needed, because
# every prefix is cached automatically.
ACCEPTED_FIELDS = (
    "anthropic_version",
    "betas",
    "billing_policy",
    "cache_control",
    "compaction",
    "container",
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)

_SAMPLING = BodyDecoder(SamplingFields)

_THINKING_TYPES = ("enabled", "adaptive", "between_tools", "disabled")

# The fraction of the context that a prompt must leave for the output, unless `max_tokens` is lower.
# If `max_tokens` exceeds the remaining context, it is reduced. But if a response ended after a few
# tokens, a coding agent would repeat its request, whereas an error makes it compact the
# conversation.
_RESERVED_SHARE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessagesRequest:
    """A valid request. model: the name in the request. hides_thinking: whether thinking blocks are
    sent without text. manages_context: whether the request has `context_management`."""

    request: GenerateRequest
    model: str
    stream: bool
    hides_thinking: bool
    manages_context: bool


def parse_messages_request(
    body: object, card: ModelCard, *, counts_only: bool = False
) -> ParsedMessagesRequest:
    """Parses the body of POST /v1/messages, or of /v1/messages/count_tokens. Raises
    AppError(INVALID)."""
    fields = Fields.from_value(body)
    check_model(fields)
    max_tokens = _read_max_tokens(fields, required=not counts_only)
    content = read_messages(fields)
    tools = read_tools(fields)
    effort, grammar = _read_output_config(fields)
    thinking = fields.nested("thinking")
    request = GenerateRequest(
        model=card.id,
        prompt=content.conversation,
        sampling=build_sampling(decode_fields(fields, _SAMPLING, SAMPLING_FIELDS)),
        max_tokens=max_tokens,
        output_reserve=max(1, min(max_tokens or 1, card.context_length // _RESERVED_SHARE)),
        stop=fields.strings("stop_sequences", MAX_STOP_STRINGS),
        # a required tool call leaves no text to constrain
        grammar=None if tools.options.must_call else grammar,
        tools=tools.options.tools,
        tool_choice=tools.options.choice,
        tool_schemas="prefer",
        parallel_tool_calls=tools.options.parallel,
        reasoning=_read_reasoning(thinking, content.effort or effort, max_tokens),
        keep_alive=read_keep_alive(fields),
    )
    parsed = ParsedMessagesRequest(
        request=request,
        model=fields.string("model") or card.id,
        stream=fields.boolean("stream") or False,
        hides_thinking=thinking is not None and thinking.value("display") == "omitted",
        manages_context=_read_context_management(fields),
    )
    _report_omitted(tools.omitted, content.omitted)
    _check_remaining(fields)
    fields.check_unknown()
    return parsed


def _read_max_tokens(fields: Fields, *, required: bool) -> int | None:
    """Reads `max_tokens`. 0 computes the prompt for the prefix cache, but generates no tokens."""
    if required:
        fields.required("max_tokens")
    return fields.integer("max_tokens", 0, INT32_MAX)


def _read_output_config(fields: Fields) -> tuple[str | None, JsonSchema | None]:
    """Reads the reasoning effort and the output schema. In an older beta, the schema is in
    `output_format`."""
    config, older = fields.nested("output_config"), fields.nested("output_format")
    effort, format_ = None, older
    if config is not None:
        effort = config.one_of("effort", EFFORTS)
        newer = config.nested("format")
        config.value("task_budget")  # Anthropic's models see it in the prompt; it limits nothing
        config.check_unknown()
        if older is not None and newer is not None:
            raise invalid_request(
                "output_format",
                "output_format is an older name of output_config.format: keep one of them",
            )
        format_ = older if newer is None else newer
    if format_ is None:
        return effort, None
    format_.required_one_of("type", ("json_schema",))
    path = format_.path("schema")
    schema = build_json_schema(as_mapping(format_.required("schema"), path), path)
    format_.check_unknown()
    return effort, schema


def _read_reasoning(
    fields: Fields | None, effort: str | None, max_tokens: int | None
) -> ReasoningOptions:
    """Reads `thinking`. Without it, the model's default applies. An option that the model does not
    support is not an error, because the same request must work with every model."""
    if fields is None:
        return ReasoningOptions(effort=effort, lenient=True)
    kind = fields.required_one_of("type", _THINKING_TYPES)
    fields.one_of("display", ("summarized", "omitted"))
    budget = fields.integer("budget_tokens", 1, INT32_MAX)
    fields.check_unknown()
    if kind == "disabled":
        return ReasoningOptions(effort="none", lenient=True)
    if budget is not None and max_tokens is not None:
        budget = max(0, min(budget, max_tokens - 1))  # reserves one token for the content
    return ReasoningOptions(effort=effort, token_budget=budget, enabled=True, lenient=True)


def _read_context_management(fields: Fields) -> bool:
    """Reads the edits that Anthropic's servers would apply to a long conversation. This server
    applies none of them and reports this in the response. Returns whether the field is set."""
    management = fields.nested("context_management")
    if management is None:
        return False
    for place, edit in enumerate(management.array("edits") or []):
        Fields.from_value(edit, management.path(f"edits.{place}")).required_string("type")
    return True


def _check_remaining(fields: Fields) -> None:
    for name in ACCEPTED_FIELDS:
        fields.value(name)
    fields.reject("mcp_servers", [], instead="connect to MCP servers in the client")
    fields.reject("stop", [], instead="use stop_sequences")
    if fields.value("thread") is not None:
        raise AppError(
            ErrorKind.INVALID,
            "thread: conversations are not stored: send all messages, without thread",
            param="thread",
            code=THREAD_UNSUPPORTED,
        )


def _report_omitted(tools: tuple[str, ...], blocks: tuple[str, ...]) -> None:
    """Reports what the prompt omits. tools, blocks: names defined by this server, so that the
    notice contains no client text."""
    parts: list[str] = []
    if tools:
        parts.append(f"tools that Anthropic's servers run ({', '.join(tools)})")
    if blocks:
        parts.append(f"blocks that only Anthropic's servers can read ({', '.join(blocks)})")
    if parts:
        add_notice(f"omitted from the prompt: {'; '.join(parts)}")
