"""DSML, how DeepSeek writes calls from V3.2 on.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 says `tool_calls` for `function_calls`. The attribute `string` tells a text from JSON; where it
and the tool's schema contradict each other, the schema has the last word: it is what the caller
checks.

Source: DeepSeek's encoding of V3.2 (`encoding_dsv32.py` beside the weights), and chat templates
made after it.
"""

from app.text.syntax.parameter_types import STRING, Types
from app.text.syntax.tagged_call import CallTags

MARK = "｜DSML｜"


def dsml(calls: str) -> CallTags:
    """calls: what the tag around all calls is called."""
    return CallTags(
        before=f"<{MARK}{calls}>",
        after=f"</{MARK}{calls}>",
        begin=f'<{MARK}invoke name="',
        name_end='">',
        end=f"</{MARK}invoke>",
        key_begin=f'<{MARK}parameter name="',
        key_ends={'" string="true">': _text, '" string="false">': _json, '">': None},
        value_end=f"</{MARK}parameter>",
        grouped=True,
    )


def _text(types: Types | None) -> Types | None:
    return STRING if types is None else (types & STRING or types)


def _json(types: Types | None) -> Types | None:
    return None if types is None else (types - STRING or types)
