"""OpenAI's Responses API: create, store, read and delete responses.

Knows: the path of each operation, the time at which a response is stored, pagination of item lists.
Must not know: request parsing (app/api/responses/request.py), response formats (events.py in the
same folder), generation.

A response is stored when it is complete and before its last byte is sent. After reading a response,
a client can therefore continue it immediately.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.fields import invalid_request, quote_value
from app.api.generate_endpoint import (
    EventStream,
    GenerateEndpoint,
    JsonBody,
    ParsedRequest,
    read_request,
)
from app.api.responses.events import (
    OnComplete,
    ResponseBuilder,
    ResponseEventEncoder,
    ResponseMetadata,
    collect_response,
)
from app.api.responses.request import ParsedResponsesRequest, parse_responses_request
from app.api.responses.store import (
    MAX_RESPONSE_BYTES,
    ResponseStore,
    ResponseStores,
    StoredResponse,
    item_ids,
)
from app.api.schema.responses import TOKEN_COUNT
from app.core.errors import AppError, ErrorKind
from app.core.ports import Generate, ModelCard, Models
from app.core.settings import Settings
from app.http.auth import get_caller
from app.http.body import RequestBodies
from app.http.responses import JsonObject, json_response

MAX_LIMIT, DEFAULT_LIMIT = 100, 20

Order = Literal["asc", "desc"]

RESPONSE_PATH = "/v1/responses/{response_id}"


def paginate_items(items: Sequence[JsonObject], query: Mapping[str, str]) -> JsonObject:
    """Returns a page of items. `items` must be in the order of the conversation. The newest item
    comes first, as in OpenAI's API, unless the query specifies an order. Raises AppError(INVALID)
    for an invalid query."""
    limit, order = _limit(query), _order(query)
    listed = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        listed = listed[_find_index(listed, after) + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > limit,
    }


def _limit(query: Mapping[str, str]) -> int:
    given = query.get("limit", str(DEFAULT_LIMIT))
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= MAX_LIMIT):
        raise invalid_request(
            "limit", f"limit must be an integer from 1 to {MAX_LIMIT}, not {quote_value(given)}"
        )
    return int(given)


def _order(query: Mapping[str, str]) -> Order:
    given = query.get("order", "desc")
    if given not in get_args(Order):
        raise invalid_request("order", f"order must be 'asc' or 'desc', not {quote_value(given)}")
    return cast("Order", given)


def _find_index(items: Sequence[JsonObject], id_: str) -> int:
    for place, item in enumerate(items):
        if item["id"] == id_:
            return place
    raise invalid_request(
        "after", f"after must be the ID of an item of this response, not {quote_value(id_)}"
    )


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    api = _ResponsesApi(models, settings, bodies)
    create = GenerateEndpoint(api.parse, generate, models, settings, bodies)
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", api.input_tokens, methods=["POST"]),
        Route("/v1/responses/compact", api.compact, methods=["POST"]),
        Route(RESPONSE_PATH, api.retrieve, methods=["GET"]),
        Route(RESPONSE_PATH, api.delete, methods=["DELETE"]),
        Route(f"{RESPONSE_PATH}/input_items", api.input_items, methods=["GET"]),
        Route(f"{RESPONSE_PATH}/cancel", api.cancel, methods=["POST"]),
    ]


class _ResponsesApi:
    def __init__(self, models: Models, settings: Settings, bodies: RequestBodies) -> None:
        self._models = models
        self._settings = settings
        self._bodies = bodies
        self._stores = ResponseStores()

    def parse(self, body: bytearray, caller: str, card: ModelCard) -> ParsedRequest:
        store = self._stores.for_caller(caller)
        parsed = parse_responses_request(
            body,
            card.id,
            store,
            context_shift=self._settings.context_shift,
            limit=card.logprobs_limit,
        )
        metadata = ResponseMetadata(
            id=f"resp_{os.urandom(24).hex()}",
            created=int(time.time()),
            echo=parsed.echo,
            tools=parsed.tools,
            encrypted_reasoning=parsed.encrypted_reasoning,
        )
        answer, keep = ResponseBuilder(metadata), _make_saver(store, parsed)
        if parsed.stream:
            reply = EventStream(ResponseEventEncoder(answer, keep))
        else:
            reply = JsonBody(lambda events: collect_response(answer, events), keep)
        return ParsedRequest(request=parsed.request, reply=reply)

    def _find_response(self, request: Request) -> tuple[ResponseStore, StoredResponse]:
        store = self._stores.for_caller(get_caller(request.scope))
        return store, _require_stored(store, request)

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise invalid_request("stream", "stream: stored responses cannot be streamed")
        if "starting_after" in request.query_params:
            raise invalid_request(
                "starting_after", "starting_after: stored responses cannot be streamed"
            )
        store, kept = self._find_response(request)
        store.touch(kept.id)
        return Response(kept.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        store, kept = self._find_response(request)
        store.delete(kept.id)
        return json_response({"id": kept.id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        store, kept = self._find_response(request)
        store.touch(kept.id)
        items = await self._bodies.workers.run(kept.input_items, size=len(kept.input))
        return json_response(paginate_items(items, request.query_params))

    async def cancel(self, request: Request) -> Response:
        self._find_response(request)
        raise invalid_request(
            None, "only background responses can be cancelled; background mode is not supported"
        )

    async def input_tokens(self, request: Request) -> Response:
        async with self._bodies.receive_json(request.scope, request.receive) as body:
            store, shifts = self._stores.for_caller(body.caller), self._settings.context_shift
            model, parsed = await read_request(
                body,
                self._models,
                lambda data, card: parse_responses_request(
                    data, card.id, store, context_shift=shifts, decoder=TOKEN_COUNT
                ),
            )
            ids = await self._models.tokenize_chat(model, parsed.request)
            return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def compact(self, request: Request) -> Response:
        raise AppError(
            ErrorKind.NOT_FOUND,
            "compaction is not supported: send fewer items, or start the server with "
            "--context-shift",
        )


def _make_saver(store: ResponseStore, parsed: ParsedResponsesRequest) -> OnComplete:
    """Returns a function that stores the complete response. Call this on the thread that parses the
    request, so that the input is not encoded on the event loop."""
    written = orjson.dumps(parsed.input_items) if parsed.store else b""

    def keep(response: JsonObject) -> None:
        if parsed.previous_response_id is not None:
            store.touch(parsed.previous_response_id)
        if not parsed.store:
            return
        store.add(
            StoredResponse(
                id=response["id"],
                previous_response_id=parsed.previous_response_id,
                input=written,
                body=orjson.dumps(response),
                items=item_ids((*parsed.input_items, *response["output"])),
            )
        )

    return keep


def _require_stored(store: ResponseStore, request: Request) -> StoredResponse:
    id_: str = request.path_params["response_id"]
    kept = store.find(id_)
    if kept is None:
        raise AppError(
            ErrorKind.NOT_FOUND,
            f"the response {quote_value(id_)} was not found: responses are stored in memory for "
            "the API key that created them; the least recently used ones are evicted, and those "
            f"larger than {MAX_RESPONSE_BYTES >> 20} MiB are not stored",
            param="response_id",
        )
    return kept
