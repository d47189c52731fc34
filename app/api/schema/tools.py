"""OpenAI's tools and tool choices.

Knows: the fields of function tools in chat completions. Must not know: the syntax of calls, the
supported schemas.
"""

from typing import Annotated, Literal

from msgspec import Meta, Raw

from app.api.schema.base import NULL, Item, Options, describe, ignore_fields

# Anthropic's limit; OpenAI's is 64. OpenAI does not allow dots in names, but the function calling
# benchmark BFCL and its clients use them.
MAX_NAME_CHARS = 128
FunctionName = Annotated[
    str,
    Meta(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME_CHARS}}}\Z"),
    describe(
        component="FunctionName",
        expected=f"1 to {MAX_NAME_CHARS} letters, digits, underscores, hyphens or dots",
        schema={"pattern": f"^[a-zA-Z0-9_.-]{{1,{MAX_NAME_CHARS}}}$"},
    ),
]


class Function(Item, kw_only=True, frozen=True):
    """The declaration of a function."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[
        Raw,
        describe(
            "A JSON schema. If it is absent, the function has no parameters.",
            schema={"type": ["object", "null"]},
        ),
    ] = NULL
    strict: Annotated[
        bool | None,
        describe(
            "If true, the arguments always satisfy the schema. Otherwise this holds only for "
            "required calls."
        ),
    ] = None


class FunctionTool(Item, kw_only=True, frozen=True):
    """A function that the model may call. Tools of other types are not supported."""

    ignored = ignore_fields("cache_control")

    type: Literal["function"]
    function: Function


class FunctionReference(Options, kw_only=True, frozen=True):
    """The name of a function in `tools`."""

    name: FunctionName


class NamedTool(Options, kw_only=True, frozen=True):
    """A tool in `allowed_tools`."""

    type: Literal["function"]
    function: FunctionReference


class NamedFunction(Options, kw_only=True, frozen=True, tag_field="type", tag="function"):
    """The function that the model must call."""

    function: FunctionReference


class AllowedToolNames(Options, kw_only=True, frozen=True):
    """The tools that the model may or must call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedTools(Options, kw_only=True, frozen=True, tag_field="type", tag="allowed_tools"):
    """A subset of the tools."""

    allowed_tools: AllowedToolNames


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None,
    describe(
        "Whether the model calls tools. `auto`, the default, leaves the decision to the model. "
        "`none` forbids calls, `required` requires at least one, and a named function forces a "
        "call of that function. `allowed_tools` restricts the tools; the others are omitted from "
        "the prompt. Required calls are enforced during sampling. All values except `none` "
        "require `tools`.",
        component="ToolChoice",
    ),
]
Tools = Annotated[
    list[FunctionTool] | None,
    describe("Functions that the model may call. Their names must be unique."),
]
