"""Constraints on the output format: converts OpenAI's `response_format` and vLLM's fields to a
grammar.

Knows: all fields for a constraint, including llama.cpp's, the rule that a request may contain only
one. Must not know: the supported schemas, regular expressions and grammars, which the grammar
compiler checks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from msgspec import Raw

from app.api.fields import as_mapping, invalid_request, quote_value
from app.api.schema.decode import decode_json, decode_object
from app.api.schema.formats import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextFormat,
)
from app.api.schema.openai import ConstrainedFields
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex
from app.http.body import FieldCounter

ANY_OBJECT_SCHEMA = '{"type":"object"}'

_STRUCTURED_OUTPUTS = "structured_outputs"


def build_grammar(body: ConstrainedFields) -> Grammar | None:
    """Returns the grammar of the output. Raises AppError(INVALID) if the request contains more than
    one."""
    gbnf = LarkGrammar(text=body.grammar, param="grammar") if body.grammar else None
    return _require_single(
        ("response_format", _build_response_format(body.response_format)),
        ("guided_json", _build_json(body.guided_json, "guided_json")),
        ("guided_regex", _build_regex(body.guided_regex, "guided_regex")),
        ("guided_choice", _build_choice(body.guided_choice, "guided_choice")),
        ("guided_grammar", _build_lark(body.guided_grammar, "guided_grammar")),
        (_STRUCTURED_OUTPUTS, _build_structured_outputs(body.structured_outputs)),
        ("json_schema", _build_json(body.json_schema, "json_schema")),
        ("grammar", gbnf),
    )


def build_named_schema(value: Raw, at: str) -> JsonSchema:
    """Returns the constraint of OpenAI's named schema, whose name and description have no effect.
    at: the path of the named schema."""
    path = f"{at}.schema"
    schema = decode_object(value, path)
    if schema is None:
        raise invalid_request(path, f"{path} is missing")
    return build_json_schema(schema, path)


def build_object_schema(value: Raw, at: str) -> JsonSchema:
    """Returns the constraint of the format `json_object`: any object, or as in llama.cpp one that
    matches a schema. at: the path of the format."""
    schema = decode_object(value, f"{at}.schema")
    if schema is None:
        return JsonSchema(text=ANY_OBJECT_SCHEMA, param=at)
    return build_json_schema(schema, f"{at}.schema")


def build_json_schema(schema: Mapping[str, Any], at: str) -> JsonSchema:
    """Builds the constraint for a schema. at: the path of the request field."""
    return JsonSchema(text=orjson.dumps(schema).decode(), param=at)


def _require_single(*candidates: tuple[str, Grammar | None]) -> Grammar | None:
    given = [(name, grammar) for name, grammar in candidates if grammar is not None]
    if len(given) > 1:
        names = [name for name, _ in given]
        raise invalid_request(
            names[1], f"{' and '.join(names)} are mutually exclusive: keep one of them"
        )
    return given[0][1] if given else None


def _build_response_format(
    format_: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> Grammar | None:
    match format_:
        case JsonSchemaFormat(json_schema=named):
            return build_named_schema(named.schema, "response_format.json_schema")
        case JsonObjectFormat(schema=schema):
            return build_object_schema(schema, "response_format")
        case _:
            return None


def _build_structured_outputs(outputs: StructuredOutputs | None) -> Grammar | None:
    if outputs is None:
        return None
    at = _STRUCTURED_OUTPUTS
    any_object = JsonSchema(text=ANY_OBJECT_SCHEMA, param=f"{at}.json_object")
    grammar = _require_single(
        (f"{at}.json", _build_json(outputs.json, f"{at}.json")),
        (f"{at}.regex", _build_regex(outputs.regex, f"{at}.regex")),
        (f"{at}.choice", _build_choice(outputs.choice, f"{at}.choice")),
        (f"{at}.grammar", _build_lark(outputs.grammar, f"{at}.grammar")),
        (f"{at}.json_object", any_object if outputs.json_object else None),
    )
    if grammar is None:
        expected = "one of json, regex, choice, grammar, or json_object: true"
        raise invalid_request(at, f"{at} must contain {expected}")
    return grammar


def _build_json(value: Raw, at: str) -> JsonSchema | None:
    """Returns the constraint of a schema given as an object or as its JSON text."""
    schema = decode_json(value)
    if schema is None:
        return None
    if isinstance(schema, str):
        text, schema = schema, None
        FieldCounter().feed(text.encode())
        try:
            schema = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise invalid_request(at, f"{at} is not valid JSON: {quote_value(text)}") from None
    return build_json_schema(as_mapping(schema, at), at)


def _build_regex(pattern: str | None, at: str) -> Regex | None:
    return None if pattern is None else Regex(pattern=pattern, param=at)


def _build_lark(text: str | None, at: str) -> LarkGrammar | None:
    return None if text is None else LarkGrammar(text=text, param=at)


def _build_choice(options: Sequence[str] | None, at: str) -> ChoiceGrammar | None:
    if options is None:
        return None
    return ChoiceGrammar(options=tuple(dict.fromkeys(options)), param=at)
