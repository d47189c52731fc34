"""Ollama's request bodies, and the keep-alive and error lines of streams.

Knows: bodies of any content type. Must not know: their fields.

As in Ollama's server, the content type is not checked, so that curl works without a header.
app/http/host_and_origin.py rejects requests from web pages with a different origin.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Receive, Scope

from app.api.ollama.errors import encode_error_line
from app.core.errors import AppError, ErrorKind
from app.http.body import Body, RequestBodies
from app.http.streaming import encode_json_line

Value = TypeVar("Value")


class OllamaBodies:
    def __init__(self, bodies: RequestBodies) -> None:
        self._bodies = bodies

    @asynccontextmanager
    async def receive(self, scope: Scope, receive: Receive) -> AsyncGenerator[Body]:
        """Receives a body with any content type, like `RequestBodies.receive_json`. Raises
        AppError(INVALID) for an empty body."""
        async with self._bodies.receive_json(scope, receive, check_type=False) as body:
            if not body.size:
                raise AppError(ErrorKind.INVALID, "missing request body")
            yield body

    async def decode(
        self, scope: Scope, receive: Receive, decode: Callable[[bytearray], Value]
    ) -> Value:
        """Receives a body and decodes it. Raises AppError."""
        async with self.receive(scope, receive) as body:
            return await body.decode(decode)


class LineResponse:
    """The keep-alive and error lines of a stream of progress steps. Implements
    `app.api.generate_endpoint.StreamEnds`."""

    # clients display the status of a line unless it is empty
    keep_alive = encode_json_line({"status": ""})

    def fail(self, error: AppError) -> bytes:
        return encode_error_line(error)
