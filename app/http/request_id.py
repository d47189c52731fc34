"""Request IDs, the access log and response counters.

Knows: the header that OpenAI's SDKs read (`x-request-id`, which they expose as `_request_id` and in
their exceptions), the traceparent header (W3C Trace Context). Must not know: routes, response
bodies.

Every request has an ID, which is sent with the response and added to log records. When the request
ends, this module logs a line and increments its counters. Omitted and ignored parts of the request
are reported in the line and in a header.
"""

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.usage import ConnectionStats
from app.http.responses import DialectErrors

# a separate logger, so that it can be disabled (app/observability/logs.py)
log = logging.getLogger("app.access")

REQUEST_ID_HEADER = "x-request-id"

# a response header that lists omitted parts of the request and ignored fields, in ASCII
NOTICE_HEADER = "x-mlxrunner-notice"

# the header that Anthropic's SDKs read
ANTHROPIC_REQUEST_ID_HEADER = "request-id"

# A valid request ID from a client. It is copied into a response header unchanged.
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)

# Matches log values that need no quotes.
_UNQUOTED_VALUE = re.compile(r"[^\s\"=]+")

# Monitoring systems poll these paths every few seconds.
_PROBE_PATHS = frozenset({"/health", "/metrics", "/v1/status"})

# The server is loading, stopping or overloaded. These status codes do not indicate errors to
# investigate.
_TRANSIENT_STATUSES = frozenset({503, 504})

# nginx's status code for a client that disconnected before the response.
_CLIENT_CLOSED_REQUEST = 499

_MAX_PATH_CHARS, _MAX_METHOD_CHARS, _MAX_REASON_CHARS, _MAX_NOTICE_CHARS = 200, 20, 300, 1000


def new_request_id() -> str:
    return f"req_{os.urandom(16).hex()}"


def build_id_headers(id: str) -> dict[str, str]:
    """Returns the headers of a response that contain the request ID."""
    return {REQUEST_ID_HEADER: id, ANTHROPIC_REQUEST_ID_HEADER: id}


class RequestIdMiddleware:
    """ASGI middleware for request IDs; place it outermost. A valid ID from the client is kept;
    otherwise, a new one is generated. The ID is stored in `request.state.request_id`. traffic:
    counts the responses. error_formats: the error formats of dialects other than OpenAI's; the
    first one that matches a request is used for its error responses. strict_fields: see
    `RequestContext`."""

    def __init__(
        self,
        app: ASGIApp,
        traffic: ConnectionStats | None = None,
        error_formats: Sequence[DialectErrors] = (),
        *,
        strict_fields: bool = False,
    ) -> None:
        self._app = app
        self._strict_fields = strict_fields
        self._error_formats = error_formats
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
        context = RequestContext(
            id=name,
            traceparent=headers.get("traceparent", ""),
            state=state,
            error_format=self._find_error_format(scope["path"], headers),
            strict_fields=self._strict_fields,
        )
        # never reset, because errors logged after this middleware also belong to the request
        REQUEST_CONTEXT.set(context)
        status = _CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                added.update(build_id_headers(name))
                if notice := context.build_notice():
                    added[NOTICE_HEADER] = notice[:_MAX_NOTICE_CHARS]
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            labels = _route_labels(scope)
            self._traffic.count_response(*labels, status)
            self._traffic.count_ignored_fields(labels[1], context.ignored_fields)
            _log_access(scope, context, status, time.monotonic() - began)

    def _find_error_format(self, path: str, headers: Headers) -> DialectErrors | None:
        for dialect in self._error_formats:
            if _is_below(path, dialect.path) or (dialect.header and dialect.header in headers):
                return dialect
        return None


def _is_below(path: str, parent: str) -> bool:
    return path.startswith(parent) and path[len(parent) : len(parent) + 1] in ("", "/")


def _route_labels(scope: Scope) -> tuple[str, str]:
    """Returns the method and the path of the matched route. Unknown paths are not used as labels,
    because clients choose them."""
    match scope.get("route"):
        case Route(path=path, methods=methods) if methods and scope["method"] in methods:
            return scope["method"], path
        case Route(path=path):
            return "none", path
        case _:
            return "none", "none"


def _log_access(scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
    level = _log_level(scope["path"], status)
    if not log.isEnabledFor(level):
        return
    fields = _log_fields(scope, context, status, seconds)
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
    """Quotes a value that could be read as more than one value."""
    return str(value) if _UNQUOTED_VALUE.fullmatch(str(value)) else json.dumps(value)


def _log_fields(
    scope: Scope, context: RequestContext, status: int, seconds: float
) -> Mapping[str, str | int]:
    """Returns the fields of the log line. Unset fields are omitted. The query string is omitted as
    well, because it may contain anything. The path is logged as sent by the client, with its
    percent-encoding. error, reason: set for a status of 400 or more; the reason omits client
    data."""
    client = scope.get("client")
    fields: dict[str, str | int] = {
        "method": scope["method"][:_MAX_METHOD_CHARS],
        "path": scope.get("raw_path", b"").decode("latin-1")[:_MAX_PATH_CHARS],
        "status": status,
        "ms": round(1000 * seconds),
    }
    if client is not None:
        fields["client"] = f"{client[0]}:{client[1]}"
    if context.caller:
        fields["caller"] = context.caller
    if context.finish:
        fields |= {
            "model": context.model[:_MAX_PATH_CHARS],
            "prompt_tokens": context.prompt_tokens,
            "cached_tokens": context.cached_tokens,
            "completion_tokens": context.completion_tokens,
            "finish": context.finish,
        }
    if context.error and status >= 400:
        fields |= {"error": context.error, "reason": context.reason[:_MAX_REASON_CHARS]}
    if notice := context.build_notice(redact=True):
        fields["notice"] = notice[:_MAX_NOTICE_CHARS]
    return fields
