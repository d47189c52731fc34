"""Headers of safetensors files, valid and invalid."""

import contextlib
import itertools
import json
import os
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from app.core.errors import AppError, ErrorKind
from app.store import safetensors_header
from tests.rows import rows
from tests.store.shards import count_bytes_read, tensor_entry, write, write_tensors


def complaint(path: Path) -> str:
    with pytest.raises(AppError) as caught:
        safetensors_header.read(path)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert caught.value.message.startswith(str(path))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < len(str(path)) + 300
    return caught.value.message


def test_names_types_shapes_sizes_and_metadata_are_read(tmp_path: Path) -> None:
    arrays = {
        "a": mx.zeros((3, 4), dtype=mx.bfloat16),
        "b": mx.zeros((5,), dtype=mx.uint32),
        "é": mx.array(1.0),
        "none": mx.zeros((0, 7)),
    }
    path = tmp_path / "x.safetensors"
    mx.save_safetensors(str(path), arrays, {"quant_type": "int4"})
    header = safetensors_header.read(path)
    assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == {
        "a": ("BF16", (3, 4)),
        "b": ("U32", (5,)),
        "é": ("F32", ()),
        "none": ("F32", (0, 7)),
    }
    assert header.metadata["quant_type"] == "int4"
    assert header.nbytes == 24 + 20 + 4
    assert [header.tensors[name].num_elements for name in arrays] == [12, 5, 1, 0]


def test_dtypes_of_half_a_byte_are_supported(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"w": tensor_entry("F4", [2, 8], 0, 8)}, 8)
    assert safetensors_header.read(path).tensors["w"].num_elements == 16
    assert "bytes, which does not match its dtype and shape" in complaint(
        write(path, {"w": tensor_entry("F4", [3], 0, 2)}, 2)
    )


@pytest.mark.parametrize("cut", [*range(8), 8, 20, 60, -1])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    path = write_tensors(tmp_path / "x.safetensors", "a", "b")
    path.write_bytes(path.read_bytes()[:cut])
    complaint(path)


GOOD = tensor_entry("F32", [2], 0, 8)
WRONG: list[tuple[Any, int, str]] = [
    (b"", 0, "is not JSON"),
    (b"\xff{}", 0, "is not JSON"),
    (b"{", 0, "is not JSON"),
    (b'{"a":1', 0, "is not JSON"),
    ([], 0, "is not a JSON object"),
    (3, 0, "is not a JSON object"),
    (b'{"a":{}, "a":{}}', 0, "'a' appears twice"),
    (b'{"a":{"dtype":"F32","dtype":"F16","shape":[],"data_offsets":[0,4]}}', 4, "appears twice"),
    (b'{"a":' + b"[" * 100_000 + b"}", 0, "nested too deeply"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 0, "nested too deeply"),
    (b'{"a":' + b"9" * 100_000 + b"}", 0, "is not JSON"),
    ({"__metadata__": 3}, 0, "__metadata__ is not an object"),
    ({"__metadata__": {"a": 3}}, 0, "a value that is not a string"),
    ({"a": 3}, 0, "must have a valid dtype"),
    ({"a": {"dtype": "F32", "shape": [2]}}, 0, "must have a valid dtype"),
    ({"a": {**GOOD, "shape": 2}}, 8, "must have a valid dtype"),
    ({"a": {**GOOD, "data_offsets": [0]}}, 8, "must have a valid dtype"),
    ({"a": {**GOOD, "data_offsets": [0, 8.0]}}, 8, "must have a valid dtype"),
    ({"a": {**GOOD, "dtype": 3}}, 8, "must have a valid dtype"),
    ({"a": {**GOOD, "dtype": "F31"}}, 8, "unknown dtype 'F31'"),
    ({"a": {**GOOD, "dtype": "F64"}}, 8, "bytes, which does not match its dtype and shape"),
    ({"a": {**GOOD, "shape": [3]}}, 8, "bytes, which does not match its dtype and shape"),
    ({"a": {**GOOD, "shape": [-2]}}, 8, "shape of 'a' is invalid"),
    ({"a": {**GOOD, "shape": [-1, -2]}}, 8, "shape of 'a' is invalid"),
    ({"a": {**GOOD, "shape": [True, 2]}}, 8, "shape of 'a' is invalid"),
    ({"a": {**GOOD, "shape": [2.0]}}, 8, "shape of 'a' is invalid"),
    ({"a": {**GOOD, "shape": ["2"]}}, 8, "shape of 'a' is invalid"),
    ({"a": {**GOOD, "shape": [1 << 31]}}, 8, "shape of 'a' is invalid"),
    ({"a": {**GOOD, "shape": [1 << 30] * 3}}, 8, "shape of 'a' is invalid"),
    ({"a": {**GOOD, "shape": [1 << 30, 1 << 30, 1 << 30, 0]}}, 0, "shape of 'a' is invalid"),
    ({"a": {**GOOD, "shape": [1] * 1000}}, 8, "shape of 'a' is invalid"),
    ({"a": tensor_entry("F32", [2], True, 9)}, 9, "data_offsets of 'a' are invalid"),
    ({"a": tensor_entry("F32", [2], -8, 0)}, 8, "data_offsets of 'a' are invalid"),
    ({"a": tensor_entry("F32", [2], 8, 0)}, 8, "data_offsets of 'a' are invalid"),
    ({"a": tensor_entry("F32", [2], 10**30, 10**30 + 8)}, 8, "data_offsets of 'a' are invalid"),
    ({"a": tensor_entry("F32", [2], 8, 16)}, 16, "'a' leaves a gap"),
    ({"a": GOOD, "b": tensor_entry("F32", [2], 12, 20)}, 20, "'b' leaves a gap"),
    ({"a": GOOD, "b": tensor_entry("F32", [2], 4, 12)}, 12, "'b' overlaps"),
    ({"a": GOOD, "b": GOOD}, 8, "overlaps"),
    ({"a": GOOD}, 7, "it is truncated"),
    ({"a": GOOD}, 9, "its tensors have 8 bytes, but the file has 9"),
    ({}, 1, "its tensors have 0 bytes, but the file has 1"),
    ({"a\nb": GOOD}, 8, "contains unprintable characters"),
    ({"\ud800": GOOD}, 8, "contains unprintable characters"),
    ({"a" * 10_000: 3}, 0, "aaa…'"),
]


@rows(("header", "data", "part"), WRONG)
def test_an_invalid_header_is_a_one_line_error(
    tmp_path: Path, header: Any, data: int, part: str
) -> None:
    assert part in complaint(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [100_000_001, 1 << 63, (1 << 64) - 1])
def test_a_wrong_header_length_is_reported(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    assert f"its header length is {length} bytes" in complaint(path)
    path.write_bytes(struct.pack("<Q", 50) + b"{}")
    assert "its header length is 50 bytes, but only 2 bytes follow" in complaint(path)


def test_a_pipe_or_a_folder_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    os.mkfifo(path)
    assert "not a regular file" in complaint(path)
    path.unlink()
    path.mkdir()
    assert "not a regular file" in complaint(path)
    path.rmdir()
    assert "No such file" in complaint(path)
    path.symlink_to(path)
    assert "symbolic links" in complaint(path)


VALID = json.dumps(
    {
        "__metadata__": {"format": "mlx"},
        "a": tensor_entry("F32", [2, 3], 0, 24),
        "b": tensor_entry("BF16", [4], 24, 32),
        "c": tensor_entry("U8", [0], 32, 32),
        "d": tensor_entry("BOOL", [], 32, 33),
    }
).encode()
PLACES = st.integers(0, 8 * (8 + len(VALID)) - 1)


@given(flips=st.lists(PLACES, min_size=1, max_size=3))
def test_flipped_bits_are_detected_or_leave_a_consistent_header(
    tmp_path_factory: pytest.TempPathFactory, flips: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    content = bytearray(write(path, VALID, 33).read_bytes())
    for position in flips:
        content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)
    with contextlib.suppress(AppError):
        check(safetensors_header.read(path))


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.sampled_from([*b'0123456789-[]{}",:eE. '])),
        min_size=1,
        max_size=4,
    )
)
def test_changed_characters_are_detected_or_leave_a_consistent_header(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]
) -> None:
    """The library's own reader accepts every header that this one accepts."""
    path = tmp_path_factory.getbasetemp() / "edited.safetensors"
    text = bytearray(VALID)
    for position, character in edits:
        text[position] = character
    write(path, bytes(text), 33)
    try:
        header = safetensors_header.read(path)
    except AppError:
        return
    check(header)
    with safe_open(path, framework="mlx") as opened:
        assert set(opened.keys()) == set(header.tensors)


def check(header: safetensors_header.SafetensorsHeader) -> None:
    tensors = sorted(header.tensors.values(), key=lambda tensor: (tensor.start, tensor.end))
    assert sum(tensor.nbytes for tensor in tensors) == 33
    for tensor in tensors:
        count = 1
        for size in tensor.shape:
            count *= size
        assert count == tensor.num_elements
        assert count * safetensors_header.DTYPE_BITS[tensor.dtype] == 8 * tensor.nbytes
    for one, next_ in itertools.pairwise(tensors):
        assert one.end == next_.start


def test_every_shorter_file_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", VALID, 33)
    content = path.read_bytes()
    assert len(safetensors_header.read(path).tensors) == 4
    for length in range(len(content)):
        path.write_bytes(content[:length])
        complaint(path)


def test_headers_of_forty_gigabytes_cost_a_few_megabytes_of_reading(tmp_path: Path) -> None:
    """Ten sparse files of a thousand tensors each: only the headers are read."""
    each = 4_000_000
    for shard in range(10):
        header = {
            f"model.layers.{shard}.mlp.experts.{i}.weight": tensor_entry(
                "BF16", [each // 2], i * each, (i + 1) * each
            )
            for i in range(1000)
        }
        write(tmp_path / f"model-{shard}.safetensors", header, 1000 * each)
    read_before = count_bytes_read()
    headers = [safetensors_header.read(path) for path in sorted(tmp_path.iterdir())]
    assert count_bytes_read() - read_before < 8 << 20
    assert sum(header.nbytes for header in headers) == 40_000_000_000
