"""JSON responses.

Knows: starlette, orjson. Must not know: the content of responses, errors, streams.
"""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

JsonObject = dict[str, Any]

# The number of array items that are encoded in one step.
_ITEMS_PER_PIECE = 512


def encode_long_array(items: list[Any]) -> list[Any] | orjson.Fragment:
    """Encodes a JSON array for a response. A long array is encoded in several steps, because orjson
    holds the GIL while it encodes, and the log probabilities of a long prompt can take ten
    megabytes. Call this function on a worker thread."""
    if len(items) <= _ITEMS_PER_PIECE:
        return items
    pieces = (
        orjson.dumps(items[at : at + _ITEMS_PER_PIECE])[1:-1]
        for at in range(0, len(items), _ITEMS_PER_PIECE)
    )
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        orjson.dumps(content), status_code=status, headers=headers, media_type="application/json"
    )
