"""The list of models in Anthropic's format, for requests that send `anthropic-version`.

Knows: the fields of a model, pagination by model ID. Must not know: the state of models.

Format: Anthropic's API reference, "List models".
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from app.api.anthropic.errors import VERSION_HEADER
from app.api.fields import invalid_request, quote_value
from app.core.ports import ModelCard, Models
from app.http.responses import JsonObject, json_response

_MAX_LIMIT, _DEFAULT_LIMIT = 1000, 20


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
