"""MiniMax M2 writes all tool calls in one pair of tags, with names as attributes.

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Oslo</parameter>
    </invoke>
    </minimax:tool_call>

Knows: these tags. Must not know: the parser of tagged calls.

Source: MiniMax's guide to the tool calls of M2, and its chat template.
"""

from app.text.syntax.tagged_calls import CallTags
from app.text.syntax.tagged_family import TaggedFamily

_TAGS = CallTags(
    before="<minimax:tool_call>",
    after="</minimax:tool_call>",
    begin='<invoke name="',
    name_end='">',
    end="</invoke>",
    key_begin='<parameter name="',
    key_ends={'">': None},
    value_end="</parameter>",
    grouped=True,
)


class Family(TaggedFamily):
    call_tags = _TAGS
    markers = (_TAGS.before, _TAGS.after, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        return _TAGS.before in template
