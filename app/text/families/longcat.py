"""Meituan's LongCat uses GLM's tool call syntax with different tag names.

    <longcat_tool_call>get_weather
    <longcat_arg_key>city</longcat_arg_key>
    <longcat_arg_value>Oslo</longcat_arg_value>
    </longcat_tool_call>

Knows: these tags. Must not know: the parser of tagged calls.

Source: the chat templates of LongCat-Flash.
"""

from app.grammar.constraint import ReasoningTags
from app.text.syntax.tagged_calls import CallTags
from app.text.syntax.tagged_family import TaggedFamily

_TAGS = CallTags(
    before="<longcat_tool_call>",
    after="</longcat_tool_call>",
    begin="",
    name_end="",
    end=None,
    key_begin="<longcat_arg_key>",
    key_ends={"</longcat_arg_key>": None},
    value_begin="<longcat_arg_value>",
    value_end="</longcat_arg_value>",
    gap_optional=True,
)
_THINK = ReasoningTags(open="<longcat_think>", close="</longcat_think>")


class Family(TaggedFamily):
    call_tags = _TAGS
    markers = (
        *(_TAGS.before, _TAGS.after),
        *(_TAGS.key_begin, *_TAGS.key_ends, _TAGS.value_begin, _TAGS.value_end),
        *(_THINK.open, _THINK.close),
    )

    def matches(self, template: str) -> bool:
        return _TAGS.before in template

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        return _THINK if _THINK.close in template else super().reasoning_tags(template)
