"""GGUF files in the folders of LM Studio and llama.cpp. For other models of LM Studio, see
test_folder_shapes.py."""

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from app import store
from app.core.errors import AppError
from app.store.model_names import ModelNotFoundError
from models.gguf import reader
from tests import tiny
from tests.models.gguf.raw_file import gguf, text_entry
from tests.store.gguf.files import write_tiny
from tests.store.gguf.test_model import split_file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.delenv("LLAMA_CACHE", raising=False)
    return tmp_path


def test_files_of_other_programs_are_listed_and_found_by_name(home: Path) -> None:
    studio = home / ".lmstudio/models/org/tiny-GGUF"
    write_tiny(studio / "tiny-Q8_0.gguf")
    (studio / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    write_tiny(home / "cache/llama.cpp/org_other_other-F16.gguf")
    (studio / "broken.gguf").write_bytes(b"GGUF")
    found = {entry.name: entry for entry in store.list_installed() if entry.path.is_file()}
    assert {name: entry.source for name, entry in found.items()} == {
        "broken": "lm studio",
        "tiny-Q8_0": "lm studio",
        "org_other_other-F16": "llama.cpp",
    }
    assert found["tiny-Q8_0"].read().shards == (studio / "tiny-Q8_0.gguf",)
    assert store.resolve("tiny-Q8_0").name == "tiny-Q8_0"
    with pytest.raises(ModelNotFoundError):
        store.resolve("mmproj-tiny")


def test_a_model_of_lm_studio_is_also_named_as_on_the_hub(home: Path) -> None:
    studio = home / ".lmstudio/models/org/tiny-GGUF"
    for label in ("Q8_0", "Q4_0"):
        write_tiny(studio / f"tiny-{label}.gguf")
    files = store.resolve("org/tiny-GGUF:q8_0")
    assert (files.name, files.path) == ("org/tiny-GGUF:Q8_0", studio / "tiny-Q8_0.gguf")
    for name in ("org/tiny-GGUF", "org/tiny-GGUF:Q2_K", "org/tiny-GGUF@main:Q8_0", "org/other"):
        with pytest.raises(ModelNotFoundError):
            store.find(name)
    with pytest.raises(ModelNotFoundError, match=r"in Q4_0, Q8_0: name one .* org/tiny-GGUF:Q4_0;"):
        store.find("org/tiny-GGUF")
    (studio / "tiny-Q4_0.gguf").unlink()
    assert store.find("hf.co/org/tiny-GGUF").path == studio / "tiny-Q8_0.gguf"
    (studio / "tiny-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(AppError, match=r"tiny-Q8_0\.gguf is not a usable GGUF file"):
        store.find("org/tiny-GGUF")


def test_a_file_is_read_again_only_after_a_change(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server scans the folders again for each list of models. Unusable files take the longest."""
    studio = home / ".lmstudio/models/org/tiny-GGUF"
    write_tiny(studio / "good.gguf")
    broken = studio / "broken.gguf"
    broken.write_bytes(gguf([text_entry("general.architecture", "llama")]))
    (studio / "other.gguf").write_bytes(gguf([text_entry("general.architecture", "rwkv9")]))
    read: list[str] = []
    original = reader.read
    monkeypatch.setattr(reader, "read", lambda path: read.append(path.name) or original(path))

    def scan() -> dict[str, str]:
        found: dict[str, str] = {}
        for entry in [one for one in store.list_installed() if one.source == "lm studio"]:
            try:
                found[entry.name] = entry.read().name
            except AppError as error:
                found[entry.name] = f"{type(error).__name__} {error.message}"
        return found

    first = scan()
    assert first["good"] == "good"
    assert first["other"].startswith("UnsupportedGGUFError")
    assert first["broken"].startswith(f"AppError {broken}")
    assert sorted(read) == ["broken.gguf", "good.gguf", "other.gguf"]
    assert scan() == first
    assert len(read) == 3
    write_tiny(broken)
    assert scan()["broken"] == "broken"


def test_a_failure_of_the_disk_is_not_remembered(home: Path) -> None:
    write_tiny(home / "tiny.gguf")
    (home / "cache").write_text("no folder")
    with pytest.raises(AppError, match="cannot be written"):
        store.find(str(home / "tiny.gguf"))
    (home / "cache").unlink()
    assert store.find(str(home / "tiny.gguf")).name == "tiny"


@pytest.mark.parametrize("name", [b"\x1b[31mred", b"two\nlines", b"bad\xff", b"\xe2\x80\xa8"])
def test_a_file_whose_name_is_no_text_is_left_out(home: Path, name: bytes) -> None:
    """Such a name changes a terminal, forges a line of the log, or cannot be sent as JSON."""
    studio = home / ".lmstudio/models/org/tiny-GGUF"
    content = write_tiny(studio / "tiny \u00e9\u6a21\u578b.gguf").read_bytes()
    folder = studio.with_name(os.fsdecode(name))
    try:
        folder.mkdir()
        for path in (folder / "m.gguf", studio / os.fsdecode(name + b".gguf")):
            path.write_bytes(content)
    except OSError:
        pytest.skip("the file system does not allow such names")
    found = {entry.name for entry in store.list_installed() if entry.source == "lm studio"}
    assert found == {"tiny \u00e9\u6a21\u578b"}


def test_a_split_model_is_listed_once_and_a_projector_is_not_a_model(home: Path) -> None:
    studio = home / ".lmstudio/models/org/tiny-GGUF"
    whole = write_tiny(home / "whole.gguf")
    studio.parent.mkdir(parents=True)
    parts = split_file(whole, studio)
    cache = home / "cache/llama.cpp"
    cache.mkdir(parents=True)
    for path in parts:
        (cache / f"org_tiny_{path.name}").write_bytes(path.read_bytes())
    for name in ("org_tiny_mmproj-model-f16.gguf", "mmproj-tiny-Q8_0.gguf"):
        (cache / name).write_bytes(b"GGUF")
    (cache / "manifest=org=tiny=latest.json").write_text("{}")
    (studio / "downloading_tiny-Q4_K_M.gguf.part").write_bytes(b"GGUF")
    found = {entry.name: entry for entry in store.list_installed() if entry.path.is_file()}
    assert {name: entry.path for name, entry in found.items()} == {
        "Tiny": parts[0],
        "org_tiny_Tiny": cache / f"org_tiny_{parts[0].name}",
    }
    assert all(len(entry.read().shards) == 2 for entry in found.values())


def test_a_link_to_a_blob_keeps_its_own_name(home: Path) -> None:
    """As in the Hugging Face cache."""
    whole = write_tiny(home / "blobs/whole.gguf")
    (home / "snapshot").mkdir()
    parts = split_file(whole, home / "parts")
    for number, path in enumerate(parts):
        blob = home / "blobs" / str(number)
        path.rename(blob)
        (home / "snapshot" / path.name).symlink_to(blob)
    files = store.find(str(home / "snapshot" / parts[-1].name))
    assert (files.name, len(files.shards)) == ("Tiny", 2)
    (home / "link").symlink_to(whole)
    assert store.find(str(home / "link")).path == whole
    (home / "link.gguf").symlink_to(whole)
    assert store.find(str(home / "link.gguf")).name == "whole"


def test_the_folder_of_llama_cpp_can_be_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(home / "elsewhere"))
    path = write_tiny(home / "elsewhere/m.gguf")
    assert store.resolve("m").path == path


def test_the_first_of_two_files_with_a_name_is_used(home: Path) -> None:
    for folder in (".lmstudio/models/a/b", ".cache/lm-studio/models/a/b"):
        write_tiny(home / folder / "same.gguf")
    found = [entry for entry in store.list_installed() if entry.name == "same"]
    assert [entry.path for entry in found] == [home / ".lmstudio/models/a/b/same.gguf"]


def test_an_unsupported_architecture_names_the_installed_model_in_another_format(
    home: Path,
) -> None:
    path = home / "plamo-3-2b-Q4_K_M.gguf"
    path.write_bytes(gguf([text_entry("general.architecture", "plamo3")]))
    models = home / ".lmstudio/models/mlx-community"
    tiny.write(models / "plamo-3-2b0-4bit")  # another model
    with pytest.raises(AppError) as caught:
        store.resolve(str(path))
    assert "'plamo3' are not supported" in caught.value.message
    assert "installed" not in caught.value.message
    tiny.write(models / "plamo-3-2b-4bit")
    with pytest.raises(AppError) as caught:
        store.resolve(str(path))
    assert caught.value.message.endswith(
        "; the same model may be installed as mlx-community/plamo-3-2b-4bit"
    )
    repository = Path(constants.HF_HUB_CACHE) / "models--pfn--PLaMo-3-2b"
    tiny.write(repository / "snapshots/0123")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123")
    with pytest.raises(AppError, match=r"installed as pfn/PLaMo-3-2b$"):
        store.resolve(str(path))
