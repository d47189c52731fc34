"""openapi.yaml with a fuzzer: valid and invalid requests."""

from typing import Any

import pytest
import schemathesis

from app.core.settings import Settings
from tests.api.fuzzed import ACCEPTING_CHECKS, document, examples
from tests.fakes import CARD, FakeGenerate, build_fake_app

SCHEMA = schemathesis.openapi.from_dict(document(CARD.id, 256))
SCHEMA.app = build_fake_app(FakeGenerate(), Settings())


@pytest.mark.product
@SCHEMA.parametrize()
@examples(30)
def test_every_response_matches_the_document(case: Any):
    case.call_and_validate(checks=ACCEPTING_CHECKS)
