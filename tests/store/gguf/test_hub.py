"""GGUF files of repositories on the hub: one quantization is downloaded, found and listed."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from app import store
from app.commands.pull import pull
from app.core.errors import AppError
from app.store import installed
from app.store.hub import cache
from app.store.hub.download_plan import plan_download
from app.store.hub.required_files import get_quantization, select_gguf
from app.store.hub.weight_headers import read_gguf_config
from app.store.model_names import HubName, ModelNotFoundError, parse_hub_name
from tests.models.gguf.raw_file import ARRAY, STRING, array, entry, gguf, string, tensor, text_entry
from tests.store.gguf.files import write_tiny
from tests.store.gguf.test_model import split_file
from tests.store.stand_in import StandIn

REPO = "org/Tiny-GGUF"


@pytest.fixture
def remote(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "remote"
    for number, label in enumerate(("Q4_K_M", "Q8_0")):
        write_tiny(folder / f"Tiny-{label}.gguf", seed=number)
    (folder / "mmproj-Tiny-F16.gguf").write_bytes(b"GGUF")
    (folder / "README.md").write_text("Tiny")
    split = split_file(folder / "Tiny-Q8_0.gguf", folder / "BF16")
    for path in split:
        path.rename(path.with_name(path.name.replace("Tiny-", "Tiny-BF16-")))
    hub.add(REPO, folder)
    return folder


def test_a_name_can_select_a_quantization() -> None:
    expected = HubName(repo_id="org/name", quantization="Q4_K_M")
    for text in ("org/name:Q4_K_M", "hf.co/org/name:Q4_K_M", "huggingface.co/org/name:Q4_K_M"):
        assert parse_hub_name(text) == expected
    assert str(expected) == "org/name:Q4_K_M"
    assert parse_hub_name("org/name@main:IQ4_XS") == HubName(
        repo_id="org/name", revision="main", quantization="IQ4_XS"
    )
    assert parse_hub_name("hf.co/org/name") == HubName(repo_id="org/name")
    # a tag of Ollama
    assert parse_hub_name("org/name:8b") is None


def test_one_quantization_is_downloaded_and_found(
    remote: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"hf.co/{REPO}:Q8_0"
    with pytest.raises(ModelNotFoundError, match="not in the Hugging Face cache"):
        store.find(name)
    pull(name, None)
    assert f"{REPO}:Q8_0 is complete" in capsys.readouterr().out
    files = store.resolve(name)
    assert files.name == f"{REPO}:Q8_0"
    assert files.path.read_bytes() == (remote / "Tiny-Q8_0.gguf").read_bytes()
    names = sorted(path.name for path in files.path.parent.iterdir())
    assert names == ["Tiny-Q8_0.gguf", "mmproj-Tiny-F16.gguf"]
    # the only one in the cache
    assert store.find(REPO).path == files.path
    listed = [entry for entry in store.list_installed() if entry.source == "hub"]
    assert [entry.name for entry in listed] == [f"{REPO}:Q8_0"]
    assert listed[0].read().path == files.path


def test_the_usual_quantization_is_downloaded_by_default(remote: Path) -> None:
    pull(REPO, None)
    assert store.find(REPO).path.name == "Tiny-Q4_K_M.gguf"


def test_a_split_model_in_a_folder_is_downloaded(remote: Path) -> None:
    pull(f"{REPO}:BF16", None)
    assert len(store.resolve(f"{REPO}:BF16").shards) == 2


def test_an_unknown_quantization_is_rejected_with_those_that_exist(remote: Path) -> None:
    with pytest.raises(AppError, match=r"no GGUF file Q2_K; it has: BF16, Q4_K_M, Q8_0"):
        pull(f"{REPO}:Q2_K", None)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Tiny-Q4_K_M.gguf", "Q4_K_M"),
        ("tiny.q8_0.gguf", "Q8_0"),
        ("Tiny-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Q8_0/Tiny-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("mmproj-Tiny-F16.gguf", None),
        ("Tiny-mmproj-F16.gguf", None),
        ("../Tiny-Q8_0.gguf", None),
        ("a/b/Tiny-Q8_0.gguf", None),
        ("Tiny.gguf", None),
        ("README.md", None),
    ],
)
def test_the_label_is_read_from_the_name(path: str, label: str | None) -> None:
    assert get_quantization(path) == label


def test_two_models_with_one_label_are_ambiguous() -> None:
    with pytest.raises(AppError, match=r"several GGUF files Q8_0: a-Q8_0\.gguf, b-Q8_0\.gguf"):
        select_gguf("org/x", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")


def test_one_of_two_quantizations_is_deleted(remote: Path) -> None:
    for label in ("Q4_K_M", "Q8_0"):
        pull(f"{REPO}:{label}", None)
    blob = store.find(f"{REPO}:Q8_0").path.resolve()
    with pytest.raises(FileNotFoundError):
        cache.delete_repository(HubName(repo_id=REPO, quantization="Q2_K"))
    installed.delete_model(installed.find_removable(f"hf.co/{REPO}:q8_0"))
    assert not blob.exists()
    with pytest.raises(ModelNotFoundError):
        store.find(f"{REPO}:Q8_0")
    assert store.find(f"{REPO}:Q4_K_M").path.is_file()
    installed.delete_model(installed.find_removable(f"{REPO}:Q4_K_M"))
    assert not cache.repo_folder(REPO).exists()


def test_the_files_of_another_format_are_kept(remote: Path, tiny_model: Path) -> None:
    for path in tiny_model.iterdir():
        (remote / path.name).write_bytes(path.read_bytes())
    for name in (REPO, f"{REPO}:Q8_0"):
        pull(name, None)
    cache.delete_repository(HubName(repo_id=REPO, quantization="Q8_0"))
    assert store.find(REPO).shards[0].suffix == ".safetensors"


def test_a_file_that_cannot_be_served_is_not_downloaded(hub: StandIn, tmp_path: Path) -> None:
    """Its header is enough to know, which is read in ranges."""
    words = [string("word" * 100) for _ in range(15_000)]
    header = [text_entry("general.architecture", "plamo3"), entry("a", ARRAY, array(STRING, words))]
    content = gguf(header, [tensor("t", (1 << 22,), 0, 0)], bytes(1 << 24))
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "Odd-Q8_0.gguf").write_bytes(content)
    hub.add(REPO, tmp_path / "remote")
    with pytest.raises(AppError) as caught:
        pull(REPO, None)
    assert caught.value.message.startswith(f"{REPO}/Odd-Q8_0.gguf: ")
    assert "'plamo3' are not supported" in caught.value.message
    assert caught.value.message.endswith("; nothing was downloaded")
    ends = [request.end for request in hub.downloads(".gguf")]
    assert None not in ends
    assert max(end for end in ends if end is not None) < len(content) - (1 << 20)


def test_factors_of_rotary_frequencies_are_known_before_the_download(
    hub: StandIn, tmp_path: Path
) -> None:
    """They are tensors, but a part of the config."""
    factors = np.linspace(1, 8, 4, dtype=np.float32)
    path = write_tiny(
        tmp_path / "remote/Tiny-F32.gguf",
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    hub.add(REPO, path.parent)
    config = read_gguf_config(plan_download(HubName(repo_id=REPO)))
    assert config == store.find(str(path)).config
    assert config["rope_scaling"]["short_factor"] == factors.tolist()


def test_a_full_disk_is_detected_before_the_download(
    remote: Path, hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header was read, but nothing is left on the disk."""
    full = shutil._ntuple_diskusage(1 << 40, (1 << 40) - 5_000, 5_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(AppError, match=r"org/Tiny-GGUF:Q8_0 needs .* more on the disk"):
        pull(f"{REPO}:Q8_0", None)
    assert not list(cache.cache_folder().rglob("*.gguf"))


def test_a_file_with_another_digest_is_downloaded_again(remote: Path) -> None:
    """It was damaged on the disk: a second pull downloads it again."""
    pull(f"{REPO}:Q8_0", None)
    blob = store.find(f"{REPO}:Q8_0").path.resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    pull(f"{REPO}:Q8_0", None)
    assert blob.read_bytes() == (remote / "Tiny-Q8_0.gguf").read_bytes()
