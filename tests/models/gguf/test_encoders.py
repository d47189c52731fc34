"""Encoders in GGUF give the same results as transformers with the same weights."""

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from models import kernels
from models.cpu_layout import is_batch_invariant
from models.encoder import Encoder, split_inputs
from models.gguf import reader
from models.gguf.architectures import read_config
from models.gguf.reader import GGUFError
from models.gguf.weights import open_weights, read_dense_layers
from tests.models.encoder_reference import draw_inputs, draw_tensor
from tests.models.gguf.encoders import (
    DENSE_SHAPES,
    ENCODERS,
    REFERENCE,
    write_embedding_gemma,
    write_encoder,
)
from tests.models.gguf.test_architectures import build
from tests.models.test_encoder import NEAR, encode
from tests.models.test_encoder import build as build_hub

Types = gguf.GGMLQuantizationType


def compute(model: Encoder) -> np.ndarray:
    """The mean of the hidden states of each input, or its score. The second segment is the
    reference's, except for a model with one segment."""
    tokens, segments = draw_inputs()
    lengths = [len(ids) for ids in tokens]
    table: Any = model
    has_segments = table.embeddings.token_type_embeddings.weight.shape[0] > 1
    hidden = model.encode(
        mx.array([id for ids in tokens for id in ids]),
        lengths,
        mx.array([id for ids in segments for id in ids]) if has_segments else None,
    )
    if model.num_scores:
        return np.array(model.score(hidden, lengths))
    return np.array([np.array(part).mean(axis=0) for part in split_inputs(hidden, lengths)])


@pytest.mark.parametrize("squeezed", [False, True], ids=["matrices", "vectors"])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_outputs_are_those_of_transformers(tmp_path: Path, name: str, squeezed: bool):
    model = build(write_encoder(tmp_path / "m.gguf", name, squeezed=squeezed))
    np.testing.assert_allclose(compute(model), np.array(REFERENCE[name]["outputs"]), atol=NEAR)


def test_fused_projections_are_split(tmp_path: Path):
    model = build(write_encoder(tmp_path / "m.gguf", "bert", fused=True))
    np.testing.assert_allclose(compute(model), np.array(REFERENCE["bert"]["outputs"]), atol=NEAR)


def quantized(name: str) -> Types | None:
    """Norms, positions and segments are F32, as in published files, and rows of 48 weights."""
    if name.startswith(("position_embd", "token_types")) or "ffn_down" in name:
        return None
    return Types.Q4_0 if "ffn_up" in name else Types.Q8_0


@pytest.mark.parametrize("name", ["bert", "nomic-bert"])
def test_quantized_weights_are_exact(tmp_path: Path, name: str):
    if kernels.ops() is None:
        pytest.skip("without the kernels, there are no blocks")
    path = write_encoder(tmp_path / "m.gguf", name, quantize=quantized)
    model: Any = build(path, keep_blocks=True)
    kinds = {type(module).__name__ for _, module in model.named_modules()}
    assert {"KernelGgufEmbedding", "KernelGgufLinear"} <= kinds
    assert is_batch_invariant(model)
    plain = tmp_path / "plain.gguf"  # the same weights, dequantized by gguf-py
    write_encoder(plain, name)
    content = bytearray(plain.read_bytes())
    values = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in reader.read(plain).tensors.values():
        stored = values[tensor.name]
        floats = gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32)
        content[tensor.offset : tensor.offset + tensor.nbytes] = floats.tobytes()
    plain.write_bytes(content)
    np.testing.assert_allclose(compute(model), compute(build(plain)), atol=1e-4)


def test_the_pooling_is_that_of_the_file(tmp_path: Path):
    expected = {"CLS": "cls", "MEAN": "mean", "LAST": "lasttoken", "RANK": "rank"}
    for kind, mode in expected.items():
        path = write_encoder(tmp_path / "m.gguf", "bert", pooling=gguf.PoolingType[kind])
        assert read_config(reader.read(path))["pooling_mode"] == mode
    path = write_encoder(tmp_path / "m.gguf", "bert")
    assert "pooling_mode" not in read_config(reader.read(path))


def test_a_head_without_its_dense_layer_is_not_supported(tmp_path: Path):
    path = write_encoder(tmp_path / "m.gguf", "xlm-roberta-reranker")
    path.write_bytes(path.read_bytes().replace(b"cls.weight", b"cls.xeight"))
    with pytest.raises(GGUFError, match="drops the pooler of a BERT"):
        read_config(reader.read(path))


def test_a_missing_table_is_named(tmp_path: Path):
    path = write_encoder(tmp_path / "m.gguf", "bert")
    path.write_bytes(path.read_bytes().replace(b"token_types.weight", b"token_typex.weight"))
    with pytest.raises(GGUFError, match=r"lacks the tensor token_types\.weight"):
        read_config(reader.read(path))


def test_experts_are_not_supported(tmp_path: Path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "nomic-bert-moe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(GGUFError, match="'nomic-bert-moe' are not supported"):
        open_weights(reader.read(path))


@pytest.mark.parametrize("slides", [None, [True, True, False]], ids=["usual", "given"])
def test_the_hidden_states_of_embedding_gemma_are_those_of_the_hub(
    tmp_path: Path, slides: list[bool] | None
):
    found = build(write_embedding_gemma(tmp_path / "m.gguf", slides=slides))
    kinds = {True: "sliding_attention", False: "full_attention"}
    expected = build_hub(
        "embedding-gemma",
        query_pre_attn_scalar=16,  # no key has it
        sliding_window_pattern=6,
        layer_types=[kinds[slide] for slide in slides or [True] * 3],
    )
    pairs = zip(encode(found, range(4)), encode(expected, range(4)), strict=True)
    for rows, theirs in pairs:
        np.testing.assert_allclose(rows, theirs, rtol=0, atol=1e-5)


def to_float16(name: str) -> Types:
    return Types.F16


def test_the_dense_layers_of_a_file_are_read(tmp_path: Path):
    path = write_embedding_gemma(tmp_path / "m.gguf", quantize=to_float16)
    layers = read_dense_layers(path)
    assert [layer.shape for layer in layers] == list(DENSE_SHAPES.values())
    for layer, (name, shape) in zip(layers, DENSE_SHAPES.items(), strict=True):
        assert layer.dtype == mx.float32
        assert np.array_equal(layer, draw_tensor(name, shape).astype(np.float16))
    assert read_dense_layers(write_encoder(tmp_path / "bert.gguf", "bert")) == []


def test_an_embedding_gemma_without_dense_layers_is_not_supported(tmp_path: Path):
    path = write_embedding_gemma(tmp_path / "m.gguf", has_dense=False)
    with pytest.raises(GGUFError, match=r"lacks dense_2\.weight and dense_3\.weight, without"):
        read_config(reader.read(path))
