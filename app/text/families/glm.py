"""GLM 4.5 and later, and Poolside's Laguna, write the function's name after the outer tag. Keys and
values are in separate tags.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

GLM 4.7 and later versions omit the line breaks.

Knows: these tags. Must not know: the parser of tagged calls.

Source: the chat templates of these models.
"""

from app.text.syntax.tagged_calls import CallTags
from app.text.syntax.tagged_family import TaggedFamily

_TAGS = CallTags(
    before="<tool_call>",
    after="</tool_call>",
    begin="",
    name_end="",
    end=None,
    key_begin="<arg_key>",
    key_ends={"</arg_key>": None},
    value_begin="<arg_value>",
    value_end="</arg_value>",
    gap_optional=True,
)


class Family(TaggedFamily):
    call_tags = _TAGS
    markers = (
        *(_TAGS.before, _TAGS.after),
        *(_TAGS.key_begin, *_TAGS.key_ends, _TAGS.value_begin, _TAGS.value_end),
        *("<think>", "</think>"),
    )

    def matches(self, template: str) -> bool:
        return _TAGS.before in template and _TAGS.key_begin in template
