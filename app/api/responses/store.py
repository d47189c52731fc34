"""A bounded in-memory store for responses, used by `previous_response_id`.

Knows: IDs, JSON as bytes, the storage limits. Must not know: the meaning of items, HTTP.

Responses are stored in memory and are lost when the process ends. A conversation can be continued
by ID only if all earlier responses are still stored. A chain is therefore evicted from its newest
response backwards: whenever a response is used, it moves to the end of the LRU order, followed by
each response before it. Eviction starts at the front. Hence:

    older response of a chain  >  newer response      in LRU order

Each caller has its own store, so that no caller can read or continue the responses of another
caller. All stores share one limit. When it is exceeded, the least recently used response of the
caller that uses the most memory is evicted. A caller below its fair share is therefore not affected
by other callers.

Thread safety: only the event loop adds, moves and removes responses. `find` and the chain lookups
may be called from the thread that parses a body, because each step is one lookup of an immutable
value.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.http.responses import JsonObject

MAX_RESPONSES = 4096
MAX_BYTES = 128 << 20
# maximum size in bytes of one response with its input, which may have images; a larger response is
# not stored
MAX_RESPONSE_BYTES = 24 << 20

# overhead in bytes of a response and of an item's index entry, in addition to the JSON
_OVERHEAD, _ITEM_OVERHEAD = 1024, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One stored response.

    input: the JSON array of the response's own input items, without the items of earlier responses.
    body: the response object as JSON. items: the IDs of the items in both. previous_response_id:
    the response that this response continues.
    """

    id: str
    previous_response_id: str | None
    input: bytes
    body: bytes
    items: tuple[str, ...]

    @property
    def size(self) -> int:
        """The approximate size in bytes."""
        return len(self.input) + len(self.body) + _OVERHEAD + _ITEM_OVERHEAD * len(self.items)

    def input_items(self) -> list[JsonObject]:
        return orjson.loads(self.input)

    def output_items(self) -> list[JsonObject]:
        return orjson.loads(self.body)["output"]


class ResponseStores:
    """The stores of all callers, with shared limits on the number of responses and on bytes."""

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self.max_response_bytes = max_response_bytes
        self._stores: dict[str, ResponseStore] = {}

    def for_caller(self, caller: str) -> "ResponseStore":
        """Returns the store of a caller. caller: the name of the caller's API key, so the number of
        stores is bounded by the number of keys. May be called on any thread."""
        return self._stores.setdefault(caller, ResponseStore(self))

    def evict(self) -> None:
        """Evicts responses until the limits are met."""
        stores = self._stores.values()
        while sum(map(len, stores)) > self._max_responses:
            max(stores, key=len).drop_oldest()
        while sum(store.nbytes for store in stores) > self._max_bytes:
            max(stores, key=lambda store: store.nbytes).drop_oldest()


class ResponseStore:
    """The responses of one caller, in LRU order. See `ResponseStores.for_caller`."""

    def __init__(self, stores: ResponseStores) -> None:
        self._stores = stores
        self._bytes = 0
        # Moving an entry does not affect concurrent lookups, unlike deleting and reinserting it.
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._response_of_item: dict[str, str] = {}  # item ID → ID of the response

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def find(self, id_: str) -> StoredResponse | None:
        return self._responses.get(id_)

    def chain(self, id_: str) -> Sequence[StoredResponse]:
        """Returns the response and all responses before it, oldest first. Raises AppError(INVALID)
        if one of them is not stored; the error code is one that the SDKs know."""
        found: list[StoredResponse] = []
        next_id: str | None = id_
        while next_id is not None:
            kept = self.find(next_id)
            if kept is None:
                raise _not_found(id_, next_id)
            found.append(kept)
            next_id = kept.previous_response_id
        return found[::-1]

    def get_conversation(self, id_: str) -> Sequence[JsonObject]:
        """Returns the items of the conversation up to the end of a response. Raises the same errors
        as `chain`."""
        items: list[JsonObject] = []
        for kept in self.chain(id_):
            items += kept.input_items()
            items += kept.output_items()
        return items

    def get_item(self, id_: str) -> JsonObject | None:
        """Returns an input or output item of any stored response."""
        holder = self._response_of_item.get(id_)
        kept = None if holder is None else self.find(holder)
        if kept is None:
            return None
        for item in (*kept.input_items(), *kept.output_items()):
            if item.get("id") == id_:
                return item
        raise AssertionError("the response does not contain the item")

    def add(self, response: StoredResponse) -> None:
        """Stores a response as the most recently used one, and evicts others if necessary. A
        response is not stored if it is too large or does not fit together with its chain."""
        assert response.id not in self._responses
        if response.size > self._stores.max_response_bytes:
            return
        self._responses[response.id] = response
        self._bytes += response.size
        for item in response.items:
            # if a client sent an item again with the same ID, use the copy that is evicted later
            self._response_of_item[item] = response.id
        self.touch(response.id)
        self._stores.evict()

    def drop_oldest(self) -> None:
        self.delete(next(iter(self._responses)))

    def touch(self, id_: str) -> None:
        """Marks a response and all earlier responses in its chain as recently used."""
        wanted: str | None = id_
        while wanted is not None and (kept := self._responses.get(wanted)) is not None:
            self._responses.move_to_end(wanted)
            wanted = kept.previous_response_id

    def delete(self, id_: str) -> bool:
        """Deletes a response. Returns whether it existed."""
        kept = self._responses.pop(id_, None)
        if kept is None:
            return False
        self._bytes -= kept.size
        for item in kept.items:
            if self._response_of_item.get(item) == id_:
                del self._response_of_item[item]
        return True


def _not_found(requested: str, missing: str) -> AppError:
    which = f"the response {mark_client_text(repr(requested[:200]))}"
    if missing != requested:
        which += f" continues {mark_client_text(repr(missing[:200]))}, which"
    return AppError(
        ErrorKind.INVALID,
        f"{which} was not found: send the whole conversation as input instead; responses are "
        "stored in memory for the API key that created them, the least recently used ones are "
        f"evicted, and those with store: false or larger than {MAX_RESPONSE_BYTES >> 20} MiB are "
        "not stored",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def item_ids(items: Sequence[Any]) -> tuple[str, ...]:
    """Returns the IDs of all items that have one."""
    return tuple(item["id"] for item in items if isinstance(item.get("id"), str))
