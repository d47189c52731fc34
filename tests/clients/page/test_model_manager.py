"""The model dialog in a real browser, against a real server and a hub in a thread."""

import tomllib
from pathlib import Path

from app.http.api_keys import generate_key, hash_key
from tests import tiny
from tests.clients.page.conftest import Use
from tests.server_process import TIMEOUT, run_server
from tests.store.stand_in import StandIn
from tests.waiting import wait_until

WEIGHTS = "model.safetensors"


def test_models_are_downloaded_changed_and_deleted(use_page: Use, tmp_path: Path):
    hub, config = StandIn(), tmp_path / "a.toml"
    hub.add("org/new", tiny.write(tmp_path / "new", intermediate_size=4096))
    config.write_text("installed = true  # all of them\n")
    environ = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hub"),
        "OLLAMA_MODELS": str(tmp_path / "ollama"),
    }

    def list_downloads() -> list[int | None]:
        """The last byte of each request for weights; None for all that follow."""
        return [request.end for request in hub.downloads(WEIGHTS)]

    def resume() -> None:
        hub.faults.stall.clear()
        hub.resumed.set()

    actions = {
        "requested weights": list_downloads,
        "stall": lambda: hub.faults.stall.update({WEIGHTS: TIMEOUT}),
        "wait for a download": lambda: wait_until(lambda: None in list_downloads()),
        "resume": resume,
        "configuration": config.read_text,
    }
    with run_server("--config", str(config), environ=environ) as server:
        server.wait_until_ready()
        seen = use_page("manage", server.url, actions)
    hub.close()
    assert "org/new: 1.6 MB of 1.6 MB to download. It needs " in seen["preview"]
    assert seen["requested"]
    assert all(end is not None and end <= 100_000 for end in seen["requested"])
    assert (seen["findings"], seen["width"], seen["errors"]) == ([], 0, [])
    assert seen["status"] == "org/new was deleted."
    assert seen["config"].startswith("installed = true  # all of them\n")
    [defaults] = tomllib.loads(seen["config"])["defaults"]
    assert defaults == {
        "name": "org/new",
        "aliases": ["new", "newer"],
        "system": "Be brief.\nRhyme.",
        "keep_alive": "forever",
        "temperature": 0.5,
    }


def test_only_a_key_that_may_manage_models_sees_the_button(use_page: Use, tmp_path: Path):
    key, admin, file = generate_key(), generate_key(), tmp_path / "keys.toml"
    file.write_text(
        f'[[keys]]\nname = "ada"\nsha256 = "{hash_key(key).hex()}"\n'
        f'[[keys]]\nname = "bob"\nsha256 = "{hash_key(admin).hex()}"\nadmin = true\n'
    )
    file.chmod(0o600)
    actions = {"key": lambda: key, "admin key": lambda: admin}
    with run_server("--api-keys", str(file)) as server:
        server.wait_until_ready()
        seen = use_page("refuse", server.url, actions)
    assert seen["shown"] is False
