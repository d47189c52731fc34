"""Defaults of models that an administrator changes while the server runs, over real engines."""

import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config.precedence import resolve_config
from app.core.settings import Settings
from tests import tiny
from tests.commands.thread_server import StepGate, gate_steps, run_with_settings
from tests.server_process import TIMEOUT
from tests.store.conftest import nowhere_else  # noqa: F401  # a fixture
from tests.waiting import wait_until

CONFIG = """\
# our server
[[models]]
name = "builtin"  # for tests
context = 1024
"""


class Client:
    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str) -> Any:
        return httpx.get(f"{self._url}{path}", timeout=TIMEOUT).json()

    def post(self, path: str, **body: Any) -> Any:
        reply = httpx.post(f"{self._url}{path}", json=body, timeout=TIMEOUT)
        return {"status": reply.status_code, **reply.json()}

    def set_defaults(self, **defaults: Any) -> Any:
        return self.post("/v1/models/defaults", model="builtin", defaults=defaults)

    def ask(self, model: str = "builtin", **fields: Any) -> Any:
        messages = [{"role": "user", "content": "What is mlxrunner?"}]
        return self.post("/v1/chat/completions", model=model, messages=messages, **fields)


@pytest.fixture(scope="module")
def gate() -> Iterator[StepGate]:
    with gate_steps() as gate:
        yield gate


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "a.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def client(config: Path, gate: StepGate) -> Iterator[Client]:
    settings = resolve_config({}, str(config), {}).settings
    with run_with_settings(settings, config=config) as server:
        yield Client(server.url)


def read_config(config: Path) -> Mapping[str, Any]:
    return tomllib.loads(config.read_text())


def test_defaults_apply_to_the_next_request_and_are_in_the_file(client: Client, config: Path):
    before = client.ask()
    assert before["usage"]["completion_tokens"] > 5
    changed = client.set_defaults(aliases=["m"], system="Be brief.", max_tokens=5, temperature=0)
    assert (changed["status"], changed["saved"]) == (200, True)
    for model in ("builtin", "m", "m:latest"):
        answer = client.ask(model)
        assert answer["model"] == "builtin"
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["usage"]["prompt_tokens"] > before["usage"]["prompt_tokens"]
    # a request overrides them
    assert client.ask(max_tokens=3)["usage"]["completion_tokens"] == 3
    shown = client.post("/api/show", model="m")
    assert shown["system"] == "Be brief."
    assert config.read_text() == CONFIG + (
        '\n[[defaults]]\nname = "builtin"\naliases = ["m"]\nsystem = "Be brief."\nmax_tokens = 5\n'
        "temperature = 0\n"
    )
    client.set_defaults()
    assert client.ask()["choices"] == before["choices"]
    assert client.ask("m")["status"] == 404
    assert config.read_text().strip() == CONFIG.strip()


def test_the_defaults_of_the_file_apply_at_start(config: Path, gate: StepGate):
    config.write_text(
        f'{CONFIG}\n[[defaults]]\nname = "builtin"\naliases = ["m"]\n'
        "context = 512\nmax_tokens = 4\n"
    )
    settings = resolve_config({}, str(config), {}).settings
    with run_with_settings(settings, config=config) as server:
        client = Client(server.url)
        assert client.ask("m")["usage"]["completion_tokens"] == 4
        [card] = client.get("/v1/models")["data"]
        assert card["context_length"] == 512
        read = client.post("/v1/models/defaults", model="m")["defaults"]
        assert read == {"aliases": ["m"], "context": 512, "max_tokens": 4}


def test_a_new_context_waits_for_the_running_answer(client: Client, gate: StepGate, config: Path):
    """A default changed while an answer runs: the answer is complete, and the next request waits
    for the model with the new context."""
    expected = client.ask()["choices"]
    gate.hold_after(3)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(client.ask)
        wait_until(lambda: client.get("/v1/status")["Running"] == 1)
        assert client.set_defaults(context=256)["status"] == 200
        wait_until(lambda: client.get("/v1/models")["data"][0]["state"] == "unloading")
        waiting = threads.submit(client.ask)
        gate.release()
        assert running.result()["choices"] == expected
        assert waiting.result()["choices"] == expected
    assert client.get("/v1/models")["data"][0]["context_length"] == 256
    assert read_config(config)["defaults"] == [{"name": "builtin", "context": 256}]


def test_a_model_stays_loaded_by_its_default(client: Client):
    client.set_defaults(keep_alive=300)
    [card] = client.get("/v1/models")["data"]
    assert card["expires_at"] is not None
    client.set_defaults(keep_alive=-1)
    [card] = client.get("/v1/models")["data"]
    assert (card["state"], card["expires_at"]) == ("ready", None)


def test_an_alias_that_is_taken_is_an_error_and_nothing_changes(
    tmp_path: Path, config: Path, gate: StepGate
):
    other = tiny.write(tmp_path / "other")
    config.write_text(f'{CONFIG}[[models]]\nname = "{other}"\n')
    text = config.read_text()
    with run_with_settings(resolve_config({}, str(config), {}).settings, config=config) as server:
        client = Client(server.url)
        refused = client.set_defaults(aliases=["other"])
        assert (refused["status"], refused["error"]["param"]) == (400, "defaults.aliases")
        assert (
            "'other' is already a name of other: choose another one" in refused["error"]["message"]
        )
        assert config.read_text() == text
        client.post("/v1/models/defaults", model="other", defaults={"aliases": ["o"]})
        assert client.set_defaults(aliases=["o"])["status"] == 400
        assert client.set_defaults(aliases=["builtin"])["status"] == 400
        assert client.set_defaults(aliases=["b"])["status"] == 200
        assert client.set_defaults(aliases=["b", "c"])["status"] == 200
        [card, _] = client.get("/v1/models")["data"]
        assert card["aliases"] == ["b", "c"]


def test_a_file_that_cannot_be_edited_is_an_error_and_nothing_changes(client: Client, config: Path):
    config.write_text("port = ")
    refused = client.set_defaults(max_tokens=2)
    assert refused["status"] == 400
    assert "the configuration file is not valid TOML" in refused["error"]["message"]
    assert client.ask()["usage"]["completion_tokens"] > 2


def test_without_a_file_the_defaults_apply_until_the_server_ends(gate: StepGate):
    with run_with_settings(Settings()) as server:
        client = Client(server.url)
        assert client.set_defaults(max_tokens=2)["saved"] is False
        assert client.ask()["usage"]["completion_tokens"] == 2


def test_an_installed_model_keeps_its_defaults_after_a_scan(
    nowhere_else: None,  # noqa: F811  # the fixture
    config: Path,
    gate: StepGate,
):
    """`nowhere_else` hides the models of this machine."""
    config.write_text(f"installed = true\n{CONFIG}")
    with run_with_settings(resolve_config({}, str(config), {}).settings, config=config) as server:
        client = Client(server.url)
        body = {"source": "builtin", "destination": "mine"}
        assert httpx.post(f"{server.url}/api/copy", json=body, timeout=TIMEOUT).status_code == 200
        defaults = {"aliases": ["m"], "max_tokens": 2, "context": 300, "system": "Rhyme."}
        changed = client.post("/v1/models/defaults", model="mine", defaults=defaults)
        assert (changed["id"], changed["defaults"]) == ("mine", defaults)
        assert client.ask("m")["usage"]["completion_tokens"] == 2
        body = {"source": "builtin", "destination": "other"}
        httpx.post(f"{server.url}/api/copy", json=body, timeout=TIMEOUT)
        answer = client.ask("m")
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("mine", 2)
        cards = {card["id"]: card for card in client.get("/v1/models")["data"]}
        assert cards.keys() == {"builtin", "mine", "other"}
        assert cards["mine"]["context_length"] == 300
        assert client.post("/api/show", model="mine")["system"] == "Rhyme."
        # the defaults of a deleted model have no effect
        httpx.request("DELETE", f"{server.url}/api/delete", json={"model": "mine"}, timeout=TIMEOUT)
        assert client.ask("m")["status"] == 404
