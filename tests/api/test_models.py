"""Endpoints that load and unload models."""

import math
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from tests.fakes import FakeGenerate

LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"


def test_a_model_is_loaded_with_its_keep_alive(call: Any, generate: FakeGenerate):
    reply = call("POST", LOAD, {"model": "fake/model", "keep_alive": -1})
    assert (reply.status, reply.json["id"], reply.json["state"]) == (200, "fake/model", "ready")
    call("POST", LOAD, {"model": "fake/model"})
    assert generate.loaded == [("fake/model", math.inf), ("fake/model", None)]


def test_a_model_is_unloaded(call: Any, generate: FakeGenerate):
    reply = call("POST", UNLOAD, {"model": "fake/model"})
    assert (reply.status, reply.json["state"]) == (200, "unloaded")
    assert generate.unloaded == ["fake/model"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
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


def test_a_browser_form_cannot_unload_a_model(call: Any, generate: FakeGenerate):
    reply = call("POST", UNLOAD, b"model=fake/model", {"content-type": "text/plain"})
    assert reply.status == 415
    assert not generate.unloaded
