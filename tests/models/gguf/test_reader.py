"""Headers of GGUF files."""

import struct
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from models.gguf import reader
from models.gguf.reader import Array, GGUFError
from tests.models.gguf.raw_file import (
    ARRAY,
    STRING,
    array,
    entry,
    gguf,
    int_entry,
    string,
    tensor,
    text_entry,
)

F32, Q4_K = 0, 12


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def test_a_file_of_another_writer_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    writer = reference.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_rope_freq_base(1e6)
    writer.add_bool("some.flag", True)
    writer.add_token_list([b"a", "ü".encode(), b"\xff"])
    writer.add_token_scores([0.0, -1.5, 2.0])
    writer.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor(
        "b.weight",
        np.zeros((4, 144), dtype=np.uint8),
        raw_dtype=reference.GGMLQuantizationType.Q4_K,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = reader.read(path)

    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.context_length"] == 128
    assert file.metadata["llama.rope.freq_base"] == 1e6
    assert file.metadata["some.flag"] is True
    tokens, scores = (file.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    assert isinstance(tokens, Array)
    assert isinstance(scores, Array)
    assert tokens.strings() == [b"a", "ü".encode(), b"\xff"]
    assert scores.numbers(4) == [0.0, -1.5, 2.0]
    first, second = file.tensors["a.weight"], file.tensors["b.weight"]
    assert (first.shape, first.type.name, first.nbytes) == ((2, 3), "F32", 24)
    assert (second.shape, second.type.name, second.nbytes) == ((4, 256), "Q4_K", 4 * 144)
    assert second.num_elements == 4 * 256
    content = path.read_bytes()[first.offset : first.offset + first.nbytes]
    assert np.frombuffer(content, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_files_of_a_split_model_are_one_model(write):
    def shard(index: int) -> bytes:
        entries = [int_entry("split.no", index), int_entry("split.count", 2)]
        entries += [int_entry("split.tensors.count", 2), text_entry("general.name", "first")]
        return gguf(entries[: 4 - index], [tensor(f"t{index}", (8,), F32, 0)], b"\0" * 32)

    first = write(shard(0), "m-00001-of-00002.gguf")
    with pytest.raises(GGUFError, match=r"has no m-00002-of-00002\.gguf: download all of them"):
        reader.read(first)
    second = write(shard(1), "m-00002-of-00002.gguf")
    for path in (first, second):
        file = reader.read(path)
        assert file.paths == (first, second)
        assert file.metadata["general.name"] == "first"
        assert {name: made.path for name, made in file.tensors.items()} == {
            "t0": first,
            "t1": second,
        }
    assert reader.is_later_shard(second)
    assert not reader.is_later_shard(first)


def test_the_fingerprint_changes_with_the_file(write):
    one = reader.read(write(gguf([text_entry("a", "b")])))
    other = reader.read(write(gguf([text_entry("a", "c")])))
    assert one.header_digest != other.header_digest
    assert one.fingerprint != other.fingerprint


T = tensor("t", (8,), F32, 0)
INVALID = {
    "empty": (b"", "it is empty"),
    "other magic": (b"PK\x03\x04" + bytes(40), r"does not begin with b'GGUF'"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "cut in the counts": (gguf()[:12], "truncated: its counts"),
    "version 1": (gguf(version=1), "its version is 1"),
    "big-endian": (gguf(version=3 << 24), "big-endian"),
    "too many tensors": (gguf(num_tensors=1 << 60), "more than the limits"),
    "too many keys": (gguf(num_keys=1 << 60), "more than the limits"),
    "missing key": (gguf(num_keys=1)[:24], "truncated: a key"),
    "endless key": (gguf([struct.pack("<Q", 1 << 62)]), "a key has 4611686018427387904 bytes"),
    "key twice": (gguf([text_entry("a", "b")] * 2), "the key a appears twice"),
    "key that is no text": (gguf([entry(b"\xff", 4, bytes(4))]), "is not a name"),
    "key with a line break": (gguf([entry("a\nb", 4, bytes(4))]), "is not a name"),
    "unknown value type": (gguf([entry("a", 77, b"")]), "the value of a has the unknown type 77"),
    "endless string": (
        gguf([entry("a", STRING, struct.pack("<Q", 1 << 63))]),
        "truncated: the value of a needs",
    ),
    "endless array": (
        gguf([entry("a", ARRAY, struct.pack("<IQ", 4, 1 << 63))]),
        "truncated: the value of a needs",
    ),
    "endless strings": (
        gguf([entry("a", ARRAY, struct.pack("<IQ", STRING, 1 << 63))]),
        "the value of a has more than 1048576 strings",
    ),
    "string beyond the array": (
        gguf([entry("a", ARRAY, array(STRING, [struct.pack("<Q", 1 << 40)]))]),
        "truncated: the value of a needs",
    ),
    "array of unknown type": (
        gguf([entry("a", ARRAY, array(44, []))]),
        "an array of the unknown type 44",
    ),
    "deep array": (
        gguf([entry("a", ARRAY, array(ARRAY, [array(ARRAY, [array(4, [])])]))]),
        "nested too deeply",
    ),
    "many inner arrays": (
        gguf([entry("a", ARRAY, array(ARRAY, [array(4, [])] * 4097))]),
        "nested too deeply or too large",
    ),
    "alignment": (gguf([int_entry("general.alignment", 24)]), "must be a power of two"),
    "alignment of zero": (gguf([int_entry("general.alignment", 0)]), "must be a power of two"),
    "long tensor name": (gguf([], [tensor("t" * 65, (8,), F32, 0)]), "65 bytes, more than 64"),
    "tensor twice": (gguf([], [T, T], bytes(64)), "the tensor t appears twice"),
    "no dimension": (gguf([], [tensor("t", (), F32, 0)], bytes(64)), "has 0 dimensions"),
    "five dimensions": (gguf([], [tensor("t", (1,) * 5, F32, 0)], bytes(64)), "5 dimensions"),
    "empty dimension": (gguf([], [tensor("t", (0,), F32, 0)], bytes(64)), "invalid shape"),
    "overflow": (gguf([], [tensor("t", (1 << 62, 4), F32, 0)], bytes(64)), "invalid shape"),
    "large product": (
        gguf([], [tensor("t", ((1 << 31) - 1,) * 4, F32, 0)], bytes(64)),
        "truncated: the tensor t ends at byte",
    ),
    "codebook type": (gguf([], [tensor("t", (256,), 16, 0)]), "type IQ2_XXS, which is not supp"),
    "unknown type": (gguf([], [tensor("t", (256,), 99, 0)]), "the unknown type 99"),
    "broken block": (gguf([], [tensor("t", (100,), Q4_K, 0)], bytes(999)), "256 elements of a Q4"),
    "unaligned data": (gguf([], [tensor("t", (8,), F32, 4)], bytes(64)), "not aligned"),
    "data beyond the end": (gguf([], [T], bytes(31)), "truncated: the tensor t ends"),
    "far offset": (
        gguf([], [tensor("t", (8,), F32, (1 << 64) - 32)], bytes(64)),
        "truncated: the tensor t ends",
    ),
    "overlap": (gguf([], [T, tensor("u", (8,), F32, 0)], bytes(64)), "tensor u overlaps"),
    "split count": (gguf([int_entry("split.count", 3)]), "split.count is 3"),
}


@pytest.mark.parametrize(("content", "reason"), INVALID.values(), ids=INVALID)
def test_an_invalid_file_is_an_error_of_one_line(write, content: bytes, reason: str):
    path = write(content)
    with pytest.raises(GGUFError, match=reason) as caught:
        reader.read(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 400


@pytest.mark.parametrize("size", range(0, 200, 7))
def test_a_truncated_file_is_an_error(write, size: int):
    whole = gguf(
        [text_entry("a", "b"), entry("c", ARRAY, array(STRING, [string("d")] * 3))],
        [T, tensor("u", (8,), F32, 32)],
        bytes(64),
    )
    reader.read(write(whole))
    with pytest.raises(GGUFError):
        reader.read(write(whole[: min(size, len(whole) - 1)]))


def test_a_long_text_is_not_decoded(write):
    """200 MB of invalid UTF-8 stopped all streams of the server for seconds."""
    long = gguf(
        [entry("a", STRING, string(b"\xff" * ((1 << 20) + 1))), text_entry("b", "c" * 1000)]
    )
    values = reader.read(write(long)).metadata
    assert isinstance(values["a"], Array)
    assert values["a"].numbers(2) == [255, 255]
    assert values["b"] == "c" * 1000


def test_a_header_longer_than_the_first_read_is_read(write):
    words = [string("word" * 100) for _ in range(15_000)]
    file = reader.read(write(gguf([entry("a", ARRAY, array(STRING, words))], [T], bytes(32))))
    value = file.metadata["a"]
    assert isinstance(value, Array)
    assert value.strings()[-1] == b"word" * 100


def test_a_header_is_copied_with_the_content_of_named_small_tensors(write, tmp_path):
    big = 1 << 24
    tensors = [tensor("big", (big,), F32, 0), tensor("small", (2,), F32, 4 * big)]
    head = gguf([text_entry("a", "b")], [*tensors, tensor("other", (2,), F32, 4 * big + 32)])
    content = head + bytes(4 * big) + b"12345678" + bytes(24) + b"87654321"
    original = reader.read(write(content))
    read: list[tuple[int, int]] = []

    def fetch(offset: int, count: int) -> bytes:
        read.append((offset, count))
        return content[offset : offset + count]

    path = tmp_path / "copy.gguf"
    reader.copy_header(fetch, len(content), path, contents=("small", "big", "none"))

    assert sum(count for _, count in read) < 5 << 20
    copy = reader.read(path)
    assert path.stat().st_size == len(content)
    assert path.stat().st_blocks * 512 < 6 << 20
    assert (copy.metadata, copy.header_digest) == (original.metadata, original.header_digest)
    with path.open("rb") as file:
        for name, expected in (("small", b"12345678"), ("other", bytes(8))):
            file.seek(copy.tensors[name].offset)
            assert file.read(8) == expected


def test_a_header_that_cannot_be_copied_is_an_error(tmp_path):
    for content, reason in ((b"PK", "does not begin with"), (gguf(num_keys=1)[:24], "truncated")):
        with pytest.raises(GGUFError, match=reason):
            reader.copy_header(
                lambda offset, count, whole=content: whole[offset : offset + count],
                len(content),
                tmp_path / "copy.gguf",
                contents=(),
            )


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    with pytest.raises(GGUFError, match="cannot be read"):
        reader.read(tmp_path / "none.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        reader.read(tmp_path)


def test_an_array_of_another_type_is_an_error(write):
    file = reader.read(write(gguf([entry("a", ARRAY, array(4, [bytes(4)]))])))
    value = file.metadata["a"]
    assert isinstance(value, Array)
    assert value.numbers(1) == [0]
    with pytest.raises(ValueError, match="strings are needed"):
        value.strings()
