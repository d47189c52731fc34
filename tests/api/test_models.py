"""Endpoints that load and unload models."""

import math
from dataclasses import replace
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from tests.fakes import PREVIEW, FakeGenerate
from tests.rows import rows

LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
DEFAULTS = "/v1/models/defaults"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_a_model_is_loaded_with_its_keep_alive(call: Any, generate: FakeGenerate):
    reply = call("POST", LOAD, {"model": "fake/model", "keep_alive": -1})
    assert (reply.status, reply.json["id"], reply.json["state"]) == (200, "fake/model", "ready")
    call("POST", LOAD, {"model": "fake/model"})
    assert generate.loaded == [("fake/model", math.inf), ("fake/model", None)]


def test_a_model_is_unloaded(call: Any, generate: FakeGenerate):
    reply = call("POST", UNLOAD, {"model": "fake/model"})
    assert (reply.status, reply.json["state"]) == (200, "unloaded")
    assert generate.unloaded == ["fake/model"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD, DEFAULTS])
@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "model"), ({"model": 5}, "model"), ({"model": "fake/model", "modell": 1}, "modell")],
)
def test_an_invalid_field_is_named(call: Any, path: str, body: Any, param: str):
    reply = call("POST", path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_a_failed_load_or_unload_returns_the_error(call: Any, generate: FakeGenerate, path: str):
    generate.open_error = AppError(ErrorKind.MODEL_FILES, "it broke")
    reply = call("POST", path, {"model": "fake/model"})
    assert (reply.status, reply.error["message"]) == (500, "it broke")


def test_an_adapter_is_loaded_and_unloaded(call: Any, generate: FakeGenerate):
    """The replies are vLLM's. If a request names no model, an adapter is loaded into the default
    model, and unloaded from the first model that has it."""
    card = replace(generate.cards[0], id="sql", parent="fake/model")
    generate.cards = [*generate.cards, card]
    body = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    reply = call("POST", LOAD_ADAPTER, body)
    assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'sql' added successfully.")
    call("POST", LOAD_ADAPTER, {**body, "model": "fake/model", "load_inplace": True})
    reply = call("POST", UNLOAD_ADAPTER, {"lora_name": "sql", "lora_int_id": 1})
    assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'sql' removed successfully.")
    call("POST", UNLOAD_ADAPTER, {"lora_name": "sql", "model": "fake/model"})
    assert generate.adapters == [
        ("fake/model", "sql", "/adapters/sql"),
        ("fake/model", "sql", "/adapters/sql", "in place"),
        ("sql", "sql"),
        ("fake/model", "sql"),
    ]


@rows(
    ("path", "body", "status", "param"),
    [
        (LOAD_ADAPTER, {"lora_name": "a"}, 400, "lora_path"),
        (LOAD_ADAPTER, {"lora_path": "/a"}, 400, "lora_name"),
        (LOAD_ADAPTER, {"lora_name": "a", "lora_path": 5}, 400, "lora_path"),
        (LOAD_ADAPTER, {"lora_name": "a", "lora_path": "/a", "load_inplac": True}, 400, None),
        (LOAD_ADAPTER, {"lora_name": "a", "lora_path": "/a", "model": "b"}, 404, "model"),
        (UNLOAD_ADAPTER, {}, 400, "lora_name"),
        (UNLOAD_ADAPTER, {"lora_name": "a", "lora_int_id": "1"}, 400, "lora_int_id"),
        (UNLOAD_ADAPTER, {"lora_name": "a"}, 404, "model"),
    ],
)
def test_an_invalid_adapter_request_is_an_error(
    call: Any, generate: FakeGenerate, path: str, body: Any, status: int, param: str | None
):
    reply = call("POST", path, body)
    assert reply.status == status
    assert reply.error["param"] == (param or "load_inplac")
    assert generate.adapters == []


def test_defaults_are_read_and_replaced(call: Any, generate: FakeGenerate):
    given = {
        "aliases": ["m"],
        "system": "Be brief.",
        "context": 512,
        "keep_alive": "5m",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
    }
    body = {"model": "fake/model", "defaults": given}
    reply = call("POST", DEFAULTS, body)
    assert reply.json == {
        "id": "fake/model",
        "object": "model.defaults",
        "defaults": {**given, "keep_alive": 300},
        "saved": True,
    }
    assert generate.defaults["fake/model"].sampling == {"temperature": 0.5, "top_k": 3}
    reply = call("POST", DEFAULTS, {"model": "fake/model"})
    assert (reply.json["defaults"], reply.json["saved"]) == ({**given, "keep_alive": 300}, None)
    # what is absent, null or blank is reset
    body = {"model": "fake/model", "defaults": {"aliases": None, "system": " ", "keep_alive": -1}}
    assert call("POST", DEFAULTS, body).json["defaults"] == {"keep_alive": -1}
    assert generate.defaults["fake/model"].keep_alive == math.inf


@rows(
    ("defaults", "param"),
    [
        ({"aliases": [""]}, "defaults.aliases"),
        ({"aliases": ["a\nb"]}, "defaults.aliases"),
        ({"aliases": ["a", "a"]}, "defaults.aliases"),
        ({"system": 5}, "defaults.system"),
        ({"context": 1}, "defaults.context"),
        ({"temperature": 9}, "defaults.temperature"),
        ({"top_k": 1.5}, "defaults.top_k"),
        ({"temprature": 1}, "defaults.temprature"),
        ([], "defaults"),
    ],
)
def test_an_invalid_default_is_named_and_nothing_changes(
    call: Any, generate: FakeGenerate, defaults: Any, param: str
):
    reply = call("POST", DEFAULTS, {"model": "fake/model", "defaults": defaults})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert generate.defaults == {}


@rows(
    ("changes", "problem"),
    [
        ({}, None),
        (
            {"missing": 9_000_000_000},
            "the download needs 9.00 GB on the disk, but only 5.00 GB is available",
        ),
        ({"disk_available": -1}, "the download needs 2.00 GB on the disk, but only 0 B is"),
        (
            {"memory_needed": 9 << 30},
            "the model needs 9.00 GiB of memory, but only 8.00 GiB is available",
        ),
    ],
)
def test_a_preview_says_whether_a_download_fits(
    call: Any, generate: FakeGenerate, changes: Any, problem: str | None
):
    generate.library.previewed = preview = replace(PREVIEW, **changes)
    reply = call("POST", "/v1/models/preview", {"model": "org/model"}).json
    assert generate.library.calls[-1] == ("preview", "org/model")
    assert (reply["id"], reply["size"], reply["missing"]) == (
        *("org/model", 3_000_000_000, preview.missing),
    )
    assert reply["memory"] == {"needed": preview.memory_needed, "available": 8 << 30}
    assert reply["fits"] == (problem is None)
    assert (reply["problem"] or "").startswith(problem or "")


def test_a_browser_form_cannot_unload_a_model(call: Any, generate: FakeGenerate):
    reply = call("POST", UNLOAD, b"model=fake/model", {"content-type": "text/plain"})
    assert reply.status == 415
    assert not generate.unloaded
