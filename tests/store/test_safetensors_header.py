"""What the header of a safetensors file says, and every way in which it can lie."""

import contextlib
import itertools
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from app.core.errors import AppError, ErrorKind
from app.store import safetensors_header
from tests.store.shards import told, write, write_tensors


def complaint(path: Path) -> str:
    with pytest.raises(AppError) as caught:
        safetensors_header.read(path)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert caught.value.message.startswith(str(path))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < len(str(path)) + 300
    return caught.value.message


def test_names_types_shapes_and_metadata_are_read_and_added_up(tmp_path: Path) -> None:
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


def test_half_bytes_count(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"w": told("F4", [2, 8], 0, 8)}, 8)
    assert safetensors_header.read(path).tensors["w"].num_elements == 16
    assert "bytes, which does not match its dtype and shape" in complaint(
        write(path, {"w": told("F4", [3], 0, 2)}, 2)
    )


@pytest.mark.parametrize("cut", [*range(8), 8, 20, 60, -1])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, cut: int) -> None:
    path = write_tensors(tmp_path / "x.safetensors", "a", "b")
    path.write_bytes(path.read_bytes()[:cut])
    complaint(path)


GOOD = told("F32", [2], 0, 8)
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
    ({"a": 3}, 0, "needs dtype, shape and data_offsets"),
    ({"a": {"dtype": "F32", "shape": [2]}}, 0, "needs dtype, shape and data_offsets"),
    ({"a": {**GOOD, "shape": 2}}, 8, "needs dtype, shape and data_offsets"),
    ({"a": {**GOOD, "data_offsets": [0]}}, 8, "needs dtype, shape and data_offsets"),
    ({"a": {**GOOD, "data_offsets": [0, 8.0]}}, 8, "needs dtype, shape and data_offsets"),
    ({"a": {**GOOD, "dtype": 3}}, 8, "needs dtype, shape and data_offsets"),
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
    ({"a": told("F32", [2], True, 9)}, 9, "data_offsets of 'a' are invalid"),
    ({"a": told("F32", [2], -8, 0)}, 8, "data_offsets of 'a' are invalid"),
    ({"a": told("F32", [2], 8, 0)}, 8, "data_offsets of 'a' are invalid"),
    ({"a": told("F32", [2], 10**30, 10**30 + 8)}, 8, "data_offsets of 'a' are invalid"),
    ({"a": told("F32", [2], 8, 16)}, 16, "'a' leaves a gap"),
    ({"a": GOOD, "b": told("F32", [2], 12, 20)}, 20, "'b' leaves a gap"),
    ({"a": GOOD, "b": told("F32", [2], 4, 12)}, 12, "'b' overlaps"),
    ({"a": GOOD, "b": GOOD}, 8, "overlaps"),
    ({"a": GOOD}, 7, "it is truncated"),
    ({"a": GOOD}, 9, "its tensors have 8 bytes, but the file has 9"),
    ({}, 1, "its tensors have 0 bytes, but the file has 1"),
    ({"a\nb": GOOD}, 8, "contains unprintable characters"),
    ({"\ud800": GOOD}, 8, "contains unprintable characters"),
    ({"a" * 10_000: 3}, 0, "aaa…'"),
]


@pytest.mark.parametrize(("header", "data", "words"), WRONG)
def test_a_header_that_lies_is_told_in_one_line(
    tmp_path: Path, header: Any, data: int, words: str
) -> None:
    assert words in complaint(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [100_000_001, 1 << 63, (1 << 64) - 1])
def test_a_header_is_not_as_long_as_it_says(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    assert f"its header length is {length} bytes" in complaint(path)
    path.write_bytes(struct.pack("<Q", 50) + b"{}")
    assert "its header length is 50 bytes, but only 2 follow" in complaint(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
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
        "a": told("F32", [2, 3], 0, 24),
        "b": told("BF16", [4], 24, 32),
        "c": told("U8", [0], 32, 32),
        "d": told("BOOL", [], 32, 33),
    }
).encode()
PLACES = st.integers(0, 8 * (8 + len(VALID)) - 1)


@given(flips=st.lists(PLACES, min_size=1, max_size=3))
def test_flipped_bits_are_noticed_or_leave_something_consistent(
    tmp_path_factory: pytest.TempPathFactory, flips: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    content = bytearray(write(path, VALID, 33).read_bytes())
    for place in flips:
        content[place // 8] ^= 1 << place % 8
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
def test_changed_characters_are_noticed_or_leave_something_consistent(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]
) -> None:
    """Whatever passes here also passes the library's own reader."""
    path = tmp_path_factory.getbasetemp() / "edited.safetensors"
    text = bytearray(VALID)
    for place, character in edits:
        text[place] = character
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


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", VALID, 33)
    content = path.read_bytes()
    assert len(safetensors_header.read(path).tensors) == 4
    for length in range(len(content)):
        path.write_bytes(content[:length])
        complaint(path)


def test_forty_gigabytes_are_looked_at_in_no_time(tmp_path: Path) -> None:
    """Files without blocks: what is not read costs nothing. Ten files of a thousand tensors."""
    each = 4_000_000
    for shard in range(10):
        header = {
            f"model.layers.{shard}.mlp.experts.{i}.weight": told(
                "BF16", [each // 2], i * each, (i + 1) * each
            )
            for i in range(1000)
        }
        write(tmp_path / f"model-{shard}.safetensors", header, 1000 * each)
    start = time.perf_counter()
    read = [safetensors_header.read(path) for path in sorted(tmp_path.iterdir())]
    assert time.perf_counter() - start < 1
    assert sum(header.nbytes for header in read) == 40_000_000_000
