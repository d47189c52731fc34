"""Ollama's chat and generate requests: converts JSON to a generate request.

Knows: the fields of both requests. Must not know: response formats, model loading.

Known but unsupported fields are rejected if they would change the output. Unknown fields follow the
rule in app/api/unknown_fields.py.
"""

from dataclasses import dataclass, replace

from app.api.fields import Fields, as_token_ids, invalid_request
from app.api.ollama.messages import read_messages, read_tools, reject_images
from app.api.ollama.options import (
    OllamaOptions,
    capability_error,
    limit_keep_alive,
    read_format,
    read_options,
    read_think,
    read_top_logprobs,
)
from app.api.openai.request import read_keep_alive
from app.core.models import ModelDetails
from app.core.requests import Conversation, GenerateRequest, Message, Prompt


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


def parse_chat(body: object, details: ModelDetails, *, admin: bool) -> OllamaRequest:
    """Parses the body of POST /api/chat. Raises AppError(INVALID)."""
    fields = Fields.from_value(body)
    messages = read_messages(fields)
    _reject_debug(fields)
    parsed = _build(
        fields,
        details,
        Conversation(messages=messages),
        read_options(fields, details),
        admin=admin,
        tools=True,
    )
    fields.check_unknown()
    if not messages:
        return _as_load(parsed, fields)
    if "completion" not in details.capabilities or not details.chat:
        raise capability_error(details, "chat", "model")
    return parsed


def parse_generate(body: object, details: ModelDetails, *, admin: bool) -> OllamaRequest:
    """Parses the body of POST /api/generate. Raises AppError(INVALID)."""
    fields = Fields.from_value(body)
    prompt, suffix = fields.string("prompt") or "", fields.string("suffix") or ""
    raw = fields.boolean("raw") or False
    context = fields.array("context") or []
    system, template = fields.string("system") or "", fields.string("template") or ""
    if raw and (system or template or context):
        raise invalid_request("raw", "raw mode does not support template, system, or context")
    if template:
        raise invalid_request(
            "template", "template is not supported: the model's own chat template is used"
        )
    reject_images(fields)
    _reject_debug(fields)
    options = read_options(fields, details)
    if raw or suffix:
        parsed = _build(fields, details, prompt, options, admin=admin, suffix=suffix or None)
    else:
        conversation = Conversation(
            messages=_build_messages(system, prompt),
            param="prompt",
            earlier_ids=as_token_ids(context, "context") if context else (),
        )
        parsed = _build(fields, details, conversation, options, admin=admin, with_ids=True)
    fields.check_unknown()
    if not prompt and not suffix:
        return _as_load(parsed, fields)
    if "completion" not in details.capabilities:
        raise capability_error(details, "generate", "model")
    if suffix and "insert" not in details.capabilities:
        raise capability_error(details, "insert", "suffix")
    return parsed


def _build(
    fields: Fields,
    details: ModelDetails,
    prompt: Prompt,
    options: OllamaOptions,
    *,
    admin: bool,
    suffix: str | None = None,
    tools: bool = False,
    with_ids: bool = False,
) -> OllamaRequest:
    fields.boolean("truncate")  # no effect: a prompt that is too long is always rejected
    fields.boolean("shift")
    keep_alive = limit_keep_alive(read_keep_alive(fields), details, admin=admin)
    request = GenerateRequest(
        model=details.name,
        prompt=prompt,
        sampling=options.sampling,
        max_tokens=options.max_tokens,
        max_context=options.max_context,
        num_keep=options.num_keep,
        stop=options.stop,
        top_logprobs=read_top_logprobs(fields),
        grammar=read_format(fields),
        tools=read_tools(fields, details) if tools else (),
        reasoning=read_think(fields, details),
        suffix=suffix,
        return_token_ids=with_ids,
        keep_alive=keep_alive,
    )
    return OllamaRequest(
        model=fields.string("model") or details.name,
        stream=fields.boolean("stream") is not False,
        request=request,
        keep_alive=keep_alive,
    )


def _as_load(parsed: OllamaRequest, fields: Fields) -> OllamaRequest:
    """Converts a request without a prompt to a request that loads or unloads the model. The caller
    checks the permissions."""
    return replace(parsed, request=None, keep_alive=read_keep_alive(fields))


def _reject_debug(fields: Fields) -> None:
    fields.reject("_debug_render_only", False)


def _build_messages(system: str, prompt: str) -> tuple[Message, ...]:
    first = (Message(role="system", content=system),) if system else ()
    return (*first, Message(role="user", content=prompt))
