"""Model folders of any size with random weights, which mlx-lm can load too.

All ids above the first 256 are visible pieces of text, so a server sends text for each token. The
config has no end-of-sequence id, so an answer always has max_tokens tokens.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds

from benchmarks import cpu_cells
from models import architectures, llama
from models.base import Model
from models.cpu_layout import apply_cpu_layout


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Keys of a Llama config."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 8192


SHAPES = {
    size: LlamaShape(
        hidden_size=cpu_cells.SHAPES[size].width,
        num_hidden_layers=cpu_cells.SHAPES[size].layers,
        intermediate_size=cpu_cells.SHAPES[size].inner,
        num_attention_heads=cpu_cells.SHAPES[size].heads,
        num_key_value_heads=cpu_cells.SHAPES[size].kv_heads,
        vocab_size=cpu_cells.SHAPES[size].vocab,
    )
    for size in ("110M", "15M")
} | {
    # almost no compute
    "free": LlamaShape(
        hidden_size=64,
        num_hidden_layers=1,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=8192,
    )
}


def write(folder: Path, size: str, seed: int = 0, vocab: int | None = None) -> Path:
    """Write a model with float32 weights and tied embeddings to a subfolder named after its size.
    vocab: another vocabulary size."""
    shape = SHAPES[size] if vocab is None else replace(SHAPES[size], vocab_size=vocab)
    destination = folder / size
    destination.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "tie_word_embeddings": True, **asdict(shape)}
    # keys without defaults in mlx-lm; these values are our defaults
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    (destination / "config.json").write_text(json.dumps(config))
    described = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (destination / "tokenizer_config.json").write_text(json.dumps(described))
    rng = np.random.default_rng(seed)
    shapes = dict(tree_flatten(llama.Model(llama.Config.from_dict(config)).parameters()))
    mx.save_safetensors(
        str(destination / "model.safetensors"),
        {
            name: mx.ones(array.shape)
            if name.endswith("norm.weight")
            else mx.array(
                rng.standard_normal(array.shape, dtype=np.float32) / array.shape[-1] ** 0.5
            )
            for name, array in shapes.items()
        },
    )
    make_tokenizer(shape.vocab_size).save(str(destination / "tokenizer.json"))
    return destination


def load(folder: Path) -> Model:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    model = architectures.build(json.loads((folder / "config.json").read_text()), weights)
    assert isinstance(model, nn.Module)
    mx.eval(model.parameters())
    # as the engine does
    apply_cpu_layout(model)
    return model


def make_tokenizer(size: int) -> Tokenizer:
    """Bytes first, then artificial words, which ids decode to but text is never split into."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    vocab |= {f"\u0120w{i}": i for i in range(len(alphabet), size)}
    tokenizer = Tokenizer(kinds.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
