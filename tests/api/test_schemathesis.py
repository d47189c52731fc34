"""openapi.yaml as a fuzzer reads it: requests that keep to it and requests that do not."""

from typing import Any

import hypothesis
import schemathesis
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
from tests.api.fuzzed import document
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


SCHEMA = schemathesis.openapi.from_dict(document(CARD.id, 256))
SCHEMA.app = build_app(FakeGenerate(), Settings())


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.filter_too_much,
        hypothesis.HealthCheck.data_too_large,
    ],
)
def test_every_answer_is_as_documented(case: Any):
    case.call_and_validate(checks=CHECKS)
