"""Anthropic's Messages API: messages, token counts, models.

Knows: the path of each endpoint. Must not know: request parsing (request.py in the same folder),
response formats (output.py), generation.
"""

import os
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.anthropic.errors import AnthropicErrors
from app.api.anthropic.models import model_routes
from app.api.anthropic.output import MessageEventEncoder, MessageMetadata, collect_message
from app.api.anthropic.request import ParsedMessagesRequest, parse_messages_request
from app.api.generate_endpoint import (
    EventStream,
    GenerateEndpoint,
    JsonBody,
    ParsedRequest,
    read_request,
)
from app.api.schema.anthropic import COUNT_TOKENS
from app.core.ports import Generate, ModelCard, Models
from app.core.settings import Settings
from app.http.auth import get_caller, is_admin
from app.http.body import RequestBodies
from app.http.responses import JsonObject, json_response

ERRORS = AnthropicErrors()


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    create = GenerateEndpoint(_prepare_message, generate, models, settings, bodies)

    async def count_tokens(request: Request) -> Response:
        async with bodies.receive_json(request.scope, request.receive) as body:
            model, parsed = await read_request(
                body, models, partial(parse_messages_request, decoder=COUNT_TOKENS)
            )
            counted = replace(
                parsed.request, caller=get_caller(request.scope), admin=is_admin(request.scope)
            )
            ids = await models.tokenize_chat(model, counted)
            return _render_count(parsed, len(ids))

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        *model_routes(models),
    ]


def _prepare_message(body: bytearray, _caller: str, card: ModelCard) -> ParsedRequest:
    parsed = parse_messages_request(body, card)
    metadata = MessageMetadata(
        id=f"msg_{os.urandom(12).hex()}",
        model=parsed.model,
        hides_thinking=parsed.hides_thinking,
        manages_context=parsed.manages_context,
    )
    if parsed.stream:
        reply = EventStream(MessageEventEncoder(metadata))
    else:
        reply = JsonBody(lambda events: collect_message(metadata, events))
    return ParsedRequest(request=parsed.request, reply=reply)


def _render_count(parsed: ParsedMessagesRequest, tokens: int) -> Response:
    content: JsonObject = {"input_tokens": tokens}
    if parsed.manages_context:
        content["context_management"] = {"original_input_tokens": tokens}
    return json_response(content)
