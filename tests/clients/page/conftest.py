"""Servers for the page, and the browser that uses it.

SCREENSHOTS names a folder to which the tests write screenshots, such as docs/images.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import ServerProcess, run_server
from tests.throttle import Throttle

SCENARIO_SECONDS = 180

Actions = Mapping[str, Callable[[], Any]]
Use = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def use_page(node: str, chrome: str) -> Use:
    """use_page(scenario, server URL, actions): runs a scenario of page.mjs, and returns its result.
    actions: what the scenario asks the test to do. driver: another program with scenarios."""

    def use(
        scenario: str, url: str, actions: Actions | None = None, driver: str = "page.mjs"
    ) -> dict[str, Any]:
        program = Path(__file__).parent / driver
        images = os.environ.get("SCREENSHOTS", "")
        process = subprocess.Popen(
            ["timeout", str(SCENARIO_SECONDS), node, str(program), chrome, url, scenario, images],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                message = json.loads(line)
                if "ask" in message:
                    reply = (actions or {})[message["ask"]]()
                    process.stdin.write(json.dumps(reply) + "\n")
                    process.stdin.flush()
                elif "failed" in message:
                    pytest.fail(message["failed"])
                else:
                    return message["result"]
        raise AssertionError(f"the scenario {scenario} did not end in {SCENARIO_SECONDS} s")

    return use


@pytest.fixture(scope="module")
def throttle(tmp_path_factory: pytest.TempPathFactory) -> Throttle:
    return Throttle(tmp_path_factory.mktemp("page") / "throttle")


@pytest.fixture(scope="module")
def server(throttle: Throttle) -> Iterator[ServerProcess]:
    """A server with the built-in model, which the test can make slow."""
    with run_server(environ=throttle.variables) as server:
        yield server


@pytest.fixture
def speeds(throttle: Throttle) -> Iterator[Actions]:
    """Actions that make the engine slow, and fast again."""

    def slow() -> None:
        throttle.on()

    def fast() -> None:
        throttle.off()

    yield {"throttle": slow, "full speed": fast}
    throttle.off()
