"""OpenAI's Responses API: responses, made, kept, read and deleted.

Knows which path does what, and that a response is kept once it is whole and before its last byte is
sent, so that whoever has read it may continue it. Requests are read in responses_request, answers
are written in responses_reply. Must not know: anything of what stands between.

Lists of items, a page at a time.
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
from app.api.generate_endpoint import EventStream, GenerateEndpoint, JsonBody, ParsedRequest
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
from app.core.errors import AppError, ErrorKind
from app.core.ports import Generate
from app.core.settings import Settings
from app.http.body import MAX_CHAT_VALUES, RequestBodies
from app.http.responses import JsonObject, get_caller, json_response

MAX_LIMIT, DEFAULT_LIMIT = 100, 20

Order = Literal["asc", "desc"]


def paginate_items(items: Sequence[JsonObject], query: Mapping[str, str]) -> JsonObject:
    """A page of items that stand in the order in which they were said. Newest first, as at OpenAI,
    unless the query says otherwise. Raises AppError(INVALID) for a query that cannot be obeyed."""
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
        "after", f"after must be the id of an item of this response, not {quote_value(id_)}"
    )


RESPONSE_PATH = "/v1/responses/{response_id}"


def routes(generate: Generate, settings: Settings, bodies: RequestBodies) -> list[Route]:
    stores = ResponseStores()

    def prepare(body: object, caller: str) -> ParsedRequest:
        store = stores.for_caller(caller)
        served = {card.id for card in generate.list_models()}
        wish = parse_responses_request(body, served, store, context_shift=settings.context_shift)
        head = ResponseMetadata(
            id=f"resp_{os.urandom(24).hex()}", created=int(time.time()), echo=wish.echo
        )
        answer, keep = ResponseBuilder(head), _make_saver(store, wish)
        if wish.stream:
            reply = EventStream(ResponseEventEncoder(answer, keep))
        else:
            reply = JsonBody(lambda said: collect_response(answer, said), keep)
        return ParsedRequest(request=wish.request, reply=reply)

    def find_response(request: Request) -> tuple[ResponseStore, StoredResponse]:
        store = stores.for_caller(get_caller(request.scope))
        return store, _require_stored(store, request)

    async def retrieve(request: Request) -> Response:
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise invalid_request("stream", "stream: stored responses cannot be streamed")
        if "starting_after" in request.query_params:
            raise invalid_request(
                "starting_after", "starting_after: stored responses cannot be streamed"
            )
        store, kept = find_response(request)
        store.touch(kept.id)
        return Response(kept.body, media_type="application/json")

    async def delete(request: Request) -> Response:
        store, kept = find_response(request)
        store.delete(kept.id)
        return json_response({"id": kept.id, "object": "response", "deleted": True})

    async def input_items(request: Request) -> Response:
        store, kept = find_response(request)
        store.touch(kept.id)
        items = await bodies.workers.run(kept.input_items, size=len(kept.input))
        return json_response(paginate_items(items, request.query_params))

    async def cancel(request: Request) -> Response:
        find_response(request)
        raise invalid_request(
            None, "only background responses can be cancelled; background mode is not supported"
        )

    async def input_tokens(request: Request) -> Response:
        async with bodies.receive_json(request.scope, request.receive, MAX_CHAT_VALUES) as body:
            store, shifts = stores.for_caller(body.caller), settings.context_shift

            async def find_model(named: str) -> list[str]:
                await generate.discover(named)
                return [card.id for card in generate.list_models()]

            def read(content: object, served: list[str]) -> ParsedResponsesRequest:
                return parse_responses_request(
                    _with_defaults(content, served), served, store, context_shift=shifts
                )

            wish = await body.read(find_model, read)
            ids = await generate.tokenize_chat(wish.request)
            return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def compact(request: Request) -> Response:
        raise AppError(
            ErrorKind.NOT_FOUND,
            "compacting is not supported: send fewer items, or start the server with "
            "--context-shift",
        )

    create = GenerateEndpoint(prepare, generate, settings, bodies, max_values=MAX_CHAT_VALUES)
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        Route("/v1/responses/compact", compact, methods=["POST"]),
        Route(RESPONSE_PATH, retrieve, methods=["GET"]),
        Route(RESPONSE_PATH, delete, methods=["DELETE"]),
        Route(f"{RESPONSE_PATH}/input_items", input_items, methods=["GET"]),
        Route(f"{RESPONSE_PATH}/cancel", cancel, methods=["POST"]),
    ]


def _with_defaults(body: object, served: Sequence[str]) -> object:
    """A request that is only counted may leave out its model and its input."""
    if not isinstance(body, dict):
        return body
    fields = cast(JsonObject, body)
    given = {name: value for name, value in fields.items() if value is not None}
    return {"input": [], **({"model": served[0]} if served else {}), **given}


def _make_saver(store: ResponseStore, parsed: ParsedResponsesRequest) -> OnComplete:
    """What is done with the whole response. Called where the request was parsed, in a thread, so
    that the input need not be written down on the event loop."""
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
            f"the response {quote_value(id_)} was not found: responses are stored in "
            "memory for the API "
            "key that created them, the least recently used are evicted, and responses larger "
            f"than {MAX_RESPONSE_BYTES >> 20} MiB are not stored",
            param="response_id",
        )
    return kept
