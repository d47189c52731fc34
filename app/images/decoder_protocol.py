"""The messages between the server and the process that decodes images.

Knows: lengths and JSON. Must not know: processes, codecs, requests.

A message is a JSON object, and data after it: the encoded image in a request, and the pixels of all
tiles in a response.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from app.images.plan import Resize, Tile

# The exit status of a process that ran out of memory.
OUT_OF_MEMORY_STATUS = 4

# the length of the JSON object, and of the data
PREFIX = struct.Struct(">IQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """The limits of the process. memory: address space in bytes; an image of the maximum size takes
    half of the default. cpu: CPU seconds per image. wall: seconds per image, for an overloaded
    machine. images: after this number, the process is replaced."""

    memory: int = 1 << 30
    cpu: int = 10
    wall: float = 30.0
    images: int = 1000


def encode_message(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return PREFIX.pack(len(text), len(data)) + text + data


def read_message(read: Callable[[int], bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Reads one message. Returns None at the end of the stream. read: returns at most the given
    number of bytes, and b"" at the end."""
    prefix = _read_exactly(read, PREFIX.size)
    if prefix is None:
        return None
    json_length, data_length = PREFIX.unpack(prefix)
    text, data = _read_exactly(read, json_length), _read_exactly(read, data_length)
    return None if text is None or data is None else (json.loads(text), data)


def _read_exactly(read: Callable[[int], bytes], length: int) -> bytes | None:
    parts: list[bytes] = []
    while length > 0:
        part = read(min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def pack_tiles(tiles: Sequence[Tile]) -> list[Any]:
    """Returns the tiles as JSON."""
    return [
        [[[one.width, one.height, one.filter] for one in tile.resizes], tile.crop] for tile in tiles
    ]


def unpack_tiles(packed: Sequence[Any]) -> tuple[Tile, ...]:
    """The inverse of `pack_tiles`."""
    return tuple(
        Tile(
            resizes=tuple(
                Resize(width=width, height=height, filter=name) for width, height, name in resizes
            ),
            crop=None if crop is None else cast(tuple[int, int, int, int], tuple(crop)),
        )
        for resizes, crop in packed
    )
