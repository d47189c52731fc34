"""DSML is DeepSeek's syntax of tool calls since V3.2.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 uses `tool_calls` instead of `function_calls`. The attribute `string` distinguishes text from
JSON. If it contradicts the tool's schema, the schema takes precedence, because the caller validates
the arguments against the schema.

Knows: the tags, the attribute of a parameter. Must not know: the outer tag (it depends on the
version), the parser of tagged calls.

Source: DeepSeek's encoding of V3.2 (`encoding_dsv32.py`, published with the weights), and chat
templates derived from it.
"""

from app.text.syntax.parameter_types import STRING_TYPE, JsonTypes
from app.text.syntax.tagged_calls import CallTags

DSML_MARKER = "｜DSML｜"


def build_dsml_tags(calls: str) -> CallTags:
    """Builds the tags of one version. calls: the name of the tag around all calls."""
    return CallTags(
        before=f"<{DSML_MARKER}{calls}>",
        after=f"</{DSML_MARKER}{calls}>",
        begin=f'<{DSML_MARKER}invoke name="',
        name_end='">',
        end=f"</{DSML_MARKER}invoke>",
        key_begin=f'<{DSML_MARKER}parameter name="',
        key_ends={
            '" string="true">': _narrow_to_string,
            '" string="false">': _narrow_to_json,
            '">': None,
        },
        value_end=f"</{DSML_MARKER}parameter>",
        grouped=True,
    )


def _narrow_to_string(types: JsonTypes | None) -> JsonTypes | None:
    return STRING_TYPE if types is None else (types & STRING_TYPE or types)


def _narrow_to_json(types: JsonTypes | None) -> JsonTypes | None:
    return None if types is None else (types - STRING_TYPE or types)
