"""OpenAI's Responses API: responses, made, kept, read and deleted.

Knows which path does what, and that a response is kept once it is whole and before its last byte is
sent, so that whoever has read it may continue it. Requests are read in responses_request, answers
are written in responses_reply. Must not know: anything of what stands between.
"""

import os
import time
from collections.abc import Sequence
from typing import cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.body import MOST_CHAT_VALUES, RequestBodies
from app.api.dialects.responses_listing import list_items
from app.api.dialects.responses_reply import Answer, Head, Keep, ResponseFrames, collect
from app.api.dialects.responses_request import Wish, parse
from app.api.dialects.responses_store import MOST_EACH, Kept, ResponseStore, ResponseStores, ids_of
from app.api.exchange import Ask, EventStream, GenerateEndpoint, WholeBody
from app.api.fields import invalid, shown
from app.api.wire import JsonObject, caller_of, json_reply
from app.core.errors import AppError, Kind
from app.core.ports import Generate
from app.core.settings import Settings

ONE = "/v1/responses/{response_id}"


def routes(generate: Generate, settings: Settings, bodies: RequestBodies) -> list[Route]:
    stores = ResponseStores()

    def ask(body: object, caller: str) -> Ask:
        store = stores.of(caller)
        served = {card.id for card in generate.models()}
        wish = parse(body, served, store, shifts=settings.context_shift)
        head = Head(id=f"resp_{os.urandom(24).hex()}", created=int(time.time()), echo=wish.echo)
        answer, keep = Answer(head), _keeping(store, wish)
        if wish.stream:
            reply = EventStream(ResponseFrames(answer, keep))
        else:
            reply = WholeBody(lambda said: collect(answer, said), keep)
        return Ask(request=wish.request, reply=reply)

    def find(request: Request) -> tuple[ResponseStore, Kept]:
        store = stores.of(caller_of(request.scope))
        return store, _kept(store, request)

    async def retrieve(request: Request) -> Response:
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise invalid("stream", "stream: stored responses cannot be streamed")
        if "starting_after" in request.query_params:
            raise invalid("starting_after", "starting_after: stored responses cannot be streamed")
        store, kept = find(request)
        store.use(kept.id)
        return Response(kept.body, media_type="application/json")

    async def delete(request: Request) -> Response:
        store, kept = find(request)
        store.forget(kept.id)
        return json_reply({"id": kept.id, "object": "response", "deleted": True})

    async def input_items(request: Request) -> Response:
        store, kept = find(request)
        store.use(kept.id)
        items = await bodies.workers.run(kept.input_items, size=len(kept.input))
        return json_reply(list_items(items, request.query_params))

    async def cancel(request: Request) -> Response:
        find(request)
        raise invalid(
            None, "only background responses can be cancelled; background mode is not supported"
        )

    async def input_tokens(request: Request) -> Response:
        async with bodies.receive_json(request.scope, request.receive, MOST_CHAT_VALUES) as body:
            store, shifts = stores.of(body.caller), settings.context_shift

            async def find_model(named: str) -> list[str]:
                await generate.look_for(named)
                return [card.id for card in generate.models()]

            def read(content: object, served: list[str]) -> Wish:
                return parse(_with_defaults(content, served), served, store, shifts=shifts)

            wish = await body.read(find_model, read)
            ids = await generate.prompt_ids(wish.request)
            return json_reply({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def compact(request: Request) -> Response:
        raise AppError(
            Kind.NOT_FOUND,
            "compacting is not supported: send fewer items, or start the server with "
            "--context-shift",
        )

    create = GenerateEndpoint(ask, generate, settings, bodies, most_values=MOST_CHAT_VALUES)
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        Route("/v1/responses/compact", compact, methods=["POST"]),
        Route(ONE, retrieve, methods=["GET"]),
        Route(ONE, delete, methods=["DELETE"]),
        Route(f"{ONE}/input_items", input_items, methods=["GET"]),
        Route(f"{ONE}/cancel", cancel, methods=["POST"]),
    ]


def _with_defaults(body: object, served: Sequence[str]) -> object:
    """A request that is only counted may leave out its model and its input."""
    if not isinstance(body, dict):
        return body
    fields = cast(JsonObject, body)
    given = {name: value for name, value in fields.items() if value is not None}
    return {"input": [], **({"model": served[0]} if served else {}), **given}


def _keeping(store: ResponseStore, wish: Wish) -> Keep:
    """What is done with the whole response. Called where the request was parsed, in a thread, so
    that the input need not be written down on the event loop."""
    written = orjson.dumps(wish.items) if wish.store else b""

    def keep(response: JsonObject) -> None:
        if wish.previous is not None:
            store.use(wish.previous)
        if not wish.store:
            return
        store.keep(
            Kept(
                id=response["id"],
                previous=wish.previous,
                input=written,
                body=orjson.dumps(response),
                items=ids_of((*wish.items, *response["output"])),
            )
        )

    return keep


def _kept(store: ResponseStore, request: Request) -> Kept:
    id_: str = request.path_params["response_id"]
    kept = store.find(id_)
    if kept is None:
        raise AppError(
            Kind.NOT_FOUND,
            f"the response {shown(id_)} was not found: responses are stored in memory for the API "
            "key that created them, the least recently used are evicted, and responses larger "
            f"than {MOST_EACH >> 20} MiB are not stored",
            param="response_id",
        )
    return kept
