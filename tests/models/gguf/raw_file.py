"""Writes GGUF files byte by byte, so that tests can write invalid ones."""

import struct
from collections.abc import Sequence

STRING, ARRAY = 8, 9


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key, the number of its type and its encoded value."""
    return string(key) + struct.pack("<I", kind) + value


def text_entry(key: str, text: str) -> bytes:
    return entry(key, STRING, string(text))


def int_entry(key: str, number: int) -> bytes:
    return entry(key, 4, struct.pack("<I", number))


def array(kind: int, values: Sequence[bytes], count: int | None = None) -> bytes:
    count = len(values) if count is None else count
    return struct.pack("<IQ", kind, count) + b"".join(values)


def tensor(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor. dims: the fastest dimension first, as in the file."""
    return (
        string(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


def gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    """A file. num_tensors, num_keys: counts that differ from the number of entries."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_keys is None else num_keys,
    )
    head += b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data
