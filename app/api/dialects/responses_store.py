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

from app.api.wire import JsonObject
from app.core.errors import AppError, Kind, quote_client

MOST_RESPONSES = 4096
MOST_BYTES = 64 << 20
# bytes of one response and its input: a larger one is not kept
MOST_EACH = 4 << 20

# what an entry, and an item's place in the table, take beside the JSON
_OVERHEAD, _ITEM_OVERHEAD = 1024, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One response as it was answered. input: the JSON array of its own input items, those of
    earlier responses not among them. body: the response object as JSON. items: the ids of the items
    in both. previous: the response that it continues."""

    id: str
    previous: str | None
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
        most: int = MOST_RESPONSES,
        most_bytes: int = MOST_BYTES,
        most_each: int = MOST_EACH,
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.most_each = most_each
        self._stores: dict[str, ResponseStore] = {}

    def of(self, caller: str) -> "ResponseStore":
        """caller: the name of its key, so there are as many stores as keys. On any thread."""
        return self._stores.setdefault(caller, ResponseStore(self))

    def make_room(self) -> None:
        """Drop responses until the bounds hold."""
        stores = self._stores.values()
        while sum(map(len, stores)) > self._most:
            max(stores, key=len).drop_oldest()
        while sum(store.nbytes for store in stores) > self._most_bytes:
            max(stores, key=lambda store: store.nbytes).drop_oldest()


class ResponseStore:
    """The responses of one caller; the least recently used goes first. See `ResponseStores.of`."""

    def __init__(self, stores: ResponseStores) -> None:
        self._stores = stores
        self._bytes = 0
        # Moving an entry changes no look-up, as deleting and inserting it again would.
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._holders: dict[str, str] = {}  # item → the response that holds it

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def find(self, id_: str) -> Kept | None:
        return self._kept.get(id_)

    def chain(self, id_: str) -> Sequence[Kept]:
        """The response and all before it, the first one first. Raises AppError(INVALID) where one
        of them is not kept: the SDKs know the code."""
        found: list[Kept] = []
        wanted: str | None = id_
        while wanted is not None:
            kept = self.find(wanted)
            if kept is None:
                raise _not_found(id_, wanted)
            found.append(kept)
            wanted = kept.previous
        return found[::-1]

    def conversation(self, id_: str) -> Sequence[JsonObject]:
        """What was said up to the end of a response, item by item. Raises as `chain` does."""
        items: list[JsonObject] = []
        for kept in self.chain(id_):
            items += kept.input_items()
            items += kept.output_items()
        return items

    def item(self, id_: str) -> JsonObject | None:
        """An input or output item of any response that is kept."""
        holder = self._holders.get(id_)
        kept = None if holder is None else self.find(holder)
        if kept is None:
            return None
        for item in (*kept.input_items(), *kept.output_items()):
            if item.get("id") == id_:
                return item
        raise AssertionError("an item that its holder does not hold")

    def keep(self, kept: Kept) -> None:
        """Make room for a response and use it. One that is too large is not kept, nor is one that
        has no room beside its chain."""
        assert kept.id not in self._kept
        if kept.size > self._stores.most_each:
            return
        self._kept[kept.id] = kept
        self._bytes += kept.size
        for item in kept.items:
            # of an item that a client sent again under its old id, the copy that will stay longer
            self._holders[item] = kept.id
        self.use(kept.id)
        self._stores.make_room()

    def drop_oldest(self) -> None:
        self.forget(next(iter(self._kept)))

    def use(self, id_: str) -> None:
        """Note that a response was asked for, and with it all that it continues."""
        wanted: str | None = id_
        while wanted is not None and (kept := self._kept.get(wanted)) is not None:
            self._kept.move_to_end(wanted)
            wanted = kept.previous

    def forget(self, id_: str) -> bool:
        """Whether there was such a response."""
        kept = self._kept.pop(id_, None)
        if kept is None:
            return False
        self._bytes -= kept.size
        for item in kept.items:
            if self._holders.get(item) == id_:
                del self._holders[item]
        return True


def _not_found(asked: str, missing: str) -> AppError:
    which = f"the response {quote_client(repr(asked[:200]))}"
    if missing != asked:
        which += f" continues {quote_client(repr(missing[:200]))}, which"
    return AppError(
        Kind.INVALID,
        f"{which} was not found: responses are stored in memory, the least recently used are "
        "evicted, and those with store: false, of other API keys, or larger than "
        f"{MOST_EACH >> 20} MiB are not stored; send the whole conversation as input instead",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def ids_of(items: Sequence[Any]) -> tuple[str, ...]:
    """The ids of items that have one."""
    return tuple(item["id"] for item in items if isinstance(item.get("id"), str))
