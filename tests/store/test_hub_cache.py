"""Models in the hub cache, including those of other tools; no network is used."""

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from app import store
from app.core.errors import AppError
from app.store.hub import cache
from app.store.hub.download import download
from app.store.hub.download_plan import plan_download
from app.store.model_names import HubName, ModelNotFoundError
from tests import tiny
from tests.store.asking import NAME, WEIGHTS, complaint, find, pull
from tests.store.stand_in import StandIn


def test_main_moves_only_with_another_pull(hub: StandIn, commit: str, tmp_path: Path) -> None:
    old = pull()
    newer = hub.add(NAME.repo_id, tiny.write(tmp_path / "newer", seed=1))
    assert find().path == old
    assert pull().name == newer
    assert find().path.name == newer
    # as `list` shows it
    assert find(HubName(repo_id=NAME.repo_id, revision=commit[:12])).path == old


def test_an_interrupted_update_keeps_the_old_revision(
    hub: StandIn, commit: str, tmp_path: Path
) -> None:
    old = pull()
    hub.add(NAME.repo_id, tiny.write(tmp_path / "newer", seed=1))
    hub.faults.status[WEIGHTS] = 500
    complaint(pull)
    assert find().path == old


def test_the_cache_makes_no_requests(hub: StandIn, commit: str) -> None:
    pull()
    before = len(hub.requests)
    assert find().context_length == 4096
    assert [str(entry.name) for entry in cache.list_revisions()] == ["org/tiny"]
    assert len(hub.requests) == before
    hub.close()
    assert find().name == "org/tiny"


def test_the_error_for_an_interrupted_download_names_the_command_to_complete_it(
    hub: StandIn, commit: str
) -> None:
    hub.faults.status[WEIGHTS] = 500
    complaint(pull)
    message = complaint(lambda: cache.find(NAME))
    assert "is incomplete: run" in message  # config.json exists, but no ref of its revision
    assert "`mlxrunner pull org/tiny`" in message


def test_a_missing_shard_makes_a_model_incomplete(hub: StandIn, commit: str) -> None:
    """Whether or not there is an index."""
    snapshot = pull()
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelNotFoundError) as caught:
        cache.find(NAME)
    assert "(model-00002-of-00002.safetensors missing)" in caught.value.message
    assert caught.value.hub == NAME


def test_a_missing_tokenizer_makes_a_model_incomplete(hub: StandIn, commit: str) -> None:
    """Unless there is another kind of tokenizer, which cannot be used."""
    snapshot = pull()
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        cache.find(NAME)
    assert "(tokenizer.json missing)" in caught.value.message
    (snapshot / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(AppError) as other:
        cache.find(NAME)
    assert "has no tokenizer.json, only tokenizer.model: use a copy" in other.value.message


def test_a_folder_of_a_repository_is_pulled_found_and_listed(
    hub: StandIn, tiny_model: Path, tmp_path: Path
) -> None:
    """LiquidAI/LFM2.5-2.6B-MLX has a complete model in a folder for each format."""
    remote = tmp_path / "formats"
    for folder in ("8bit", "4bit", "docs"):
        shutil.copytree(tiny_model, remote / folder)
    hub.add("org/formats", remote)
    name = HubName(repo_id="org/formats")
    plan = plan_download(name)
    assert str(plan.name) == "org/formats/4bit"
    assert {file.path.partition("/")[0] for file in plan.files} == {"4bit"}
    download(plan)
    other = plan_download(HubName(repo_id="org/formats", subfolder="8bit"))
    assert store.find("org/formats").path.name == "4bit", "of the other, there is only a config"
    download(other)
    for given, found in (("org/formats", "4bit"), ("org/formats/8bit", "8bit")):
        files = store.find(given)
        assert (files.name, files.path.name) == (f"org/formats/{found}", found)
        assert files.tokenizer_vocab_size
    listed = {str(entry.name) for entry in cache.list_revisions()}
    assert listed == {"org/formats/4bit", "org/formats/8bit"}
    (store.find("org/formats/8bit").path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        store.find("org/formats/8bit")
    assert "mlxrunner pull org/formats/8bit" in caught.value.message


def test_a_partial_download_of_another_tool_is_incomplete(hub: StandIn, commit: str) -> None:
    """huggingface_hub leaves a listing of the repository, the only sign of missing files."""
    huggingface_hub.snapshot_download(
        NAME.repo_id,
        cache_dir=cache.cache_folder(),
        allow_patterns=["config.json", "tokenizer.json", WEIGHTS],
    )
    assert "(tokenizer_config.json missing)" in complaint(lambda: cache.find(NAME))
    pull()
    assert find().path.name == commit


def test_an_interrupted_download_is_listed(hub: StandIn, commit: str) -> None:
    hub.faults.status[WEIGHTS] = 500
    complaint(pull)
    assert [str(entry.name) for entry in cache.list_revisions()] == ["org/tiny"]


def test_a_dangling_link_is_a_missing_file(hub: StandIn, commit: str) -> None:
    snapshot = pull()
    os.remove((snapshot / WEIGHTS).resolve())
    assert f"({WEIGHTS} missing)" in complaint(lambda: cache.find(NAME))
    assert [entry.folder for entry in cache.list_revisions()] == [snapshot]


def test_every_name_of_a_revision_is_listed(hub: StandIn, commit: str, tmp_path: Path) -> None:
    hub.repositories[NAME.repo_id].refs["v1.0"] = commit
    pull(HubName(repo_id=NAME.repo_id, revision="v1.0"))
    pull()
    hub.add(NAME.repo_id, tiny.write(tmp_path / "newer", seed=1))
    newer = pull().name
    pull(HubName(repo_id=NAME.repo_id, revision=newer))
    (cache.repo_folder(NAME.repo_id) / "refs" / "v1.0").unlink()
    (cache.repo_folder(NAME.repo_id) / "refs" / ".DS_Store").write_bytes(b"\xff")
    (cache.cache_folder() / "datasets--org--tiny" / "snapshots").mkdir(parents=True)
    names = [str(entry.name) for entry in cache.list_revisions()]
    assert sorted(names) == sorted(["org/tiny", f"org/tiny@{commit[:12]}"])
    pull(HubName(repo_id=NAME.repo_id, revision="v1.0"))
    names = [str(entry.name) for entry in cache.list_revisions()]
    assert sorted(names) == ["org/tiny", "org/tiny@v1.0"]


def test_a_model_that_was_never_pulled_is_not_found() -> None:
    assert cache.find(NAME) is None
    assert list(cache.list_revisions()) == []
