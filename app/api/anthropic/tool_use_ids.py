"""Ids of tool calls as Anthropic writes them: `toolu_` and 24 letters or digits.

Knows: both forms of an id. Must not know: calls.

Clients check this form. Some chat templates render IDs or require another form. Therefore the
engine's ID can be recovered from the ID that a client sends back, and the server stores nothing.
"""

import base64
import re
from contextlib import suppress

_PREFIX, _LENGTH = "toolu_", 24

# the usual ids of app/text/output.py
_USUAL_PREFIX = "call_"
_USUAL = re.compile(r"[0-9a-f]{24}", re.ASCII)

# The first letter of an encoded ID is not a hexadecimal digit. The padding is not a base 32 digit.
_ENCODED, _PADDING = "x", "0"


def to_tool_use_id(call_id: str) -> str:
    """Converts an ID for a client. An ID in an unusual form may become longer."""
    if (usual := call_id.removeprefix(_USUAL_PREFIX)) != call_id and _USUAL.fullmatch(usual):
        return _PREFIX + usual
    digits = base64.b32encode(call_id.encode()).decode().rstrip("=").lower()
    return _PREFIX + (_ENCODED + digits).ljust(_LENGTH, _PADDING)


def to_call_id(tool_use_id: str) -> str:
    """Returns the engine's ID. Returns an ID of another server unchanged."""
    spelled = tool_use_id.removeprefix(_PREFIX)
    if spelled == tool_use_id:
        return tool_use_id
    if _USUAL.fullmatch(spelled):
        return _USUAL_PREFIX + spelled
    if spelled.startswith(_ENCODED):
        digits = spelled[1:].rstrip(_PADDING).upper()
        with suppress(ValueError):
            call_id = base64.b32decode(digits + "=" * (-len(digits) % 8)).decode()
            if to_tool_use_id(call_id) == tool_use_id:
                return call_id
    return tool_use_id
