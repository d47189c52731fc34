"""Names, manifests and blobs of Ollama's store, valid and invalid."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from app import store
from tests.store.asking import refusal
from tests.store.ollama_store import OllamaStore


def _corrupt(blob: Path) -> None:
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
def test_a_name_resolves_to_its_manifest(
    ollama: OllamaStore, layers: list[dict[str, Any]], name: str, parts: str
) -> None:
    path = ollama.write(name, layers)
    assert path == ollama.root / "manifests" / parts
    assert store.find(name).path == path
    assert store.find(name).name == name
    assert [entry.name for entry in store.list_installed()] == ["builtin", name]


def test_the_default_registry_and_tag_are_omitted_from_the_name(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    ollama.write("tiny", layers)
    assert store.find("registry.ollama.ai/library/tiny:latest").name == "tiny"


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_corrupt_tensor_blob_is_detected_before_it_is_loaded(
    ollama: OllamaStore, layers: list[dict[str, Any]], name: str
) -> None:
    ollama.write("tiny", layers)
    [layer] = [layer for layer in layers if layer.get("name") == name]
    blob = ollama.path_of(layer)
    _corrupt(blob)
    store.find("tiny")  # reads headers only
    assert f"{blob} is damaged" in refusal(call=store.resolve)


def test_a_corrupt_small_blob_is_detected_at_once(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    ollama.write("tiny", layers)
    [layer] = [layer for layer in layers if layer.get("name") == "config.json"]
    blob = ollama.path_of(layer)
    blob.write_bytes(blob.read_bytes().replace(b"llama", b"lloma"))
    assert "(config.json) is damaged" in refusal()


def test_a_truncated_or_missing_blob_is_named(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    path = ollama.write("tiny", layers)
    blob = ollama.path_of(layers[0])
    content = blob.read_bytes()
    blob.write_bytes(content[:-10])
    assert f"{blob} has {len(content) - 10} bytes, but {path} gives {len(content)}" in refusal()
    blob.unlink()
    assert f"{path} lists {blob.name}, which is missing" in refusal()
    blob.symlink_to(blob)
    assert str(blob) in refusal()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "has no layers"),
        ('{"layers": {}}', "has no layers"),
        ('{"layers": [3]}', "lacks mediaType, digest or size"),
        ('{"layers": [{"mediaType": "x", "digest": "sha256:0"}]}', "lacks mediaType"),
    ],
)
def test_an_invalid_manifest_is_named(
    ollama: OllamaStore, layers: list[dict[str, Any]], content: str, error: str
) -> None:
    path = ollama.write("tiny", layers)
    path.write_text(content)
    message = refusal()
    assert error in message
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
def test_an_invalid_digest_is_rejected(
    ollama: OllamaStore, layers: list[dict[str, Any]], digest: str
) -> None:
    ollama.write("tiny", [*layers, {**layers[0], "digest": digest}])
    assert "which is not a SHA-256 digest" in refusal()


def test_a_circular_link_is_a_one_line_error(
    ollama: OllamaStore, layers: list[dict[str, Any]]
) -> None:
    path = ollama.write("tiny", layers)
    path.unlink()
    path.symlink_to(path)
    assert str(path) in refusal()
    # a folder that contains itself does not cause an endless search
    (path.parent / "again").symlink_to(path.parent, target_is_directory=True)
    assert [entry.name for entry in store.list_installed()] == ["builtin", "tiny"]


def test_the_default_store_is_in_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed_model: Path
) -> None:
    monkeypatch.delenv("OLLAMA_MODELS")
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = OllamaStore(tmp_path / ".ollama" / "models")
    at_home.write("tiny", at_home.model(packed_model))
    assert store.find("tiny").name == "tiny"


def test_verified_blobs_are_not_read_again(
    ollama: OllamaStore, layers: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The cache compares size and modification time, which this test keeps."""
    ollama.write("tiny", layers)
    store.resolve("tiny")
    digests = json.loads((tmp_path / "cache" / "mlxrunner" / "verified.json").read_bytes())
    assert len(digests) == len(store.find("tiny").shards)
    blob = ollama.path_of(layers[0])
    before = blob.stat()
    _corrupt(blob)
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    store.resolve("tiny")
    os.utime(blob, ns=(0, 0))
    assert "is damaged" in refusal(call=store.resolve)
