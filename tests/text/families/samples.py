"""A call of each family as a model generates it: `get_weather` with the city Oslo."""

from app.text.family import ChatFamily, load_families

_JSON = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
_DSML = (
    '<｜DSML｜{0}>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{0}>"
)
_KEYS = "get_weather\n<{0}arg_key>city</{0}arg_key>\n<{0}arg_value>Oslo</{0}arg_value>\n"
_COHERE = '[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}]'
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{0}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

SAMPLES = {
    "apertus": '<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>',
    "apriel": f"<tool_calls>[{_JSON}]</tool_calls>",
    "cohere": f"<|START_ACTION|>{_COHERE}<|END_ACTION|>",
    "cohere_moe": f"<|START_ACTION|>{_COHERE}<|END_ACTION|>",
    "command_r": f"Action:\n```json\n{_COHERE}\n```",
    "deepseek_r1": _DEEPSEEK.format(
        'function<｜tool▁sep｜>get_weather\n```json\n{"city": "Oslo"}\n```'
    ),
    "deepseek_v31": _DEEPSEEK.format('get_weather<｜tool▁sep｜>{"city": "Oslo"}'),
    "deepseek_v32": _DSML.format("function_calls"),
    "deepseek_v4": _DSML.format("tool_calls"),
    "firefunction": f" functools[{_JSON}]",
    "function_gemma": (
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>"
    ),
    "functionary_v22": (
        '<|from|>assistant\n<|recipient|>get_weather\n<|content|>{"city": "Oslo"}'
        "<|from|>assistant\n<|recipient|>all\n<|content|>"
    ),
    "functionary_v31": '<function=get_weather>{"city": "Oslo"}</function>',
    "functionary_v32": '>>>get_weather\n{"city": "Oslo"}>>>all\n',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>',
    "gigachat": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_JSON}",
    "gigachat_31": f"<|function_call|>{_JSON}",
    "glimmer": (
        "<|start|>assistant to=get_weather<|message|><atem:function_calls>\n"
        '<atem:invoke name="get_weather">\n<atem:parameter name="city">Oslo</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    ),
    "glm": f"<tool_call>{_KEYS.format('')}</tool_call>",
    "granite": f"<|tool_call|>[{_JSON}]",
    "harmony": (
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city": "Oslo"}<|call|>'
    ),
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "jamba": f"<tool_calls>[\n{_JSON}\n]</tool_calls>",
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "lfm2": '<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>',
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}',
    "llama_pythonic": '<|python_start|>[get_weather(city="Oslo")]<|python_end|>',
    "longcat": f"<longcat_tool_call>{_KEYS.format('longcat_')}</longcat_tool_call>",
    "minicpm3": (
        '<|tool_call_start|>\n```python\nget_weather(city="Oslo")\n```\n<|tool_call_end|>'
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Oslo</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "mirothinker": (
        "<use_mcp_tool>\n<server_name>x</server_name>\n<tool_name>get_weather</tool_name>\n"
        '<arguments>\n{"city": "Oslo"}\n</arguments>\n</use_mcp_tool>'
    ),
    "mistral_v11": '[TOOL_CALLS]get_weather[CALL_ID]aaaaaaaaa[ARGS]{"city": "Oslo"}',
    "mistral_v13": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
    "mistral_v3": f"[TOOL_CALLS][{_JSON}]",
    "nemotron_v2": f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
    "olmo3": '<function_calls>get_weather(city="Oslo")</function_calls>',
    "qwen_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n"
        "</seed:tool_call>"
    ),
}

# parts are addressed to recipients, so reasoning is not part of the syntax
WITHOUT_REASONING = ("functionary_v22", "functionary_v32")


def load_family(name: str) -> ChatFamily:
    return load_families()[name]
