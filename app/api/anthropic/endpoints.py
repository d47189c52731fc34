"""Anthropic's API: messages, token counts, and the list of models for requests that send
`anthropic-version`.

Knows: the path of each endpoint, the fields of a model, pagination by model ID. Must not know:
request parsing (request.py in the same folder), the format of messages (output.py), generation, the
state of models.

Format of models: Anthropic's API reference, "List models".
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from app.api.anthropic.errors import VERSION_HEADER, AnthropicErrors
from app.api.anthropic.output import MessageEventEncoder, MessageMetadata, collect_message
from app.api.anthropic.request import ParsedMessagesRequest, parse_messages_request
from app.api.fields import invalid_request, quote_value
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

_MAX_LIMIT, _DEFAULT_LIMIT = 1000, 20


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


class AnthropicRoute(Route):
    """A route for requests that send `anthropic-version`. Other requests to the same path are
    handled by OpenAI's route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and VERSION_HEADER in Headers(scope=scope):
            return super().matches(scope)
        return Match.NONE, {}


def model_routes(models: Models) -> list[Route]:
    async def list_models(request: Request) -> Response:
        await models.rescan()
        return json_response(paginate_models(models.list_models(), request.query_params))

    async def retrieve_model(request: Request) -> Response:
        model = await models.resolve(request.path_params["id"])
        return json_response(render_model(model.card))

    return [
        AnthropicRoute("/v1/models", list_models, methods=["GET"]),
        AnthropicRoute("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
    ]


def paginate_models(cards: Sequence[ModelCard], query: Mapping[str, str]) -> JsonObject:
    """Returns a page of models. Raises AppError(INVALID) for an invalid query."""
    limit = _read_limit(query)
    ids = [card.id for card in cards]
    first, last = 0, len(cards)
    if "after_id" in query:
        first = _find_id(ids, query["after_id"], "after_id") + 1
    if "before_id" in query:
        last = _find_id(ids, query["before_id"], "before_id")
    if "before_id" in query and "after_id" not in query:
        first = max(first, last - limit)
        more = first > 0
    else:
        more = last - first > limit
    page = cards[first : min(last, first + limit)]
    return {
        "data": [render_model(card) for card in page],
        "has_more": more,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }


def render_model(card: ModelCard) -> JsonObject:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
        "capabilities": {"image_input": {"supported": card.vision}},
    }


def _read_limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", str(_DEFAULT_LIMIT))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _MAX_LIMIT):
        raise invalid_request(
            "limit", f"limit must be an integer from 1 to {_MAX_LIMIT}, not {quote_value(text)}"
        )
    return int(text)


def _find_id(ids: Sequence[str], id_: str, name: str) -> int:
    if id_ not in ids:
        raise invalid_request(name, f"{name} must be the id of a model, not {quote_value(id_)}")
    return ids.index(id_)
