"""Requests of /v1/messages: converts their struct to a generate request.

Knows: which fields of Anthropic's API have an effect. Must not know: response formats. The modules
in app/api/openai convert the fields that are shared with chat completions.
"""

from dataclasses import dataclass

from app.api.anthropic.errors import THREAD_UNSUPPORTED
from app.api.anthropic.messages import build_messages
from app.api.anthropic.tools import build_tools
from app.api.fields import invalid_request
from app.api.openai.request import get_keep_alive
from app.api.openai.sampling import build_sampling, to_tuple
from app.api.openai.structured_outputs import build_named_schema
from app.api.schema.anthropic import MESSAGES, AnthropicThinking, MessagesBody, OutputConfig
from app.api.schema.decode import BodyDecoder, is_null
from app.core.errors import AppError, ErrorKind
from app.core.ports import ModelCard
from app.core.request_context import add_notice
from app.core.requests import GenerateRequest, JsonSchema, ReasoningOptions

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
    data: bytes | bytearray, card: ModelCard, *, decoder: BodyDecoder[MessagesBody] = MESSAGES
) -> ParsedMessagesRequest:
    """Parses the body of POST /v1/messages, or of /v1/messages/count_tokens. Raises
    AppError(INVALID)."""
    body = decoder.decode(data)
    if not is_null(body.thread):
        raise AppError(
            ErrorKind.INVALID,
            "thread: conversations are not stored: send all messages, without thread",
            param="thread",
            code=THREAD_UNSUPPORTED,
        )
    max_tokens, config = body.max_tokens, body.output_config or OutputConfig()
    content, tools = build_messages(body), build_tools(body)
    grammar = _build_grammar(body, config)
    request = GenerateRequest(
        model=card.id,
        prompt=content.conversation,
        sampling=build_sampling(body),
        # 0 computes the prompt for the prefix cache, but generates no tokens
        max_tokens=max_tokens,
        output_reserve=max(1, min(max_tokens or 1, card.context_length // _RESERVED_SHARE)),
        stop=to_tuple(body.stop_sequences),
        # a required tool call leaves no text to constrain
        grammar=None if tools.options.must_call else grammar,
        tools=tools.options.tools,
        tool_choice=tools.options.choice,
        tool_schemas="prefer",
        parallel_tool_calls=tools.options.parallel,
        reasoning=_build_reasoning(body.thinking, content.effort or config.effort, max_tokens),
        keep_alive=get_keep_alive(body.keep_alive, body.ttl),
    )
    _report_omitted(tools.omitted, content.omitted)
    return ParsedMessagesRequest(
        request=request,
        model=body.model or card.id,
        stream=body.stream or False,
        hides_thinking=body.thinking is not None and body.thinking.display == "omitted",
        manages_context=body.context_management is not None,
    )


def _build_grammar(body: MessagesBody, config: OutputConfig) -> JsonSchema | None:
    """Returns the constraint of the output schema. In an older beta, it is in `output_format`."""
    older, newer = body.output_format, config.format
    if older is not None and newer is not None:
        raise invalid_request(
            "output_format",
            "output_format is an older name for output_config.format: keep one of them",
        )
    if newer is not None:
        return build_named_schema(newer.schema, "output_config.format")
    return None if older is None else build_named_schema(older.schema, "output_format")


def _build_reasoning(
    thinking: AnthropicThinking | None, effort: str | None, max_tokens: int | None
) -> ReasoningOptions:
    """Without `thinking`, the model's default applies. An option that the model does not support is
    not an error, because the same request must work with every model."""
    if thinking is None:
        return ReasoningOptions(effort=effort, lenient=True)
    if thinking.type == "disabled":
        return ReasoningOptions(effort="none", lenient=True)
    budget = thinking.budget_tokens
    if budget is not None and max_tokens is not None:
        budget = max(0, min(budget, max_tokens - 1))  # reserves one token for the content
    return ReasoningOptions(effort=effort, token_budget=budget, enabled=True, lenient=True)


def _report_omitted(tools: tuple[str, ...], blocks: tuple[str, ...]) -> None:
    """Reports the parts that the prompt omits. tools, blocks: names defined by this server, so that
    the notice contains no client text."""
    parts: list[str] = []
    if tools:
        parts.append(f"tools that Anthropic's servers run ({', '.join(tools)})")
    if blocks:
        parts.append(f"blocks that only Anthropic's servers can read ({', '.join(blocks)})")
    if parts:
        add_notice(f"omitted from the prompt: {'; '.join(parts)}")
