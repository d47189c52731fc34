"""Constraints on the output format: converts OpenAI's `response_format` and vLLM's fields to a
grammar.

Knows: all field names for a constraint, also llama.cpp's, the rule that a request may contain only
one. Must not know: the supported schemas, regular expressions and grammars, which the grammar
compiler checks.

vLLM has two forms: `guided_…` fields, and the object `structured_outputs` that replaced them
(docs.vllm.ai, "Structured Outputs").
"""

from collections.abc import Mapping
from typing import Any

import orjson

from app.api.fields import Fields, as_mapping, invalid_request, quote_value
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex

ANY_OBJECT_SCHEMA = '{"type":"object"}'

# The grammar types, as named in vLLM's `structured_outputs` and, with a prefix, in `guided_…`.
GRAMMAR_KINDS = ("json", "regex", "choice", "grammar")

# Other options of `structured_outputs`, which configure vLLM's grammar libraries.
UNSUPPORTED_OPTIONS = (
    "structural_tag",
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
    "whitespace_pattern",
)


def read_grammar(fields: Fields) -> Grammar | None:
    """Returns the grammar of the output. Raises AppError(INVALID) if the request contains more than
    one."""
    candidates = [
        ("response_format", _response_format(fields)),
        *((f"guided_{kind}", _read_kind(fields, kind, f"guided_{kind}")) for kind in GRAMMAR_KINDS),
        ("structured_outputs", _structured_outputs(fields)),
        ("json_schema", _json(fields, "json_schema")),
        ("grammar", _gbnf(fields)),
    ]
    given = [(name, grammar) for name, grammar in candidates if grammar is not None]
    return _require_single(given)


def read_schema(fields: Fields, *, named: bool = True) -> JsonSchema:
    """Reads OpenAI's named schema. `name` and `description` have no effect, and every schema is
    strict. named: whether a name is required, as in OpenAI's API, but not in llama.cpp."""
    if named:
        fields.required("name")
    fields.string("name")
    fields.string("description")
    fields.boolean("strict")
    at = fields.path("schema")
    return build_json_schema(as_mapping(fields.required("schema"), at), at)


def read_object_schema(fields: Fields) -> JsonSchema:
    """Reads the format `json_object`: any object, or as in llama.cpp one that matches `schema`."""
    schema, at = fields.mapping("schema"), fields.path("schema")
    if schema is None:
        return JsonSchema(text=ANY_OBJECT_SCHEMA, param=fields.path("").removesuffix("."))
    return build_json_schema(schema, at)


def _require_single(given: list[tuple[str, Grammar]]) -> Grammar | None:
    if len(given) > 1:
        names = [name for name, _ in given]
        raise invalid_request(
            names[1], f"{' and '.join(names)} are mutually exclusive: keep one of them"
        )
    return given[0][1] if given else None


def _response_format(fields: Fields) -> Grammar | None:
    response_format = fields.nested("response_format")
    if response_format is None:
        return None
    kind = response_format.required_one_of("type", ("text", "json_object", "json_schema"))
    grammar = None
    if kind == "json_schema":
        path = response_format.path("json_schema")
        described = Fields.from_value(response_format.required("json_schema"), path)
        grammar = read_schema(described, named=False)
        described.check_unknown()
    else:
        response_format.reject("json_schema")
    if kind == "json_object":
        grammar = read_object_schema(response_format)
    else:
        response_format.reject("schema", instead="use json_schema.schema, or the type json_object")
    response_format.check_unknown()
    return grammar


def _structured_outputs(fields: Fields) -> Grammar | None:
    outputs = fields.nested("structured_outputs")
    if outputs is None:
        return None
    candidates = [(outputs.path(kind), _read_kind(outputs, kind, kind)) for kind in GRAMMAR_KINDS]
    if outputs.boolean("json_object"):
        path = outputs.path("json_object")
        candidates.append((path, JsonSchema(text=ANY_OBJECT_SCHEMA, param=path)))
    for name in UNSUPPORTED_OPTIONS:
        outputs.reject(name, False)
    outputs.check_unknown()
    grammar = _require_single(
        [(name, grammar) for name, grammar in candidates if grammar is not None]
    )
    if grammar is None:
        expected = f"one of {', '.join(GRAMMAR_KINDS)}, or json_object: true"
        raise invalid_request("structured_outputs", f"structured_outputs must contain {expected}")
    return grammar


def _read_kind(fields: Fields, kind: str, name: str) -> Grammar | None:
    at = fields.path(name)
    match kind:
        case "json":
            return _json(fields, name)
        case "choice":
            return _choice(fields, name)
        case _:
            text = fields.string(name)
            if text is None:
                return None
            if not text:
                raise invalid_request(at, f"{at} must not be empty")
            return (
                Regex(pattern=text, param=at)
                if kind == "regex"
                else LarkGrammar(text=text, param=at)
            )


def _json(fields: Fields, name: str) -> JsonSchema | None:
    """Reads a schema given as an object or as its JSON text."""
    value, at = fields.value(name), fields.path(name)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise invalid_request(at, f"{at} is not valid JSON: {quote_value(value)}") from None
    return build_json_schema(as_mapping(value, at), at)


def _gbnf(fields: Fields) -> LarkGrammar | None:
    """Reads llama.cpp's `grammar`. Clients send an empty one for none."""
    text = fields.string("grammar")
    return LarkGrammar(text=text, param=fields.path("grammar")) if text else None


def _choice(fields: Fields, name: str) -> ChoiceGrammar | None:
    options = fields.array(name)
    if options is None:
        return None
    at = fields.path(name)
    if not options:
        raise invalid_request(at, f"{at} must contain at least one string")
    read: dict[str, None] = {}  # duplicates are dropped
    for place, option in enumerate(options):
        if not isinstance(option, str) or not option:
            path = f"{at}.{place}"
            raise invalid_request(
                path, f"{path} must be a non-empty string, not {quote_value(option)}"
            )
        read[option] = None
    return ChoiceGrammar(options=tuple(read), param=at)


def build_json_schema(schema: Mapping[str, Any], at: str) -> JsonSchema:
    """Builds the constraint for a schema. at: the path of the request field."""
    return JsonSchema(text=orjson.dumps(schema).decode(), param=at)
