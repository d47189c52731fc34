"""Writes the tiny encoders of encoder_reference.json as GGUF files, as llama.cpp's converter does.

It follows conversion/bert.py of llama.cpp. Nothing of models/gguf is used.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models import encoder_reference
from tests.models.encoder_reference import draw_tensor
from tests.models.gguf.converter import Types, write_tensors

REFERENCE: Any = json.loads(encoder_reference.FILE.read_text())

# name in encoder_reference.json -> llama.cpp's architecture
ENCODERS = {
    "bert": "bert",
    "xlm-roberta": "bert",
    "xlm-roberta-reranker": "bert",
    "nomic-bert": "nomic-bert",
}

# the dense layers of an EmbeddingGemma
DENSE_SHAPES = {"dense_2.weight": (96, 32), "dense_3.weight": (32, 96)}


def write_encoder(
    path: Path,
    name: str,
    *,
    pooling: gguf.PoolingType | None = None,
    quantize: Callable[[str], Types | None] = lambda name: None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    fused: bool = False,
    squeezed: bool = False,
) -> Path:
    """quantize: the type of a matrix, by its name in the file. extra: adds keys, such as a
    tokenizer. fused: whether the projections of a BERT's attention are one tensor. squeezed:
    whether a matrix of one row is a vector, as in old files."""
    case, arch = REFERENCE[name], ENCODERS[name]
    config: dict[str, Any] = case["config"]
    is_roberta = config["model_type"] == "xlm-roberta"
    unused = config["pad_token_id"] + 1 if is_roberta else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"] - unused)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if "rope_parameters" in config:
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if pooling is not None:
        writer.add_pooling_type(pooling)
    extra(writer)
    number = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    tensors: dict[str, np.ndarray] = {}
    for tensor, shape in case["tensors"].items():
        array = draw_tensor(tensor, shape)
        tensor = tensor.removeprefix("roberta.")
        if tensor.startswith("pooler."):
            continue
        if tensor == "embeddings.position_embeddings.weight":
            array = array[unused:]
        if squeezed and array.ndim > 1:
            array = array.squeeze()
        target = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert target is not None, tensor
        tensors[target] = array
    if fused:
        tensors = _fuse(tensors)
    write_tensors(writer, tensors, quantize)
    return path


def write_embedding_gemma(
    path: Path,
    *,
    quantize: Callable[[str], Types | None] = lambda name: None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    has_dense: bool = True,
    slides: list[bool] | None = None,
) -> Path:
    """An EmbeddingGemma with the dense modules of sentence-transformers, as conversion/gemma.py
    writes it. slides: whether the window of each layer slides, as some files have it."""
    case = REFERENCE["embedding-gemma"]
    config: dict[str, Any] = case["config"]
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "gemma-embedding")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    if slides is not None:
        writer.add_sliding_window_pattern(slides)
    extra(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA_EMBEDDING, 3)
    tensors: dict[str, np.ndarray] = {}
    for tensor, shape in case["tensors"].items():
        name = names.get_name(tensor, try_suffixes=(".weight",))
        assert name is not None, tensor
        array = draw_tensor(tensor, shape)
        tensors[name] = array + 1 if tensor.endswith("norm.weight") else array
    if has_dense:
        for name, shape in DENSE_SHAPES.items():
            tensors[name] = draw_tensor(name, shape)
    write_tensors(writer, tensors, quantize)
    return path


def _fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = dict(tensors)
    for name in tensors:
        if ".attn_q." in name:
            parts = [found.pop(name.replace(".attn_q.", f".attn_{x}.")) for x in "qkv"]
            found[name.replace(".attn_q.", ".attn_qkv.")] = np.concatenate(parts)
    return found
