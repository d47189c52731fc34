"""A client of ours, with or without a key: what it sends may cost it time, and nobody else."""

import gzip
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests import tiny
from tests.attacks.attacker import Attack, Read, Send
from tests.attacks.conftest import ESCAPES, Victim
from tests.http import lines
from tests.http.lines import head
from tests.server_process import TIMEOUT, run_server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def post(victim: Victim, path: str, body: dict[str, Any]) -> httpx.Response:
    return victim.client.post(path, json=body)


def requests(asked: Iterable[tuple[str, dict[str, Any]]], threads: int = 2) -> Attack:
    """Each of these, on a connection of its own, one after the other."""
    return Attack([[Send(lines.post(body, path)), Read()] for path, body in asked], threads)


def raw(victim: Victim, path: str) -> httpx.URL:
    """As it stands, where httpx would tidy dots away."""
    return httpx.URL(victim.server.url).copy_with(raw_path=path.encode())


def names(disk: Path) -> list[str]:
    """Ways to write a model's folder that is there, but is not served."""
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
    """And nothing in an answer tells whether a path leads somewhere."""
    for name in names(victim.disk):
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
    there, not_there = (
        post(victim, COMPLETIONS, {"model": str(victim.disk / name), "prompt": "hi"}).text
        for name in ("hidden", "absent")
    )
    assert there.replace("hidden", "absent") == not_there


@pytest.mark.parametrize(
    "path",
    ["../hidden", "..%2fhidden", "%2e%2e/hidden", "tiny/../../hidden", "%2fetc%2fpasswd", "%00"],
)
def test_a_path_of_the_api_leads_to_no_file(victim: Victim, path: str) -> None:
    reply = victim.client.get(raw(victim, f"/v1/models/{path}"))
    assert reply.status_code == 404
    assert "root:" not in reply.text


def test_no_error_of_a_broken_model_reveals_a_path(tmp_path: Path) -> None:
    """Over HTTP, where each model has a process of its own."""
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
        failed = 0
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
                failed += '"error":{' in reply.text
                for seen in (reply, *map(client.get, ("/v1/models", "/v1/status", "/health"))):
                    assert str(tmp_path) not in seen.text, (name, path)
                    assert "site-packages" not in seen.text, (name, path)
        assert failed == 4 * 5
        log = server.log_text()
    assert str(tmp_path / "weights" / "model.safetensors") in log


def test_names_that_are_paths_disturb_nobody(victim: Victim) -> None:
    asked = [{"model": name, "prompt": "hi"} for name in names(victim.disk)]
    seen = victim.undisturbed(requests((COMPLETIONS, body) for body in asked))
    assert set(seen.statuses) == {"404"}


@pytest.mark.parametrize("way", sorted(ESCAPES.keys() - {"range", "loops"}))
def test_a_template_does_not_get_out_of_its_sandbox(victim: Victim, way: str) -> None:
    """The template comes with the model, and so from a stranger."""
    body = {"model": "hostile", "messages": [{"role": "user", "content": way}]}
    reply = post(victim, CHAT, body)
    assert reply.status_code in (400, 500), reply.text
    assert reply.json()["error"]["message"]
    assert not victim.marker.exists()
    assert "root:" not in reply.text


@pytest.mark.parametrize("way", ["range", "loops"])
def test_a_template_without_end_disturbs_nobody(victim: Victim, way: str) -> None:
    body = {"model": "hostile", "messages": [{"role": "user", "content": way}]}
    reply = post(victim, CHAT, body)
    assert reply.status_code in (400, 500), reply.text
    seen = victim.undisturbed(requests([(CHAT, body)], threads=4))
    assert set(seen.statuses) <= {"400", "500", "429"}


def test_a_message_is_no_template(victim: Victim) -> None:
    """What a user says is put in as it is: the template's words around it are the same."""
    for content in (
        "{{ 7 * 7 }}",
        "{% for m in messages %}x{% endfor %}",
        "{# gone #}",
        "{{",
        "%}",
    ):
        messages = [{"role": "user", "content": content}]
        reply = post(victim, CHAT, {"model": "tiny", "messages": messages, "max_tokens": 1})
        expected = len(f"user: {content}\nassistant: ")  # a token each
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


def expressions() -> list[tuple[str, dict[str, Any]]]:
    """Requests whose grammar was made to take for ever, wherever an expression may stand."""
    base = {"model": "tiny", "max_tokens": 24, "logit_bias": {"97": 20}}
    found: list[tuple[str, dict[str, Any]]] = []
    for pattern in EXPRESSIONS:
        schema = {"type": "string", "pattern": pattern}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        chat = {**base, "messages": [{"role": "user", "content": "a" * 50}]}
        found.append((CHAT, {**chat, "response_format": wanted}))
        found.append((COMPLETIONS, {**base, "prompt": "a" * 50, "guided_regex": pattern}))
    return found


def schemas() -> list[dict[str, Any]]:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    many = {f"p{n}": {"type": "string", "maxLength": 1000 + n} for n in range(300)}
    fan: dict[str, Any] = {"anyOf": [{"const": "a" * n} for n in range(1, 100)]}
    for _ in range(3):
        fan = {"type": "array", "items": {"anyOf": [fan, fan]}, "minItems": 10_000}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    return [
        deep,
        {"type": "object", "properties": many, "additionalProperties": False},
        fan,
        loop,
        {"type": "array", "items": {"enum": list(range(4_000))}, "maxItems": 100_000},
    ]


def test_expressions_that_never_end_disturb_nobody(victim: Victim) -> None:
    asked = expressions()
    for path, body in asked:
        reply = post(victim, path, body)
        assert reply.status_code in (200, 400), reply.text
    seen = victim.undisturbed(requests(asked))
    assert set(seen.statuses) <= {"200", "400", "429"}


def test_schemas_that_never_end_disturb_nobody(victim: Victim) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    for schema in schemas():
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        asked.append((CHAT, {**body, "max_tokens": 8, "response_format": wanted}))
        reply = post(victim, *asked[-1])
        assert reply.status_code in (200, 400), reply.text
    seen = victim.undisturbed(requests(asked))
    assert set(seen.statuses) <= {"200", "400", "429"}


def test_stop_strings_that_almost_match_disturb_nobody(victim: Victim) -> None:
    """Every letter of the answer is the beginning of all of them again."""
    stops = ["a" * length + "b" for length in (500, 499, 498, 497)]
    body = {"model": "tiny", "prompt": "a", "stop": stops, "max_tokens": 200}
    body |= {"logit_bias": {"97": 100}}

    seen = victim.undisturbed(requests([(COMPLETIONS, body)]))
    assert set(seen.statuses) <= {"200", "400", "429"}


def test_a_packed_body_is_not_unpacked(victim: Victim) -> None:
    """50 MB of nothing, in 50 kB."""
    bomb = gzip.compress(b" " * (50 << 20), 9)
    assert len(bomb) < 100_000
    for encoding in ("gzip", "GZip", "gzip, gzip", "deflate", "br", "zstd"):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        reply = victim.client.post(CHAT, content=bomb, headers=headers)
        assert reply.status_code == 415, reply.text
        assert reply.json()["error"]["code"] == "unsupported_content_encoding"
    packed = head("POST", CHAT, Content_Length=len(bomb), Content_Encoding="gzip") + bomb
    seen = victim.undisturbed(Attack([[Send(packed), Read()]], threads=2))
    assert set(seen.statuses) <= {"415", "none"}


FORGED = "2026-01-01 00:00:00,000 INFO app: FORGED"


def test_nothing_that_a_client_says_begins_a_line_of_the_log(victim: Victim) -> None:
    said = f"x\n{FORGED}\r\n{FORGED}\u2028{FORGED}\x85{FORGED}\x1b[2J\x1b]0;title\x07\u202e"
    post(victim, COMPLETIONS, {"model": said, "prompt": said, "stop": [said], "user": said})
    post(victim, COMPLETIONS, {"model": "tiny", "prompt": said, said: said})
    post(victim, CHAT, {"model": "tiny", "messages": [{"role": said, "content": said}]})
    post(victim, "/v1/models/load", {"model": said})
    victim.client.get("/nowhere", params={said: said}, headers={"user-agent": "a\tb"})
    victim.client.get(raw(victim, f"/v1/models/{quote(said)}"))
    victim.client.get(raw(victim, f"/{quote(said)}"), headers={"x-request-id": "a\tb"})
    log = victim.server.log_text()
    assert "\x1b" not in log
    assert "\u202e" not in log
    assert [line for line in re.split("[\r\n\u2028\x85]", log) if line.startswith("2026-01")] == []
