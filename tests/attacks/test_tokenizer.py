"""A model whose tokenizer.json was made to end the server, beside one that does its work."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.server_process import TIMEOUT, ServerProcess, run_server

COMPLETIONS = "/v1/completions"


def grown(letter: str, times: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": letter}, "content": letter * times}


MULTIPLIES = {"type": "Sequence", "normalizers": [grown("a", 1000)] * 6}


def hostile() -> dict[str, dict[str, Any]]:
    """Keys of tokenizer.json, by the name of the model."""
    added = json.loads(tiny.tokenizer().to_str())["added_tokens"]
    return {
        # 10^18 letters of one
        "multiplies": {"normalizer": MULTIPLIES},
        # the same, of a token that is normalized when the file is read
        "fills": {
            "normalizer": MULTIPLIES,
            "added_tokens": [*added, {**added[0], "id": 258, "content": "a", "normalized": True}],
        },
        # ten million tries, and then a panic
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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    models = [tiny.write(folder / "good")]
    for name, changes in hostile().items():
        models.append(tiny.write(folder / name))
        file = models[-1] / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with run_server(*map(str, models), "--memory", "2", "--parallel", "2") as server:
        yield server


def ask(served: ServerProcess, model: str, prompt: str = "abc") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 2}
    return httpx.post(f"{served.url}{COMPLETIONS}", json=body, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("multiplies", "its normalizers can make a text 1e+18 times as long"),
        ("fills", "checking it needs more than "),
    ],
)
def test_a_tokenizer_that_takes_all_memory_is_refused_and_the_others_go_on(
    served: ServerProcess, model: str, why: str
) -> None:
    assert ask(served, "good").status_code == 200
    for _ in range(2):
        reply = ask(served, model)
        assert reply.status_code == 500, reply.text
        error = reply.json()["error"]
        assert error["code"] == "bad_model_files"
        assert error["message"].startswith(f"{model}/tokenizer.json is not a usable tokenizer: ")
        assert why in error["message"]
        url = f"{served.url}/v1/tokenize"
        tokenized = httpx.post(url, params={"model": model}, content="a", timeout=TIMEOUT)
        assert tokenized.status_code == 500
    assert served.process.poll() is None
    assert ask(served, "good").status_code == 200


def test_a_text_over_which_a_tokenizer_panics_is_refused_and_others_are_answered(
    served: ServerProcess,
) -> None:
    """The panic is no Exception in Python: it became a 500 in plain text."""
    reply = ask(served, "panics", "x" * 40)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "prompt"
    assert error["message"].startswith("this model's tokenizer cannot encode the text: ")
    assert ask(served, "panics").status_code == 200
    assert ask(served, "good", "x" * 40).status_code == 200


def test_a_server_of_such_a_model_alone_says_why_it_ends(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "alone")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **hostile()["multiplies"]}))
    server = ServerProcess([str(folder)], {})
    assert server.process.wait(TIMEOUT) == 1
    server.stop()
    assert "Traceback" not in server.log_text()
    assert (
        "its normalizers can make a text 1e+18 times as long" in server.log_text().splitlines()[-1]
    )
