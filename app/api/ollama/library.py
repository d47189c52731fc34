"""Ollama's model management endpoints: pull, create, copy, delete and blobs.

Knows: their fields and response lines. Must not know: how models are stored and downloaded. Only
administrators can use these routes (app/http/auth.py).
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.fields import as_array, invalid_request, quote_value
from app.api.generate_endpoint import GenerateResponder
from app.api.ollama.body import LineResponse, OllamaBodies
from app.api.ollama.names import DEFAULT_TAG, find_model, get_name, strip_prefix
from app.api.ollama.options import MAX_STOP_STRINGS
from app.api.openai.sampling import to_tuple
from app.api.schema.decode import decode_object
from app.api.schema.ollama import COPY, CREATE, NAME, PULL, OllamaCreateBody, OllamaOptions
from app.core.errors import AppError, ErrorKind
from app.core.models import LibraryStep, ModelRecipe
from app.core.ports import BlobWriter, Models
from app.core.sampling_params import SAMPLING_KNOBS
from app.http.body import EXTEND_BODY
from app.http.responses import JsonObject, error_response
from app.http.streaming import (
    ClientDisconnected,
    cancel_on_disconnect,
    encode_json_line,
    send_json,
)

# the number of bytes per write to disk
_WRITE_BYTES = 1 << 20

MAX_FILES = 4096

# the parameters that `create` stores; app/store/ollama/model.py reads the same parameters
_PARAMETERS = frozenset(
    {knob.runner_name or knob.name for knob in SAMPLING_KNOBS} | {"num_ctx", "num_predict", "stop"}
)


class LibraryEndpoints:
    """The ASGI applications and handlers of the routes."""

    def __init__(self, models: Models, bodies: OllamaBodies, responder: GenerateResponder) -> None:
        self._models = models
        self._bodies = bodies
        self._responder = responder

    async def pull(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._bodies.decode(scope, receive, PULL.decode)
        name = get_name(model=body.model, name=body.name)
        steps = self._models.library.pull(await self._resolve_spelling(strip_prefix(name)))
        await self._send_steps(steps, scope, receive, send, stream=body.stream is not False)

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._bodies.decode(scope, receive, CREATE.decode)
        steps = self._models.library.create(await self._build_recipe(body))
        await self._send_steps(steps, scope, receive, send, stream=body.stream is not False)

    async def copy(self, request: Request) -> Response:
        body = await self._bodies.decode(request.scope, request.receive, COPY.decode)
        source = get_name(source=body.source)
        destination = get_name(destination=body.destination)
        model = await find_model(self._models, source)
        await self._models.library.copy(model.card.id, strip_prefix(destination))
        return Response(status_code=200)

    async def delete(self, request: Request) -> Response:
        body = await self._bodies.decode(request.scope, request.receive, NAME.decode)
        name = get_name(model=body.model, name=body.name)
        try:
            model = await find_model(self._models, name)
        except AppError as error:
            if error.kind is not ErrorKind.MODEL_NOT_FOUND:
                raise
            # a model that cannot be served can still be deleted
            await self._models.library.delete(strip_prefix(name))
        else:
            if self._models.model_state(model).phase not in ("unloaded", "refused"):
                await self._models.unload(model)
            await self._models.library.delete(model.card.id)
        return Response(status_code=200)

    async def push(self, request: Request) -> Response:
        message = "push is not supported: this server uploads nothing"
        return error_response(AppError(ErrorKind.NOT_FOUND, message), status=501)

    async def blob(self, request: Request) -> Response:
        """Checks whether a file is stored (HEAD), or receives a file of any size (POST). The file
        is written to disk as it is received, and does not count against the memory budget for
        request bodies."""
        digest = request.path_params["digest"]
        library = self._models.library
        exists = await library.has_blob(digest)
        if exists or request.method == "HEAD":
            return Response(status_code=200 if exists else 404)
        async with library.upload_blob(digest) as blob:
            await _receive_blob(request.scope, request.receive, blob)
        return Response(status_code=201)

    async def _resolve_spelling(self, name: str) -> str:
        """Returns the name of the served model that this name refers to. If there is none, or if it
        is one of several GGUF files of that repository, returns the name without its default tag,
        because repositories on the hub have no tags."""
        plain = name.removesuffix(DEFAULT_TAG)
        try:
            found = (await find_model(self._models, name)).card.id
        except AppError as error:
            if error.kind is not ErrorKind.MODEL_NOT_FOUND:
                raise
            return plain
        return plain if found.startswith(f"{plain}:") else found

    async def _build_recipe(self, body: OllamaCreateBody) -> ModelRecipe:
        name = get_name(model=body.model, name=body.name)
        base, files = body.from_ or None, body.files or {}
        if base is None and not files:
            raise invalid_request("from", "neither 'from' or 'files' was specified")
        if base is not None and files:
            raise invalid_request("files", "from and files exclude each other: keep one of them")
        if base is not None:
            base = (await find_model(self._models, base)).card.id
        messages = body.messages
        return ModelRecipe(
            name=strip_prefix(name),
            base=base,
            files=_check_files(files),
            system=body.system,
            license="\n\n".join(to_tuple(body.license)) or None,
            parameters=_build_parameters(body.parameters),
            messages=None if messages is None else tuple((m.role, m.content) for m in messages),
        )

    async def _send_steps(
        self,
        steps: AsyncGenerator[LibraryStep],
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        stream: bool,
    ) -> None:
        """Sends the steps as lines, or only the last step without `stream`. A client disconnect
        stops the operation."""

        async def exchange(send: Send) -> None:
            async with aclosing(steps):
                if stream:
                    lines = _encode_steps(steps)
                    await self._responder.respond_lines(lines, LineResponse(), send)
                    return
                try:
                    last = [step async for step in steps][-1]
                except AppError as error:
                    if error.kind is not ErrorKind.MODEL_FILES:
                        raise
                    # the error is in the hub or the disk, not in this server
                    response = error_response(error, status=502)
                    await response(scope, receive, send)
                    return
            await send_json(_render_step(last), scope, send)

        await cancel_on_disconnect(receive, send, exchange)


async def _encode_steps(steps: AsyncGenerator[LibraryStep]) -> AsyncGenerator[bytes]:
    async with aclosing(steps):
        async for step in steps:
            yield encode_json_line(_render_step(step))


def _render_step(step: LibraryStep) -> JsonObject:
    layer = step.layer
    if layer is None:
        return {"status": step.status}
    return {
        "status": f"pulling {layer.digest.partition(':')[2][:12]}",
        "digest": layer.digest,
        "total": layer.total,
        "completed": layer.completed,
    }


async def _receive_blob(scope: Scope, receive: Receive, blob: BlobWriter) -> None:
    """Writes the body to the blob. Raises ClientDisconnected if the body is incomplete."""
    extend = scope.get("extensions", {}).get(EXTEND_BODY)
    buffer, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        buffer += message.get("body", b"")
        more = message.get("more_body", False)
        if buffer and (len(buffer) >= _WRITE_BYTES or not more):
            await blob.write(bytes(buffer))
            buffer.clear()
            if extend is not None:
                extend()
    await blob.commit()


def _check_files(files: Mapping[str, str]) -> Mapping[str, str]:
    if len(files) > MAX_FILES:
        raise invalid_request("files", f"files must contain at most {MAX_FILES} files")
    for name in files:
        if name.startswith("/") or ".." in name.split("/"):
            raise invalid_request("files", "file path must be relative")
    return files


def _build_parameters(value: Raw) -> dict[str, Any]:
    """Converts `parameters`. Raises AppError(INVALID) for an unknown name and an invalid type."""
    parameters: dict[str, Any] = {}
    for name, one in (decode_object(value, "parameters") or {}).items():
        if one is None or name in OllamaOptions.ignored or name == "num_keep":
            continue
        path = f"parameters.{name[:100]}"
        if name not in _PARAMETERS:
            raise invalid_request(path, f"unknown parameter {path}")
        if name == "stop":
            parameters[name] = _check_stop(one, path)
        elif isinstance(one, bool) or not isinstance(one, int | float):
            raise invalid_request(path, f"{path} must be a number")
        else:
            parameters[name] = one
    return parameters


def _check_stop(value: object, path: str) -> list[str]:
    texts = [value] if as_array(value) is None else as_array(value) or []
    if len(texts) <= MAX_STOP_STRINGS and all(isinstance(text, str) and text for text in texts):
        return cast("list[str]", texts)
    expected = f"up to {MAX_STOP_STRINGS} strings, none of them empty"
    raise invalid_request(path, f"{path} must be {expected}, not {quote_value(value)}")
