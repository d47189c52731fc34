"""Lists of items, a page at a time.

Knows the query of OpenAI's lists and the shape of a page. Must not know: where items are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

from app.api.fields import invalid_request, quote_value
from app.api.wire import JsonObject

MAX_LIMIT, DEFAULT_LIMIT = 100, 20

Order = Literal["asc", "desc"]


def paginate_items(items: Sequence[JsonObject], query: Mapping[str, str]) -> JsonObject:
    """A page of items that stand in the order in which they were said. Newest first, as at OpenAI,
    unless the query says otherwise. Raises AppError(INVALID) for a query that cannot be obeyed."""
    limit, order = _limit(query), _order(query)
    listed = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        listed = listed[_find_index(listed, after) + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > limit,
    }


def _limit(query: Mapping[str, str]) -> int:
    given = query.get("limit", str(DEFAULT_LIMIT))
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= MAX_LIMIT):
        raise invalid_request(
            "limit", f"limit must be an integer from 1 to {MAX_LIMIT}, not {quote_value(given)}"
        )
    return int(given)


def _order(query: Mapping[str, str]) -> Order:
    given = query.get("order", "desc")
    if given not in get_args(Order):
        raise invalid_request("order", f"order must be 'asc' or 'desc', not {quote_value(given)}")
    return cast("Order", given)


def _find_index(items: Sequence[JsonObject], id_: str) -> int:
    for place, item in enumerate(items):
        if item["id"] == id_:
            return place
    raise invalid_request(
        "after", f"after must be the id of an item of this response, not {quote_value(id_)}"
    )
