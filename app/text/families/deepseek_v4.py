"""DeepSeek V4: calls in DSML, which `app/text/syntax/dsml.py` describes."""

from app.text.syntax.dsml import MARK, dsml
from app.text.syntax.tagged_family import TaggedFamily

_CALLS = "tool_calls"


class Family(TaggedFamily):
    call_tags = dsml(_CALLS)
    markers = (MARK, "<think>", "</think>")

    def claims(self, template: str) -> bool:
        return MARK in template and f"{_CALLS}>" in template
