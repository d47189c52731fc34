"""A store as Ollama writes it, behind a real server: its models with their own names, and GGUF
files that are pulled, truncated and deleted while the server runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.models.gguf.raw_file import gguf, text_entry
from tests.server_process import ROOT, TIMEOUT, UNTRACED, ServerProcess, run_server
from tests.store.gguf.files import write_tiny
from tests.store.ollama_store import GO_TEMPLATE, OllamaStore
from tests.store.stand_in import StandIn, sha256
from tests.waiting import wait_until

SYSTEM, LICENSE = "You are terse.", "MIT License"
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
PARAMETERS = {"temperature": 0, "num_ctx": 2048, "num_predict": 24, "stop": ["<|user|>"]}
QUESTION = {"role": "user", "content": "Why is the sky blue?"}

CONFIG = {
    "model_format": "gguf",
    "model_family": "llama",
    "model_families": ["llama"],
    "model_type": "3.2B",
    "file_type": "Q4_K_M",
    "architecture": "amd64",
    "os": "linux",
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A server with --installed. ollama: its store. hub: where it downloads from. home: of the
    user. plain: the weights of most models."""

    server: ServerProcess
    ollama: OllamaStore
    hub: StandIn
    home: Path
    environ: dict[str, str]
    plain: bytes

    def write(self, name: str, *more: dict[str, Any]) -> Path:
        layers = [self.ollama.layer("model", self.plain), *more]
        return self.ollama.write(name, layers, config=CONFIG)

    def post(self, path: str, *, status: int = 200, **body: Any) -> Any:
        reply = httpx.post(self.server.url + path, json=body, timeout=TIMEOUT)
        assert reply.status_code == status, reply.text
        return reply.json()

    def ask(self, model: str, messages: Sequence[Any] = (QUESTION,), **options: Any) -> Any:
        return self.post("/api/chat", model=model, messages=messages, stream=False, options=options)

    def tags(self) -> dict[str, Any]:
        listed = httpx.get(f"{self.server.url}/api/tags", timeout=TIMEOUT).json()["models"]
        return {entry["name"]: entry for entry in listed}

    def wait_until_listed(self, name: str) -> None:
        """The server scans its models at most once a second."""
        wait_until(lambda: f"{name}:latest" in self.tags(), self.server.log_text, limit=TIMEOUT)

    def pull(self, model: str) -> list[dict[str, Any]]:
        body = {"model": model}
        with httpx.stream("POST", f"{self.server.url}/api/pull", json=body, timeout=TIMEOUT) as r:
            return [json.loads(line) for line in r.iter_lines()]

    def run(self, *arguments: str) -> str:
        """The output of a command."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "app", *arguments],
            cwd=ROOT,
            env={**os.environ, **UNTRACED, **self.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    home = tmp_path_factory.mktemp("home")
    hub, ollama = StandIn(), OllamaStore(home / "ollama")
    environ = {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "OLLAMA_MODELS": str(ollama.root),
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": hub.endpoint,
    }
    plain = write_tiny(home / "plain.gguf").read_bytes()
    with run_server("--installed", environ=environ) as server:
        yield Machine(
            server=server, ollama=ollama, hub=hub, home=home, environ=environ, plain=plain
        )
    hub.close()


@pytest.fixture(scope="module")
def stored(machine: Machine) -> Machine:
    """Models that were pulled or created with Ollama after the server started."""
    ollama = machine.ollama
    machine.write(
        "llama3.2",
        ollama.layer("template", GO_TEMPLATE.encode()),
        ollama.layer("system", SYSTEM.encode()),
        ollama.json("params", PARAMETERS),
        ollama.json("messages", MESSAGES),
        ollama.layer("license", LICENSE.encode()),
    )
    machine.write("me/plain:7b")
    machine.write("hf.co/org/Ours-GGUF:Q8_0")
    broken = ollama.layer("model", machine.plain[:1000])
    ollama.write("broken", [broken], config=CONFIG)
    machine.wait_until_listed("llama3.2")
    return machine


def test_the_models_of_the_store_are_listed_with_their_names(stored: Machine) -> None:
    stored.ask("llama3.2")
    tags = stored.tags()
    names = {"llama3.2:latest", "me/plain:7b", "hf.co/org/Ours-GGUF:Q8_0", "builtin:latest"}
    assert names <= tags.keys()
    assert "broken:latest" not in tags
    details = tags["llama3.2:latest"]["details"]
    assert (details["format"], details["family"]) == ("gguf", "llama")
    assert (details["quantization_level"], details["parameter_size"]) == ("F32", "13.0K")
    assert details["context_length"] == PARAMETERS["num_ctx"]
    assert tags["llama3.2:latest"]["digest"] != tags["me/plain:7b"]["digest"]


def test_a_model_is_shown_with_all_of_its_layers(stored: Machine) -> None:
    shown = stored.post("/api/show", model="llama3.2", verbose=True)
    assert (shown["system"], shown["license"]) == (SYSTEM, LICENSE)
    assert shown["messages"] == MESSAGES
    # the file's Jinja template, not Ollama's
    assert shown["template"] == tiny.CHAT_TEMPLATE
    parameters = dict(line.split(maxsplit=1) for line in shown["parameters"].splitlines())
    assert parameters == {
        "num_ctx": "2048",
        "temperature": "0",
        "num_predict": "24",
        "stop": '"<|user|>"',
    }
    assert shown["model_info"]["llama.context_length"] == 2048
    assert {tensor["type"] for tensor in shown["tensors"]} == {"F32"}
    assert "completion" in shown["capabilities"]


def test_a_chat_uses_the_system_prompt_the_messages_and_the_parameters(stored: Machine) -> None:
    """It is the chat with another model of the same weights, to which the client sends them."""
    options: dict[str, Any] = {"temperature": 0, "num_predict": 24}
    sent = [{"role": "system", "content": SYSTEM}, *MESSAGES, QUESTION]
    expected = stored.ask("me/plain:7b", sent, **options)
    found = stored.ask("llama3.2")
    assert found["message"] == expected["message"]
    assert found["prompt_eval_count"] == expected["prompt_eval_count"]
    assert found["eval_count"] == expected["eval_count"] <= 24
    assert found["message"] != stored.ask("me/plain:7b", **options)["message"]
    generated = stored.post(
        "/api/generate", model="llama3.2", prompt=QUESTION["content"], stream=False
    )
    assert generated["response"] == expected["message"]["content"]
    assert generated["prompt_eval_count"] == expected["prompt_eval_count"]
    # a system prompt of the request replaces the model's
    other = [{"role": "system", "content": "Rhyme."}]
    expected = stored.ask("me/plain:7b", [*other, *MESSAGES, QUESTION], **options)
    assert stored.ask("llama3.2", [*other, QUESTION])["message"] == expected["message"]


@pytest.mark.parametrize(
    "name",
    [
        "llama3.2:latest",
        "library/llama3.2",
        "registry.ollama.ai/library/llama3.2:latest",
        "LLAMA3.2",
    ],
)
def test_a_model_is_found_by_each_spelling_of_its_name(stored: Machine, name: str) -> None:
    found = stored.ask(name)
    assert found["model"] == name
    assert found["message"] == stored.ask("llama3.2")["message"]


def test_a_model_that_ollama_pulled_from_the_hub_has_its_name_there(stored: Machine) -> None:
    before = len(stored.hub.requests)
    for name in ("hf.co/org/Ours-GGUF:Q8_0", "org/Ours-GGUF:Q8_0", "hf.co/org/Ours-GGUF:q8_0"):
        assert stored.ask(name, num_predict=2)["done"]
        assert stored.pull(name)[-1] == {"status": "success"}
    assert len(stored.hub.requests) == before


def test_a_stop_of_a_model_that_ollama_creates_now_ends_its_answers(stored: Machine) -> None:
    text = stored.ask("llama3.2")["message"]["content"]
    stop = next(char for char in text[2:] if char.isascii() and char.isprintable())
    ollama = stored.ollama
    stored.write(
        "stopped",
        ollama.layer("system", SYSTEM.encode()),
        ollama.json("messages", MESSAGES),
        ollama.json("params", {**PARAMETERS, "stop": [stop]}),
    )
    stored.wait_until_listed("stopped")
    found = stored.ask("stopped")
    assert found["message"]["content"] == text[: text.index(stop)]
    assert found["done_reason"] == "stop"


def test_the_context_of_a_loaded_model_is_its_parameter(stored: Machine) -> None:
    stored.ask("llama3.2")
    loaded = httpx.get(f"{stored.server.url}/api/ps", timeout=TIMEOUT).json()["models"]
    contexts = {entry["name"]: entry["context_length"] for entry in loaded}
    assert contexts["llama3.2:latest"] == 2048
    long = [{"role": "user", "content": "x" * 3000}]
    error = stored.post("/api/chat", model="llama3.2", messages=long, stream=False, status=400)[
        "error"
    ]
    assert "context" in error


def test_commands_know_the_models(stored: Machine) -> None:
    listed = stored.run("list").splitlines()
    assert any(line.startswith("llama3.2 ") and " ollama " in line for line in listed)
    [problem] = [line for line in listed if line.startswith("broken (ollama)")]
    assert "is truncated" in problem
    shown = stored.run("show", "llama3.2").splitlines()
    for line in (
        "llama3.2",
        f"  system prompt {SYSTEM}",
        "  default       context 2048",
        "  embeddings    F32",
    ):
        assert line in shown
    expected = stored.ask("llama3.2")["message"]["content"]
    # no server is running at that port
    assert stored.run("run", "llama3.2", QUESTION["content"], "--port", "9").strip() == (
        expected.strip()
    )


def test_a_model_is_served_alone_by_its_name(stored: Machine) -> None:
    with run_server("llama3.2", environ=stored.environ) as server:
        body = {"model": "llama3.2:latest", "messages": [QUESTION], "stream": False}
        reply = httpx.post(f"{server.url}/api/chat", json=body, timeout=TIMEOUT).json()
    assert reply["message"] == stored.ask("llama3.2")["message"]


@pytest.fixture(scope="module")
def repository(machine: Machine) -> str:
    folder = machine.home / "remote"
    for number, label in enumerate(("Q4_K_M", "Q8_0", "F16")):
        write_tiny(folder / f"Tiny-{label}.gguf", seed=number)
    (folder / "mmproj-Tiny-F16.gguf").write_bytes(machine.plain)
    machine.hub.add("org/Tiny-GGUF", folder)
    return "org/Tiny-GGUF"


def test_a_quantization_is_pulled_with_ollamas_lines_and_answers(
    machine: Machine, repository: str
) -> None:
    lines = machine.pull(f"hf.co/{repository}:Q4_K_M")
    assert lines[0] == {"status": "pulling manifest"}
    assert [line["status"] for line in lines[-3:]] == [
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    content = (machine.home / "remote/Tiny-Q4_K_M.gguf").read_bytes()
    digest, size = sha256(content), len(content)
    layers = [line for line in lines if line.get("digest") == f"sha256:{digest}"]
    for line in layers:
        assert line["status"] == f"pulling {digest[:12]}"
        assert line["total"] == size
    completed = [line["completed"] for line in layers]
    assert completed == sorted(completed)
    assert completed[-1] == size
    names = (f"hf.co/{repository}:Q4_K_M", f"{repository}:q4_k_m", f"hf.co/{repository}:latest")
    answers = [machine.ask(name, temperature=0, num_predict=8)["message"] for name in names]
    assert answers[0] == answers[1] == answers[2]
    assert machine.tags()[f"{repository}:Q4_K_M"]["details"]["format"] == "gguf"


def test_without_a_label_the_usual_quantization_is_pulled(
    machine: Machine, repository: str
) -> None:
    """Also if another one is installed."""
    machine.pull(f"{repository}:F16")
    machine.post("/api/pull", model=f"hf.co/{repository}", stream=False)
    assert {f"{repository}:F16", f"{repository}:Q4_K_M"} <= machine.tags().keys()


def test_a_broken_pull_is_resumed(machine: Machine, repository: str) -> None:
    """Here, the connection breaks while the header is read."""
    name = "Tiny-Q8_0.gguf"
    machine.hub.faults.cut[name] = 700
    assert machine.pull(f"{repository}:Q8_0")[-1] == {"status": "success"}
    starts = [request.range for request in machine.hub.downloads(f"/{name}")]
    assert any(0 < start <= 700 for start in starts)
    machine.post("/api/pull", model=f"{repository}:Q8_0", stream=False)
    assert machine.ask(f"{repository}:Q8_0", num_predict=2)["done"]


def test_a_corrupt_pull_is_an_error_and_leaves_no_model(machine: Machine) -> None:
    folder = machine.home / "corrupt"
    write_tiny(folder / "Bad-Q8_0.gguf", seed=7)
    machine.hub.add("org/Bad-GGUF", folder)
    machine.hub.faults.corrupt.add("Bad-Q8_0.gguf")
    *_, last = machine.pull("org/Bad-GGUF:Q8_0")
    assert "is not a usable GGUF file: it does not begin with b'GGUF'" in last["error"]
    assert "mlxrunner-header" not in last["error"]
    assert "org/Bad-GGUF:Q8_0" not in machine.tags()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf.co/org/Tiny-GGUF:Q2_K", "no GGUF file Q2_K; it has: F16, Q4_K_M, Q8_0"),
        ("hf.co/org/None-GGUF:Q8_0", "pull model manifest: file does not exist"),
        ("org/Odd-GGUF", "architecture 'plamo3' are not supported"),
    ],
)
def test_a_pull_that_cannot_succeed_is_an_error_before_the_download(
    machine: Machine, repository: str, name: str, expected: str
) -> None:
    folder = machine.home / "odd"
    folder.mkdir(exist_ok=True)
    odd = gguf([text_entry("general.architecture", "plamo3")], data=bytes(2000))
    (folder / "Odd-Q8_0.gguf").write_bytes(odd)
    machine.hub.add("org/Odd-GGUF", folder)
    *_, last = machine.pull(name)
    assert expected in last["error"]
    assert "\n" not in last["error"]


def test_one_quantization_is_deleted(machine: Machine, repository: str) -> None:
    for label in ("F16", "Q4_K_M"):
        machine.pull(f"{repository}:{label}")
    body = {"model": f"hf.co/{repository}:F16"}
    reply = httpx.request("DELETE", f"{machine.server.url}/api/delete", json=body, timeout=TIMEOUT)
    assert reply.status_code == 200, reply.text
    tags = machine.tags()
    assert f"{repository}:F16" not in tags
    assert f"{repository}:Q4_K_M" in tags


def test_a_file_that_is_truncated_while_it_is_served_costs_only_its_next_load(
    machine: Machine,
) -> None:
    """The weights are in memory: no file is mapped."""
    path = machine.home / ".lmstudio/models/org/tiny/cut.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(machine.plain)
    machine.wait_until_listed("cut")
    before = machine.ask("cut", temperature=0, num_predict=8)
    os.truncate(path, len(machine.plain) // 2)
    again = machine.ask("cut", temperature=0, num_predict=8)
    assert again["message"] == before["message"]
    machine.post("/api/chat", model="cut", messages=[], keep_alive=0, stream=False)
    body = {"model": "cut", "messages": [QUESTION], "stream": False}
    reply = httpx.post(f"{machine.server.url}/api/chat", json=body, timeout=TIMEOUT)
    assert reply.status_code >= 400
    assert "truncated" in reply.json()["error"]
    assert "download it again" in reply.json()["error"]
    path.write_bytes(machine.plain)
    after = machine.ask("cut", temperature=0, num_predict=8)
    assert after["message"] == before["message"]
    assert machine.server.process.poll() is None
