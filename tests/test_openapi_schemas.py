"""The schemas of typed request bodies in openapi.yaml match their structs."""

from typing import Any

from tests.openapi_document import read_openapi
from tests.openapi_schemas import BODIES, PATH, build_components, splice


def test_the_committed_document_has_the_generated_schemas():
    document = PATH.read_text("utf-8")
    assert splice(document) == document, "run `make openapi`"


def test_the_written_schemas_have_the_values_of_the_structs():
    schemas = read_openapi()["components"]["schemas"]
    components = build_components()
    assert components.keys() >= BODIES.keys()
    assert join_lines({name: schemas[name] for name in components}) == join_lines(components)


def join_lines(value: Any) -> Any:
    """The value with every text on one line."""
    match value:
        case str():
            return " ".join(value.split())
        case list():
            return [join_lines(item) for item in value]
        case dict():
            return {name: join_lines(item) for name, item in value.items()}
        case _:
            return value


def test_required_fields_come_first_and_then_common_ones():
    chat = build_components()["ChatCompletionRequest"]
    assert list(chat["properties"])[:3] == ["messages", "model", "stream"]


def is_described(schema: Any, schemas: Any) -> bool:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    parts = [*schema.get("allOf", ()), *schema.get("anyOf", ())]
    return "description" in schema or any(is_described(part, schemas) for part in parts)


def test_every_field_of_a_body_has_a_description():
    components = build_components()
    schemas = {**read_openapi()["components"]["schemas"], **components}
    fields = {
        f"{name}.{field}": schema
        for name in BODIES
        for field, schema in components[name]["properties"].items()
    }
    assert [name for name, schema in fields.items() if not is_described(schema, schemas)] == []
