"""The fields that clients read from model lists: strict readers, as schemas."""

import math
import re
from dataclasses import replace
from typing import Any

import jsonschema_rs

from tests.fakes import CARD, DETAILS, READY, FakeGenerate

TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}


def strict(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


# Zed's LocalModelListing: a missing key fails the whole list
ZED = strict(
    models={
        "type": "array",
        "items": strict(
            name=TEXT,
            modified_at=TEXT,
            size=NUMBER,
            digest={"type": "string", "pattern": "^[0-9a-f]{64}$"},
            details=strict(format=TEXT, family=TEXT, parameter_size=TEXT, quantization_level=TEXT),
        ),
    }
)
# Copilot's and the Python client's
SHOW = strict(
    capabilities={
        "type": "array",
        "items": {"enum": ["completion", "tools", "insert", "thinking"]},
    },
    model_info=strict(**{"general.architecture": TEXT, "general.basename": TEXT}),
    details=strict(family=TEXT),
    template=TEXT,
    parameters=TEXT,
)


def test_the_version_has_only_numbers_and_dots(call):
    """Open WebUI splits it into integers; Copilot needs 0.6.4 or newer."""
    version = call("GET", "/api/version").json["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_the_root_has_the_text_that_launchers_check(call):
    reply = call("GET", "/")
    assert (reply.body, reply.headers["content-type"]) == (
        b"Ollama is running",
        "text/plain; charset=utf-8",
    )
    assert call("HEAD", "/").status == 200


def test_tags_have_every_key_of_strict_readers(generate: FakeGenerate, call):
    generate.cards = (CARD, replace(CARD, id="qwen3:8b"))
    got = call("GET", "/api/tags").json
    jsonschema_rs.validate(ZED, got)
    assert [one["model"] for one in got["models"]] == ["fake/model:latest", "qwen3:8b"]
    assert got["models"][0]["details"]["parameter_size"] == "8.19B"


def test_ps_lists_what_is_loaded_with_dates_that_python_can_read(generate: FakeGenerate, call):
    [one] = call("GET", "/api/ps").json["models"]
    assert (one["model"], one["size"], one["context_length"]) == (
        "fake/model:latest",
        READY.stats.allocated_bytes,
        4096,
    )
    assert one["expires_at"] == "2318-01-01T00:00:00Z"
    generate.runner_status = replace(READY, state="loading")
    assert call("GET", "/api/ps").json == {"models": []}


def test_show_has_every_key_of_strict_readers(generate: FakeGenerate, call):
    got = call("POST", "/api/show", {"name": "FAKE/model"}).json
    jsonschema_rs.validate(SHOW, got)
    info = got["model_info"]
    prefix = info["general.architecture"]
    assert info[f"{prefix}.context_length"] == 4096
    assert info["general.basename"] == "FAKE/model"
    assert got["parameters"].split() == ["num_ctx", "4096"]
    assert ".Suffix" in got["template"]
    assert "tensors" not in got
    [tensor] = call("POST", "/api/show", {"model": CARD.id, "verbose": True}).json["tensors"]
    assert tensor == {"name": "lm_head.weight", "type": "BF16", "shape": [256, 64]}


def test_show_lists_the_parts_that_a_preset_adds(generate: FakeGenerate, call):
    generate.details = replace(
        DETAILS,
        system="Rhyme.",
        messages=(("user", "a"), ("assistant", "b")),
        parent="base",
        defaults={"temperature": 0.5},
        stop=("\n",),
        keep_alive=math.inf,
    )
    got = call("POST", "/api/show", {"model": CARD.id}).json
    assert got["system"] == "Rhyme."
    assert got["messages"][1] == {"role": "assistant", "content": "b"}
    assert got["details"]["parent_model"] == "base"
    assert 'PARAMETER stop "\\n"' in got["modelfile"]
    assert 'MESSAGE user "a"' in got["modelfile"]


def test_an_unknown_model_is_an_error(call):
    assert call("POST", "/api/show", {"model": "no"}).json == {"error": "model 'no' not found"}
    assert call("POST", "/api/show", {}).json == {"error": "model is required"}


def test_routes_that_require_an_account_do_not_exist(call):
    for path in ("/api/me", "/api/signout", "/api/experimental/x"):
        reply = call("POST", path, {})
        assert reply.status == 404
        assert isinstance(reply.json["error"], str)
