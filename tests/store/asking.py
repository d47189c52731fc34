"""The model org/tiny on the stand-in hub, and helpers for its tests."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.store.hub import cache
from app.store.hub.download import download
from app.store.hub.download_plan import plan_download
from app.store.model_names import HubName
from tests.store.stand_in import sha256

NAME = HubName(repo_id="org/tiny")
WEIGHTS = "model.safetensors"


def pull(name: HubName = NAME) -> Path:
    return download(plan_download(name), io.StringIO())


def find(name: HubName = NAME) -> ModelFiles:
    files = cache.find(name)
    assert files is not None
    return files


def complaint(call: Callable[[], object]) -> str:
    with pytest.raises(AppError) as caught:
        call()
    assert "\n" not in caught.value.message
    return caught.value.message


def blob(content: bytes) -> Path:
    return cache.repo_folder(NAME.repo_id) / "blobs" / sha256(content)


def refusal(name: str = "tiny", call: Callable[[str], object] = store.find) -> str:
    with pytest.raises(AppError) as caught:
        call(name)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert "\n" not in caught.value.message
    return caught.value.message
