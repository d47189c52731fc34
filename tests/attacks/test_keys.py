"""Somebody on the network who has no key, and somebody who has one that is not good for all."""

import random
import statistics
import time

import httpx
import pytest

from app.http import api_keys
from tests.attacks.conftest import Guarded, entries
from tests.server_process import TIMEOUT

CHAT = "/v1/chat/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_only_keys_come_in(guarded: Guarded) -> None:
    client = guarded.client
    assert client.post(CHAT, json=ASK).status_code == 401
    assert client.post(CHAT, json=ASK, headers=bearer(api_keys.generate_key())).status_code == 401
    for key in (guarded.user, guarded.admin, guarded.owner):
        assert client.post(CHAT, json=ASK, headers=bearer(key)).status_code == 200
        assert client.post(CHAT, json=ASK, headers={"x-api-key": key}).status_code == 200


def test_only_admins_manage(guarded: Guarded) -> None:
    def statuses(key: str) -> set[int]:
        headers = bearer(key)
        return {
            guarded.client.get("/metrics", headers=headers).status_code,
            guarded.client.post(
                "/v1/models/load", json={"model": "tiny"}, headers=headers
            ).status_code,
        }

    assert statuses(guarded.user) == {403}
    assert statuses(guarded.admin) == statuses(guarded.owner) == {200}


def test_only_admins_have_a_model_leave(guarded: Guarded) -> None:
    def ask(key: str, **fields: object) -> int:
        body = {**ASK, "keep_alive": 0, **fields}
        return guarded.client.post(CHAT, json=body, headers=bearer(key)).status_code

    def state() -> str:
        headers = bearer(guarded.user)
        return guarded.client.get("/v1/models/tiny", headers=headers).json()["state"]

    def stays() -> bool:
        time.sleep(0.3)
        return state() == "ready"

    for key, status in ((guarded.user, 200), (guarded.owner, 400)):
        told = {"logit_bias": {"999": 1}} if status == 400 else {}
        assert ask(key, **told) == status
        assert stays()
        embedding = {"model": "tiny", "input": "x" * (5000 if told else 1), "keep_alive": 0}
        reply = guarded.client.post("/v1/embeddings", json=embedding, headers=bearer(key))
        assert reply.status_code == status, reply.text
        assert stays()
    assert ask(guarded.owner) == 200
    until = time.monotonic() + TIMEOUT
    while state() == "ready":
        assert time.monotonic() < until
        time.sleep(0.02)
    assert ask(guarded.user) == 200


def test_strangers_see_four_figures(guarded: Guarded) -> None:
    bare = guarded.client.get("/v1/status").json()
    assert set(bare) == {"Status", "Progress", "ContextLength", "Memory"}
    assert guarded.client.get("/v1/status", headers=bearer(guarded.user)).json().keys() == set(bare)
    whole = guarded.client.get("/v1/status", headers=bearer(guarded.admin)).json()
    assert set(whole) > set(bare)
    health = guarded.client.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


def test_guessing_tells_nothing_by_its_time(guarded: Guarded) -> None:
    """A guess that begins like a key is refused as quickly as any. Over a network nobody measures
    nanoseconds; that a comparison has no early end at all, tests/http/test_api_keys_file.py
    shows."""
    near = [guarded.user[:length] + "x" * (46 - length) for length in (0, 23, 45)]
    took: dict[str, list[float]] = {guess: [] for guess in near}
    order = near * 40
    random.Random(0).shuffle(order)
    for guess in order:
        begun = time.perf_counter()
        assert guarded.client.get("/v1/models", headers=bearer(guess)).status_code == 401
        took[guess].append(time.perf_counter() - begun)
    medians = [statistics.median(times) for times in took.values()]
    assert max(medians) - min(medians) < 0.25 * min(medians) + 0.001


def test_a_key_that_was_taken_away_is_of_no_use(guarded: Guarded) -> None:
    """And one that was added is, without a restart; a file that breaks changes nothing."""
    lost, text = api_keys.generate_key(), guarded.file.read_text()

    def wait_for(status: int) -> None:
        deadline = time.monotonic() + 10
        while guarded.client.get("/v1/models", headers=bearer(lost)).status_code != status:
            assert time.monotonic() < deadline, guarded.server.log_text()
            time.sleep(0.05)

    try:
        guarded.file.write_text(text + entries(lost=lost))
        wait_for(200)
        guarded.file.write_text(text)
        wait_for(401)
        guarded.file.write_text("[[keys")
        time.sleep(1.2)
        for shown, status in ((lost, 401), ("", 401), (guarded.user, 200)):
            reply = guarded.client.get("/v1/models", headers={"x-api-key": shown})
            assert reply.status_code == status
    finally:
        guarded.file.write_text(text)


def test_the_line_is_encrypted(guarded: Guarded) -> None:
    assert guarded.server.url.startswith("https:")
    with pytest.raises(httpx.TransportError):
        httpx.get(guarded.server.url.replace("https:", "http:") + "/health")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{guarded.server.url}/health")


# Words that stand nowhere else. Named so that the test runs last of those that use this server.
SECRETS = ("xylophone-prompt", "xylophone-answer-prefix", "xylophone-tool", "xylophone-schema")


def test_the_log_holds_neither_keys_nor_prompts(guarded: Guarded) -> None:
    prompt, prefix, tool, schema = SECRETS
    wrong = api_keys.generate_key()
    user, client = bearer(guarded.user), guarded.client
    said = {**ASK, "messages": [{"role": "user", "content": prompt}]}
    function = {"name": "f", "description": tool, "parameters": {"type": "object"}}
    # answers, whole and streamed, and errors of every kind
    for path, body, headers in (
        (CHAT, said, user),
        (CHAT, {**said, "stream": True}, user),
        (CHAT, said, bearer(wrong)),
        (CHAT, said, {"x-api-key": wrong}),
        (CHAT, said, {}),
        (CHAT, {**said, "tools": [{"type": "function", "function": function}]}, user),
        (CHAT, {**said, "model": "none"}, user),
        (CHAT, {**said, "temperature": prompt}, user),
        (CHAT, {**said, prompt: prompt}, user),
        (CHAT, {**said, "logit_bias": {tool: 1}}, user),
        (CHAT, {**said, "guided_regex": "(" + schema}, user),
        (CHAT, {**said, "guided_json": {"properties": {tool: {"patternProperties": 1}}}}, user),
        (CHAT, {**said, "guided_grammar": f"start: {schema}"}, user),
        (CHAT, {**said, "tool_choice": {"type": "function", "function": {"name": tool}}}, user),
        (CHAT, {**said, "messages": [{"role": "user", "content": prompt * 1000}]}, user),
        (CHAT, {**said, "messages": [{"role": prefix, "content": prefix}]}, user),
        (CHAT, {**said, "response_format": {"type": "json_schema", "json_schema": schema}}, user),
        ("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 2}, user),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": prompt, "guided_regex": "(" + schema},
            user,
        ),
        ("/v1/embeddings", {"model": "tiny", "input": prompt}, user),
        ("/v1/responses", {"model": "tiny", "input": prompt, "max_output_tokens": 16}, user),
        ("/v1/tokenize", {"prompt": prompt}, user),
        ("/completion", {"prompt": prompt, "options": {"num_predict": 2}}, user),
        ("/v1/models/load", {"model": "tiny"}, user),
    ):
        client.post(path, json=body, headers=headers)
    client.post(CHAT, content=f'{{"{prompt}', headers={**user, "content-type": "application/json"})
    client.post(CHAT, content=b"\xff" + prompt.encode(), headers=user)
    client.get("/v1/models", headers=bearer(wrong), params={"key": wrong, "prompt": prompt})
    log = guarded.server.log_text()
    assert "listening" in log or "running on" in log, "the log is read at all"
    for secret in (guarded.user, guarded.admin, guarded.owner, wrong, *SECRETS):
        assert secret not in log
    for digest in (api_keys.hash_key(key).hex() for key in (guarded.user, guarded.admin)):
        assert digest not in log
