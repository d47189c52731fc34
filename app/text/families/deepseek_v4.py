"""DeepSeek V4: calls in DSML, which `app/text/dsml.py` describes."""

from app.text.dsml import MARK, dsml
from app.text.tagged_family import TaggedFamily

_CALLS = "tool_calls"


class Family(TaggedFamily):
    call_tags = dsml(_CALLS)
    markers = (MARK, "<think>", "</think>")

    def claims(self, template: str) -> bool:
        return MARK in template and f"{_CALLS}>" in template
