"""openapi.yaml as a fuzzer reads it: requests that keep to it and requests that do not."""

from typing import Any

import schemathesis

from app.core.settings import Settings
from tests.api.fuzzed import ACCEPTING_CHECKS, document, examples
from tests.fakes import CARD, FakeGenerate, build_fake_app

SCHEMA = schemathesis.openapi.from_dict(document(CARD.id, 256))
SCHEMA.app = build_fake_app(FakeGenerate(), Settings())


@SCHEMA.parametrize()
@examples(30)
def test_every_answer_is_as_documented(case: Any):
    case.call_and_validate(checks=ACCEPTING_CHECKS)
