"""ByteDance's Seed-OSS uses Qwen3-Coder's tags within a different outer tag. Values are on the same
line as their tags.

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Oslo</parameter>
    </function>
    </seed:tool_call>

Knows: these tags, the notation of values. Must not know: the parser of tagged calls.

Source: the model's chat template. Lists and objects are written as Python literals.
"""

from app.grammar.constraint import ReasoningTags
from app.text.syntax.tagged_calls import CallTags
from app.text.syntax.tagged_family import TaggedFamily

_TAGS = CallTags(
    before="<seed:tool_call>",
    after="</seed:tool_call>",
    begin="<function=",
    name_end=">",
    end="</function>",
    key_begin="<parameter=",
    key_ends={">": None},
    value_end="</parameter>",
)
_THINK = ReasoningTags(open="<seed:think>", close="</seed:think>")


class Family(TaggedFamily):
    call_tags = _TAGS
    markers = (_TAGS.before, _TAGS.after, _THINK.open, _THINK.close)

    def matches(self, template: str) -> bool:
        return _TAGS.before in template

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        return _THINK
