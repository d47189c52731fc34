"""What a file must hash to, and which files need not be hashed twice."""

import hashlib
import os
from pathlib import Path

import pytest

from app.core.errors import AppError
from app.store.digests import DigestCache, git_sha1, sha256


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "blob"
    made.write_bytes(b"hello\n" * 500_000)  # more than one piece
    return made


def test_digests_are_those_of_everybody_else(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    assert sha256(file) == hashlib.sha256(content).hexdigest()
    assert git_sha1(file) == hashlib.sha1(b"blob 3000000\0" + content).hexdigest()
    hello = tmp_path / "hello"
    hello.write_bytes(b"hello\n")
    # what `git hash-object` says of such a file
    assert git_sha1(hello) == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_a_damaged_file_is_named_with_both_digests(file: Path, tmp_path: Path) -> None:
    wanted = "0" * 64
    with pytest.raises(AppError) as caught:
        DigestCache(tmp_path / "memory").verify({file: wanted})
    for words in (str(file), wanted, sha256(file)):
        assert words in caught.value.message
    assert not (tmp_path / "memory").exists()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(AppError, match="nowhere"):
        DigestCache(tmp_path / "memory").verify({tmp_path / "nowhere": "0" * 64})


def test_what_changed_is_hashed_again(file: Path, tmp_path: Path) -> None:
    verified, wanted = DigestCache(tmp_path / "memory"), sha256(file)
    verified.verify({file: wanted})
    file.write_bytes(b"other\n" * 500_000)
    os.utime(file, ns=(1, 1))
    with pytest.raises(AppError):
        verified.verify({file: wanted})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": "b"}'])
def test_a_memory_that_makes_no_sense_is_forgotten(
    file: Path, tmp_path: Path, content: bytes
) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(content)
    DigestCache(memory).verify({file: sha256(file)})
    assert sha256(file).encode() in memory.read_bytes()


def test_where_nothing_can_be_written_nothing_is_remembered(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    DigestCache(tmp_path / "taken" / "memory").verify({file: sha256(file)})
