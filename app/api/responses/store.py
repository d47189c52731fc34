"""What was answered, for as long as there is room: what `previous_response_id` leads to.

Knows: ids, JSON as bytes, how much may be kept. Must not know: what an item means, HTTP.

Everything is held in memory and gone with the process. Who begins a conversation anew by an id
needs every answer before it, so a chain is only ever shortened at its young end: whenever a
response is used, it and then each one before it is moved behind all others, and room is made at
the front. Hence:

    the older one of a chain  >  the younger one      in the order of use

Each caller has a store of its own, so that no caller reads or continues another one's responses.
All stores share the room; where it is used up, the caller that holds most of it gives up its least
recently used response. A caller that holds less than its share loses nothing to others.

Owner: the event loop, which alone adds, moves and removes. `find` and the walks may be called from
the thread that parses a body: each step is one look-up of a value that never changes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.http.responses import JsonObject

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20
# bytes of one response and its input: a larger one is not kept
MAX_RESPONSE_BYTES = 4 << 20

# what an entry, and an item's place in the table, take beside the JSON
_OVERHEAD, _ITEM_OVERHEAD = 1024, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response as it was answered. input: the JSON array of its own input items, those of
    earlier responses not among them. body: the response object as JSON. items: the ids of the items
    in both. previous_response_id: the response that it continues."""

    id: str
    previous_response_id: str | None
    input: bytes
    body: bytes
    items: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        return len(self.input) + len(self.body) + _OVERHEAD + _ITEM_OVERHEAD * len(self.items)

    def input_items(self) -> list[JsonObject]:
        return orjson.loads(self.input)

    def output_items(self) -> list[JsonObject]:
        return orjson.loads(self.body)["output"]


class ResponseStores:
    """The stores of all callers, bounded together by count and by bytes."""

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
        """caller: the name of its key, so there are as many stores as keys. On any thread."""
        return self._stores.setdefault(caller, ResponseStore(self))

    def evict(self) -> None:
        """Drop responses until the bounds hold."""
        stores = self._stores.values()
        while sum(map(len, stores)) > self._max_responses:
            max(stores, key=len).drop_oldest()
        while sum(store.nbytes for store in stores) > self._max_bytes:
            max(stores, key=lambda store: store.nbytes).drop_oldest()


class ResponseStore:
    """The responses of one caller; the least recently used goes first. See
    `ResponseStores.for_caller`."""

    def __init__(self, stores: ResponseStores) -> None:
        self._stores = stores
        self._bytes = 0
        # Moving an entry changes no look-up, as deleting and inserting it again would.
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._response_of_item: dict[str, str] = {}  # item → the response that holds it

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def find(self, id_: str) -> StoredResponse | None:
        return self._responses.get(id_)

    def chain(self, id_: str) -> Sequence[StoredResponse]:
        """The response and all before it, the first one first. Raises AppError(INVALID) where one
        of them is not kept: the SDKs know the code."""
        found: list[StoredResponse] = []
        wanted: str | None = id_
        while wanted is not None:
            kept = self.find(wanted)
            if kept is None:
                raise _not_found(id_, wanted)
            found.append(kept)
            wanted = kept.previous_response_id
        return found[::-1]

    def get_conversation(self, id_: str) -> Sequence[JsonObject]:
        """What was said up to the end of a response, item by item. Raises as `chain` does."""
        items: list[JsonObject] = []
        for kept in self.chain(id_):
            items += kept.input_items()
            items += kept.output_items()
        return items

    def get_item(self, id_: str) -> JsonObject | None:
        """An input or output item of any response that is kept."""
        holder = self._response_of_item.get(id_)
        kept = None if holder is None else self.find(holder)
        if kept is None:
            return None
        for item in (*kept.input_items(), *kept.output_items()):
            if item.get("id") == id_:
                return item
        raise AssertionError("an item that its holder does not hold")

    def add(self, response: StoredResponse) -> None:
        """Make room for a response and use it. One that is too large is not kept, nor is one that
        has no room beside its chain."""
        assert response.id not in self._responses
        if response.size > self._stores.max_response_bytes:
            return
        self._responses[response.id] = response
        self._bytes += response.size
        for item in response.items:
            # of an item that a client sent again under its old id, the copy that will stay longer
            self._response_of_item[item] = response.id
        self.touch(response.id)
        self._stores.evict()

    def drop_oldest(self) -> None:
        self.delete(next(iter(self._responses)))

    def touch(self, id_: str) -> None:
        """Note that a response was asked for, and with it all that it continues."""
        wanted: str | None = id_
        while wanted is not None and (kept := self._responses.get(wanted)) is not None:
            self._responses.move_to_end(wanted)
            wanted = kept.previous_response_id

    def delete(self, id_: str) -> bool:
        """Whether there was such a response."""
        kept = self._responses.pop(id_, None)
        if kept is None:
            return False
        self._bytes -= kept.size
        for item in kept.items:
            if self._response_of_item.get(item) == id_:
                del self._response_of_item[item]
        return True


def _not_found(asked: str, missing: str) -> AppError:
    which = f"the response {mark_client_text(repr(asked[:200]))}"
    if missing != asked:
        which += f" continues {mark_client_text(repr(missing[:200]))}, which"
    return AppError(
        ErrorKind.INVALID,
        f"{which} was not found: responses are stored in memory, the least recently used are "
        "evicted, and those with store: false, of other API keys, or larger than "
        f"{MAX_RESPONSE_BYTES >> 20} MiB are not stored; send the whole conversation as "
        "input instead",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def item_ids(items: Sequence[Any]) -> tuple[str, ...]:
    """The ids of items that have one."""
    return tuple(item["id"] for item in items if isinstance(item.get("id"), str))
