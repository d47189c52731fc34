"""Ollama's native API: the path of each endpoint.

Knows: routes, loading and unloading. Must not know: request parsing (request.py), response formats
(output.py), generation.

Wire format: docs/api.md in ollama/ollama, August 2026 (fb3076099).
"""

import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.embeddings import embed
from app.api.generate_endpoint import (
    NDJSON,
    GenerateResponder,
    JsonBody,
    JsonLines,
    ParsedRequest,
)
from app.api.ollama.body import OllamaBodies
from app.api.ollama.embed import parse_embed, parse_embeddings, render_embed, render_embeddings
from app.api.ollama.errors import OllamaErrors
from app.api.ollama.library import LibraryEndpoints
from app.api.ollama.model_lists import render_running, render_show, render_tags
from app.api.ollama.names import MAX_NAME_CHARS, find_model, get_name
from app.api.ollama.options import limit_keep_alive
from app.api.ollama.output import LineEncoder, LineFormat, collect
from app.api.ollama.request import OllamaRequest, parse_chat, parse_generate
from app.api.schema.ollama import SHOW
from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.models import ModelDetails
from app.core.ports import Generate, Models, ResolvedModel
from app.core.requests import Embeddings, EmbedRequest
from app.core.settings import Settings
from app.http.auth import is_admin
from app.http.body import RequestBodies
from app.http.responses import JsonObject, json_response
from app.http.streaming import cancel_on_disconnect, encode_json_line, send_json

ERRORS = OllamaErrors()

# Clients compare this version with their minimum version. It may contain only numbers and dots.
VERSION = "0.32.0"

Kind = Literal["chat", "generate"]
Parse = Callable[..., OllamaRequest]
_ParseEmbed = Callable[..., EmbedRequest]
_RenderEmbed = Callable[[str, Embeddings], JsonObject]


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    own = OllamaBodies(bodies)
    responder = GenerateResponder(generate, settings, bodies)
    library = LibraryEndpoints(models, own, responder)
    embeds = _EmbedEndpoints(generate, models, bodies, own)
    return [
        Route("/api/version", _version, methods=["GET"]),
        Route("/api/status", _status, methods=["GET"]),
        *_list_routes(models, own),
        Route(
            "/api/chat",
            OllamaEndpoint("chat", parse_chat, models, own, responder),
            methods=["POST"],
        ),
        Route(
            "/api/generate",
            OllamaEndpoint("generate", parse_generate, models, own, responder),
            methods=["POST"],
        ),
        Route("/api/embed", _AsgiMethod(embeds.embed), methods=["POST"]),
        Route("/api/embeddings", _AsgiMethod(embeds.embeddings), methods=["POST"]),
        Route("/api/pull", _AsgiMethod(library.pull), methods=["POST"]),
        Route("/api/create", _AsgiMethod(library.create), methods=["POST"]),
        Route("/api/copy", library.copy, methods=["POST"]),
        Route("/api/delete", library.delete, methods=["DELETE"]),
        Route("/api/push", library.push, methods=["POST"]),
        Route("/api/blobs/{digest}", library.blob, methods=["HEAD", "POST"]),
    ]


class _AsgiMethod:
    """A method as an ASGI application. Starlette would call a plain method with a request."""

    def __init__(self, method: ASGIApp) -> None:
        self._method = method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._method(scope, receive, send)


async def _version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def _status(request: Request) -> Response:
    return json_response({"cloud": {"disabled": True, "source": "none"}})


def _list_routes(models: Models, bodies: OllamaBodies) -> list[Route]:
    async def tags(request: Request) -> Response:
        return json_response(render_tags(await models.list_details()))

    async def running(request: Request) -> Response:
        details = {one.name: one for one in await models.list_details()}
        return json_response(render_running(models.list_model_states(), details))

    async def show(request: Request) -> Response:
        body = await bodies.decode(request.scope, request.receive, SHOW.decode)
        name = get_name(model=body.model, name=body.name)
        model = await find_model(models, name)
        tensors = await models.list_tensors(model) if body.verbose else None
        return json_response(render_show(name, await models.describe(model), tensors))

    return [
        Route("/api/tags", tags, methods=["GET"]),
        Route("/api/ps", running, methods=["GET"]),
        Route("/api/show", show, methods=["POST"]),
    ]


async def _find_to_embed(models: Models, name: str | None) -> tuple[ResolvedModel, ModelDetails]:
    try:
        return await _find_described(models, name)
    except AppError as error:
        if error.kind is ErrorKind.MODEL_NOT_FOUND:
            shown = mark_client_text((name or "")[:MAX_NAME_CHARS])
            message = f'model "{shown}" not found, try pulling it first'
            raise AppError(error.kind, message, param="model") from error
        raise


async def _find_described(models: Models, name: str | None) -> tuple[ResolvedModel, ModelDetails]:
    model = await find_model(models, name)
    return model, await models.describe(model)


class OllamaEndpoint:
    """An ASGI application for an endpoint that generates output, or loads or unloads a model.

    parse: builds the request from the bytes of the body, the model's details and the caller's
    permissions."""

    def __init__(
        self,
        kind: Kind,
        parse: Parse,
        models: Models,
        bodies: OllamaBodies,
        responder: GenerateResponder,
    ) -> None:
        self._kind: Kind = kind
        self._parse = parse
        self._models = models
        self._bodies = bodies
        self._responder = responder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.time_ns()
        async with self._bodies.receive(scope, receive) as body:

            async def exchange(send: Send) -> None:
                (model, details), parsed = await body.read(
                    partial(_find_described, self._models),
                    lambda data, found: self._parse(data, found[1], admin=is_admin(scope)),
                )
                format = LineFormat(
                    model=parsed.model,
                    kind=self._kind,
                    started=started,
                    logprobs=parsed.request is not None and parsed.request.top_logprobs is not None,
                    with_context=parsed.request is not None and parsed.request.return_token_ids,
                )
                if parsed.request is None:
                    await self._load(model, details, parsed, format, scope, send)
                    return
                reply = (
                    JsonLines(LineEncoder(format), NDJSON)
                    if parsed.stream
                    else JsonBody(partial(collect, format))
                )
                request = ParsedRequest(request=parsed.request, reply=reply)
                await self._responder.respond(model, request, scope, send)

            await cancel_on_disconnect(receive, send, exchange)

    async def _load(
        self,
        model: ResolvedModel,
        details: ModelDetails,
        parsed: OllamaRequest,
        format: LineFormat,
        scope: Scope,
        send: Send,
    ) -> None:
        """Loads or unloads the model, for a request without a prompt."""
        admin = is_admin(scope)
        if parsed.unloads and not admin:
            message = "unloading a model needs an admin key: keep_alive cannot be 0 here"
            raise AppError(ErrorKind.FORBIDDEN, message, code="insufficient_scope")

        async def apply() -> JsonObject:
            if parsed.unloads:
                if self._models.model_state(model).phase not in ("unloaded", "refused"):
                    await self._models.unload(model)
                return format.render(reason="unload")
            seconds = limit_keep_alive(parsed.keep_alive, details, admin=admin)
            await self._models.load(model, seconds, admin=admin)
            return format.render(reason="load")

        async def lines() -> AsyncGenerator[bytes]:
            yield encode_json_line(await apply())

        if parsed.stream:
            await self._responder.respond_lines(lines(), LineEncoder(format), send)
        else:
            await send_json(await apply(), scope, send)


class _EmbedEndpoints:
    """The ASGI applications of both embedding endpoints. A client disconnect cancels the
    request."""

    def __init__(
        self, generate: Generate, models: Models, bodies: RequestBodies, own: OllamaBodies
    ) -> None:
        self._generate = generate
        self._models = models
        self._workers = bodies.workers
        self._bodies = own

    async def embed(self, scope: Scope, receive: Receive, send: Send) -> None:
        render = partial(render_embed, time.time_ns())
        await self._exchange(parse_embed, render, scope, receive, send)

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exchange(parse_embeddings, render_embeddings, scope, receive, send)

    async def _exchange(
        self, parse: _ParseEmbed, render: _RenderEmbed, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with self._bodies.receive(scope, receive) as body:

            async def exchange(send: Send) -> None:
                name = ""

                async def find(requested: str | None) -> tuple[ResolvedModel, ModelDetails]:
                    nonlocal name
                    found = await _find_to_embed(self._models, requested)
                    name = requested or found[0].card.id
                    return found

                (model, _), request = await body.read(
                    find, lambda data, found: parse(data, found[1], admin=is_admin(scope))
                )
                reply = render(name, Embeddings(vectors=(), prompt_tokens=0))
                if request.inputs:
                    reply = await embed(
                        request, model, self._generate, self._workers, scope, partial(render, name)
                    )
                await send_json(reply, scope, send)

            await cancel_on_disconnect(receive, send, exchange)
