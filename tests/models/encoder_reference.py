"""Writes tests/models/encoder_reference.json: the output of transformers for tiny encoders.

It needs torch, and therefore the environment of `make parity` (requirements/parity.in):

    python -m tests.models.encoder_reference

A tensor of a checkpoint is drawn from its name, so that the file contains only shapes.
"""

import json
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("encoder_reference.json")

LENGTHS = (1, 3, 12, 40)
VOCAB = 60

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MODERN = {**_SIZES, **_IDS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 16}
_RERANKER = {"num_labels": 1}

# name: the class of transformers, and the arguments of its config
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("BertModel", {**_SIZES, "max_position_embeddings": 64}),
    "bert-reranker": (
        "BertForSequenceClassification",
        {**_SIZES, **_RERANKER, "max_position_embeddings": 64},
    ),
    "xlm-roberta": (
        "XLMRobertaModel",
        {**_SIZES, "max_position_embeddings": 64, "type_vocab_size": 1},
    ),
    "xlm-roberta-reranker": (
        "XLMRobertaForSequenceClassification",
        {**_SIZES, **_RERANKER, "max_position_embeddings": 64, "type_vocab_size": 1},
    ),
    "nomic-bert": ("NomicBertModel", {**_SIZES, "max_position_embeddings": 64}),
    "modernbert": ("ModernBertModel", _MODERN),
    "modernbert-reranker": (
        "ModernBertForSequenceClassification",
        {**_MODERN, **_RERANKER, "classifier_pooling": "mean"},
    ),
    "embedding-gemma": (
        "Gemma3TextModel",
        {
            **_SIZES,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 64,
            "sliding_window": 12,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "use_bidirectional_attention": True,
        },
    ),
}


def draw_tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """The tensor of a checkpoint, drawn from its name."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    is_norm = len(shape) == 1 and name.endswith("weight") and "dense" not in name
    return (1 + 0.1 * drawn if is_norm else 0.15 * drawn).astype(np.float32)


def draw_inputs() -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of each input, and their segments. No input contains the tokens 0 to 2."""
    rng = np.random.default_rng(7)
    tokens = [rng.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    return tokens, [[int(2 * i >= length) for i in range(length)] for length in LENGTHS]


def main() -> None:
    found = {name: _compute(*case) for name, case in CASES.items()}
    FILE.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")


def _compute(kind: str, arguments: Mapping[str, Any]) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers
    from safetensors.numpy import load_file, save_file

    make: Any = getattr(transformers, kind)
    config = make.config_class(**arguments)
    with tempfile.TemporaryDirectory() as folder:
        make(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {name: list(array.shape) for name, array in load_file(file).items()}
        drawn = {name: draw_tensor(name, shape) for name, shape in shapes.items()}
        save_file(drawn, file, metadata={"format": "pt"})
        model = make.from_pretrained(folder, attn_implementation="eager").eval()
        saved = json.loads((Path(folder) / "config.json").read_text())
    outputs: list[list[float]] = []
    with torch.no_grad():
        for tokens, segments in zip(*draw_inputs(), strict=True):
            given = {"input_ids": torch.tensor([tokens])}
            if getattr(config, "type_vocab_size", 1) > 1:
                given["token_type_ids"] = torch.tensor([segments])
            result = model(**given)
            output = result.logits[0] if "logits" in result else result.last_hidden_state[0].mean(0)
            outputs.append([float(f"{value:.7g}") for value in output.tolist()])
    saved.pop("transformers_version", None)
    return {"config": saved, "tensors": shapes, "outputs": outputs}


if __name__ == "__main__":
    main()
