"""Random weights of a shape in a format, for llama.cpp: one GGUF file.

    PYTHON -m tests.bench.cpu_gguf FILE SIZE FORMAT

Run by a Python that has gguf and numpy. Printable characters are tokens of their own, so that a
text has as many tokens as letters, and every other id above the bytes is a visible piece.
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
    made = gguf.GGUFWriter(str(file), shape.kind)
    made.add_name(size)
    made.add_context_length(8192)
    made.add_embedding_length(shape.width)
    made.add_block_count(shape.layers)
    made.add_feed_forward_length(shape.inner)
    made.add_head_count(shape.heads)
    made.add_head_count_kv(shape.kv_heads)
    made.add_key_length(shape.head_dim)
    made.add_value_length(shape.head_dim)
    made.add_rope_dimension_count(shape.head_dim)
    made.add_rope_freq_base(10000.0)
    made.add_layer_norm_rms_eps(1e-6)
    made.add_vocab_size(shape.vocab)
    _add_vocabulary(made, shape.vocab)
    rng = np.random.default_rng(0)
    for name, rows, columns in _list_matrices(shape):
        plain = rng.standard_normal((rows, columns), dtype=np.float32) / columns**0.5
        packed = plain if kind.name == "F32" else gguf.quants.quantize(plain, kind)
        made.add_tensor(name, packed, raw_dtype=kind)
    for name, length in _list_norms(shape):
        made.add_tensor(name, np.ones(length, np.float32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def _add_vocabulary(made: gguf.GGUFWriter, size: int) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    pieces += [*string.ascii_letters, *string.digits, SPACE]
    pieces += [f"{SPACE}w{i}" for i in range(size - len(pieces))]
    kinds += [NORMAL] * (size - len(kinds))
    made.add_tokenizer_model("llama")
    made.add_token_list([piece.encode() for piece in pieces])
    made.add_token_scores([-float(i) for i in range(size)])
    made.add_token_types(kinds)
    made.add_bos_token_id(BOS)
    made.add_eos_token_id(EOS)
    made.add_add_bos_token(False)
    made.add_add_space_prefix(False)


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
