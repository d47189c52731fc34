"""Names, manifests and blobs of Ollama's store, and what may be wrong with them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from app import store
from tests.store.asking import refusal
from tests.store.ollama_store import OllamaStore


def _rot(blob: Path) -> None:
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("tiny", "registry.ollama.ai/library/tiny/latest"),
        ("tiny:4b", "registry.ollama.ai/library/tiny/4b"),
        ("me/tiny:4b", "registry.ollama.ai/me/tiny/4b"),
        ("example.org:5000/me/tiny:4b", "example.org:5000/me/tiny/4b"),
    ],
)
def test_a_name_leads_to_its_manifest(
    ollama: OllamaStore, layers: list[dict[str, Any]], name: str, parts: str
) -> None:
    path = ollama.write(name, layers)
    assert path == ollama.root / "manifests" / parts
    assert store.find(name).path == path
    assert store.find(name).name == name
    assert [entry.name for entry in store.list_installed()] == ["builtin", name]


def test_latest_goes_without_saying(ollama: OllamaStore, layers: list[dict[str, Any]]) -> None:
    ollama.write("tiny", layers)
    assert store.find("registry.ollama.ai/library/tiny:latest").name == "tiny"


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_tensor_blob_that_rotted_is_found_before_it_is_loaded(
    ollama: OllamaStore, layers: list[dict[str, Any]], name: str
) -> None:
    ollama.write("tiny", layers)
    [layer] = [layer for layer in layers if layer.get("name") == name]
    blob = ollama.path_of(layer)
    _rot(blob)
    store.find("tiny")  # reads headers only
    assert f"{blob} is damaged" in refusal(ask=store.resolve)


def test_a_small_blob_that_rotted_is_found_at_once(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    ollama.write("tiny", layers)
    [layer] = [layer for layer in layers if layer.get("name") == "config.json"]
    blob = ollama.path_of(layer)
    blob.write_bytes(blob.read_bytes().replace(b"llama", b"lloma"))
    assert "(config.json) is damaged" in refusal()


def test_a_blob_that_is_cut_off_or_gone_is_named(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    path = ollama.write("tiny", layers)
    blob = ollama.path_of(layers[0])
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-10])
    assert f"{blob} has {len(whole) - 10} bytes, but {path} gives {len(whole)}" in refusal()
    blob.unlink()
    assert f"{path} lists {blob.name}, which is missing" in refusal()
    blob.symlink_to(blob)
    assert str(blob) in refusal()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "has no layers"),
        ('{"layers": {}}', "has no layers"),
        ('{"layers": [3]}', "lacks mediaType, digest or size"),
        ('{"layers": [{"mediaType": "x", "digest": "sha256:0"}]}', "lacks mediaType"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_named(
    ollama: OllamaStore, layers: list[dict[str, Any]], content: str, words: str
) -> None:
    path = ollama.write("tiny", layers)
    path.write_text(content)
    message = refusal()
    assert words in message
    assert str(path) in message


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../../etc/passwd",
        "sha256:" + "0" * 63,
        "sha256-" + "0" * 64,
        "sha512:" + "0" * 64,
        "sha256:" + "A" * 64,
    ],
)
def test_a_digest_that_is_none_is_refused(
    ollama: OllamaStore, layers: list[dict[str, Any]], digest: str
) -> None:
    ollama.write("tiny", [*layers, {**layers[0], "digest": digest}])
    assert "which is not a SHA-256 digest" in refusal()


def test_a_manifest_that_is_a_circle_of_links_is_one_line(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    path = ollama.write("tiny", layers)
    path.unlink()
    path.symlink_to(path)
    assert str(path) in refusal()
    # a packed that holds itself has no end either
    (path.parent / "again").symlink_to(path.parent, target_is_directory=True)
    assert [entry.name for entry in store.list_installed()] == ["builtin", "tiny"]


def test_without_a_setting_the_store_is_where_ollama_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: Path
) -> None:
    monkeypatch.delenv("OLLAMA_MODELS")
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = OllamaStore(tmp_path / ".ollama" / "models")
    at_home.write("tiny", at_home.model(packed))
    assert store.find("tiny").name == "tiny"


def test_what_was_verified_is_not_read_again(
    ollama: OllamaStore, layers: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The memory is told by size and time of change, which this test leaves as they were."""
    ollama.write("tiny", layers)
    store.resolve("tiny")
    known = json.loads((tmp_path / "cache" / "mlxrunner" / "verified.json").read_bytes())
    assert len(known) == len(store.find("tiny").shards)
    blob = ollama.path_of(layers[0])
    before = blob.stat()
    _rot(blob)
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    store.resolve("tiny")
    os.utime(blob, ns=(0, 0))
    assert "is damaged" in refusal(ask=store.resolve)
