"""DeepSeek V3.2 writes tool calls in DSML (`app/text/syntax/dsml.py`).

Knows: the outer tag of this version. Must not know: the DSML parser.
"""

from app.text.syntax.dsml import DSML_MARKER, build_dsml_tags
from app.text.syntax.tagged_family import TaggedFamily

_CALLS = "function_calls"


class Family(TaggedFamily):
    call_tags = build_dsml_tags(_CALLS)
    markers = (DSML_MARKER, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        return DSML_MARKER in template and f"{_CALLS}>" in template
