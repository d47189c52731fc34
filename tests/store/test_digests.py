"""File digests, and the cache of verified files."""

import hashlib
import os
from pathlib import Path

import pytest

from app.core.errors import AppError
from app.store.digests import DigestCache, git_sha1, sha256


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(b"hello\n" * 500_000)  # more than one chunk
    return path


def test_digests_equal_those_of_hashlib_and_git(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    assert sha256(file) == hashlib.sha256(content).hexdigest()
    assert git_sha1(file) == hashlib.sha1(b"blob 3000000\0" + content).hexdigest()
    hello = tmp_path / "hello"
    hello.write_bytes(b"hello\n")
    # from `git hash-object`
    assert git_sha1(hello) == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_a_damaged_file_is_named_with_both_digests(file: Path, tmp_path: Path) -> None:
    expected = "0" * 64
    with pytest.raises(AppError) as caught:
        DigestCache(tmp_path / "cache").verify({file: expected})
    for part in (str(file), expected, sha256(file)):
        assert part in caught.value.message
    assert not (tmp_path / "cache").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AppError, match="nowhere"):
        DigestCache(tmp_path / "cache").verify({tmp_path / "nowhere": "0" * 64})


def test_a_changed_file_is_hashed_again(file: Path, tmp_path: Path) -> None:
    cache, expected = DigestCache(tmp_path / "cache"), sha256(file)
    cache.verify({file: expected})
    file.write_bytes(b"other\n" * 500_000)
    os.utime(file, ns=(1, 1))
    with pytest.raises(AppError):
        cache.verify({file: expected})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": "b"}'])
def test_an_invalid_cache_file_is_replaced(file: Path, tmp_path: Path, content: bytes) -> None:
    cache_file = tmp_path / "cache"
    cache_file.write_bytes(content)
    DigestCache(cache_file).verify({file: sha256(file)})
    assert sha256(file).encode() in cache_file.read_bytes()


def test_an_unwritable_cache_is_no_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    DigestCache(tmp_path / "taken" / "cache").verify({file: sha256(file)})
