"""Qwen3-Coder, Qwen 3.5, Nemotron 3 and Step 3.5 write a tool call with tags for the function and
each parameter. Values are unescaped and on separate lines.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

Knows: these tags. Must not know: the parser of tagged calls.

Source: the chat templates of these models.
"""

from app.text.syntax.tagged_calls import CallTags
from app.text.syntax.tagged_family import TaggedFamily

_TAGS = CallTags(
    before="<tool_call>",
    after="</tool_call>",
    begin="<function=",
    name_end=">",
    end="</function>",
    key_begin="<parameter=",
    key_ends={">": None},
    value_end="</parameter>",
    values_on_own_lines=True,
)


class Family(TaggedFamily):
    call_tags = _TAGS
    markers = (_TAGS.before, _TAGS.after, "<think>", "</think>")

    def matches(self, template: str) -> bool:
        return all(mark in template for mark in (_TAGS.before, _TAGS.begin, _TAGS.key_begin))
