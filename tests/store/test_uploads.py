"""Uploads of blobs to Ollama's store."""

import hashlib
from contextlib import closing

import pytest

from app.core.errors import AppError, ErrorKind
from app.store.ollama.manifest import get_blob_path
from app.store.ollama.writer import BlobUpload


def test_the_free_space_is_checked_at_the_first_write_and_then_once_per_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = 0
    checks: list[int] = []
    monkeypatch.setattr("app.store.ollama.writer._CHECK_INTERVAL", 10)
    monkeypatch.setattr(
        "app.store.ollama.writer.check_disk_space", lambda _: checks.append(written)
    )
    with closing(BlobUpload("0" * 64)) as upload:
        for _ in range(31):
            upload.write(b"x")
            written += 1
    assert checks == [0, 10, 20, 30]


def test_a_full_disk_ends_an_upload_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"content").hexdigest()
    monkeypatch.setattr("app.store.ollama.writer.RESERVED_BYTES", 1 << 60)
    with closing(BlobUpload(digest)) as upload, pytest.raises(AppError) as caught:
        upload.write(b"content")
    assert (caught.value.kind, caught.value.code) == (ErrorKind.TOO_LARGE, "disk_full")
    assert list(get_blob_path(digest).parent.iterdir()) == []
