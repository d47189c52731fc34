"""The HTTP client of the commands, for a server on this machine or on the local network.

Knows: HTTP and JSON, streams of server-sent events. Must not know: the server's endpoints.

It is built on the standard library, so that a command starts quickly. Proxies are ignored.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from app.core.errors import AppError, ErrorKind

# seconds for a request that the server answers at once
REQUEST_TIMEOUT = 10.0

_KINDS = {
    400: ErrorKind.INVALID,
    401: ErrorKind.UNAUTHORIZED,
    403: ErrorKind.FORBIDDEN,
    404: ErrorKind.MODEL_NOT_FOUND,
    429: ErrorKind.BUSY,
}


def get_json(
    url: str, api_key: str | None = None, timeout: float = REQUEST_TIMEOUT
) -> tuple[int, Mapping[str, Any]]:
    """Returns the status and the JSON object of a GET request, {} for any other body. Raises
    OSError if there is no server."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=_build_headers(api_key))
    try:
        with opener.open(request, timeout=timeout) as reply:
            status, body = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    except http.client.HTTPException:  # another protocol
        return 0, {}
    return status, _parse_object(body)


def send_json(
    method: str,
    url: str,
    path: str,
    body: Mapping[str, Any],
    api_key: str | None,
    timeout: float | None,
) -> tuple[int, Mapping[str, Any]]:
    """Returns the status and the JSON object of the answer. timeout: in seconds; None waits
    forever. Raises AppError(ENGINE) if there is no answer."""
    with _open(method, url, path, body, api_key, timeout) as response:
        return response.status, _parse_object(response.read())


@contextmanager
def stream_events(
    url: str, path: str, body: Mapping[str, Any], api_key: str | None
) -> Generator[Iterator[str]]:
    """Posts a request, and yields the lines of the server-sent events in its response. Leaving the
    context closes the connection, which cancels the request. Raises AppError for a status other
    than 200, and if the connection breaks."""
    with _open("POST", url, path, body, api_key, None) as response:
        if response.status != 200:
            raise read_error(response.status, _parse_object(response.read()))
        yield _iter_lines(response, url)


def read_error(status: int, body: Mapping[str, Any]) -> AppError:
    """Returns the error in the body of a response, in OpenAI's format or in Ollama's."""
    error: Any = body.get("error")
    if isinstance(error, dict):
        error = cast("dict[str, Any]", error).get("message")
    message = str(error) if error else f"the server answered with status {status}"
    return AppError(_KINDS.get(status, ErrorKind.ENGINE), " ".join(message.split()))


@contextmanager
def _open(
    method: str,
    url: str,
    path: str,
    body: Mapping[str, Any],
    api_key: str | None,
    timeout: float | None,
) -> Generator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    with closing(connection):
        headers = {"Content-Type": "application/json", **_build_headers(api_key)}
        try:
            connection.request(method, path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise _lost_error(url, error) from error
        with closing(response):
            yield response


def _iter_lines(response: http.client.HTTPResponse, url: str) -> Iterator[str]:
    try:
        for line in response:
            yield line.decode(errors="replace").rstrip("\r\n")
    except (OSError, http.client.HTTPException) as error:
        raise _lost_error(url, error) from error


def _lost_error(url: str, error: Exception) -> AppError:
    why = str(error) or type(error).__name__
    return AppError(ErrorKind.ENGINE, f"the connection to the server at {url} was lost: {why}")


def _build_headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _parse_object(body: bytes) -> Mapping[str, Any]:
    try:
        parsed: Any = json.loads(body)
    except ValueError:
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
