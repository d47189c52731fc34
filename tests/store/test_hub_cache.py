"""What is served from the cache, whoever filled it, and without the network."""

import os
from pathlib import Path

import huggingface_hub
import pytest

from app.store.hub import cache
from app.store.model_names import HubName, ModelNotFoundError
from tests import tiny
from tests.store.asking import NAME, WEIGHTS, complaint, find, pull
from tests.store.stand_in import StandIn


def test_main_moves_only_when_it_is_pulled_again(hub: StandIn, commit: str, tmp_path: Path) -> None:
    old = pull()
    newer = hub.add(NAME.repo_id, tiny.write(tmp_path / "newer", seed=1))
    assert find().path == old
    assert pull().name == newer
    assert find().path.name == newer
    # as `list` shows it
    assert find(HubName(repo_id=NAME.repo_id, revision=commit[:12])).path == old


def test_an_update_that_was_interrupted_leaves_what_was_served(
    hub: StandIn, commit: str, tmp_path: Path
) -> None:
    old = pull()
    hub.add(NAME.repo_id, tiny.write(tmp_path / "newer", seed=1))
    hub.faults.status[WEIGHTS] = 500
    complaint(pull)
    assert find().path == old


def test_the_cache_asks_nobody(hub: StandIn, commit: str) -> None:
    pull()
    before = len(hub.asked)
    assert find().context_length == 4096
    assert [str(entry.name) for entry in cache.list_revisions()] == ["org/tiny"]
    assert len(hub.asked) == before
    hub.close()
    assert find().name == "org/tiny"


def test_an_interrupted_download_says_how_to_complete_it(hub: StandIn, commit: str) -> None:
    hub.faults.status[WEIGHTS] = 500
    complaint(pull)
    message = complaint(lambda: cache.find(NAME))
    assert "is incomplete: run" in message  # config.json is here, and no name for its revision
    assert "`mlxrunner pull org/tiny`" in message


def test_a_shard_that_only_the_index_names_is_missed(hub: StandIn, commit: str) -> None:
    here = pull()
    (here / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    )
    with pytest.raises(ModelNotFoundError) as caught:
        cache.find(NAME)
    assert "(model-2.safetensors missing)" in caught.value.message
    assert caught.value.hub == NAME


def test_what_another_tool_fetched_in_part_is_incomplete(hub: StandIn, commit: str) -> None:
    """huggingface_hub leaves a listing of the repository, without which nothing would tell."""
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


def test_a_link_that_leads_nowhere_is_a_missing_file(hub: StandIn, commit: str) -> None:
    here = pull()
    os.remove((here / WEIGHTS).resolve())
    assert f"({WEIGHTS} missing)" in complaint(lambda: cache.find(NAME))
    assert [entry.folder for entry in cache.list_revisions()] == [here]


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
    listed = [str(entry.name) for entry in cache.list_revisions()]
    assert sorted(listed) == sorted(["org/tiny", f"org/tiny@{commit[:12]}"])
    pull(HubName(repo_id=NAME.repo_id, revision="v1.0"))
    listed = [str(entry.name) for entry in cache.list_revisions()]
    assert sorted(listed) == ["org/tiny", "org/tiny@v1.0"]


def test_what_was_never_pulled_is_not_there() -> None:
    assert cache.find(NAME) is None
    assert list(cache.list_revisions()) == []
