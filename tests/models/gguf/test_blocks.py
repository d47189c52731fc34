"""The values of GGUF's block types.

The expected digests were computed by gguf-py 0.19 from the same bytes (`gguf.quants.dequantize`,
NaN replaced by 0).
"""

import hashlib
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from models.base import ModelError
from models.gguf.blocks import dequantize, has_affine_packing, repack_affine
from models.gguf.ggml_types import GGML_TYPES

ROWS = 6

# name -> the beginning of the SHA-256 digest of the weights
DIGESTS = {
    "F32": "1260fab9a9318ef4",
    "F16": "f48dfeefcf16c919",
    "Q4_0": "b9e3be78fed6e3bc",
    "Q4_1": "730b71a3d2690f7b",
    "Q5_0": "0e2fae937346aa81",
    "Q5_1": "54c49537d3dbc49b",
    "Q8_0": "45cd8891545021ff",
    "Q2_K": "f21470e6e2320f13",
    "Q3_K": "e6cb70d14d282d92",
    "Q4_K": "a2be54e40d4b37c0",
    "Q5_K": "7f736ac4e7b90fd7",
    "Q6_K": "a5573f16c65516aa",
    "IQ4_NL": "f7272b8a66b0bd67",
    "IQ4_XS": "80ba1eaca75bed5c",
    "BF16": "28716f2c482bc181",
    "MXFP4": "a822f5adca55fd27",
}
IDS = {kind.name: id for id, kind in GGML_TYPES.items()}
AFFINE = sorted(name for name, id in IDS.items() if has_affine_packing(id))


def make_rows(name: str) -> mx.array:
    """Random blocks, of which all bytes are valid."""
    kind = GGML_TYPES[IDS[name]]
    blocks = {1: 64, 32: 16, 256: 4}[kind.elements]
    digest = hashlib.shake_256(name.encode()).digest(ROWS * blocks * kind.nbytes)
    return mx.array(np.frombuffer(digest, dtype=np.uint8).reshape(ROWS, -1))


def without_nan(weights: mx.array) -> mx.array:
    return mx.where(mx.isnan(weights), 0.0, weights)


@pytest.mark.parametrize("name", DIGESTS)
def test_weights_are_bit_identical_to_those_of_gguf_py(name: str) -> None:
    weights = dequantize(make_rows(name), IDS[name])
    assert weights.dtype == mx.float32
    digest = hashlib.sha256(bytes(memoryview(cast(Any, without_nan(weights))))).hexdigest()
    assert digest[:16] == DIGESTS[name]


def test_every_type_has_expected_weights() -> None:
    assert set(DIGESTS) == set(IDS)


@pytest.mark.parametrize("name", DIGESTS)
def test_leading_axes_are_kept(name: str) -> None:
    rows = make_rows(name)
    stacked = dequantize(mx.unflatten(rows, 0, (2, 3)), IDS[name])
    flat = dequantize(rows, IDS[name])
    assert stacked.shape == (2, 3, flat.shape[-1])
    assert mx.array_equal(stacked.flatten(0, 1), flat, equal_nan=True)


@pytest.mark.parametrize("name", AFFINE)
def test_the_affine_packing_has_the_same_weights(name: str) -> None:
    rows = make_rows(name)
    packed = repack_affine(rows, IDS[name])
    restored = mx.dequantize(
        packed.weight,
        packed.scales,
        packed.biases,
        group_size=packed.group_size,
        bits=packed.bits,
        mode=packed.mode,
        dtype=mx.float32,
    )
    weights = dequantize(rows, IDS[name])
    # MLX multiplies infinite scales, and reads the exponent 255 as NaN
    usual = mx.abs(weights) < 1e37
    assert mx.all(usual.mean() > 0.9)
    assert mx.array_equal(mx.where(usual, restored, 0), mx.where(usual, weights, 0))


def test_the_types_with_groups_of_sixteen_have_no_affine_packing() -> None:
    assert set(DIGESTS) - set(AFFINE) == {"F32", "F16", "BF16", "Q2_K", "Q3_K", "Q6_K"}
    with pytest.raises(ModelError, match="no packing with the same weights as Q6_K"):
        repack_affine(make_rows("Q6_K"), IDS["Q6_K"])


def test_large_tensors_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows("Q4_K")
    whole = dequantize(rows, IDS["Q4_K"])
    monkeypatch.setattr("models.gguf.blocks._WEIGHTS_PER_SLICE", 5 * 256)
    assert mx.array_equal(dequantize(rows, IDS["Q4_K"]), whole, equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 17), (0, 18), (2, 0)])
def test_rows_must_consist_of_blocks(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="rows of Q4_0 must consist of blocks of 18 bytes"):
        dequantize(mx.zeros(shape, dtype=mx.uint8), IDS["Q4_0"])


@pytest.mark.parametrize(("type_id", "name"), [(16, "IQ2_XXS"), (40, "NVFP4"), (99, "unknown")])
def test_other_types_are_refused_by_name(type_id: int, name: str) -> None:
    with pytest.raises(ModelError, match=f"type {name}.* are not supported"):
        dequantize(mx.zeros((1, 16), dtype=mx.uint8), type_id)
