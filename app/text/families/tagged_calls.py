"""Families whose tool calls are in tags, with raw values (`app/text/syntax/tagged_calls.py`). They
differ in the tags only.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

Knows: the tags. Must not know: the parser and the grammar of tagged calls.

Sources: the chat templates of these models, MiniMax's guide to the tool calls of M2, and DeepSeek's
encoding of V3.2 (`encoding_dsv32.py`, published with the weights).
"""

from app.grammar.constraint import ReasoningTags
from app.text.syntax.parameter_types import STRING_TYPE, JsonTypes
from app.text.syntax.tagged_calls import CallTags, TaggedFamily

_DSML = "｜DSML｜"


def _build_dsml_tags(calls: str) -> CallTags:
    """DeepSeek's tags since V3.2. The attribute `string` distinguishes text from JSON. If it
    contradicts the tool's schema, the schema takes precedence, because the caller validates the
    arguments against the schema. calls: the name of the tag around all calls."""
    return CallTags(
        before=f"<{_DSML}{calls}>",
        after=f"</{_DSML}{calls}>",
        begin=f'<{_DSML}invoke name="',
        name_end='">',
        end=f"</{_DSML}invoke>",
        key_begin=f'<{_DSML}parameter name="',
        key_ends={
            '" string="true">': _narrow_to_string,
            '" string="false">': _narrow_to_json,
            '">': None,
        },
        value_end=f"</{_DSML}parameter>",
        grouped=True,
    )


def _narrow_to_string(types: JsonTypes | None) -> JsonTypes | None:
    return STRING_TYPE if types is None else (types & STRING_TYPE or types)


def _narrow_to_json(types: JsonTypes | None) -> JsonTypes | None:
    return None if types is None else (types - STRING_TYPE or types)


def _build_keyed_tags(prefix: str) -> CallTags:
    """GLM's tags: the name follows the outer tag, and keys and values have their own."""
    return CallTags(
        before=f"<{prefix}tool_call>",
        after=f"</{prefix}tool_call>",
        begin="",
        name_end="",
        end=None,
        key_begin=f"<{prefix}arg_key>",
        key_ends={f"</{prefix}arg_key>": None},
        value_begin=f"<{prefix}arg_value>",
        value_end=f"</{prefix}arg_value>",
        gap_optional=True,
    )


def _list_keyed_markers(tags: CallTags) -> tuple[str, ...]:
    key = (tags.key_begin, *tags.key_ends)
    return (tags.before, tags.after, *key, tags.value_begin, tags.value_end)


def _build_function_tags(outer: str, *, values_on_own_lines: bool) -> CallTags:
    """Qwen3-Coder's tags: the function and each parameter have their own."""
    return CallTags(
        before=f"<{outer}>",
        after=f"</{outer}>",
        begin="<function=",
        name_end=">",
        end="</function>",
        key_begin="<parameter=",
        key_ends={">": None},
        value_end="</parameter>",
        values_on_own_lines=values_on_own_lines,
    )


# one pair of tags around all calls, and names as attributes
_MINIMAX = CallTags(
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
_GLM = _build_keyed_tags("")
_LONGCAT = _build_keyed_tags("longcat_")
_QWEN_CODER = _build_function_tags("tool_call", values_on_own_lines=True)
_SEED_OSS = _build_function_tags("seed:tool_call", values_on_own_lines=False)

FAMILIES = {
    "deepseek_v32": TaggedFamily(
        _build_dsml_tags("function_calls"),
        template_marks=(_DSML, "function_calls>"),
        markers=(_DSML,),
    ),
    "deepseek_v4": TaggedFamily(
        _build_dsml_tags("tool_calls"),
        template_marks=(_DSML, "tool_calls>"),
        markers=(_DSML,),
    ),
    # GLM 4.5 and later, and Poolside's Laguna; GLM 4.7 and later omit the line breaks
    "glm": TaggedFamily(
        _GLM, template_marks=(_GLM.before, _GLM.key_begin), markers=_list_keyed_markers(_GLM)
    ),
    # Meituan's LongCat-Flash
    "longcat": TaggedFamily(
        _LONGCAT,
        template_marks=(_LONGCAT.before,),
        markers=_list_keyed_markers(_LONGCAT),
        reasoning=ReasoningTags(open="<longcat_think>", close="</longcat_think>"),
    ),
    # MiniMax M2
    "minimax": TaggedFamily(
        _MINIMAX,
        template_marks=(_MINIMAX.before,),
        markers=(_MINIMAX.before, _MINIMAX.after),
    ),
    # Qwen3-Coder, Qwen 3.5, Nemotron 3 and Step 3.5
    "qwen_coder": TaggedFamily(
        _QWEN_CODER,
        template_marks=(_QWEN_CODER.before, _QWEN_CODER.begin, _QWEN_CODER.key_begin),
        markers=(_QWEN_CODER.before, _QWEN_CODER.after),
    ),
    # ByteDance's Seed-OSS, which writes lists and objects as Python literals
    "seed_oss": TaggedFamily(
        _SEED_OSS,
        template_marks=(_SEED_OSS.before,),
        markers=(_SEED_OSS.before, _SEED_OSS.after),
        reasoning=ReasoningTags(open="<seed:think>", close="</seed:think>"),
    ),
}
