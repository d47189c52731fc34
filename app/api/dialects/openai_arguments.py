"""The arguments of calls that are sent back.

Knows: that a model may have written no JSON, and that whoever called it sends that back as it was,
to tell what came of it. Must not know: which dialect it came by.
"""

from typing import Any

import orjson

# under which a template is shown arguments that are no object
INVALID_ARGUMENTS_KEY = "invalid_arguments"


def normalize_arguments(text: str) -> str:
    """The text of a JSON object, which is all that templates can render. Clients send "" for no
    arguments. Anything else was the model's own mistake, or was cut off: it is told as that."""
    object_ = text.strip() or "{}"
    return (
        object_
        if isinstance(_try_parse(object_), dict)
        else orjson.dumps({INVALID_ARGUMENTS_KEY: text}).decode()
    )


def _try_parse(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
