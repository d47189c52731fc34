"""Reasoning in an opaque form: OpenAI's `encrypted_content` and Anthropic's signatures.

Knows: the format. Must not know: items, blocks, when a client requests this form.

Some clients do not keep the text of the reasoning. They send back only this form, and the next
prompt then contains the reasoning. The text is encoded but not encrypted, because reasoning is not
secret here: a client that changes it could also send another text.
"""

import hashlib
from base64 import b64decode, b64encode

# "mlxrunner" in base 64, and a letter for the kind
_PREFIX, _DIGEST_PREFIX = "bWx4cnVubmVyT", "bWx4cnVubmVyD"


def encode_reasoning(text: str) -> str:
    return _PREFIX + b64encode(text.encode()).decode("ascii")


def decode_reasoning(content: str) -> str | None:
    """Returns the text. Returns None if another server created the content, or if it is damaged."""
    if not content.startswith(_PREFIX):
        return None
    try:
        return b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return None


def digest_reasoning(text: str) -> str:
    """Returns a short form, for a client that also gets the text. The text cannot be decoded from
    it."""
    digest = hashlib.blake2b(text.encode(), digest_size=24).digest()
    return _DIGEST_PREFIX + b64encode(digest).decode("ascii")
