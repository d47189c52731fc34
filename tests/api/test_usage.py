"""/v1/usage and the metrics of each key."""

import asyncio
from typing import Any

from app.core.settings import Settings
from app.core.usage import UsageCounters, UsageLimits
from app.http.api_keys import ApiKey, Keyring, generate_key, hash_key
from tests.api.asgi import Conversation, Reply
from tests.fakes import FakeGenerate, build_fake_app

USER, ADMIN = generate_key(), generate_key()
LIMITS = UsageLimits(daily_tokens=1000, requests_per_minute=60)
KEYS = (
    ApiKey(name="anna", digest=hash_key(USER), limits=LIMITS),
    ApiKey(name="boss", digest=hash_key(ADMIN), admin=True),
)


def get(path: str, usage: UsageCounters, key: str | None = None) -> Reply:
    async def run() -> Reply:
        keyring = Keyring() if key is None else Keyring(KEYS)
        app = build_fake_app(FakeGenerate(), Settings(), keyring=keyring, usage=usage)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await Conversation(app, "GET", path, None, headers).end()

    return asyncio.run(run())


def make_usage() -> UsageCounters:
    usage = UsageCounters(Keyring(KEYS).get_limits, lambda: 86400.0 * 20_000)
    for _ in range(2):
        usage.admit("anna")
    usage.add_tokens("anna", prompt=10, cached=4, generated=3)
    usage.admit("bob")  # whose key was removed
    return usage


def render(name: str | None, **changes: Any) -> dict[str, Any]:
    return {
        "object": "usage",
        "key": name,
        "requests": 0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "generated_tokens": 0,
        "today": {"date": "2024-10-04", "tokens": 0},
        "limits": {"daily_tokens": None, "requests_per_minute": None},
        **changes,
    }


ANNA = render(
    "anna",
    requests=2,
    prompt_tokens=10,
    cached_tokens=4,
    generated_tokens=3,
    today={"date": "2024-10-04", "tokens": 13},
    limits={"daily_tokens": 1000, "requests_per_minute": 60},
)


def test_a_key_sees_its_own_usage_and_an_admin_that_of_all():
    usage = make_usage()
    assert get("/v1/usage", usage, USER).json == {"object": "list", "data": [ANNA]}
    everyone = [ANNA, render("bob", requests=1), render("boss")]
    assert get("/v1/usage", usage, ADMIN).json == {"object": "list", "data": everyone}


def test_without_keys_all_clients_are_one_caller():
    usage = UsageCounters(clock=lambda: 86400.0 * 20_000)
    usage.admit("")
    assert get("/v1/usage", usage).json["data"] == [render(None, requests=1)]


def test_the_metrics_have_a_label_for_the_key():
    text = get("/metrics", make_usage(), ADMIN).body.decode()
    for line in (
        'mlxrunner_key_requests_total{key="anna"} 2.0',
        'mlxrunner_key_prompt_tokens_total{key="anna"} 10.0',
        'mlxrunner_key_cached_tokens_total{key="anna"} 4.0',
        'mlxrunner_key_generated_tokens_total{key="anna"} 3.0',
        'mlxrunner_key_requests_total{key="bob"} 1.0',
    ):
        assert line in text.splitlines()
