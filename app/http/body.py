"""Request bodies: size limits, a shared memory budget, and decoding off the event loop.

Knows: ASGI messages, JSON's syntax, thread pools. Must not know: dialects, the content of requests.

Bodies are passed on as bytes, and decoded to structs. A decoder builds an object for each value
that it needs. Even for `[]`, the object is many times larger than the text, and the decoder holds
the GIL while it builds the objects. Values are therefore counted while the body is received, before
any object is built.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.runtime import trim_malloc
from app.core.settings import MEBIBYTE, Settings
from app.core.thread_pools import ThreadPools
from app.http.auth import get_caller
from app.http.streaming import ClientDisconnected

Found = TypeVar("Found")
Result = TypeVar("Result")

# The maximum number of objects, arrays and keys in a body, and of commas. A conversation of 20,000
# messages has 60,000 fields; a schema of 5,000 properties has 25,000. Only a prompt of token IDs
# has a hundred thousand items.
MAX_FIELDS, MAX_ITEMS = 65_536, 1_048_576

# The memory budget for all bodies in flight, in bytes, not counting the first _UNCOUNTED_BYTES of
# each body, and the minimum number of full-size bodies that are admitted. A caller with a key may
# use at most half of the budget.
_BUDGET_BYTES, _MIN_FULL_SIZE_BODIES = 128 * MEBIBYTE, 8

# The number of bytes of each body that do not count against the budget. Small requests are
# therefore served even if large ones have used up the budget. --max-connections bounds the
# uncounted bytes.
_UNCOUNTED_BYTES = 64 * 1024

# The model of a larger body is found on a thread. Smaller bodies take less than 3 ms.
_LARGE_BYTES = MEBIBYTE

# The delay in seconds after a large body until free memory is returned to the system, once for all
# bodies received in that time.
_RELEASE_DELAY = 1.0

# An ASGI extension: a function that restarts the body timeout.
EXTEND_BODY = "mlxrunner.extend_body"

_NOT_STRUCTURE = bytes(c for c in range(256) if c not in b'",:[{')


class FieldCounter:
    """Counts the objects, arrays and keys of a JSON text, and its commas, as it is received.

    Detecting strings takes ten times as long as reading the bytes, so their content is counted as
    well until there are too many fields with it.
    """

    def __init__(self) -> None:
        self.fields = self.items = 0
        self._exact = False
        self._in_string = False
        self._escapes = False  # the last byte is a backslash that escapes the next one

    def feed(self, data: bytes, before: bytes | bytearray = b"") -> None:
        """Counts those in `data`. before: all data that was fed before. Raises AppError(INVALID) if
        there are too many."""
        self._add(self._remove_strings(data) if self._exact else data)
        if not self._exact and max(self.fields, self.items) > MAX_FIELDS:
            self._exact, self.fields, self.items = True, 0, 0
            self._add(self._remove_strings(bytes(before)))
            self._add(self._remove_strings(data))
        for count, most, name in (
            (self.fields, MAX_FIELDS, "fields"),
            (self.items, MAX_ITEMS, "items"),
        ):
            if count > most:
                message = f"the body contains more than {most:,} {name}: send fewer at a time"
                raise AppError(ErrorKind.INVALID, message, code="too_many_values")

    def _add(self, text: bytes) -> None:
        self.fields += text.count(b"[") + text.count(b"{") + text.count(b":")
        self.items += text.count(b",")

    def _remove_strings(self, data: bytes) -> bytes:
        """Returns the structural characters outside of strings."""
        if self._escapes:
            data = b"\\" + data
        backslashes = len(data) - len(data.rstrip(b"\\"))
        self._escapes = backslashes % 2 == 1
        if self._escapes:
            data = data[:-1]
        if b"\\" in data:
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = data.translate(None, _NOT_STRUCTURE).split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        return outside


class BodyMemoryBudget:
    """The memory budget for the bodies in flight. total: the budget in bytes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._used: Counter[str] = Counter()

    @property
    def used(self) -> int:
        return self._used.total()

    def reserve(self, caller: str, nbytes: int) -> None:
        """Reserves memory. Raises AppError(OVERLOADED) if fewer than `nbytes` bytes are left."""
        share = self.total // 2 if caller else self.total
        if self.used + nbytes > self.total or self._used[caller] + nbytes > share:
            raise AppError(
                ErrorKind.OVERLOADED,
                "the request bodies in flight use all of the memory reserved for them "
                f"({self.total // MEBIBYTE} MiB): try again in a moment",
                code="too_many_bodies",
                retry_after=1,
            )
        self._used[caller] += nbytes

    def release(self, caller: str, nbytes: int) -> None:
        self._used[caller] -= nbytes
        if not self._used[caller]:
            del self._used[caller]


class Body:
    """The complete body of one request. data: the bytes of the body; empty after the body was
    decoded. counter: counts the fields of JSON; None for other content."""

    def __init__(self, bodies: "RequestBodies", caller: str, counter: FieldCounter | None) -> None:
        self._bodies = bodies
        self.caller = caller
        self.counter = counter
        self.data = bytearray()
        self.size = 0
        self.reserved_bytes = 0

    def take_data(self) -> bytearray:
        """Returns all bytes and releases them."""
        data, self.data = self.data, bytearray()
        return data

    async def decode(self, decode: Callable[[bytearray], Result]) -> Result:
        """Calls `decode` with the bytes of the body, on a thread, and returns its result."""
        return await self._run(partial(decode, self.take_data()))

    async def read(
        self,
        find: Callable[[str | None], Awaitable[Found]],
        read: Callable[[bytearray, Found], Result],
    ) -> tuple[Found, Result]:
        """Calls `read` with the bytes of the body, on a thread. `find` runs first, on the event
        loop. It resolves the model requested in the body, and its result is passed to `read`.
        Returns both results. Raises AppError(INVALID) for invalid JSON, and the errors of `find`
        and `read`."""
        data = self.take_data()
        peek = partial(peek_model_name, data)
        found = await find(await self._run(peek) if self.size > _LARGE_BYTES else peek())
        return found, await self._run(partial(read, data, found))

    async def _run(self, work: Callable[[], Result]) -> Result:
        self._bodies.decoding += 1
        try:
            return await self._bodies.workers.run(work, size=self.size, key=self.caller)
        finally:
            self._bodies.decoding -= 1


class RequestBodies:
    """Receives the request bodies of one server. in_flight: the number of bodies that are received
    or used. decoding: the number of bodies that are being decoded or wait for a thread."""

    def __init__(self, settings: Settings, workers: ThreadPools) -> None:
        self.workers = workers
        self._limit = settings.max_body
        self._budget = BodyMemoryBudget(_get_budget_bytes(settings))
        self._release_timer: asyncio.TimerHandle | None = None
        self.in_flight = self.decoding = 0

    def apply(self, settings: Settings) -> None:
        """Applies a new limit, to bodies that are received from now on."""
        self._limit = settings.max_body
        self._budget.total = _get_budget_bytes(settings)

    @property
    def reserved_bytes(self) -> int:
        """The number of bytes that count against the budget."""
        return self._budget.used

    @asynccontextmanager
    async def receive(self, scope: Scope, receive: Receive) -> AsyncGenerator[Body]:
        """Receives the whole body. The body counts as in flight until the context exits.

        Raises AppError(TOO_LARGE) as soon as the size is known to exceed the limit. Raises
        AppError(MEDIA_TYPE) for a compressed body, which may expand a thousandfold. Raises
        AppError(OVERLOADED) if the bodies in flight use too much memory. The server
        (app/http/connection.py) discards the rest of the body and enforces the time limit for it.
        Raises ClientDisconnected if the client disconnects before the body is complete.
        """
        async with self._receive_body(scope, receive) as body:
            yield body

    @asynccontextmanager
    async def receive_json(
        self, scope: Scope, receive: Receive, *, check_type: bool = True
    ) -> AsyncGenerator[Body]:
        """Receives a JSON body as `receive` does. Also raises AppError(INVALID) for too many
        fields, and with `check_type` AppError(MEDIA_TYPE) for any other content type."""
        if check_type:
            check_json(scope)
        async with self._receive_body(scope, receive, FieldCounter()) as body:
            yield body

    async def decode(
        self, scope: Scope, receive: Receive, decode: Callable[[bytearray], Result]
    ) -> Result:
        """Receives a JSON body and decodes it, for requests that need it only once. Raises the
        errors of `receive_json` and of `decode`."""
        async with self.receive_json(scope, receive) as body:
            return await body.decode(decode)

    @asynccontextmanager
    async def _receive_body(
        self, scope: Scope, receive: Receive, counter: FieldCounter | None = None
    ) -> AsyncGenerator[Body]:
        _check_headers(scope, self._limit)
        body = Body(self, get_caller(scope), counter)
        self.in_flight += 1
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                data, more = message.get("body", b""), message.get("more_body", False)
                self._append(body, data)
            yield body
        finally:
            self.in_flight -= 1
            self._budget.release(body.caller, body.reserved_bytes)
            if body.reserved_bytes > _LARGE_BYTES and self._release_timer is None:
                loop = asyncio.get_running_loop()
                self._release_timer = loop.call_later(_RELEASE_DELAY, self._release_memory)

    def _release_memory(self) -> None:
        self._release_timer = None
        asyncio.get_running_loop().run_in_executor(None, trim_malloc)

    def _append(self, body: Body, data: bytes) -> None:
        body.size += len(data)
        if body.size > self._limit:
            raise _too_large(self._limit)
        self._reserve(body, min(len(data), max(0, body.size - _UNCOUNTED_BYTES)))
        if body.counter is not None:
            body.counter.feed(data, before=body.data)
        body.data += data

    def _reserve(self, body: Body, nbytes: int) -> None:
        if nbytes:
            self._budget.reserve(body.caller, nbytes)
            body.reserved_bytes += nbytes


def _get_budget_bytes(settings: Settings) -> int:
    return max(_BUDGET_BYTES, _MIN_FULL_SIZE_BODIES * settings.max_body)


class _ModelField(msgspec.Struct):
    """The only field of a body that is needed before the others."""

    model: msgspec.Raw = msgspec.Raw(b"null")


def peek_model_name(data: bytearray) -> str | None:
    """Returns the "model" field of a body, and skips all others. Returns None if it is not a
    string. Raises AppError(INVALID) for invalid JSON."""
    try:
        name = _decode_json(data, _ModelField).model
        return _decode_json(name, str)
    except msgspec.ValidationError:
        return None


def _decode_json(data: bytearray | msgspec.Raw, type_: type[Result]) -> Result:
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
    raise AppError(ErrorKind.INVALID, f"the body is not valid JSON: {reason}")


def is_json(scope: Scope) -> bool:
    """Returns whether the content type is JSON."""
    given = Headers(scope=scope).get("content-type", "")
    return given.partition(";")[0].strip().lower() == "application/json"


def check_json(scope: Scope) -> None:
    """Raises AppError(MEDIA_TYPE) unless the content type is JSON.

    This also blocks web pages from other origins. A browser sends this content type across origins
    only after a preflight request, which CORS rejects.
    """
    if not is_json(scope):
        given = Headers(scope=scope).get("content-type", "")
        named = mark_client_text(given[:200]) if given else "missing"
        raise AppError(
            ErrorKind.UNSUPPORTED_MEDIA_TYPE,
            f"the Content-Type must be application/json, but is {named}; "
            "with curl, add: -H 'Content-Type: application/json'",
        )


def _check_headers(scope: Scope, limit: int) -> None:
    headers = Headers(scope=scope)
    coding = headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        raise AppError(
            ErrorKind.UNSUPPORTED_MEDIA_TYPE,
            f"compressed bodies are not supported, but the Content-Encoding is "
            f"{mark_client_text(coding[:200])}",
            code="unsupported_content_encoding",
        )
    length = headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> AppError:
    return AppError(ErrorKind.TOO_LARGE, f"the body is larger than the limit of {limit:,} bytes")
