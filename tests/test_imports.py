"""Every module can be imported, without a warning, by each supported Python. A running server
imports none on its event loop."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.server_process import TIMEOUT, run_server

ROOT = Path(__file__).resolve().parents[1]


def list_modules() -> list[str]:
    files = [
        path.relative_to(ROOT) for name in ("app", "models") for path in (ROOT / name).rglob("*.py")
    ]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    return sorted(name for name in names if not name.endswith("__main__"))


def test_every_module_can_be_imported() -> None:
    names = list_modules()
    assert len(names) > 300
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")


# sitecustomize.py: prints each module that the server imports on its event loop
REPORT_IMPORTS = """
import asyncio, sys

def report(event, arguments):
    if event == "import" and asyncio._get_running_loop() is not None:
        print("IMPORT ON THE EVENT LOOP:", arguments[0], file=sys.stderr, flush=True)

if "serve" in sys.orig_argv:
    sys.addaudithook(report)
"""

MESSAGES = [{"role": "user", "content": "hello"}]
SHORT_CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 2}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}


def test_no_import_blocks_the_event_loop(tiny_model: Path, plant: Callable[[str], None]) -> None:
    """The first start of a server on a slow disk logged the stack of a blocked event loop, because
    it imported an HTTP client."""
    plant(REPORT_IMPORTS)
    schema = {"name": "a", "schema": {"type": "object", "properties": {"a": {"const": 1}}}}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", SHORT_CHAT),
        ("/v1/chat/completions", {**SHORT_CHAT, "stream": True, "logprobs": True}),
        (
            "/v1/chat/completions",
            {**SHORT_CHAT, "tools": [{"type": "function", "function": WEATHER}]},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_schema", "json_schema": schema},
            },
        ),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/tokenize", {"prompt": "a"}),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 2}}),
        ("/api/show", {}),
        ("/api/copy", {"source": "builtin", "destination": "copy"}),
        ("/api/create", {"model": "new", "from": "builtin"}),
        ("/api/pull", {"model": "org/missing"}),
        ("/v1/models/unload", {}),
    ]
    with run_server("builtin", str(tiny_model), "--installed") as running:
        running.wait_until_ready()
        with httpx.Client(base_url=running.url, timeout=TIMEOUT) as client:
            for path in ("/", "/docs", "/metrics", "/api/tags", "/v1/models", "/v1/status"):
                assert client.get(path).is_success, path
            for model in ("builtin", tiny_model.name, "org/missing"):
                for path, body in bodies:
                    client.post(path, json={"model": model, **body})
            client.request("DELETE", "/api/delete", json={"model": "copy"})
        running.stop()
        assert [line for line in running.log if "IMPORT" in line] == []
