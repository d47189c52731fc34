"""Request fields that constrain the format of the output.

Knows: OpenAI's `response_format`, vLLM's and llama.cpp's fields. Must not know: the supported
schemas, regular expressions and grammars, which the grammar compiler checks.
"""

from typing import Annotated

from msgspec import Meta, Raw

from app.api.schema.base import NULL, Options, Text, describe, reject_fields

_SCHEMA_OR_TEXT = {
    "anyOf": [
        {"type": ["object", "null"]},
        {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"type": "object"},
        },
    ]
}

GuidedJson = Annotated[
    Raw,
    describe(
        "A JSON schema, as an object or as a string, that constrains the output.",
        component="GuidedJson",
        schema=_SCHEMA_OR_TEXT,
    ),
]
GuidedText = Annotated[
    Text | None,
    describe(
        "A regular expression that matches the whole output, or a context-free grammar "
        "(llguidance's Lark, or GBNF) that produces it.",
        component="GuidedText",
    ),
]
GuidedChoice = Annotated[
    Annotated[list[Text], Meta(min_length=1)] | None,
    describe("The output is one of these strings.", component="GuidedChoice"),
]
Gbnf = Annotated[
    str | None,
    describe(
        "A grammar in GBNF for the output, as in llama.cpp. An empty one has no effect.",
        component="Gbnf",
    ),
]


class NamedSchema(Options, kw_only=True, frozen=True):
    """OpenAI's named schema. Every schema is strict; llama.cpp's clients send no name."""

    schema: Annotated[
        Raw,
        describe(
            "A JSON schema. A schema that cannot be enforced is rejected with the reason.",
            schema={"type": "object"},
        ),
    ]
    name: str | None = None
    description: str | None = None
    strict: Annotated[
        bool | None,
        describe("The output always satisfies its schema, regardless of this value."),
    ] = None


class TextFormat(Options, kw_only=True, frozen=True, tag_field="type", tag="text"):
    """Any text."""

    unsupported = reject_fields(
        json_schema=(), schema="use json_schema.schema, or the type json_object"
    )


class JsonObjectFormat(Options, kw_only=True, frozen=True, tag_field="type", tag="json_object"):
    """Any object, or as in llama.cpp one that matches `schema`."""

    unsupported = reject_fields(json_schema=())

    schema: Annotated[
        Raw,
        describe("The object's schema, as in llama.cpp.", schema={"type": ["object", "null"]}),
    ] = NULL


class JsonSchemaFormat(Options, kw_only=True, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    unsupported = reject_fields(schema="use json_schema.schema, or the type json_object")

    json_schema: Annotated[NamedSchema, describe(component="NamedSchema")]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
    describe(
        "The format of the output: text (the default), a JSON object, or JSON that satisfies a "
        "schema. If `max_tokens` truncates the output, it is only a prefix of valid output. With "
        "required calls, the format has no effect. A request can set only one of this field, the "
        "`guided_…` fields, `structured_outputs`, `grammar` and `json_schema`.",
        component="ResponseFormat",
    ),
]


class StructuredOutputs(Options, kw_only=True, frozen=True):
    """vLLM's newer format of the `guided_…` fields (docs.vllm.ai, "Structured Outputs"). The
    unsupported options configure vLLM's grammar libraries."""

    unsupported = reject_fields(
        structural_tag=(False,),
        disable_any_whitespace=(False,),
        disable_additional_properties=(False,),
        disable_fallback=(False,),
        whitespace_pattern=(False,),
    )

    json: Annotated[Raw, describe(schema=_SCHEMA_OR_TEXT)] = NULL
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


StructuredOutputsField = Annotated[
    StructuredOutputs | None,
    describe(
        "The newer format of the `guided_…` fields. Exactly one field must be set.",
        component="StructuredOutputs",
        schema={"minProperties": 1},
    ),
]
