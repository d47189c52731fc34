"""Random weights of a shape in a format, for llama.cpp: one GGUF file.

    PYTHON -m tests.bench.cpu_gguf FILE SIZE FORMAT

It needs a Python with gguf and numpy. Each printable character is a token, so a text has as many
tokens as letters, and all other ids above the bytes are visible pieces.
"""

import string
import sys
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports]  # of another environment
import numpy as np

from tests.bench.cpu_cells import FORMATS, SHAPES, ModelShape

BOS, EOS = 1, 2
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SPACE = "\u2581"


def write(file: Path, size: str, form: str) -> None:
    shape, kind = SHAPES[size], gguf.GGMLQuantizationType[FORMATS[form].gguf]
    writer = gguf.GGUFWriter(str(file), shape.kind)
    writer.add_name(size)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocab)
    _add_vocabulary(writer, shape.vocab)
    rng = np.random.default_rng(0)
    for name, rows, columns in _list_matrices(shape):
        plain = rng.standard_normal((rows, columns), dtype=np.float32) / columns**0.5
        packed = plain if kind.name == "F32" else gguf.quants.quantize(plain, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    for name, length in _list_norms(shape):
        writer.add_tensor(name, np.ones(length, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    pieces += [*string.ascii_letters, *string.digits, SPACE]
    pieces += [f"{SPACE}w{i}" for i in range(size - len(pieces))]
    kinds += [NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.encode() for piece in pieces])
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _list_matrices(shape: ModelShape) -> list[tuple[str, int, int]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = [("token_embd.weight", shape.vocab, shape.width)]
    for i in range(shape.layers):
        found += [
            (f"blk.{i}.attn_q.weight", queries, shape.width),
            (f"blk.{i}.attn_k.weight", keys, shape.width),
            (f"blk.{i}.attn_v.weight", keys, shape.width),
            (f"blk.{i}.attn_output.weight", shape.width, queries),
            (f"blk.{i}.ffn_gate.weight", shape.inner, shape.width),
            (f"blk.{i}.ffn_up.weight", shape.inner, shape.width),
            (f"blk.{i}.ffn_down.weight", shape.width, shape.inner),
        ]
    return found


def _list_norms(shape: ModelShape) -> list[tuple[str, int]]:
    found = [("output_norm.weight", shape.width)]
    for i in range(shape.layers):
        found += [(f"blk.{i}.{name}.weight", shape.width) for name in ("attn_norm", "ffn_norm")]
        if shape.kind == "qwen3":
            heads = ("attn_q_norm", "attn_k_norm")
            found += [(f"blk.{i}.{name}.weight", shape.head_dim) for name in heads]
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:])
