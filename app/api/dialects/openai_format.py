"""Forms that an answer must have: from OpenAI's `response_format`, and vLLM's fields, to a grammar.

Knows every spelling of the wish, and that there may be only one of them. vLLM has two: `guided_…`
fields, and the object `structured_outputs` that replaced them
(docs.vllm.ai, "Structured Outputs"). Must not know: whether a schema, an expression or a grammar
can be followed; that is found out where they are.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from app.api.fields import Fields, as_mapping, invalid, shown
from app.core.requests import Choice, Grammar, JsonSchema, Lark, Regex

ANY_OBJECT = '{"type":"object"}'

# Kinds of grammar, as vLLM names them in `structured_outputs`, and with `guided_` before.
KINDS = ("json", "regex", "choice", "grammar")

# More of `structured_outputs`, about the libraries that vLLM can do it with.
FOREIGN = (
    "structural_tag",
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
    "whitespace_pattern",
)


def read_grammar(fields: Fields) -> Grammar | None:
    """What the answer must follow. Raises AppError(INVALID) for a wish that is said twice."""
    wishes = [
        ("response_format", _response_format(fields)),
        *((f"guided_{kind}", _of_kind(fields, kind, f"guided_{kind}")) for kind in KINDS),
        ("structured_outputs", _structured_outputs(fields)),
    ]
    given = [(name, grammar) for name, grammar in wishes if grammar is not None]
    return _only(given)


def read_schema(described: Fields) -> JsonSchema:
    """OpenAI's named schema. `name` and `description` change no answer, and every answer is
    strict."""
    described.required_string("name")
    described.string("description")
    described.boolean("strict")
    at = described.path("schema")
    return _json_schema(as_mapping(described.required("schema"), at), at)


def _only(given: list[tuple[str, Grammar]]) -> Grammar | None:
    if len(given) > 1:
        names = [name for name, _ in given]
        raise invalid(names[1], f"{' and '.join(names)} exclude each other: keep one of them")
    return given[0][1] if given else None


def _response_format(fields: Fields) -> Grammar | None:
    response_format = fields.nested("response_format")
    if response_format is None:
        return None
    kind = response_format.required_word("type", ("text", "json_object", "json_schema"))
    grammar = None
    if kind == "json_schema":
        path = response_format.path("json_schema")
        described = Fields.of(response_format.required("json_schema"), path)
        grammar = read_schema(described)
        described.close()
    else:
        response_format.refuse("json_schema")
        if kind == "json_object":
            grammar = JsonSchema(text=ANY_OBJECT, at="response_format")
    response_format.close()
    return grammar


def _structured_outputs(fields: Fields) -> Grammar | None:
    outputs = fields.nested("structured_outputs")
    if outputs is None:
        return None
    wishes = [(outputs.path(kind), _of_kind(outputs, kind, kind)) for kind in KINDS]
    if outputs.boolean("json_object"):
        path = outputs.path("json_object")
        wishes.append((path, JsonSchema(text=ANY_OBJECT, at=path)))
    for name in FOREIGN:
        outputs.refuse(name, False)
    outputs.close()
    grammar = _only([(name, grammar) for name, grammar in wishes if grammar is not None])
    if grammar is None:
        wanted = f"one of {', '.join(KINDS)}, or json_object: true"
        raise invalid("structured_outputs", f"structured_outputs must contain {wanted}")
    return grammar


def _of_kind(fields: Fields, kind: str, name: str) -> Grammar | None:
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
                raise invalid(at, f"{at} must not be empty")
            return Regex(pattern=text, at=at) if kind == "regex" else Lark(text=text, at=at)


def _json(fields: Fields, name: str) -> JsonSchema | None:
    """A schema as an object, or as the text of one."""
    value, at = fields.value(name), fields.path(name)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise invalid(at, f"{at} is not valid JSON: {shown(value)}") from None
    return _json_schema(as_mapping(value, at), at)


def _choice(fields: Fields, name: str) -> Choice | None:
    options = fields.array(name)
    if options is None:
        return None
    at = fields.path(name)
    if not options:
        raise invalid(at, f"{at} must contain at least one string")
    read: dict[str, None] = {}  # said twice is said once
    for place, option in enumerate(options):
        if not isinstance(option, str) or not option:
            path = f"{at}.{place}"
            raise invalid(path, f"{path} must be a non-empty string, not {shown(option)}")
        read[option] = None
    return Choice(options=tuple(read), at=at)


def _json_schema(schema: Mapping[str, Any], at: str) -> JsonSchema:
    return JsonSchema(text=orjson.dumps(schema).decode(), at=at)
