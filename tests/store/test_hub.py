"""From the hub to the cache, against a hub that can do wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from app import store
from app.store.hub import cache
from app.store.hub.download_plan import DownloadPlan, plan_download
from app.store.model_names import HubName, ModelNotFoundError
from tests import tiny
from tests.store.asking import NAME, WEIGHTS, blob, complaint, find, pull
from tests.store.stand_in import TOKEN, StandIn, git_sha1, sha256


def test_only_what_a_model_needs_is_offered(hub: StandIn, commit: str) -> None:
    offer = plan_download(NAME)
    assert offer.commit == commit
    assert [file.path for file in offer.files] == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        WEIGHTS,
    ]
    assert offer.config["model_type"] == "llama"
    assert [asked.path.rpartition("/")[2] for asked in hub.downloads()] == ["config.json"]
    assert 0 < offer.missing_bytes < offer.total_bytes


def test_what_was_pulled_equals_what_lies_on_the_hub(
    hub: StandIn, commit: str, remote: Path
) -> None:
    here = pull()
    assert here.name == commit
    for file in here.iterdir():
        assert file.read_bytes() == (remote / file.name).read_bytes()
    files = cache.find(NAME)
    assert files is not None
    assert (files.name, files.path) == ("org/tiny", here)
    assert plan_download(NAME).missing_bytes == 0


def test_a_second_pull_asks_for_no_file_again(hub: StandIn, commit: str) -> None:
    pull()
    before = len(hub.downloads())
    pull()
    assert len(hub.downloads()) == before


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    hub: StandIn, commit: str, remote: Path
) -> None:
    hub.faults.cut[WEIGHTS] = 10_000
    pull()
    assert [asked.range for asked in hub.downloads(WEIGHTS) if "large" in asked.path] == [0, 10_000]


def test_a_second_try_asks_for_the_rest_only(hub: StandIn, commit: str, remote: Path) -> None:
    """huggingface_hub 2.4 writes to a file of a random name and removes it when it fails, so that
    a second try would begin anew."""
    hub.faults.cut[WEIGHTS] = 10_000
    hub.faults.status[WEIGHTS] = 503
    assert "returned HTTP 503" in complaint(pull)
    half = blob((remote / WEIGHTS).read_bytes())
    assert half.with_name(f"{half.name}.incomplete").stat().st_size == 10_000
    hub.faults.status.clear()
    hub.asked.clear()
    pull()
    assert {asked.range for asked in hub.downloads(WEIGHTS)} == {10_000}


def test_silence_is_not_waited_for(
    hub: StandIn, commit: str, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.faults.stall[WEIGHTS] = 1.0
    pull()
    half = (remote / WEIGHTS).stat().st_size // 2 // 1_000 * 1_000
    assert [asked.range for asked in hub.downloads(WEIGHTS) if "large" in asked.path] == [0, half]


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer_config.json"])
def test_a_file_that_arrives_damaged_is_found_and_not_kept(
    hub: StandIn, commit: str, remote: Path, name: str
) -> None:
    """Sizes are right: only a digest tells."""
    hub.faults.corrupt.add(name)
    assert f"{name} is corrupt" in complaint(pull)
    content = (remote / name).read_bytes()
    assert not blob(content).exists()
    with pytest.raises(ModelNotFoundError):
        store.find(NAME.repo_id)
    hub.faults.corrupt.clear()
    assert (pull() / name).read_bytes() == content


def test_a_damaged_half_from_before_does_not_spoil_the_whole(
    hub: StandIn, commit: str, remote: Path
) -> None:
    content = (remote / WEIGHTS).read_bytes()
    half = blob(content).with_name(f"{sha256(content)}.incomplete")
    half.parent.mkdir(parents=True)
    half.write_bytes(b"?" * 5_000)
    assert (pull() / WEIGHTS).read_bytes() == content
    assert {asked.range for asked in hub.downloads(WEIGHTS)} == {0, 5_000}
    assert not half.exists()


@pytest.mark.parametrize("more", [0, 7])
def test_a_half_that_is_as_long_as_the_whole_is_not_asked_for_more(
    hub: StandIn, commit: str, remote: Path, more: int
) -> None:
    content = (remote / WEIGHTS).read_bytes()
    half = blob(content).with_name(f"{sha256(content)}.incomplete")
    half.parent.mkdir(parents=True)
    half.write_bytes(content + b"?" * more)
    assert (pull() / WEIGHTS).read_bytes() == content


def test_a_blob_that_rotted_on_the_disk_is_fetched_again(
    hub: StandIn, commit: str, remote: Path
) -> None:
    pull()
    content = (remote / WEIGHTS).read_bytes()
    blob(content).write_bytes(b"?" * len(content))
    assert (pull() / WEIGHTS).read_bytes() == content


def test_a_revision_is_what_was_asked_for(hub: StandIn, commit: str, tmp_path: Path) -> None:
    hub.add(NAME.repo_id, tiny.write(tmp_path / "newer", seed=1))
    pinned = HubName(repo_id=NAME.repo_id, revision=commit)
    assert pull(pinned).name == commit
    assert find(pinned).name == f"org/tiny@{commit}"
    assert cache.find(NAME) is None


def test_offline_is_said(hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in complaint(pull)
    assert not hub.asked


def test_a_gated_model_names_its_page_and_the_token(hub: StandIn, remote: Path) -> None:
    hub.add(NAME.repo_id, remote, gated=True)
    message = complaint(pull)
    assert "is gated: accept its conditions at" in message
    assert "HF_TOKEN" in message


def test_a_token_opens_a_gated_model_and_is_told_to_the_hub_alone(
    hub: StandIn, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME.repo_id, remote, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pull()
    large = [asked for asked in hub.asked if asked.path.startswith("/large/")]
    assert large
    assert {asked.authorization for asked in large} == {None}


def test_a_private_model_is_like_one_that_is_not_there(hub: StandIn, remote: Path) -> None:
    hub.add(NAME.repo_id, remote, private=True)
    assert "is private: check the name, or set HF_TOKEN" in complaint(pull)
    assert "was not found on" in complaint(lambda: pull(HubName(repo_id="org/nothing")))


def test_a_revision_that_is_not_there_is_named(hub: StandIn, commit: str) -> None:
    name = HubName(repo_id=NAME.repo_id, revision="v9")
    assert complaint(lambda: pull(name)) == "org/tiny has no revision v9"


def test_a_hub_that_cannot_be_reached_is_one_line() -> None:
    assert "could not be downloaded from http://127.0.0.1:9" in complaint(pull)


@pytest.mark.parametrize("answer", [[1], {"error": "log in first"}, {"id": "a/b", "siblings": [7]}])
def test_an_answer_that_is_no_hubs_is_one_line(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    def reply_json(handler: Any, _: object) -> None:
        handler.reply(200, {}, json.dumps(answer).encode())

    monkeypatch.setattr(hub.handler, "reply_json", reply_json)
    assert "returned an invalid response" in complaint(pull)


def test_a_token_that_is_none_is_one_line_and_not_shown(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s\xe9cret")
    message = complaint(pull)
    assert "check the network, HF_ENDPOINT and HF_TOKEN" in message
    assert "cret" not in message


def test_a_password_in_the_hubs_address_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:password@127.0.0.1:9")
    message = complaint(pull)
    assert "http://127.0.0.1:9" in message
    assert "password" not in message


def test_nobody_who_interrupts_waits_for_a_silent_hub(
    hub: StandIn, commit: str, tmp_path: Path
) -> None:
    hub.faults.stall[WEIGHTS] = 60
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from app.cli import main; sys.exit(main(['pull', 'org/tiny']))"
    )
    homes = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, env={**os.environ, **homes}
    ) as pulling:
        while WEIGHTS in hub.faults.stall and not hub.downloads(WEIGHTS)[1:]:
            assert pulling.poll() is None
            time.sleep(0.01)
        time.sleep(0.2)
        pulling.send_signal(signal.SIGINT)
        # half of what it would wait for
        _, told = pulling.communicate(timeout=30)
    assert pulling.returncode == 130
    assert told.endswith(b"mlxrunner: interrupted; run the command again to resume the download\n")


@pytest.mark.parametrize(
    ("gone", "left", "words"),
    [
        (WEIGHTS, "q4.gguf", "contains GGUF files"),
        (WEIGHTS, "pytorch_model.bin", "contains pickled weights, which are never opened"),
        (WEIGHTS, "README.md", "no .safetensors file in its top folder"),
        ("tokenizer.json", WEIGHTS, "has no tokenizer.json"),
        ("config.json", WEIGHTS, "has no config.json"),
    ],
)
def test_what_cannot_be_served_is_not_downloaded(
    hub: StandIn, remote: Path, gone: str, left: str, words: str
) -> None:
    (remote / gone).unlink()
    for name in {"q4.gguf", "pytorch_model.bin"} - {left}:
        (remote / name).unlink()
    hub.add(NAME.repo_id, remote)
    assert words in complaint(pull)
    assert hub.downloads() == []


def test_mistrals_own_cut_of_the_weights_is_left_where_it_is(
    hub: StandIn, remote: Path, tmp_path: Path
) -> None:
    shutil.copy(remote / WEIGHTS, remote / "consolidated.safetensors")
    hub.add(NAME.repo_id, remote)
    assert [
        file.path for file in plan_download(NAME).files if file.path.endswith(".safetensors")
    ] == [WEIGHTS]


def test_a_full_disk_is_noticed_before(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nearly_full(_: Path) -> object:
        return shutil._ntuple_diskusage(1 << 40, (1 << 40) - 5_000, 5_000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    message = complaint(pull)
    assert "needs 59.2 kB more" in message
    assert "5.00 kB free" in message
    assert hub.downloads(WEIGHTS) == []


def test_digests_that_could_be_paths_are_refused(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.store.stand_in.sha256", lambda _: "../../../../etc/passwd")
    assert "has no size or digest for" in complaint(pull)


def test_a_hub_that_says_nothing_is_given_up(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    hub.faults.silence = 0.6
    assert "could not be downloaded from" in complaint(pull)


def test_an_offer_counts_what_is_missing(hub: StandIn, commit: str, remote: Path) -> None:
    offer: DownloadPlan = plan_download(NAME)
    assert offer.missing_bytes == offer.total_bytes - (remote / "config.json").stat().st_size
    assert {file.git_sha1 for file in offer.files if file.sha256 is None} == {
        git_sha1((remote / name).read_bytes()) for name in ("config.json", "tokenizer_config.json")
    }
