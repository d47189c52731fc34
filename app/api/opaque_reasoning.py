"""Opaque reasoning content: OpenAI's `encrypted_content` and Anthropic's signatures.

Knows: the encoding. Must not know: items, blocks, when a client requests opaque reasoning.

Some clients do not store the reasoning text. They send back only the opaque content, from which the
reasoning is restored for the next prompt. The text is encoded but not encrypted, because reasoning
is not secret here, and a client may send any reasoning text anyway.
"""

import hashlib
from base64 import b64decode, b64encode

# "mlxrunner" in base64, followed by a letter for the kind
_PREFIX, _DIGEST_PREFIX = "bWx4cnVubmVyT", "bWx4cnVubmVyD"


def encode_reasoning(text: str) -> str:
    return _PREFIX + b64encode(text.encode()).decode("ascii")


def decode_reasoning(content: str) -> str | None:
    """Returns the text. Returns None if the content is corrupted or was created by another
    server."""
    if not content.startswith(_PREFIX):
        return None
    try:
        return b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return None


def digest_reasoning(text: str) -> str:
    """Returns a short digest, for clients that also receive the text. The text cannot be restored
    from the digest."""
    digest = hashlib.blake2b(text.encode(), digest_size=24).digest()
    return _DIGEST_PREFIX + b64encode(digest).decode("ascii")
