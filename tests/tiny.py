"""A model folder that is written in milliseconds: two layers, random weights from a seed.

The tokenizer is byte-level, so any text can be encoded and decoded: ids 0 to 255 are bytes, then
come the special tokens. Logits are spread widely, so that near-ties are rare.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models import llama

BOS, END = 256, 257
VOCAB = 258

# Positions of a context that no engine fills during a test: attention over that many tokens, one
# token after the other, takes minutes at any memory bandwidth.
LONG = 1 << 20

# Fields of a completion that is endless in a context of `LONG`.
UNENDING: dict[str, Any] = {"max_tokens": LONG // 2, "logit_bias": {str(END): -100}}

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": END,
}


def weights(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, mx.array]:
    """Every tensor that the Llama of `config` needs, by name, drawn from `seed`."""
    rng = np.random.default_rng(seed)
    shapes: Any = tree_flatten(llama.Model(llama.Config.from_dict(config)).parameters())
    tensors: dict[str, mx.array] = {}
    for name, array in shapes:
        scale = 4.0 if "lm_head" in name else 1.0
        values = rng.standard_normal(array.shape) * scale / np.sqrt(array.shape[-1])
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * rng.standard_normal(array.shape)
        tensors[name] = mx.array(values.astype(np.float32))
    return tensors


def tokenizer() -> Tokenizer:
    """One token per byte, followed by <s> and </s>."""
    byte_level = Tokenizer(models.BPE(vocab=dict(_VOCABULARY), merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return byte_level


def _map_characters() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters, by GPT-2's map: printable Latin-1 is
    unchanged, other bytes are mapped to U+0100 and above."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    characters = {chr(b if b in printable else next(others)): b for b in range(256)}
    assert characters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return characters


# not for each tokenizer: the tests write a thousand of them
_VOCABULARY: Mapping[str, int] = _map_characters()


def write(folder: Path, *, seed: int = 0, chat: bool = True, **changes: Any) -> Path:
    """A model folder in the layout of the Hugging Face hub. changes: keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights(config, seed))
    tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
    }
    if chat:
        tokenizer_config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
