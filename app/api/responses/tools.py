"""The tools of /v1/responses: functions, custom tools, and namespaces that group them.

Knows: the tool types, the tool names in the prompt, references to tools in `tool_choice`. Must not
know: items, the syntax of calls.

A chat template supports only functions with unique names. A function in a namespace is therefore
called `namespace__function` in the prompt; its calls contain both names. A custom tool, which takes
text, is converted to a function with one argument. Hosted tools, which run on OpenAI's servers, are
omitted from the prompt with a notice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from app.api.fields import Fields, invalid_request, quote_value
from app.api.openai.tools import (
    ToolOptions,
    check_tool_names,
    read_function,
    read_tool_name,
    unknown_tool_error,
)
from app.core.requests import NamedToolChoice, Tool, ToolChoice
from app.http.responses import JsonObject

# The tools that OpenAI's servers run or define (OpenAI's reference, November 2026). Some have
# versions.
HOSTED_TOOLS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)
_HOSTED_VERSIONS = ("web_search_2025_08_26", "web_search_preview_2025_03_11")

_CALLABLE_KINDS = ("function", "custom")

# The argument of a custom tool in the prompt.
CUSTOM_INPUT = "input"

_SEPARATOR = "__"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTool:
    """A tool as declared by the client. custom: whether its input is text."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTools:
    """The tools of a request. options: the tools that the model may call, with their names in the
    prompt. declared: maps these names to the declared tools. hosted: the types of the omitted
    tools."""

    options: ToolOptions = field(default_factory=ToolOptions)
    declared: Mapping[str, DeclaredTool] = field(default_factory=dict[str, DeclaredTool])
    hosted: tuple[str, ...] = ()

    def find(self, name: str) -> DeclaredTool:
        """Returns the tool for a call. The model may have omitted the namespace or invented a
        name."""
        known = self.declared.get(name)
        if known is None:
            same = [tool for tool in self.declared.values() if tool.name == name]
            known = same[0] if len(same) == 1 else DeclaredTool(name=name)
        return known

    @property
    def notice(self) -> str | None:
        if not self.hosted:
            return None
        return f"omitted tools that this server does not run: {', '.join(self.hosted)}"


def qualify_name(name: str, namespace: str | None) -> str:
    """Returns the name of a function in the prompt."""
    if namespace is None:
        return name
    return namespace + (name if namespace.endswith(_SEPARATOR) else _SEPARATOR + name)


def read_response_tools(fields: Fields) -> ResponseTools:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`. Clients also send these options
    without tools, which is an error only if a call is required."""
    reader = _ToolReader()
    for place, value in enumerate(fields.array("tools") or []):
        reader.read(Fields.from_value(value, f"tools.{place}"))
    tools, choice = tuple(reader.tools), fields.value("tool_choice")
    check_tool_names(tools)
    options = ToolOptions(parallel=fields.boolean("parallel_tool_calls") is not False)
    hosted = tuple(dict.fromkeys(reader.hosted))
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid_request(
                "tool_choice", "tool_choice requires a tool, but there are no tools"
            )
        return ResponseTools(options=options, hosted=hosted)
    chosen, left = _read_tool_choice(
        choice,
        tools,
        reader.read_chosen_name,
        (*_CALLABLE_KINDS, *HOSTED_TOOLS, *_HOSTED_VERSIONS),
    )
    return ResponseTools(
        options=replace(options, tools=left, choice=chosen), declared=reader.declared, hosted=hosted
    )


class _ToolReader:
    """Reads the array of tools."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.declared: dict[str, DeclaredTool] = {}
        self.hosted: list[str] = []

    def read(self, fields: Fields) -> None:
        match fields.required_string("type"):
            case "namespace":
                self._read_namespace(fields)
            case "function" | "custom":
                self._add_tool(fields, None)
            case kind if kind in HOSTED_TOOLS or kind in _HOSTED_VERSIONS:
                self.hosted.append(kind)  # its options are meaningless here
            case kind:
                raise _unsupported_kind(fields, kind, "function, custom, namespace")

    def read_chosen_name(self, fields: Fields, kind: str) -> str | None:
        """Reads a tool from `tool_choice`. Returns its name in the prompt, or None for an omitted
        tool."""
        if kind not in _CALLABLE_KINDS:
            fields.items()
            return None
        name, namespace = fields.required_string("name"), fields.string("namespace")
        chosen = DeclaredTool(name=name, namespace=namespace, custom=kind == "custom")
        for prompt_name, tool in self.declared.items():
            bare = namespace is None and replace(tool, namespace=None) == chosen
            if tool == chosen or bare:
                return prompt_name
        raise unknown_tool_error(fields.path("name"), name)

    def _read_namespace(self, fields: Fields) -> None:
        name, description = read_tool_name(fields), fields.string("description")
        at, before = fields.path("tools"), len(self.tools)
        fields.required("tools")
        for place, value in enumerate(fields.array("tools") or []):
            member = Fields.from_value(value, f"{at}.{place}")
            kind = member.required_string("type")
            if kind not in _CALLABLE_KINDS:
                raise _unsupported_kind(member, kind, "function, custom")
            self._add_tool(member, name)
        fields.ignore_unknown()
        if description and len(self.tools) > before:
            # added only once, because some descriptions are long
            first = self.tools[before]
            described = "\n\n".join(filter(None, (first.description, f"{name}: {description}")))
            self.tools[before] = replace(first, description=described)

    def _add_tool(self, fields: Fields, namespace: str | None) -> None:
        custom = fields.value("type") == "custom"
        tool = _read_custom_tool(fields) if custom else _read_function_tool(fields)
        fields.ignore_unknown()
        name = qualify_name(tool.name, namespace)
        self.declared[name] = DeclaredTool(name=tool.name, namespace=namespace, custom=custom)
        self.tools.append(replace(tool, name=name))


ReadToolName = Callable[[Fields, str], str | None]
"""Reads a tool name from an object of this type; returns None for a tool that is hidden from the
model."""


def _read_tool_choice(
    value: object,
    tools: tuple[Tool, ...],
    read_name: ReadToolName,
    kinds: Sequence[str],
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Reads `tool_choice`. Returns the tool choice and the remaining tools. kinds: the tool types
    that it may refer to."""
    if value is None:
        return "auto", tools
    if isinstance(value, str):
        choice = Fields({"tool_choice": value})
        word = choice.required_one_of("tool_choice", ("none", "auto", "required"))
        return cast("Literal['none', 'auto', 'required']", word), tools
    fields = Fields.from_value(value, "tool_choice")
    kind = fields.required_one_of("type", (*kinds, "allowed_tools"))
    if kind != "allowed_tools":
        name = read_name(fields, kind)
        if name is None:
            raise invalid_request(
                "tool_choice.type", "tool_choice requires a tool that this server does not run"
            )
        fields.check_unknown()
        return NamedToolChoice(name=name), tools
    mode, left = _read_allowed_tools(fields, read_name, kinds)
    fields.check_unknown()
    return mode, tuple(tool for tool in tools if tool.name in left)


def _read_allowed_tools(
    fields: Fields, read_name: ReadToolName, kinds: Sequence[str]
) -> tuple[Literal["auto", "required"], set[str]]:
    """Reads the subset of tools allowed for this response."""
    mode = fields.required_one_of("mode", ("auto", "required"))
    fields.required("tools")
    given = fields.array("tools") or []
    path = fields.path("tools")
    if not given:
        raise invalid_request(path, f"{path} must contain at least one tool")
    left: set[str] = set()
    for place, value in enumerate(given):
        tool = Fields.from_value(value, f"{path}.{place}")
        name = read_name(tool, tool.required_one_of("type", kinds))
        if name is not None:
            left.add(name)
        tool.check_unknown()
    if mode == "required" and not left:
        raise invalid_request(path, f"{path} must contain a tool that the model may call")
    return cast("Literal['auto', 'required']", mode), left


def _unsupported_kind(fields: Fields, kind: str, supported: str) -> Exception:
    path = fields.path("type")
    return invalid_request(
        path, f"{path} is {quote_value(kind)}, which is not supported: use {supported}"
    )


def _read_function_tool(fields: Fields) -> Tool:
    _reject_execution_options(fields)
    fields.reject("output_schema")
    return read_function(fields, _get_path(fields))


def _reject_execution_options(fields: Fields) -> None:
    fields.reject("allowed_callers", ["direct"])
    fields.reject("async", False)
    fields.boolean("defer_loading")  # no effect: every tool is in the prompt


def _read_custom_tool(fields: Fields) -> Tool:
    """Reads a tool that takes text. A regular expression is enforced. A Lark grammar cannot be
    enforced within a JSON string, so it is added to the description."""
    _reject_execution_options(fields)
    text: JsonObject = {"type": "string"}
    description, source = fields.string("description"), None
    format_ = fields.nested("format")
    if format_ is not None and format_.required_one_of("type", ("text", "grammar")) == "grammar":
        syntax = format_.required_one_of("syntax", ("lark", "regex"))
        definition = format_.required_string("definition")
        if syntax == "regex":
            # a pattern of a JSON Schema may match anywhere in the string
            text["pattern"], source = f"^(?:{definition})$", format_.path("definition")
        else:
            shown = f"The {CUSTOM_INPUT} follows this Lark grammar:\n{definition}"
            description = "\n\n".join(filter(None, (description, shown)))
    if format_ is not None:
        format_.check_unknown()
    return Tool(
        name=read_tool_name(fields),
        description=description,
        parameters={
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
        strict=source is not None,
        param=_get_path(fields),
        source_param=source,
    )


def _get_path(fields: Fields) -> str:
    return fields.path("").removesuffix(".")


def render_tools(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Renders the tools of a request for its response."""
    return [_render_tool(tool) for tool in tools]


def _render_tool(tool: JsonObject) -> JsonObject:
    match tool["type"]:
        case "function":
            return {
                "type": "function",
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get("parameters"),
                "strict": tool.get("strict") or False,
            }
        case "namespace":
            return {
                "type": "namespace",
                "name": tool["name"],
                "description": tool.get("description") or "",
                "tools": [_render_tool(member) for member in tool["tools"]],
            }
        case _:
            return {name: value for name, value in tool.items() if value is not None}
