"""openapi.yaml as a fuzzer needs it."""

from pathlib import Path
from typing import Any

import hypothesis
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

# what holds for any model
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
)

# whether valid requests are accepted too depends on the model: on its context, for one
ACCEPTING_CHECKS = (*CHECKS, positive_data_acceptance)


def examples(count: int) -> hypothesis.settings:
    """The same requests on every run, as many as that for each operation."""
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.filter_too_much,
            hypothesis.HealthCheck.data_too_large,
        ],
    )


def document(model: str, vocab: int) -> Any:
    """As it stands in the repository, but for what a schema cannot say or cannot know: which model
    is served, how large its vocabulary is, and that a text is JSON."""
    text = (Path(__file__).parents[2] / "openapi.yaml").read_text("utf-8")
    read = yaml.safe_load(text)
    schemas = read["components"]["schemas"]
    schemas["ModelId"]["enum"] = [model]
    schemas["TokenIds"]["items"]["maximum"] = vocab - 1
    schemas["ToolCall"]["properties"]["function"]["properties"]["arguments"]["enum"] = ["", "{}"]
    return read
