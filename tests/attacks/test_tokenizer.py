"""Models with a malicious tokenizer.json, next to a valid model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.server_process import TIMEOUT, ServerProcess, run_server

COMPLETIONS = "/v1/completions"


def replace_normalizer(letter: str, factor: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": letter}, "content": letter * factor}


MULTIPLIES = {"type": "Sequence", "normalizers": [replace_normalizer("a", 1000)] * 6}


def build_hostile_fields() -> dict[str, dict[str, Any]]:
    """Fields of tokenizer.json by the name of the model."""
    added = json.loads(tiny.tokenizer().to_str())["added_tokens"]
    return {
        # makes 10^18 letters of one
        "multiplies": {"normalizer": MULTIPLIES},
        # the same for a token that is normalized while the file is loaded
        "fills": {
            "normalizer": MULTIPLIES,
            "added_tokens": [*added, {**added[0], "id": 258, "content": "a", "normalized": True}],
        },
        # ten million backtracking steps, and then a panic
        "panics": {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(x+x+)+y"},
                "behavior": "Isolated",
                "invert": False,
            },
        },
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    models = [tiny.write(folder / "good")]
    for name, changes in build_hostile_fields().items():
        models.append(tiny.write(folder / name))
        file = models[-1] / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with run_server(*map(str, models), "--memory", "2", "--parallel", "2") as server:
        yield server


def send_request(server: ServerProcess, model: str, prompt: str = "abc") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 2}
    return httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=TIMEOUT)


@pytest.mark.product
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("multiplies", "its normalizers can make a text 1e+18 times as long"),
        ("fills", "checking it needs more than "),
    ],
)
def test_a_tokenizer_that_needs_all_memory_is_rejected(
    server: ServerProcess, model: str, reason: str
) -> None:
    assert send_request(server, "good").status_code == 200
    for _ in range(2):
        reply = send_request(server, model)
        assert reply.status_code == 500, reply.text
        error = reply.json()["error"]
        assert error["code"] == "bad_model_files"
        assert error["message"].startswith(f"{model}/tokenizer.json is not a usable tokenizer: ")
        assert reason in error["message"]
        url = f"{server.url}/v1/tokenize"
        tokenized = httpx.post(url, params={"model": model}, content="a", timeout=TIMEOUT)
        assert tokenized.status_code == 500
    assert server.process.poll() is None
    assert send_request(server, "good").status_code == 200


def test_a_text_that_makes_the_tokenizer_panic_is_rejected(
    server: ServerProcess,
) -> None:
    """The panic is not an Exception in Python: the response was a 500 in plain text."""
    reply = send_request(server, "panics", "x" * 40)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "prompt"
    assert error["message"].startswith("this model's tokenizer cannot encode the text: ")
    assert send_request(server, "panics").status_code == 200
    assert send_request(server, "good", "x" * 40).status_code == 200


def test_a_server_with_only_such_a_model_ends_with_the_reason(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "alone")
    file = folder / "tokenizer.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), **build_hostile_fields()["multiplies"]})
    )
    server = ServerProcess([str(folder)], {})
    assert server.process.wait(TIMEOUT) == 1
    server.stop()
    assert "Traceback" not in server.log_text()
    assert (
        "its normalizers can make a text 1e+18 times as long" in server.log_text().splitlines()[-1]
    )
