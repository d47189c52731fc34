"""openapi.yaml with a fuzzer: valid and invalid requests."""

from typing import Any

import pytest
import schemathesis

from app.core.settings import Settings
from tests.api.fuzzed import ACCEPTING_CHECKS, document, each_operation, send_cases
from tests.fakes import CARD, FakeGenerate, build_fake_app

SCHEMA = schemathesis.openapi.from_dict(document(CARD.id, 256))
SCHEMA.app = build_fake_app(FakeGenerate(), Settings())


@pytest.mark.exhaustive
@pytest.mark.no_cover
@each_operation(SCHEMA)
def test_every_response_matches_the_document(operation: Any):
    def send(case: Any) -> None:
        case.call_and_validate(checks=ACCEPTING_CHECKS)

    send_cases(SCHEMA, operation, send, 30)
