"""Writes the weights of a model folder, or random blocks, as a GGUF file for llama.cpp.

Knows: GGUF (version 3), llama.cpp's Q8_0 and Q4_0, the names of its tensors, and the types of the
tensors of its file types. Must not know: processes. Each printable character is a token, so a text
has as many tokens as letters, and all other ids above the bytes are visible pieces.
"""

import string
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_cells import MAX_POSITIONS, ModelShape
from benchmarks.cpu_weights import StoredWeights
from tests.models.gguf.random_blocks import IDS, make_blocks

BOS, EOS = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_SPACE = "\u2581"
_ALIGNMENT, _GROUP = 32, 32

# codes of GGUF: of value types, and of tensor types
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_TENSOR_TYPES: Mapping[str, int] = {"F32": 0, "Q4_0": 2, "Q8_0": 8, "BF16": 30}

_TENSORS: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


# the shape, the code of the type and the bytes of a tensor
_Tensor = tuple[tuple[int, ...], int, np.ndarray]


def write(file: Path, weights: StoredWeights) -> None:
    """Write the file. During this time, the quantized tensors are in memory."""
    kind = weights.format.gguf
    names = sorted(weights.names())
    tensors = {name: _make_tensor(weights, name, kind) for name in names}
    _write_tensors(file, weights.shape, tensors)


def write_random_blocks(file: Path, shape: ModelShape, file_type: str) -> None:
    """Write random blocks, in the types that llama-quantize chooses for the file type."""
    tensors: dict[str, _Tensor] = {}
    for name, size in _list_shapes(shape).items():
        if len(size) == 1:
            tensors[name] = size, _TENSOR_TYPES["F32"], np.ones(size, np.float32)
        else:
            code = IDS[_choose_type(name, shape.layers, file_type)]
            tensors[name] = size, code, np.array(make_blocks(code, *size, seed=len(tensors)))
    _write_tensors(file, shape, tensors)


def _choose_type(name: str, layers: int, file_type: str) -> str:
    if file_type != "Q4_K_M":
        return file_type
    if name.startswith("model.embed_tokens"):
        return "Q6_K"
    layer = int(name.split(".")[2])
    eighth = layers // 8
    has_more_bits = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if has_more_bits and ("v_proj" in name or "down_proj" in name) else "Q4_K"


def _list_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights, by our names."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (shape.width,),
        "self_attn.q_proj": (queries, shape.width),
        "self_attn.k_proj": (keys, shape.width),
        "self_attn.v_proj": (keys, shape.width),
        "self_attn.o_proj": (shape.width, queries),
        "post_attention_layernorm": (shape.width,),
        "mlp.gate_proj": (shape.inner, shape.width),
        "mlp.up_proj": (shape.inner, shape.width),
        "mlp.down_proj": (shape.width, shape.inner),
    }
    if shape.kind == "qwen3":
        of_layer |= {f"self_attn.{one}_norm": (shape.head_dim,) for one in "qk"}
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.width),
        "model.norm.weight": (shape.width,),
    }
    for layer in range(shape.layers):
        found |= {f"model.layers.{layer}.{path}.weight": size for path, size in of_layer.items()}
    return found


def _write_tensors(file: Path, shape: ModelShape, tensors: Mapping[str, _Tensor]) -> None:
    metadata = _make_metadata(shape)
    with file.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, (code, value) in metadata.items():
            out.write(_pack_text(key) + struct.pack("<I", code) + _pack_value(code, value))
        offset = 0
        for name, (size, code, packed) in tensors.items():
            dimensions = struct.pack(f"<I{len(size)}Q", len(size), *reversed(size))
            out.write(_pack_text(_rename(name)) + dimensions + struct.pack("<IQ", code, offset))
            offset += _align(packed.nbytes)
        out.write(bytes(_align(out.tell()) - out.tell()))
        for _, _, packed in tensors.values():
            out.write(packed.tobytes())
            out.write(bytes(_align(packed.nbytes) - packed.nbytes))


def _make_tensor(weights: StoredWeights, name: str, kind: str) -> _Tensor:
    """Norms are float32."""
    plain = weights.read(name)
    if plain.ndim == 1:
        return plain.shape, _TENSOR_TYPES["F32"], plain.astype(np.float32)
    shape = weights.shape
    if shape.kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        plain = _interleave(plain, shape.heads if "q_proj" in name else shape.kv_heads)
    return plain.shape, _TENSOR_TYPES[kind], quantize(plain, kind)


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring pairs in this architecture, and we rotate halves."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def quantize(weight: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of a matrix in a type of llama.cpp."""
    if kind == "F32":
        return np.ascontiguousarray(weight, np.float32)
    if kind == "BF16":
        return _round_to_bfloat16(weight)
    groups = weight.reshape(-1, _GROUP).astype(np.float32)
    if kind == "Q8_0":
        scales = np.abs(groups).max(axis=1, keepdims=True) / 127
        numbers = np.round(groups * _invert(scales)).astype(np.int8).view(np.uint8)
    else:
        # the number of largest magnitude becomes -8
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
        scales = largest / -8
        levels = np.clip(np.floor(groups * _invert(scales) + 8.5), 0, 15).astype(np.uint8)
        numbers = levels[:, :16] | (levels[:, 16:] << 4)
    return np.concatenate([scales.astype(np.float16).view(np.uint8), numbers], axis=1)


def _invert(scales: np.ndarray) -> np.ndarray:
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


def _round_to_bfloat16(weight: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(weight, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _make_metadata(shape: ModelShape) -> dict[str, tuple[int, Any]]:
    numbers = {
        "context_length": MAX_POSITIONS,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": shape.vocab,
    }
    found: dict[str, tuple[int, Any]] = {"general.architecture": (_STRING, shape.kind)}
    found |= {f"{shape.kind}.{key}": (_UINT32, value) for key, value in numbers.items()}
    found[f"{shape.kind}.rope.freq_base"] = (_FLOAT32, 10000.0)
    found[f"{shape.kind}.attention.layer_norm_rms_epsilon"] = (_FLOAT32, 1e-6)
    return found | _make_vocabulary(shape.vocab)


def _make_vocabulary(size: int) -> dict[str, tuple[int, Any]]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256]
    pieces += [*string.ascii_letters, *string.digits, _SPACE]
    pieces += [f"{_SPACE}w{i}" for i in range(size - len(pieces))]
    kinds += [_NORMAL] * (size - len(kinds))
    return {
        "tokenizer.ggml.model": (_STRING, "llama"),
        "tokenizer.ggml.tokens": (_ARRAY, (_STRING, pieces)),
        "tokenizer.ggml.scores": (_ARRAY, (_FLOAT32, [-float(i) for i in range(size)])),
        "tokenizer.ggml.token_type": (_ARRAY, (_INT32, kinds)),
        "tokenizer.ggml.bos_token_id": (_UINT32, BOS),
        "tokenizer.ggml.eos_token_id": (_UINT32, EOS),
        "tokenizer.ggml.add_bos_token": (_BOOL, False),
        "tokenizer.ggml.add_space_prefix": (_BOOL, False),
    }


def _pack_value(code: int, value: Any) -> bytes:
    if code == _STRING:
        return _pack_text(value)
    if code == _ARRAY:
        inner, values = value
        packed = b"".join(_pack_value(inner, one) for one in values)
        return struct.pack("<IQ", inner, len(values)) + packed
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[code], value)


def _pack_text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _rename(name: str) -> str:
    """A name in llama.cpp: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    path = name.removesuffix(".weight")
    prefix = ""
    if path.startswith("model.layers."):
        layer, path = path.removeprefix("model.layers.").split(".", 1)
        prefix = f"blk.{layer}."
    return f"{prefix}{_TENSORS[path]}.weight"


def _align(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
