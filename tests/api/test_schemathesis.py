"""openapi.yaml as a fuzzer reads it: requests that keep to it and requests that do not."""

from typing import Any

import schemathesis

from app.api.app import build_app
from app.core.settings import Settings
from tests.api.fuzzed import ACCEPTING_CHECKS, document, examples
from tests.fakes import CARD, FakeGenerate

SCHEMA = schemathesis.openapi.from_dict(document(CARD.id, 256))
SCHEMA.app = build_app(FakeGenerate(), Settings())


@SCHEMA.parametrize()
@examples(30)
def test_every_answer_is_as_documented(case: Any):
    case.call_and_validate(check_invariants=ACCEPTING_CHECKS)
