"""Clients without a key, and clients whose key has no admin rights."""

import math
import random
import time

import httpx
import pytest

from app.http import api_keys
from tests.attacks.conftest import Guarded, entries
from tests.server_process import TIMEOUT
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
CHAT_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_only_valid_keys_are_accepted(guarded: Guarded) -> None:
    client = guarded.client
    assert client.post(CHAT, json=CHAT_BODY).status_code == 401
    assert (
        client.post(CHAT, json=CHAT_BODY, headers=bearer(api_keys.generate_key())).status_code
        == 401
    )
    for key in (guarded.user, guarded.admin, guarded.owner):
        assert client.post(CHAT, json=CHAT_BODY, headers=bearer(key)).status_code == 200
        assert client.post(CHAT, json=CHAT_BODY, headers={"x-api-key": key}).status_code == 200


def test_only_admins_may_manage_models(guarded: Guarded) -> None:
    def get_statuses(key: str) -> set[int]:
        headers = bearer(key)
        return {
            guarded.client.get("/metrics", headers=headers).status_code,
            guarded.client.post(
                "/v1/models/load", json={"model": "tiny"}, headers=headers
            ).status_code,
        }

    assert get_statuses(guarded.user) == {403}
    assert get_statuses(guarded.admin) == get_statuses(guarded.owner) == {200}


def test_only_admins_may_unload_a_model_with_keep_alive(guarded: Guarded) -> None:
    def send_chat(key: str, **fields: object) -> int:
        body = {**CHAT_BODY, "keep_alive": 0, **fields}
        return guarded.client.post(CHAT, json=body, headers=bearer(key)).status_code

    def state() -> str:
        headers = bearer(guarded.user)
        return guarded.client.get("/v1/models/tiny", headers=headers).json()["state"]

    def is_kept() -> bool:
        # an unload would begin at the end of the request; if the sleep is too short, the test
        # misses it, but does not fail
        time.sleep(0.3)
        return state() == "ready"

    for key, status in ((guarded.user, 200), (guarded.owner, 400)):
        invalid_field = {"logit_bias": {"999": 1}} if status == 400 else {}
        assert send_chat(key, **invalid_field) == status
        assert is_kept()
        embedding = {
            "model": "tiny",
            "input": "x" * (5000 if invalid_field else 1),
            "keep_alive": 0,
        }
        reply = guarded.client.post("/v1/embeddings", json=embedding, headers=bearer(key))
        assert reply.status_code == status, reply.text
        assert is_kept()
    assert send_chat(guarded.owner) == 200
    wait_until(lambda: state() != "ready", limit=TIMEOUT)
    assert send_chat(guarded.user) == 200


def test_clients_without_a_key_see_four_fields(guarded: Guarded) -> None:
    public_status = guarded.client.get("/v1/status").json()
    assert set(public_status) == {"Status", "Progress", "ContextLength", "Memory"}
    assert guarded.client.get("/v1/status", headers=bearer(guarded.user)).json().keys() == set(
        public_status
    )
    full_status = guarded.client.get("/v1/status", headers=bearer(guarded.admin)).json()
    assert set(full_status) > set(public_status)
    health = guarded.client.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


@pytest.mark.timing
def test_the_time_of_a_guess_reveals_nothing(guarded: Guarded) -> None:
    """A guess with the prefix of a key is rejected as quickly as any. Nanoseconds cannot be
    measured over a network; tests/http/test_api_keys_file.py shows that comparisons never end
    early. For each guess, the fastest rejection counts, because other programs delay some of
    them."""
    guesses = [guarded.user[:length] + "x" * (46 - length) for length in (0, 23, 45)]
    fastest = dict.fromkeys(guesses, math.inf)
    order = guesses * 100
    random.Random(0).shuffle(order)
    for guess in order:
        start = time.perf_counter()
        assert guarded.client.get("/v1/models", headers=bearer(guess)).status_code == 401
        fastest[guess] = min(fastest[guess], time.perf_counter() - start)
    times = sorted(1000 * seconds for seconds in fastest.values())
    print("fastest rejections:", ", ".join(f"{time_:.2f} ms" for time_ in times))
    assert times[-1] < 1.25 * times[0] + 1


def test_a_removed_key_is_rejected(guarded: Guarded) -> None:
    """An added key is accepted without a restart; a broken file changes nothing."""
    new_key, text = api_keys.generate_key(), guarded.file.read_text()

    def wait_for(status: int) -> None:
        def has_status() -> bool:
            reply = guarded.client.get("/v1/models", headers=bearer(new_key))
            return reply.status_code == status

        wait_until(has_status, guarded.server.log_text, limit=TIMEOUT)

    def is_reported_broken() -> bool:
        assert guarded.client.get("/v1/models", headers=bearer(guarded.user)).status_code == 200
        return "keeping the previous keys" in guarded.server.log_text()

    try:
        guarded.file.write_text(text + entries(lost=new_key))
        wait_for(200)
        guarded.file.write_text(text)
        wait_for(401)
        guarded.file.write_text("[[keys")
        # a lookup reads the file again, and logs that it is broken
        wait_until(is_reported_broken, guarded.server.log_text, limit=TIMEOUT)
        for key, status in ((new_key, 401), ("", 401), (guarded.user, 200)):
            reply = guarded.client.get("/v1/models", headers={"x-api-key": key})
            assert reply.status_code == status
    finally:
        guarded.file.write_text(text)


def test_the_connection_is_encrypted(guarded: Guarded) -> None:
    assert guarded.server.url.startswith("https:")
    with pytest.raises(httpx.TransportError):
        httpx.get(guarded.server.url.replace("https:", "http:") + "/health", timeout=TIMEOUT)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{guarded.server.url}/health", timeout=TIMEOUT)


# Words that occur nowhere else. The name of the test makes it run last of those with this server.
SECRETS = ("xylophone-prompt", "xylophone-answer-prefix", "xylophone-tool", "xylophone-schema")


def test_the_log_contains_neither_keys_nor_prompts(guarded: Guarded) -> None:
    prompt, prefix, tool, schema = SECRETS
    wrong = api_keys.generate_key()
    user, client = bearer(guarded.user), guarded.client
    chat = {**CHAT_BODY, "messages": [{"role": "user", "content": prompt}]}
    function = {"name": "f", "description": tool, "parameters": {"type": "object"}}
    # unstreamed and streamed answers, and errors of every kind
    for path, body, headers in (
        (CHAT, chat, user),
        (CHAT, {**chat, "stream": True}, user),
        (CHAT, chat, bearer(wrong)),
        (CHAT, chat, {"x-api-key": wrong}),
        (CHAT, chat, {}),
        (CHAT, {**chat, "tools": [{"type": "function", "function": function}]}, user),
        (CHAT, {**chat, "model": "none"}, user),
        (CHAT, {**chat, "temperature": prompt}, user),
        (CHAT, {**chat, prompt: prompt}, user),
        (CHAT, {**chat, "logit_bias": {tool: 1}}, user),
        (CHAT, {**chat, "guided_regex": "(" + schema}, user),
        (CHAT, {**chat, "guided_json": {"properties": {tool: {"patternProperties": 1}}}}, user),
        (CHAT, {**chat, "guided_grammar": f"start: {schema}"}, user),
        (CHAT, {**chat, "tool_choice": {"type": "function", "function": {"name": tool}}}, user),
        (CHAT, {**chat, "messages": [{"role": "user", "content": prompt * 1000}]}, user),
        (CHAT, {**chat, "messages": [{"role": prefix, "content": prefix}]}, user),
        (CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": schema}}, user),
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
    assert "listening" in log or "running on" in log, "the log is empty"
    for secret in (guarded.user, guarded.admin, guarded.owner, wrong, *SECRETS):
        assert secret not in log
    for digest in (api_keys.hash_key(key).hex() for key in (guarded.user, guarded.admin)):
        assert digest not in log
