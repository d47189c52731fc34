"""The parsers and openapi.yaml agree with the table of sampling parameters."""

import dataclasses
from typing import Any

import pytest

from app.api.schema.base import Options
from app.api.schema.generation import SamplingFields
from app.api.schema.models import DefaultValues
from app.api.schema.ollama import OllamaOptions
from app.api.schema.ollama_runner import RunnerOptions
from app.core.sampling_params import SAMPLING_KNOBS, SamplingKnob, SamplingParams
from tests.openapi_document import read_openapi

OPENAPI: dict[str, Any] = read_openapi()

each_knob = pytest.mark.parametrize("knob", SAMPLING_KNOBS, ids=lambda knob: knob.name)


def test_every_field_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {knob.name for knob in SAMPLING_KNOBS} == fields - {
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
    }


@each_knob
def test_the_default_is_in_the_range(knob: SamplingKnob) -> None:
    if knob.default is not None:
        assert knob.low <= knob.default <= knob.high
        assert isinstance(knob.default, knob.kind)


@each_knob
@pytest.mark.parametrize("body", [SamplingFields, OllamaOptions, RunnerOptions, DefaultValues])
def test_each_body_has_the_parameter(body: type[Options], knob: SamplingKnob) -> None:
    assert {knob.name, knob.runner_name} & set(body.__struct_fields__)


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = OPENAPI["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def find_properties(schema: Any, name: str) -> list[dict[str, Any]]:
    """Every property of that name in a schema and in its subschemas."""
    found: list[dict[str, Any]] = []
    match schema:
        case {"properties": dict(properties)} if name in properties:
            found.append(resolve(properties[name]))
        case _:
            pass
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key != "properties":
                found += find_properties(value, name)
    elif isinstance(schema, list):
        for value in schema:
            found += find_properties(value, name)
    return found


@each_knob
def test_openapi_has_the_range(knob: SamplingKnob) -> None:
    found = [
        schema
        for schema in find_properties(OPENAPI["components"]["schemas"], knob.name)
        if "minimum" in schema
    ]
    assert found
    for schema in found:
        assert schema["maximum"] in (knob.high, knob.trusted_high)
        assert schema["minimum"] == knob.low
