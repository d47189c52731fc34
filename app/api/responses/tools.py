"""The tools of /v1/responses: functions, custom tools, and namespaces that group them.

Knows: the tool types, the tool names in the prompt, references to tools in `tool_choice`. Must not
know: items, the syntax of calls.

A chat template supports only functions with unique names. A function in a namespace is therefore
called `namespace__function` in the prompt; its calls contain both names. A custom tool, which takes
text, is converted to a function with one argument. Hosted tools, which run on OpenAI's servers, are
omitted from the prompt with a notice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.api.fields import invalid_request
from app.api.openai.chat import (
    NO_PARAMETERS,
    ToolOptions,
    check_tool_names,
    unknown_tool_error,
)
from app.api.schema import responses as schema
from app.api.schema.decode import decode_object, require
from app.api.schema.responses import ResponseBody
from app.core.requests import NamedToolChoice, Tool
from app.http.responses import JsonObject

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


def build_response_tools(body: ResponseBody) -> ResponseTools:
    """Converts `tools`, `tool_choice` and `parallel_tool_calls`. Clients also send these options
    without tools, which is an error only if a call is required."""
    builder = _ToolBuilder()
    for index, tool in enumerate(body.tools or ()):
        builder.add(tool, f"tools.{index}")
    tools, choice = tuple(builder.tools), body.tool_choice
    check_tool_names(tools)
    options = ToolOptions(parallel=body.parallel_tool_calls is not False)
    hosted = tuple(dict.fromkeys(builder.hosted))
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid_request(
                "tool_choice", "tool_choice requires a tool, but there are no tools"
            )
        return ResponseTools(options=options, hosted=hosted)
    if isinstance(choice, schema.ResponseToolChoice):
        options = _apply_choice(options, choice, tools, builder)
    else:
        options = replace(options, tools=tools, choice=choice or "auto")
    return ResponseTools(options=options, declared=builder.declared, hosted=hosted)


class _ToolBuilder:
    """Converts the array of tools."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.declared: dict[str, DeclaredTool] = {}
        self.hosted: list[str] = []

    def add(self, tool: schema.ResponseTool, path: str) -> None:
        match tool.type:
            case "namespace":
                self._add_namespace(tool, path)
            case "function" | "custom":
                self._add_tool(tool, path, None)
            case hosted:
                self.hosted.append(hosted)

    def find_name(
        self, reference: schema.ToolReference | schema.ResponseToolChoice, path: str
    ) -> str | None:
        """Returns the name in the prompt of a tool in `tool_choice`, or None for an omitted
        tool."""
        if reference.type not in ("function", "custom"):
            return None
        chosen = DeclaredTool(
            name=require(reference.name, f"{path}.name"),
            namespace=reference.namespace,
            custom=reference.type == "custom",
        )
        for name, tool in self.declared.items():
            bare = chosen.namespace is None and replace(tool, namespace=None) == chosen
            if tool == chosen or bare:
                return name
        raise unknown_tool_error(f"{path}.name", chosen.name)

    def _add_namespace(self, tool: schema.ResponseTool, path: str) -> None:
        name = require(tool.name, f"{path}.name")
        start = len(self.tools)
        for index, member in enumerate(require(tool.tools, f"{path}.tools")):
            self._add_tool(member, f"{path}.tools.{index}", name)
        if tool.description and len(self.tools) > start:
            # added only once, because some descriptions are long
            first = self.tools[start]
            described = f"{name}: {tool.description}"
            description = "\n\n".join(filter(None, (first.description, described)))
            self.tools[start] = replace(first, description=description)

    def _add_tool(
        self, tool: schema.ResponseTool | schema.MemberTool, path: str, namespace: str | None
    ) -> None:
        custom = tool.type == "custom"
        name = require(tool.name, f"{path}.name")
        built = _build_custom_tool(tool, name, path) if custom else _build_tool(tool, name, path)
        prompt_name = qualify_name(name, namespace)
        self.declared[prompt_name] = DeclaredTool(name=name, namespace=namespace, custom=custom)
        self.tools.append(replace(built, name=prompt_name))


def _apply_choice(
    options: ToolOptions,
    choice: schema.ResponseToolChoice,
    tools: tuple[Tool, ...],
    builder: _ToolBuilder,
) -> ToolOptions:
    """Applies a choice of one tool, or of the tools that the model may call."""
    if choice.type != "allowed_tools":
        name = builder.find_name(choice, "tool_choice")
        if name is None:
            raise invalid_request(
                "tool_choice.type", "tool_choice requires a tool that this server does not run"
            )
        return replace(options, tools=tools, choice=NamedToolChoice(name=name))
    mode = require(choice.mode, "tool_choice.mode")
    path = "tool_choice.tools"
    references = require(choice.tools, path)
    if not references:
        raise invalid_request(path, f"{path} must contain at least one tool")
    names = {
        builder.find_name(reference, f"{path}.{index}")
        for index, reference in enumerate(references)
    }
    allowed = tuple(tool for tool in tools if tool.name in names)
    if mode == "required" and not allowed:
        raise invalid_request(path, f"{path} must contain a tool that the model may call")
    return replace(options, tools=allowed, choice=mode)


def _build_tool(tool: schema.ResponseTool | schema.MemberTool, name: str, path: str) -> Tool:
    return Tool(
        name=name,
        description=tool.description,
        parameters=decode_object(tool.parameters, f"{path}.parameters") or NO_PARAMETERS,
        strict=tool.strict or False,
        param=path,
    )


def _build_custom_tool(tool: schema.ResponseTool | schema.MemberTool, name: str, path: str) -> Tool:
    """Builds a tool that takes text. A regular expression is enforced. A Lark grammar cannot be
    enforced within a JSON string, so it is added to the description."""
    text: JsonObject = {"type": "string"}
    description, source = tool.description, None
    match tool.format:
        case schema.GrammarInput(syntax="regex", definition=definition):
            # a pattern of a JSON Schema may match anywhere in the string
            text["pattern"], source = f"^(?:{definition})$", f"{path}.format.definition"
        case schema.GrammarInput(definition=definition):
            shown = f"The {CUSTOM_INPUT} follows this Lark grammar:\n{definition}"
            description = "\n\n".join(filter(None, (description, shown)))
        case _:
            pass
    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
        strict=source is not None,
        param=path,
        source_param=source,
    )


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
