"""DeepSeek V3.2: tool calls in DSML (`app/text/syntax/dsml.py`)."""

from app.text.syntax.dsml import DSML_MARKER, build_dsml_tags
from app.text.syntax.tagged_family import TaggedFamily

_CALLS = "function_calls"


class Family(TaggedFamily):
    call_tags = build_dsml_tags(_CALLS)
    markers = (DSML_MARKER, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        return DSML_MARKER in template and f"{_CALLS}>" in template
