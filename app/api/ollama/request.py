"""Ollama's chat and generate requests: converts their structs to a generate request.

Knows: the fields of both requests. Must not know: response formats, model loading.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from app.api.fields import invalid_request
from app.api.ollama.messages import build_messages, build_tools, read_images
from app.api.ollama.options import (
    build_format,
    build_options,
    build_reasoning,
    capability_error,
    get_top_logprobs,
    limit_keep_alive,
)
from app.api.openai.request import get_keep_alive
from app.api.schema.ollama import CHAT, GENERATE, OllamaPromptBody
from app.core.images import ContentPart, join_parts
from app.core.models import ModelDetails
from app.core.requests import Conversation, GenerateRequest, Message, Prompt, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest:
    """A valid request. model: the name in the request. stream: whether to stream the response as
    JSON lines. request: None if the model is only loaded or unloaded. keep_alive: in seconds; None
    keeps the current value."""

    model: str
    stream: bool
    request: GenerateRequest | None
    keep_alive: float | None = None

    @property
    def unloads(self) -> bool:
        return self.request is None and self.keep_alive == 0


def parse_chat(data: bytes | bytearray, details: ModelDetails, *, admin: bool) -> OllamaRequest:
    """Parses the body of POST /api/chat. Raises AppError(INVALID)."""
    body = CHAT.decode(data)
    messages = build_messages(body.messages or ())
    tools = build_tools(body.tools, details)
    parsed = _build(body, details, Conversation(messages=messages), admin=admin, tools=tools)
    if not messages:
        return _as_load(parsed, body)
    if "completion" not in details.capabilities or not details.chat:
        raise capability_error(details, "chat", "model")
    return parsed


def parse_generate(data: bytes | bytearray, details: ModelDetails, *, admin: bool) -> OllamaRequest:
    """Parses the body of POST /api/generate. Raises AppError(INVALID)."""
    body = GENERATE.decode(data)
    prompt, suffix, system = body.prompt or "", body.suffix or "", body.system or ""
    if body.raw and (system or body.template or body.context):
        raise invalid_request("raw", "raw mode does not support template, system, or context")
    if body.template:
        raise invalid_request(
            "template", "template is not supported: the model's own chat template is used"
        )
    if body.raw or suffix:
        if body.images:
            name = "raw" if body.raw else "suffix"
            raise invalid_request("images", f"images: not supported together with {name}")
        parsed = _build(body, details, prompt, admin=admin, suffix=suffix or None)
    else:
        conversation = Conversation(
            messages=_build_messages(
                system, (*read_images(body.images, "images", omit=False), prompt)
            ),
            param="prompt",
            earlier_ids=tuple(body.context or ()),
        )
        parsed = _build(body, details, conversation, admin=admin, with_ids=True)
    if not prompt and not suffix and not body.images:
        return _as_load(parsed, body)
    if "completion" not in details.capabilities:
        raise capability_error(details, "generate", "model")
    if suffix and "insert" not in details.capabilities:
        raise capability_error(details, "insert", "suffix")
    return parsed


def _build(
    body: OllamaPromptBody,
    details: ModelDetails,
    prompt: Prompt,
    *,
    admin: bool,
    suffix: str | None = None,
    tools: tuple[Tool, ...] = (),
    with_ids: bool = False,
) -> OllamaRequest:
    options = build_options(body.options, details)
    keep_alive = limit_keep_alive(get_keep_alive(body.keep_alive), details, admin=admin)
    request = GenerateRequest(
        model=details.name,
        prompt=prompt,
        sampling=options.sampling,
        max_tokens=options.max_tokens,
        max_context=options.max_context,
        num_keep=options.num_keep,
        stop=options.stop,
        top_logprobs=get_top_logprobs(body),
        grammar=build_format(body.format),
        tools=tools,
        reasoning=build_reasoning(body.think, details),
        suffix=suffix,
        return_token_ids=with_ids,
        keep_alive=keep_alive,
    )
    return OllamaRequest(
        model=body.model or details.name,
        stream=body.stream is not False,
        request=request,
        keep_alive=keep_alive,
    )


def _as_load(parsed: OllamaRequest, body: OllamaPromptBody) -> OllamaRequest:
    """Converts a request without a prompt to a request that loads or unloads the model. The caller
    checks the permissions."""
    return replace(parsed, request=None, keep_alive=get_keep_alive(body.keep_alive))


def _build_messages(system: str, parts: Iterable[ContentPart]) -> tuple[Message, ...]:
    first = (Message(role="system", content=system),) if system else ()
    text, images = join_parts(parts)
    return (*first, Message(role="user", content=text, images=images))
