"""openapi.yaml with a fuzzer: valid and invalid requests, to a fake and to a real server."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis

from app.core.settings import Settings
from tests import tiny
from tests.api.fuzzed import ACCEPTING_CHECKS, CHECKS, document, each_operation, send_cases
from tests.fakes import CARD, FakeGenerate, build_fake_app
from tests.server_process import ServerProcess, run_server

pytestmark = pytest.mark.exhaustive

SCHEMA = schemathesis.openapi.from_dict(document(CARD.id, 256))
SCHEMA.app = build_fake_app(FakeGenerate(), Settings())

REAL_SCHEMA = schemathesis.openapi.from_dict(document("tiny", tiny.VOCAB))


@pytest.mark.no_cover
@each_operation(SCHEMA)
def test_every_response_matches_the_document(operation: Any):
    def send(case: Any) -> None:
        case.call_and_validate(checks=ACCEPTING_CHECKS)

    send_cases(SCHEMA, operation, send, 30)


@pytest.fixture(scope="module")
def short_context_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a short context, so that answers without a limit end soon."""
    folder = tiny.write(tmp_path_factory.mktemp("small") / "tiny", max_position_embeddings=96)
    with run_server(str(folder)) as running_server:
        yield running_server


@pytest.mark.no_cover
@each_operation(REAL_SCHEMA)
def test_the_real_server_matches_the_document(
    operation: Any, short_context_server: ServerProcess
) -> None:
    def send(case: Any) -> None:
        case.call_and_validate(base_url=short_context_server.url, checks=CHECKS)

    send_cases(REAL_SCHEMA, operation, send, 10)
    assert short_context_server.status()["Status"] == 0
