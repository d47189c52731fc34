"""Errors as those may hear them who ask for a model: without what lies where on the disk.

Knows: words. Must not know: who asks. The log has the error as it was.
"""

import re
from pathlib import Path

from app.core.errors import AppError

# An absolute path, not one of our routes, nor a part of an address or of a relative one. Names
# with blanks are cut short, which leaves a word of them and not the way there.
_ABSOLUTE_PATH = re.compile(
    r"(?<![\w./:~-])~?/(?!v1/)(?:[^\s/'\"`:;,)\]]+/)*(?P<name>[^\s/'\"`:;,)\]]+)"
)


def redact_paths(error: AppError, folder: Path | None, name: str) -> AppError:
    """folder: where the model lies, which becomes its name; of other paths only the last part is
    left."""
    message = error.marked_message
    if folder is not None:
        message = message.replace(str(folder), name)
    message = " ".join(_ABSOLUTE_PATH.sub(r"\g<name>", message).split())
    return AppError(
        error.kind,
        message,
        param=error.param,
        code=error.code,
        retry_after=error.retry_after,
    )
