"""Base classes of the objects in a request body, and helpers to declare their fields.

Knows: msgspec, how a field is declared. Must not know: the fields of any dialect.

A field that is null is treated as absent everywhere, so every optional field has the type
`… | None`. Free JSON (schemas, variables of a template) stays `msgspec.Raw` until it is used.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw

from app.core.sampling_params import INT32_MAX

OBJECT_DECODER = msgspec.json.Decoder(dict[str, Raw])

NULL = Raw(b"null")

# The values of the field `type` of some objects; None if the field is absent.
TypeNames = Container[str | None]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field that is not supported. neutral: its values that have no effect, which are
    accepted. instead: without such values, the recommendation in the error message."""

    neutral: tuple[object, ...] = ()
    instead: str | None = None


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """A body, or an object of options in it. An unknown name that is probably a misspelled known
    one is an error; other unknown names are ignored and reported.

    unsupported: further known names, which are rejected unless their value has no effect. ignored:
    known names whose fields never have an effect, with a description. opaque_types: the values of
    the field `type` with which the object may have any fields, which are neither checked nor
    reported.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    ignored: ClassVar[Mapping[str, str]] = {}
    opaque_types: ClassVar[TypeNames] = frozenset[str | None]()
    check_names: ClassVar[bool] = True


class Item(Options, kw_only=True, frozen=True):
    """An object that a client copies or stores: a message, a part of its content, a tool, a call.
    Unknown names are never errors, because the client may have them from another server."""

    check_names: ClassVar[bool] = False


class AnyObject(msgspec.Struct, frozen=True):
    """An object that has no effect. Its fields are skipped."""


def reject_fields(**fields: tuple[object, ...] | str) -> Mapping[str, Unsupported]:
    """Declares unsupported fields: for each, the values without effect, or what to use instead."""
    return {
        name: Unsupported(instead=value) if isinstance(value, str) else Unsupported(neutral=value)
        for name, value in fields.items()
    }


def ignore_fields(names: str, **described: str) -> Mapping[str, str]:
    """Declares fields that never have an effect: names, separated by spaces, and fields with a
    description."""
    return {**dict.fromkeys(names.split(), "No effect."), **described}


# The keys of `Meta.extra`: the valid values, for error messages; the whole error message; the name
# of the type's schema in openapi.yaml; the JSON Schema of a type that is less exact than its
# conversion. An error inside a value with EXPECTED or MESSAGE has the path of the field.
EXPECTED, MESSAGE, COMPONENT, EXACT = "expected", "message", "component", "exact"


def describe(
    description: str | None = None,
    *,
    component: str | None = None,
    expected: str | None = None,
    message: str | None = None,
    schema: dict[str, Any] | None = None,
    exact: dict[str, Any] | None = None,
) -> Meta:
    """Describes a field. component: the name of the schema in openapi.yaml that other fields of
    this type refer to. expected: the valid values, for error messages. message: the whole message
    for an invalid value; `{name}` is the name of the field. schema: what the JSON Schema has in
    addition to the type, or instead of it for free JSON. exact: the whole JSON Schema."""
    extra = {EXPECTED: expected, MESSAGE: message, COMPONENT: component, EXACT: exact}
    return Meta(
        description=description,
        extra={name: value for name, value in extra.items() if value is not None} or None,
        extra_json_schema=schema,
    )


def refer(*names: str) -> list[dict[str, str]]:
    """Returns the JSON Schema of components of openapi.yaml."""
    return [{"$ref": f"#/components/schemas/{name}"} for name in names]


def refer_to_list(*names: str, nullable: bool = False, **limits: int) -> dict[str, Any]:
    """Returns the JSON Schema of an array of these components."""
    type_ = ["array", "null"] if nullable else "array"
    return {"type": type_, **limits, "items": {"anyOf": refer(*names)}}


Text = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX), describe(component="TokenId")]
Identifier = Annotated[
    str | None, describe("A client-defined identifier. No effect.", component="Identifier")
]
NoEffectText = Annotated[str | None, describe("No effect.")]
NoEffectObject = Annotated[AnyObject | None, describe("No effect.")]
Model = Annotated[
    str | None,
    describe(
        "May be omitted if the server has only one model.",
        schema={"anyOf": [{"$ref": "#/components/schemas/ModelId"}, {"type": "null"}]},
    ),
]
