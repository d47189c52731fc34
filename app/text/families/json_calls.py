"""Families whose tool calls are JSON objects after a marker, alone or in an array
(`app/text/syntax/json_calls.py`). They differ in the texts around the calls only.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Knows: these texts. Must not know: the parser and the grammar of JSON calls.

Sources: the chat templates of Firefunction v2, GigaChat 3.1 (one call per turn), Jamba 1.6, Qwen
2.5 and 3, and Nemotron Nano 2 (the templates of Llama Nemotron use the same syntax);
NousResearch's Hermes function calling.
"""

from app.text.syntax.json_family import JsonFamily, JsonLayout

_THINK = ("<think>", "</think>")

FAMILIES = {
    "firefunction": JsonFamily(
        JsonLayout(before=" functools[", between=", ", after="]", trigger=" functools["),
        template_marks=(" functools[",),
        call_markers=("functools",),
    ),
    "gigachat_31": JsonFamily(
        JsonLayout(call_before="<|function_call|>"),
        template_marks=("<|function_call|>", "<|message_sep|>"),
        call_markers=("<|function_call|>",),
        markers=("<|function_call|>",),
    ),
    # Hermes, Qwen and many other models
    "hermes": JsonFamily(
        JsonLayout(call_before="<tool_call>\n", between="\n", call_after="\n</tool_call>"),
        template_marks=("<tool_call>", '{"name":'),
        # other families that use the same tags
        foreign_marks=("<function=", "<arg_key>", "<use_mcp_tool>", "<tool_calls>"),
        call_markers=("<tool_call>",),
        call_close="</tool_call>",
        markers=("<tool_call>", "</tool_call>", *_THINK),
    ),
    "jamba": JsonFamily(
        JsonLayout(before="<tool_calls>[\n", between=",\n", after="\n]</tool_calls>"),
        template_marks=("<tool_calls>", "<tool_definitions>"),
        call_markers=("<tool_calls>",),
        call_close="</tool_calls>",
        markers=("<tool_calls>", "</tool_calls>"),
    ),
    "nemotron_v2": JsonFamily(
        JsonLayout(before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
        template_marks=("<TOOLCALL>",),
        call_markers=("<TOOLCALL>",),
        call_close="</TOOLCALL>",
        markers=("<TOOLCALL>", "</TOOLCALL>", *_THINK),
    ),
}
