"""Servers for the page, and the browser that uses it.

SCREENSHOTS names a folder to which the tests write screenshots, such as docs/images.
"""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.throttle import Throttle

SCENARIO_SECONDS = 180

Actions = Mapping[str, Callable[[], Any]]
Use = Callable[..., dict[str, Any]]


class BrowserProcess:
    """A browser that runs scenarios, each in a separate context, until it fails to end one."""

    def __init__(self, node: str, chrome: str) -> None:
        driver = Path(__file__).parent / "driver.mjs"
        self._process = subprocess.Popen(
            [node, str(driver), chrome, os.environ.get("SCREENSHOTS", "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def use(self, scenario: str, url: str, actions: Actions) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(SCENARIO_SECONDS, self._process.kill)
        timer.start()
        try:
            self._send({"scenario": scenario, "server": url})
            for line in self._process.stdout:
                message = json.loads(line)
                if "ask" in message:
                    self._send(actions[message["ask"]]())
                elif "failed" in message:
                    pytest.fail(message["failed"])
                else:
                    return message["result"]
        except BaseException:
            # a scenario that waits for a reply would take the next scenario for it
            self._process.kill()
            raise
        finally:
            timer.cancel()
        raise AssertionError(f"the scenario {scenario} did not end in {SCENARIO_SECONDS} s")

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(TIMEOUT)
            finally:
                self._process.kill()


@pytest.fixture(scope="session")
def use_page(node: str, chrome: str) -> Iterator[Use]:
    """use_page(scenario, server URL, actions): runs a scenario of page.mjs or models.mjs, and
    returns its result. actions: what the scenario asks the test to do."""
    browsers: list[BrowserProcess] = []

    def use(scenario: str, url: str, actions: Actions | None = None) -> dict[str, Any]:
        if not browsers or not browsers[-1].is_running:
            browsers.append(BrowserProcess(node, chrome))
        return browsers[-1].use(scenario, url, actions or {})

    yield use
    for browser in browsers:
        browser.stop()


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
