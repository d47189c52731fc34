"""A name for every request, told with its answer and in the log, whatever the answer is.

Knows the header that OpenAI's SDKs read (`x-request-id`; they show it as `_request_id` and in
their exceptions). Must not know: routes, or what is answered.
"""

import logging
import os
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

HEADER = "x-request-id"

# What a client may call its request. It goes into a header and into the log as it is.
_SANE = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)

# Told with 503: nothing is wrong that anybody would have to look into.
_LATER = 503


class RequestIds:
    """ASGI middleware, to stand around everything else. The id is the client's own, if it sent one
    that can be repeated, and lies in `request.state.request_id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if _SANE.fullmatch(given) else f"req_{os.urandom(16).hex()}"
        scope.setdefault("state", {})["request_id"] = name

        async def naming_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
                status = message["status"]
                if status >= 500 and status != _LATER:
                    log.error("%s: %s %r: %d", name, scope["method"], scope["path"], status)
            await send(message)

        await self._app(scope, receive, naming_send)
