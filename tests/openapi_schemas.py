"""Generates the schemas of the typed request bodies in openapi.yaml: `make openapi`.

Each body is a component, and so are the types that name one (`describe(component=…)`), objects with
a tag, and objects in arrays.
"""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from inspect import get_annotations
from pathlib import Path
from typing import Any, cast

from msgspec import inspect

from app.api.schema.anthropic import CountTokensBody, MessagesBody
from app.api.schema.base import COMPONENT, EXACT, Options
from app.api.schema.embeddings import EmbeddingBody, NativeEmbeddingBody, RerankBody
from app.api.schema.llamacpp import InfillBody, NativeBody
from app.api.schema.ollama import (
    OllamaChatBody,
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaNameBody,
    OllamaPullBody,
    OllamaShowBody,
)
from app.api.schema.ollama_runner import RunnerBody
from app.api.schema.openai import ChatBody, CompletionBody
from app.api.schema.responses import ResponseBody
from app.api.schema.tokenization import DetokenizeBody, TemplateBody, TokenizeBody

PATH = Path(__file__).parents[1] / "openapi.yaml"
BEGIN = "    # Generated from app/api/schema by `make openapi`: do not edit.\n"
END = "    # The end of the generated schemas.\n"

BODIES: Mapping[str, type[Options]] = {
    "ChatCompletionRequest": ChatBody,
    "CompletionRequest": CompletionBody,
    "ResponseRequest": ResponseBody,
    "MessagesRequest": MessagesBody,
    "CountTokensRequest": CountTokensBody,
    "OllamaChatRequest": OllamaChatBody,
    "OllamaGenerateRequest": OllamaGenerateBody,
    "OllamaEmbedRequest": OllamaEmbedBody,
    "OllamaEmbeddingsRequest": OllamaEmbeddingsBody,
    "OllamaNameRequest": OllamaNameBody,
    "OllamaShowRequest": OllamaShowBody,
    "OllamaPullRequest": OllamaPullBody,
    "OllamaCopyRequest": OllamaCopyBody,
    "OllamaCreateRequest": OllamaCreateBody,
    "NativeRequest": NativeBody,
    "InfillRequest": InfillBody,
    "RunnerRequest": RunnerBody,
    "EmbeddingRequest": EmbeddingBody,
    "NativeEmbeddingRequest": NativeEmbeddingBody,
    "RerankRequest": RerankBody,
    "TokenizeRequest": TokenizeBody,
    "DetokenizeObject": DetokenizeBody,
    "TemplateRequest": TemplateBody,
}

# Rules between fields.
_STREAM_OPTIONS = {"$ref": "#/components/schemas/StreamOptionsNeedStream"}
RULES: Mapping[str, Sequence[Any]] = {
    "ChatCompletionRequest": (
        _STREAM_OPTIONS,
        {
            "description": "top_logprobs requires logprobs.",
            "anyOf": [
                {"properties": {"top_logprobs": {"type": "null"}}},
                {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
            ],
        },
    ),
    "CompletionRequest": (_STREAM_OPTIONS,),
    "TokenizeRequest": (
        {
            "description": "The chat template adds the special tokens of a conversation.",
            "anyOf": [
                {"properties": {"messages": {"type": "null"}}},
                {"properties": {"add_special_tokens": {"enum": [False, None]}}},
            ],
        },
    ),
    "ResponseRequest": (
        _STREAM_OPTIONS,
        {
            "description": "A required call needs tools.",
            "anyOf": [
                {"properties": {"tool_choice": {"enum": ["none", "auto", None]}}},
                {
                    "required": ["tools"],
                    "properties": {"tools": {"type": "array", "minItems": 1}},
                },
            ],
        },
    ),
}

# Fields that must be set, but that are optional in the structs, because they may have older names.
REQUIRED = {
    "OllamaNameRequest": ["model"],
    "OllamaShowRequest": ["model"],
    "OllamaPullRequest": ["model"],
    "OllamaCreateRequest": ["model"],
    "OllamaCopyRequest": ["source", "destination"],
    "InfillRequest": ["input_prefix"],
    "NativeEmbeddingRequest": ["content"],
}

# Fields that are accepted only because some clients send them.
UNDOCUMENTED: Mapping[type[Options], Sequence[str]] = {
    ChatBody: ("suffix", "text_verbosity"),
    CompletionBody: ("tools",),
    ResponseBody: ("n",),
    MessagesBody: ("stop", "thread"),
    CountTokensBody: ("stop", "thread"),
    OllamaChatBody: ("_debug_render_only",),
    OllamaGenerateBody: ("_debug_render_only", "template", "images"),
    OllamaShowBody: ("template",),
    OllamaPullBody: ("username", "password"),
    OllamaCreateBody: tuple(OllamaCreateBody.unsupported),
}

# The description of a field that would change the response otherwise.
NEUTRAL = "Not supported: only a value without effect is accepted."

# The most common optional fields, which come first.
COMMON = (
    "model",
    "stream",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "n",
    "tools",
    "tool_choice",
    "response_format",
)

# msgspec lists the values of a literal type in alphabetical order
_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
LEVELS = {level: place for place, level in enumerate(_LEVELS)}

_PLAIN = re.compile(r"[A-Za-z_$][\w$./ -]*")
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


class SchemaBuilder:
    """Converts types to JSON Schema and collects the components."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def add_body(self, name: str, type_: type[Options]) -> None:
        self.components[name] = {}  # before the components that it refers to
        schema = self._convert_struct(cast("inspect.StructType", inspect.type_info(type_)))
        if name in REQUIRED:
            schema["required"] = REQUIRED[name]
        if name in RULES:
            first = ("type", "description", "required")
            start = {name: schema.pop(name) for name in first if name in schema}
            schema = {**start, "allOf": list(RULES[name]), **schema}
        self.components[name] = schema

    def convert(self, type_: inspect.Type, *, named: bool = False) -> Any:
        """named: whether an object is a separate component."""
        match type_:
            case inspect.Metadata(type=inner, extra=extra, extra_json_schema=more):
                more = dict(more or {})
                component, exact = map((extra or {}).get, (COMPONENT, EXACT))
                if exact is not None:
                    return _merge(exact, more)
                if component is None:
                    return _merge(self._convert_inner(inner, named=named), more)
                if component not in self.components:
                    self.components[component] = {}
                    schema = self._convert_inner(inner, named=False)
                    self.components[component] = _merge(schema, more)
                return {"$ref": f"#/components/schemas/{component}"}
            case inspect.UnionType(types=types):
                return self._convert_union(types)
            case inspect.StructType(cls=cls) if named or type_.tag is not None:
                if cls.__name__ not in self.components:
                    self.components[cls.__name__] = {}
                    self.components[cls.__name__] = self._convert_struct(type_)
                return {"$ref": f"#/components/schemas/{cls.__name__}"}
            case inspect.StructType():
                return self._convert_struct(type_)
            case inspect.ListType(item_type=item, min_length=low, max_length=high):
                items = self.convert(item, named=True)
                return {"type": "array", **_limits(minItems=low, maxItems=high), "items": items}
            case inspect.IntType(ge=low, le=high):
                return {"type": "integer", **_limits(minimum=low, maximum=high)}
            case inspect.FloatType(ge=low, le=high):
                return {"type": "number", **_limits(minimum=low, maximum=high)}
            case inspect.StrType(min_length=low, max_length=high):
                return {"type": "string", **_limits(minLength=low, maxLength=high)}
            case inspect.BoolType():
                return {"type": "boolean"}
            case inspect.LiteralType(values=values):
                if len(values) == 1:
                    return {"const": values[0]}
                return {"enum": sorted(values, key=lambda one: LEVELS.get(str(one), 0))}
            case inspect.NoneType():
                return {"type": "null"}
            case _:
                return {}

    def _convert_inner(self, type_: inspect.Type, *, named: bool) -> Any:
        if isinstance(type_, inspect.StructType) and not named:
            return self._convert_struct(type_)
        return self.convert(type_, named=named)

    def _convert_union(self, types: Sequence[inspect.Type]) -> Any:
        is_optional = any(isinstance(one, inspect.NoneType) for one in types)
        members = [self.convert(one) for one in types if not isinstance(one, inspect.NoneType)]
        first = members[0]
        if is_optional and "enum" in first:
            members[0] = {**first, "enum": [*first["enum"], None]}
        elif is_optional and "$ref" not in first and "type" in first:
            limits = {name: value for name, value in first.items() if name != "type"}
            members[0] = {"type": [first["type"], "null"], **limits}
        elif is_optional:
            members.append({"type": "null"})
        return members[0] if len(members) == 1 else {"anyOf": members}

    def _convert_struct(self, type_: inspect.StructType) -> Any:
        cls = type_.cls
        doc = " ".join((cls.__doc__ or "").split())
        schema: dict[str, Any] = {"type": "object", "description": doc}
        if not issubclass(cls, Options):
            more = {field.encode_name: self.convert(field.type) for field in type_.fields}
            required = [field.encode_name for field in type_.fields if field.required]
            parts = {"required": required, "properties": more}
            return {"type": "object", **{name: one for name, one in parts.items() if one}}
        properties: dict[str, Any] = {}
        required: list[str] = []
        if type_.tag_field is not None:
            required.append(type_.tag_field)
            properties[type_.tag_field] = {"const": type_.tag}
        for field in sorted(type_.fields, key=_order_field(cls)):
            if field.required:
                required.append(field.encode_name)
            properties[field.encode_name] = self.convert(field.type)
        for name, description in cls.ignored.items():
            properties[name] = {"description": description}
        for name, rule in cls.unsupported.items():
            if name in properties:
                continue
            if rule.neutral:
                properties[name] = {"enum": [*rule.neutral, None], "description": NEUTRAL}
            elif cls not in UNDOCUMENTED:
                properties[name] = {"type": "null", "description": rule.instead or "Not supported."}
        for name in UNDOCUMENTED.get(cls, ()):
            del properties[name]
        if required:
            schema["required"] = required
        return {**schema, "properties": properties}


def _order_field(cls: type[Options]) -> Any:
    """Required fields come first, then the common ones, then those of the struct itself."""
    depth = {
        name: place
        for place, base in reversed([*enumerate(cls.__mro__)])
        for name in get_annotations(base)
    }

    def key(field: inspect.Field) -> tuple[bool, int, int]:
        name = field.encode_name
        common = COMMON.index(name) if name in COMMON else len(COMMON)
        return not field.required, common, depth[field.name]

    return key


def _limits(**limits: Any) -> dict[str, Any]:
    return {name: value for name, value in limits.items() if value is not None}


def _merge(schema: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema and more:
        return {"allOf": [schema], **more}
    # an object may have its own description
    return {**schema, **more}


def build_components() -> dict[str, Any]:
    builder = SchemaBuilder()
    for name, type_ in BODIES.items():
        builder.add_body(name, type_)
    return builder.components


def render(components: Mapping[str, Any]) -> str:
    blocks = ("\n".join(_write_mapping({name: one}, 4)) for name, one in components.items())
    return BEGIN + "\n" + "\n\n".join(blocks) + "\n\n" + END


def _write_mapping(mapping: Mapping[str, Any], indent: int) -> Iterator[str]:
    pad = " " * indent
    for name, value in mapping.items():
        flow = f"{pad}{_scalar(name)}: {_flow(value)}"
        if len(flow) <= 100 and not (isinstance(value, str) and len(value) > 70):
            yield flow
        elif isinstance(value, str):
            yield f"{pad}{_scalar(name)}: |"
            yield from textwrap.wrap(
                value,
                100,
                initial_indent=f"{pad}  ",
                subsequent_indent=f"{pad}  ",
                break_on_hyphens=False,
            )
        else:
            yield f"{pad}{_scalar(name)}:"
            yield from _write_block(value, indent + 2)


def _write_block(value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _write_mapping(cast("Mapping[str, Any]", value), indent)
        return
    pad = " " * indent
    for item in value:
        flow = f"{pad}- {_flow(item)}"
        if len(flow) <= 100:
            yield flow
            continue
        lines = list(_write_block(item, indent + 2))
        yield f"{pad}- {lines[0].lstrip()}"
        yield from lines[1:]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return "{" + ", ".join(f"{_scalar(name)}: {_flow(one)}" for name, one in items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(one) for one in cast("list[Any]", value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value == value.strip()
    if is_plain and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def splice(document: str) -> str:
    """Returns the document with the generated schemas."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + render(build_components()) + after


if __name__ == "__main__":
    PATH.write_text(splice(PATH.read_text("utf-8")), "utf-8")
