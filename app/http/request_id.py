"""A name for every request, told with its answer and in the log, and when it is over a line in the
log and a count.

Knows the header that OpenAI's SDKs read (`x-request-id`; they show it as `_request_id` and in
their exceptions), and that of W3C's Trace Context. Must not know: routes, or what is answered.
"""

import json
import logging
import os
import re
import time
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.server_stats import ConnectionStats

# its own, so that it can be switched off (app/serving/logs.py)
log = logging.getLogger("app.access")

REQUEST_ID_HEADER = "x-request-id"

# What a client may call its request. It goes into a header as it is.
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)

# A value of the line that begins and ends where it seems to.
_UNQUOTED_VALUE = re.compile(r"[^\s\"=]+")

# Asked every few seconds by those who watch.
_PROBE_PATHS = frozenset({"/health", "/metrics", "/v1/status"})

# A server that loads, stops or has no time: nothing is wrong that anybody would have to look into.
_TRANSIENT_STATUSES = frozenset({503, 504})

# What nginx writes for a client that left before it was answered.
_CLIENT_CLOSED_REQUEST = 499

_MAX_PATH_CHARS, _MAX_METHOD_CHARS, _MAX_REASON_CHARS = 200, 20, 300


def new_request_id() -> str:
    return f"req_{os.urandom(16).hex()}"


class RequestIdMiddleware:
    """ASGI middleware, to stand around everything else. The id is the client's own, if it sent one
    that can be repeated, and lies in `request.state.request_id`. traffic: where each answer is
    counted."""

    def __init__(self, app: ASGIApp, traffic: ConnectionStats | None = None) -> None:
        self._app = app
        self._traffic = ConnectionStats() if traffic is None else traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        name = given if _VALID_ID.fullmatch(given) else new_request_id()
        state = scope.setdefault("state", {})
        state["request_id"] = name
        visit = RequestContext(id=name, traceparent=headers.get("traceparent", ""), state=state)
        # never taken back: what the server logs of a fault when this is left belongs to it too
        REQUEST_CONTEXT.set(visit)
        status = _CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = name
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._traffic.count_response(*_route_labels(scope), status)
            _log_access(scope, visit, status, time.monotonic() - began)


def _route_labels(scope: Scope) -> tuple[str, str]:
    """Method and path of the route that took the request: what a client made up is no figure."""
    match scope.get("route"):
        case Route(path=path, methods=methods) if methods and scope["method"] in methods:
            return scope["method"], path
        case Route(path=path):
            return "none", path
        case _:
            return "none", "none"


def _log_access(scope: Scope, visit: RequestContext, status: int, seconds: float) -> None:
    level = _log_level(scope["path"], status)
    if not log.isEnabledFor(level):
        return
    fields = _log_fields(scope, visit, status, seconds)
    first = ("method", "path", "status")
    text = " ".join(_quote_if_needed(fields[name]) for name in first)
    rest = " ".join(
        f"{name}={_quote_if_needed(fields[name])}" for name in fields if name not in first
    )
    log.log(level, "%s %s", text, rest, extra={"fields": fields})


def _log_level(path: str, status: int) -> int:
    if status >= 500 and status not in _TRANSIENT_STATUSES:
        return logging.ERROR
    return logging.DEBUG if path in _PROBE_PATHS else logging.INFO


def _quote_if_needed(value: str | int) -> str:
    """In quotes where it could be taken for more than one value."""
    return str(value) if _UNQUOTED_VALUE.fullmatch(str(value)) else json.dumps(value)


def _log_fields(
    scope: Scope, visit: RequestContext, status: int, seconds: float
) -> Mapping[str, str | int]:
    """Without the query, which may hold anything, and without what there is nothing to say of.
    The path is as the client wrote it, with its escapes. error, reason: of a status of 400 or more;
    the reason leaves out what the client sent."""
    client = scope.get("client")
    fields: dict[str, str | int] = {
        "method": scope["method"][:_MAX_METHOD_CHARS],
        "path": scope.get("raw_path", b"").decode("latin-1")[:_MAX_PATH_CHARS],
        "status": status,
        "ms": round(1000 * seconds),
    }
    if client is not None:
        fields["client"] = f"{client[0]}:{client[1]}"
    if visit.caller:
        fields["caller"] = visit.caller
    if visit.finish:
        fields |= {
            "model": visit.model[:_MAX_PATH_CHARS],
            "prompt_tokens": visit.prompt_tokens,
            "cached_tokens": visit.cached_tokens,
            "completion_tokens": visit.completion_tokens,
            "finish": visit.finish,
        }
    if visit.error and status >= 400:
        fields |= {"error": visit.error, "reason": visit.reason[:_MAX_REASON_CHARS]}
    return fields
