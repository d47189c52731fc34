"""openapi.yaml as a fuzzer reads it: requests that keep to it and requests that do not."""

from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
import yaml
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.api.app import build_app
from app.core.settings import Settings
from tests.fakes import CARD, FakeGenerate

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    positive_data_acceptance,
)


def document() -> Any:
    """As it stands in the repository, but for what a schema cannot say or cannot know: which
    models are served, how large the vocabulary is, and that a text is JSON."""
    text = (Path(__file__).parents[2] / "openapi.yaml").read_text("utf-8")
    read = yaml.safe_load(text)
    schemas = read["components"]["schemas"]
    schemas["ModelId"]["enum"] = [CARD.id]
    schemas["TokenIds"]["items"]["maximum"] = 255
    schemas["ToolCall"]["properties"]["function"]["properties"]["arguments"]["enum"] = ["", "{}"]
    return read


SCHEMA = schemathesis.openapi.from_dict(document())
SCHEMA.app = build_app(FakeGenerate(), Settings())


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_every_answer_is_as_documented(case: Any):
    case.call_and_validate(checks=CHECKS)
