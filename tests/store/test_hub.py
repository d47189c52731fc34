"""Downloads from the hub to the cache, with a hub that can fail."""

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


def test_the_plan_has_only_the_files_that_a_model_needs(hub: StandIn, commit: str) -> None:
    plan = plan_download(NAME)
    assert plan.commit == commit
    assert [file.path for file in plan.files] == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        WEIGHTS,
    ]
    assert plan.config["model_type"] == "llama"
    assert [request.path.rpartition("/")[2] for request in hub.downloads()] == ["config.json"]
    assert 0 < plan.missing_bytes < plan.total_bytes


def test_pulled_files_equal_those_on_the_hub(hub: StandIn, commit: str, remote: Path) -> None:
    snapshot = pull()
    assert snapshot.name == commit
    for file in snapshot.iterdir():
        assert file.read_bytes() == (remote / file.name).read_bytes()
    files = cache.find(NAME)
    assert files is not None
    assert (files.name, files.path) == ("org/tiny", snapshot)
    assert plan_download(NAME).missing_bytes == 0


def test_a_second_pull_downloads_no_file(hub: StandIn, commit: str) -> None:
    pull()
    before = len(hub.downloads())
    pull()
    assert len(hub.downloads()) == before


def test_a_broken_connection_is_resumed_where_it_broke(
    hub: StandIn, commit: str, remote: Path
) -> None:
    hub.faults.cut[WEIGHTS] = 10_000
    pull()
    assert [request.range for request in hub.downloads(WEIGHTS) if "large" in request.path] == [
        0,
        10_000,
    ]


def test_a_second_attempt_downloads_only_the_rest(hub: StandIn, commit: str, remote: Path) -> None:
    """huggingface_hub 2.4 writes to a file with a random name and removes it on failure, so that
    a second attempt would start again."""
    hub.faults.cut[WEIGHTS] = 10_000
    hub.faults.status[WEIGHTS] = 503
    assert "returned HTTP 503" in complaint(pull)
    partial = blob((remote / WEIGHTS).read_bytes())
    assert partial.with_name(f"{partial.name}.incomplete").stat().st_size == 10_000
    hub.faults.status.clear()
    hub.requests.clear()
    pull()
    assert {request.range for request in hub.downloads(WEIGHTS)} == {10_000}


def test_a_stalled_download_times_out_and_resumes(
    hub: StandIn, commit: str, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.faults.stall[WEIGHTS] = 60
    pull()
    half_size = (remote / WEIGHTS).stat().st_size // 2 // 1_000 * 1_000
    assert [request.range for request in hub.downloads(WEIGHTS) if "large" in request.path] == [
        0,
        half_size,
    ]


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer_config.json"])
def test_a_corrupt_download_is_detected_and_not_kept(
    hub: StandIn, commit: str, remote: Path, name: str
) -> None:
    """The size is right, so only the digest differs."""
    hub.faults.corrupt.add(name)
    assert f"{name} is corrupt" in complaint(pull)
    content = (remote / name).read_bytes()
    assert not blob(content).exists()
    with pytest.raises(ModelNotFoundError):
        store.find(NAME.repo_id)
    hub.faults.corrupt.clear()
    assert (pull() / name).read_bytes() == content


def test_a_corrupt_partial_file_is_downloaded_again(
    hub: StandIn, commit: str, remote: Path
) -> None:
    content = (remote / WEIGHTS).read_bytes()
    partial = blob(content).with_name(f"{sha256(content)}.incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"?" * 5_000)
    assert (pull() / WEIGHTS).read_bytes() == content
    assert {request.range for request in hub.downloads(WEIGHTS)} == {0, 5_000}
    assert not partial.exists()


@pytest.mark.parametrize("more", [0, 7])
def test_a_partial_file_of_full_length_is_not_extended(
    hub: StandIn, commit: str, remote: Path, more: int
) -> None:
    content = (remote / WEIGHTS).read_bytes()
    partial = blob(content).with_name(f"{sha256(content)}.incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content + b"?" * more)
    assert (pull() / WEIGHTS).read_bytes() == content


def test_a_corrupt_blob_on_disk_is_downloaded_again(
    hub: StandIn, commit: str, remote: Path
) -> None:
    pull()
    content = (remote / WEIGHTS).read_bytes()
    blob(content).write_bytes(b"?" * len(content))
    assert (pull() / WEIGHTS).read_bytes() == content


def test_the_requested_revision_is_pulled(hub: StandIn, commit: str, tmp_path: Path) -> None:
    hub.add(NAME.repo_id, tiny.write(tmp_path / "newer", seed=1))
    pinned = HubName(repo_id=NAME.repo_id, revision=commit)
    assert pull(pinned).name == commit
    assert find(pinned).name == f"org/tiny@{commit}"
    assert cache.find(NAME) is None


def test_offline_mode_is_reported(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in complaint(pull)
    assert not hub.requests


def test_the_error_for_a_gated_model_names_its_page_and_the_token(
    hub: StandIn, remote: Path
) -> None:
    hub.add(NAME.repo_id, remote, gated=True)
    message = complaint(pull)
    assert "is gated: accept its conditions at" in message
    assert "HF_TOKEN" in message


def test_a_token_opens_a_gated_model_and_is_sent_only_to_the_hub(
    hub: StandIn, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME.repo_id, remote, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pull()
    large = [request for request in hub.requests if request.path.startswith("/large/")]
    assert large
    assert {request.authorization for request in large} == {None}


def test_a_private_model_is_reported_like_a_missing_one(hub: StandIn, remote: Path) -> None:
    hub.add(NAME.repo_id, remote, private=True)
    assert "is private: check the name, or set HF_TOKEN" in complaint(pull)
    assert "was not found on" in complaint(lambda: pull(HubName(repo_id="org/nothing")))


def test_a_missing_revision_is_named(hub: StandIn, commit: str) -> None:
    name = HubName(repo_id=NAME.repo_id, revision="v9")
    assert complaint(lambda: pull(name)) == "org/tiny has no revision v9"


def test_an_unreachable_hub_is_a_one_line_error() -> None:
    """The message was only an error number of the system, with the advice to try again."""
    message = complaint(pull)
    assert message == (
        "org/tiny could not be downloaded: http://127.0.0.1:9 cannot be reached (Connection "
        "refused). Is this machine offline? Check the network, then run the command again: a "
        "download continues where it ended"
    )


@pytest.mark.parametrize(
    "response", [[1], {"error": "log in first"}, {"id": "a/b", "siblings": [7]}]
)
def test_an_invalid_hub_response_is_a_one_line_error(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch, response: object
) -> None:
    def reply_json(handler: Any, _: object) -> None:
        handler.reply(200, {}, json.dumps(response).encode())

    monkeypatch.setattr(hub.handler, "reply_json", reply_json)
    assert "returned an invalid response" in complaint(pull)


def test_an_invalid_token_is_a_one_line_error_and_not_shown(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s\xe9cret")
    message = complaint(pull)
    assert "check the network, HF_ENDPOINT and HF_TOKEN" in message
    assert "cret" not in message


def test_a_password_in_the_hub_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:password@127.0.0.1:9")
    message = complaint(pull)
    assert "http://127.0.0.1:9" in message
    assert "password" not in message


def test_an_interrupt_does_not_wait_for_a_stalled_hub(
    hub: StandIn, commit: str, tmp_path: Path
) -> None:
    hub.faults.stall[WEIGHTS] = 60
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from app.cli import main; sys.exit(main(['pull', 'org/tiny']))"
    )
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    with subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, env={**os.environ, **variables}
    ) as process:
        while WEIGHTS in hub.faults.stall and not hub.downloads(WEIGHTS)[1:]:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.2)  # so that half of the file has arrived; without it the test proves less
        process.send_signal(signal.SIGINT)
        # half of the stall
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.endswith(
        b"mlxrunner: interrupted; run the command again to resume the download\n"
    )


@pytest.mark.parametrize(
    ("removed", "kept", "message"),
    [
        (WEIGHTS, "q4.gguf", "contains GGUF files"),
        (WEIGHTS, "pytorch_model.bin", "contains pickled weights, which are never opened"),
        (WEIGHTS, "README.md", "no .safetensors file in its top-level folder"),
        ("tokenizer.json", WEIGHTS, "has no tokenizer.json"),
        ("config.json", WEIGHTS, "has no config.json"),
    ],
)
def test_an_unsupported_model_is_not_downloaded(
    hub: StandIn, remote: Path, removed: str, kept: str, message: str
) -> None:
    (remote / removed).unlink()
    for name in {"q4.gguf", "pytorch_model.bin"} - {kept}:
        (remote / name).unlink()
    hub.add(NAME.repo_id, remote)
    assert message in complaint(pull)
    assert hub.downloads() == []


def test_consolidated_weights_of_mistral_are_not_downloaded(
    hub: StandIn, remote: Path, tmp_path: Path
) -> None:
    shutil.copy(remote / WEIGHTS, remote / "consolidated.safetensors")
    hub.add(NAME.repo_id, remote)
    assert [
        file.path for file in plan_download(NAME).files if file.path.endswith(".safetensors")
    ] == [WEIGHTS]


def test_a_full_disk_is_detected_before_the_download(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nearly_full(_: Path) -> object:
        return shutil._ntuple_diskusage(1 << 40, (1 << 40) - 5_000, 5_000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    message = complaint(pull)
    assert "needs 59.2 kB more" in message
    assert "of which 5.00 kB are free, and 1.07 GB must remain free" in message
    assert hub.downloads(WEIGHTS) == []


def test_digests_that_could_be_paths_are_rejected(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.store.stand_in.sha256", lambda _: "../../../../etc/passwd")
    assert "has no size or digest for" in complaint(pull)


def test_a_hub_that_does_not_respond_times_out(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    hub.faults.silence = 0.6
    assert "could not be downloaded from" in complaint(pull)


def test_a_plan_counts_the_missing_bytes(hub: StandIn, commit: str, remote: Path) -> None:
    plan: DownloadPlan = plan_download(NAME)
    assert plan.missing_bytes == plan.total_bytes - (remote / "config.json").stat().st_size
    assert {file.git_sha1 for file in plan.files if file.sha256 is None} == {
        git_sha1((remote / name).read_bytes()) for name in ("config.json", "tokenizer_config.json")
    }
