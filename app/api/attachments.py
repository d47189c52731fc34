"""Images, audio and files in a conversation, for models that read text only.

Knows: which of them are rejected, the text that replaces the others. Must not know: dialects.

A new question with an attachment is rejected, because the model could not answer it. In tool
results and in earlier turns, a placeholder replaces the attachment, and the response has a notice:
an error would end the conversation, because the client sends the same turns with every later
request.
"""

from collections.abc import Sequence
from typing import Literal

from app.api.fields import invalid_request
from app.core.request_context import add_notice

AttachmentKind = Literal["image", "audio", "file"]

_KINDS = {"image": "images are", "audio": "audio is", "file": "files are"}


def is_new_question(roles: Sequence[str]) -> bool:
    """Returns whether the last message is a question of the user. If a tool result precedes it, it
    belongs to the result: some clients send the images that a tool returns in a user message.
    roles: of all messages, with "tool" for each message with a tool result."""
    if not roles or roles[-1] != "user":
        return False
    since_answer = roles[
        max((n for n, role in enumerate(roles) if role == "assistant"), default=0) :
    ]
    return "tool" not in since_answer


def read_attachment(kind: AttachmentKind, path: str, *, omit: bool) -> str:
    """Reports an attachment as omitted and returns the text that replaces it. Without `omit`,
    raises AppError(INVALID)."""
    if not omit:
        raise invalid_request(
            path, f"{path}: {_KINDS[kind]} not supported: this model reads text only"
        )
    add_notice(f"{_KINDS[kind]} omitted: this model reads text only")
    return f"[{kind} omitted: this model reads text only]"
