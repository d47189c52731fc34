"""A reload with SIGHUP: what changes, and that nothing that runs is cut."""

import json
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx

from app.http.api_keys import ApiKey, format_entry, hash_key
from tests.server_process import TIMEOUT, UNTRACED, ServerProcess, run_server
from tests.throttle import Throttle
from tests.waiting import wait_until

OLD_KEY, NEW_KEY = "mr-old-0123456789abcdef", "mr-new-0123456789abcdef"
STREAMS = 4
BODY: Mapping[str, Any] = {"prompt": "once", "temperature": 0, "max_tokens": 24}


def write_keys(file: Path, *keys: str) -> None:
    entries = [ApiKey(name=key[3:6], digest=hash_key(key), admin=True) for key in keys]
    file.write_text("\n".join(format_entry(entry, "test") for entry in entries))
    file.chmod(0o600)


def headers(key: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: ServerProcess, model: str, **fields: Any) -> httpx.Response:
    body = {**BODY, "model": model, **fields}
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=body, headers=headers(NEW_KEY), timeout=TIMEOUT)


def count_lines(server: ServerProcess, text: str) -> int:
    return sum(text in line for line in server.log)


def reload(server: ServerProcess, expected: str) -> None:
    """Sends SIGHUP, and waits for another log line with this text."""
    before = count_lines(server, expected)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: count_lines(server, expected) > before, server.log_text, limit=TIMEOUT)


def test_a_reload_under_load_cuts_nothing(
    tiny_model: Path, long_model: Path, tmp_path: Path, throttle: Throttle
) -> None:
    """SIGHUP ended the process."""
    config, keys = tmp_path / "config.toml", tmp_path / "keys.toml"
    first = (
        f'api_keys = "{keys}"\nmax_tokens = 20\n[[models]]\nname = "{tiny_model}"\nalias = "a"\n'
    )
    config.write_text(first)
    write_keys(keys, OLD_KEY, NEW_KEY)
    arguments = ("--config", str(config))
    with run_server(*arguments, environ={**os.environ, **throttle.variables}) as server:
        server.wait_until_ready()
        expected = ask(server, "a").json()["choices"][0]
        assert expected["finish_reason"] == "length"
        begun = Barrier(STREAMS + 1)

        def stream(number: int) -> tuple[str, str]:
            body = {**BODY, "model": "a", "stream": True}
            url, text, reason = f"{server.url}/v1/completions", "", ""
            with httpx.stream(
                "POST", url, json=body, headers=headers(OLD_KEY), timeout=TIMEOUT
            ) as reply:
                for line in reply.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if not text:
                        begun.wait(TIMEOUT)
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
            return text, reason

        throttle.on()
        with ThreadPoolExecutor() as clients:
            streams = [clients.submit(stream, number) for number in range(STREAMS)]
            begun.wait(TIMEOUT)
            write_keys(keys, NEW_KEY)
            config.write_text(
                f'api_keys = "{keys}"\nmax_tokens = 3\nlog_level = "debug"\nload_wait = 9\n'
                # "a" gets different engine settings, so it is reloaded after its requests
                f'[[models]]\nname = "{tiny_model}"\nalias = "a"\ncontext = 48\n'
                f'[[models]]\nname = "{long_model}"\nalias = "b"\n'
            )
            reload(server, "reloaded the settings (2 models)")
            waiting = clients.submit(ask, server, "a")
            throttle.off()
            answers = [done.result() for done in streams]
            answer = waiting.result().json()
        assert answers == [(expected["text"], "length")] * STREAMS
        assert answer["usage"]["completion_tokens"] == 3
        assert ask(server, "b").json()["usage"]["completion_tokens"] == 3
        assert count_lines(server, "SIGHUP: --load-wait has changed, which needs a restart") == 1
        assert httpx.get(f"{server.url}/v1/models", headers=headers(OLD_KEY)).status_code == 401
        models = httpx.get(f"{server.url}/v1/models", headers=headers(NEW_KEY)).json()["data"]
        assert [model["id"] for model in models] == ["a", "b"]

        usage = httpx.get(f"{server.url}/v1/usage", headers=headers(NEW_KEY)).json()["data"]
        counts = {entry["key"]: (entry["requests"], entry["generated_tokens"]) for entry in usage}
        assert counts == {"new": (3, 20 + 3 + 3), "old": (STREAMS, 20 * STREAMS)}

        config.write_text("max_tokens = many\n")
        reload(server, "keeping the previous settings and models")
        config.write_text(f'api_keys = "{keys}"\n[[models]]\nname = "{tmp_path}/missing"\n')
        reload(server, "keeping the previous settings and models")
        assert ask(server, "a").status_code == 200

        config.write_text(f'api_keys = "{keys}"\n[[models]]\nname = "{long_model}"\nalias = "b"\n')
        reload(server, "reloaded the settings (1 model)")
        assert ask(server, "a").json()["error"]["code"] == "model_not_found"
        assert ask(server, "b").json()["usage"]["completion_tokens"] == 24
        assert server.process.poll() is None
        server.stop()
        assert "Traceback" not in server.log_text()


def test_a_signal_during_a_load_does_not_end_the_server(
    tiny_model: Path, throttle: Throttle
) -> None:
    throttle.hold_loads()
    server = ServerProcess([str(tiny_model)], {**UNTRACED, **throttle.variables})
    try:
        assert server.url  # it listens
        reload(server, "reloaded the settings (1 model)")
        throttle.release_loads()
        server.wait_until_ready()
    finally:
        throttle.release_loads()
        server.stop()
