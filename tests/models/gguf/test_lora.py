"""LoRA adapters in GGUF change a model as the same adapters in PEFT's format do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from models.base import ModelError
from models.gguf import reader
from models.gguf.lora import read_lora_weights
from models.gguf.reader import GGUFError
from models.lora import LoraFactors
from tests import tiny
from tests.models.gguf.converter import permute
from tests.models.test_lora import draw_adapter

ALPHA = 2.0
ADAPTER = draw_adapter(7)


def write_adapter(
    path: Path,
    adapter: Mapping[str, LoraFactors] = ADAPTER,
    *,
    config: Mapping[str, Any] = tiny.CONFIG,
    kind: str = "adapter",
    alpha: float | None = ALPHA,
    quantized: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """As llama.cpp's convert_lora_to_gguf.py does: the rows of the second factor of a rotated
    projection are reordered like those of the model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, factors in adapter.items():
        a, b = np.array(factors.a), np.array(factors.b)
        if name.endswith("q_proj"):
            b = permute(b, config["num_attention_heads"])
        if name.endswith("k_proj"):
            b = permute(b, config["num_key_value_heads"])
        base = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
        for suffix, array in (("lora_a", a), ("lora_b", b)):
            if quantized is None:
                writer.add_tensor(f"{base}.{suffix}", np.ascontiguousarray(array))
            else:
                packed = gguf.quants.quantize(array, quantized)
                writer.add_tensor(f"{base}.{suffix}", packed, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path, config: Mapping[str, Any] = tiny.CONFIG) -> dict[str, LoraFactors]:
    return read_lora_weights(reader.read(path), config)


def test_the_factors_are_those_of_the_original(tmp_path: Path) -> None:
    found = read(write_adapter(tmp_path / "a.gguf"))
    assert found.keys() == ADAPTER.keys()
    for name, original in ADAPTER.items():
        assert mx.array_equal(found[name].a, original.a), name
        assert mx.array_equal(found[name].b, original.b), name
        assert found[name].scale == ALPHA / original.a.shape[0]


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_factors_of_half_the_size_are_read(tmp_path: Path, kind: str) -> None:
    path = write_adapter(tmp_path / "a.gguf", quantized=gguf.GGMLQuantizationType[kind])
    for name, one in read(path).items():
        np.testing.assert_allclose(
            np.array(one.a.astype(mx.float32)), np.array(ADAPTER[name].a), rtol=1e-2
        )


def test_an_alpha_of_zero_does_not_scale_the_product(tmp_path: Path) -> None:
    """As in llama.cpp."""
    found = read(write_adapter(tmp_path / "a.gguf", alpha=0.0))
    assert {one.scale for one in found.values()} == {1.0}


def test_a_file_that_is_not_an_adapter_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"a\.gguf is not a LoRA adapter"):
        read(write_adapter(tmp_path / "a.gguf", kind="model"))
    with pytest.raises(GGUFError, match=r"b\.gguf: adapter\.lora\.alpha is None"):
        read(write_adapter(tmp_path / "b.gguf", alpha=None))


def test_a_tensor_that_is_not_a_factor_is_rejected_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"blk\.0\.attn_norm\.weight, which is not a factor"):
        read(tmp_path / "a.gguf")


def test_a_missing_factor_is_reported(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_v.weight.lora_b", b"blk.9.attn_v.weight.lora_b"))
    with pytest.raises(ModelError, match=r"only one factor of model\.layers\.0\.self_attn\.v_proj"):
        read(path)
