"""An allowed client: its requests must not slow down or affect other clients."""

import gzip
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests import tiny
from tests.attacks.attacker import Attack, Read, Send
from tests.attacks.conftest import ESCAPES, Victim
from tests.http import raw_client
from tests.http.raw_client import head
from tests.server_process import TIMEOUT, run_server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def post(victim: Victim, path: str, body: dict[str, Any]) -> httpx.Response:
    return victim.client.post(path, json=body)


def build_attack(requests: Iterable[tuple[str, dict[str, Any]]], threads: int = 2) -> Attack:
    """These requests in sequence, each on its own connection."""
    return Attack([[Send(raw_client.post(body, path)), Read()] for path, body in requests], threads)


def raw_url(victim: Victim, path: str) -> httpx.URL:
    """The unnormalized path; httpx would remove dots."""
    return httpx.URL(victim.server.url).copy_with(raw_path=path.encode())


def hidden_names(disk: Path) -> list[str]:
    """Different spellings of a model folder that exists but is not served."""
    return [
        str(disk / "hidden"),
        f"{disk}/tiny/../hidden",
        "../hidden",
        "tiny/../hidden",
        "./hidden",
        "hidden",
        f"file://{disk}/hidden",
        "hidden\x00",
        "tiny\x00/../hidden",
        "..%2fhidden",
        "..\\hidden",
        "~/hidden",
        "$HOME/hidden",
        "/etc/passwd",
        "../../../../../../../../etc/passwd",
        "/dev/zero",
        "/proc/self/environ",
        "a" * 100_000,
        "/" * 100_000,
    ]


def test_a_name_is_never_a_path(victim: Victim) -> None:
    """The response does not reveal whether a path exists."""
    for name in hidden_names(victim.disk):
        for path, more in (
            (COMPLETIONS, {"prompt": "hi"}),
            (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/embeddings", {"input": "hi"}),
            ("/v1/models/load", {}),
            ("/v1/models/unload", {}),
        ):
            reply = post(victim, path, {"model": name, **more})
            assert reply.status_code == 404, (name[:50], path, reply.text[:300])
            assert reply.json()["error"]["code"] == "model_not_found"
            assert len(reply.content) < 1000
    existing, absent = (
        post(victim, COMPLETIONS, {"model": str(victim.disk / name), "prompt": "hi"}).text
        for name in ("hidden", "absent")
    )
    assert existing.replace("hidden", "absent") == absent


@pytest.mark.parametrize(
    "path",
    ["../hidden", "..%2fhidden", "%2e%2e/hidden", "tiny/../../hidden", "%2fetc%2fpasswd", "%00"],
)
def test_a_path_of_the_api_opens_no_file(victim: Victim, path: str) -> None:
    reply = victim.client.get(raw_url(victim, f"/v1/models/{path}"))
    assert reply.status_code == 404
    assert "root:" not in reply.text


def test_no_error_of_a_broken_model_reveals_a_path(tmp_path: Path) -> None:
    """Over HTTP, with one process per model."""
    for name in ("tokenizer", "weights", "template", "gone"):
        tiny.write(tmp_path / name)
    models = [str(folder) for folder in sorted(tmp_path.iterdir())]
    with (
        run_server(*models) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
    ):
        (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
        (tmp_path / "weights" / "model.safetensors").write_bytes(b"garbage")
        (tmp_path / "template" / "tokenizer_config.json").write_text('{"chat_template": [1]}')
        shutil.rmtree(tmp_path / "gone")
        num_errors = 0
        for name in ("tokenizer", "weights", "template", "gone"):
            chat = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
            client.post("/v1/models/unload", json={"model": name})
            for path, body in (
                (COMPLETIONS, {"model": name, "prompt": "hi", "guided_regex": "a+"}),
                (CHAT, chat),
                (CHAT, {**chat, "stream": True}),
                ("/v1/embeddings", {"model": name, "input": "hi"}),
                ("/v1/models/load", {"model": name}),
            ):
                reply = client.post(path, json=body)
                num_errors += '"error":{' in reply.text
                for reply_ in (reply, *map(client.get, ("/v1/models", "/v1/status", "/health"))):
                    # an administrator sees the folder of each model
                    text = re.sub(r'"root":"[^"]*"', "", reply_.text)
                    assert str(tmp_path) not in text, (name, path)
                    assert "site-packages" not in reply_.text, (name, path)
        assert num_errors == 4 * 5
        log = server.log_text()
    assert str(tmp_path / "weights" / "model.safetensors") in log


@pytest.mark.exhaustive
@pytest.mark.timing
def test_names_that_are_paths_do_not_disturb_other_clients(victim: Victim) -> None:
    requests = [{"model": name, "prompt": "hi"} for name in hidden_names(victim.disk)]
    result = victim.attack(build_attack((COMPLETIONS, body) for body in requests))
    assert set(result.statuses) == {"404"}


@pytest.mark.parametrize("name", sorted(ESCAPES.keys() - {"range", "loops"}))
def test_a_template_cannot_escape_the_sandbox(victim: Victim, name: str) -> None:
    """The template comes with the model, and is untrusted."""
    body = {"model": "hostile", "messages": [{"role": "user", "content": name}]}
    reply = post(victim, CHAT, body)
    assert reply.status_code in (400, 500), reply.text
    assert reply.json()["error"]["message"]
    assert not victim.marker.exists()
    assert "root:" not in reply.text


# `range` exceeds the limit by up to 10 ms on a slow processor (EPYC, Zen 3: 0.068 to 0.085 s)
@pytest.mark.parametrize(
    "name", ["loops", "compare", "memory", pytest.param("range", marks=pytest.mark.exhaustive)]
)
@pytest.mark.timing
def test_an_endless_template_does_not_disturb_other_clients(victim: Victim, name: str) -> None:
    body = {"model": "hostile", "messages": [{"role": "user", "content": name}]}
    reply = post(victim, CHAT, body)
    assert reply.status_code in (400, 500), reply.text
    attack = replace(build_attack([(CHAT, body)], threads=4), startup=1.0)
    assert set(victim.attack(attack).statuses) <= {"400", "500", "429"}


def test_a_message_is_not_rendered_as_a_template(victim: Victim) -> None:
    """The content of a message is inserted unchanged, between the same texts of the template."""
    for content in (
        "{{ 7 * 7 }}",
        "{% for m in messages %}x{% endfor %}",
        "{# gone #}",
        "{{",
        "%}",
    ):
        messages = [{"role": "user", "content": content}]
        reply = post(victim, CHAT, {"model": "tiny", "messages": messages, "max_tokens": 1})
        expected = len(f"user: {content}\nassistant: ")  # one token per character
        assert reply.json()["usage"]["prompt_tokens"] == expected, content


EXPRESSIONS = [
    "(a+)+$",
    "(a|a)*b",
    "(a|aa)+$",
    "(.*a){30}",
    "([a-zA-Z]+)*z",
    "(x+x+)+y",
    "((a{1,100}){1,100}){1,100}",
    "(?:a?){5000}a{5000}",
    ".*" * 500,
    "(" * 5000,
    "[a-z]{1,100000}",
]


def requests_with_patterns() -> list[tuple[str, dict[str, Any]]]:
    """Requests with pathological regular expressions, in every field that accepts one."""
    base = {"model": "tiny", "max_tokens": 24, "logit_bias": {"97": 20}}
    requests_: list[tuple[str, dict[str, Any]]] = []
    for pattern in EXPRESSIONS:
        schema = {"type": "string", "pattern": pattern}
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        chat = {**base, "messages": [{"role": "user", "content": "a" * 50}]}
        requests_.append((CHAT, {**chat, "response_format": response_format}))
        requests_.append((COMPLETIONS, {**base, "prompt": "a" * 50, "guided_regex": pattern}))
    return requests_


def build_schemas() -> list[dict[str, Any]]:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        nested = {"type": "array", "items": nested}
    many = {f"p{n}": {"type": "string", "maxLength": 1000 + n} for n in range(300)}
    exponential: dict[str, Any] = {"anyOf": [{"const": "a" * n} for n in range(1, 100)]}
    for _ in range(3):
        exponential = {
            "type": "array",
            "items": {"anyOf": [exponential, exponential]},
            "minItems": 10_000,
        }
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    return [
        nested,
        {"type": "object", "properties": many, "additionalProperties": False},
        exponential,
        loop,
        {"type": "array", "items": {"enum": list(range(4_000))}, "maxItems": 100_000},
    ]


@pytest.mark.exhaustive
@pytest.mark.timing
def test_pathological_expressions_do_not_disturb_other_clients(victim: Victim) -> None:
    requests = requests_with_patterns()
    for path, body in requests:
        reply = post(victim, path, body)
        assert reply.status_code in (200, 400), reply.text
    result = victim.attack(build_attack(requests))
    assert set(result.statuses) <= {"200", "400", "429"}


@pytest.mark.timing
def test_pathological_schemas_do_not_disturb_other_clients(victim: Victim) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    for schema in build_schemas():
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        requests.append((CHAT, {**body, "max_tokens": 8, "response_format": response_format}))
        reply = post(victim, *requests[-1])
        assert reply.status_code in (200, 400), reply.text
    result = victim.attack(build_attack(requests))
    assert set(result.statuses) <= {"200", "400", "429"}


@pytest.mark.exhaustive
@pytest.mark.timing
def test_stop_strings_that_almost_match_do_not_disturb_other_clients(victim: Victim) -> None:
    """Every letter of the answer may be the beginning of each of them."""
    stops = ["a" * length + "b" for length in (500, 499, 498, 497)]
    body = {"model": "tiny", "prompt": "a", "stop": stops, "max_tokens": 200}
    body |= {"logit_bias": {"97": 100}}

    result = victim.attack(build_attack([(COMPLETIONS, body)]))
    assert set(result.statuses) <= {"200", "400", "429"}


def compress_spaces() -> bytes:
    """50 MB of spaces in 50 kB."""
    compressed = gzip.compress(b" " * (50 << 20), 9)
    assert len(compressed) < 100_000
    return compressed


def test_a_compressed_body_is_not_decompressed(victim: Victim) -> None:
    compressed = compress_spaces()
    for encoding in ("gzip", "GZip", "gzip, gzip", "deflate", "br", "zstd"):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        reply = victim.client.post(CHAT, content=compressed, headers=headers)
        assert reply.status_code == 415, reply.text
        assert reply.json()["error"]["code"] == "unsupported_content_encoding"


@pytest.mark.timing
def test_compressed_bodies_do_not_disturb_other_clients(victim: Victim) -> None:
    body = compress_spaces()
    request = head("POST", CHAT, Content_Length=len(body), Content_Encoding="gzip") + body
    result = victim.attack(Attack([[Send(request), Read()]], threads=2))
    assert set(result.statuses) <= {"415", "none"}


FORGED = "2026-01-01 00:00:00,000 INFO app: FORGED"


def test_a_client_cannot_forge_log_lines(victim: Victim) -> None:
    hostile = f"x\n{FORGED}\r\n{FORGED}\u2028{FORGED}\x85{FORGED}\x1b[2J\x1b]0;title\x07\u202e"
    post(
        victim,
        COMPLETIONS,
        {"model": hostile, "prompt": hostile, "stop": [hostile], "user": hostile},
    )
    post(victim, COMPLETIONS, {"model": "tiny", "prompt": hostile, hostile: hostile})
    post(victim, CHAT, {"model": "tiny", "messages": [{"role": hostile, "content": hostile}]})
    post(victim, "/v1/models/load", {"model": hostile})
    victim.client.get("/nowhere", params={hostile: hostile}, headers={"user-agent": "a\tb"})
    victim.client.get(raw_url(victim, f"/v1/models/{quote(hostile)}"))
    victim.client.get(raw_url(victim, f"/{quote(hostile)}"), headers={"x-request-id": "a\tb"})
    log = victim.server.log_text()
    assert "\x1b" not in log
    assert "\u202e" not in log
    assert [line for line in re.split("[\r\n\u2028\x85]", log) if line.startswith("2026-01")] == []
