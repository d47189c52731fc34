"""Writes tests/serving/sentence_reference.json: what sentence-transformers computes.

The models are the folders of tests/tiny_encoder.py.

It needs torch and sentence-transformers 6.2, which no environment of the project has:

    pip install torch transformers==5.24.0 sentence-transformers==6.2.0 mlx
    python -m tests.serving.sentence_reference [PART OF A NAME]…

An embedding is stored as its products with a few fixed unit vectors.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny_encoder

FILE = Path(__file__).with_name("sentence_reference.json")

TEXTS = 200
DIRECTIONS = 6
PER_QUERY = 20

# name of the encoder: the arguments of tiny_encoder.write
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"pooling": "mean_tokens"},
    "xlm-roberta": {"pooling": "cls_token"},
    "nomic-bert": {"pooling": "mean_tokens"},
    "modernbert": {"pooling": "cls_token", "dense": (24,)},
    "embedding-gemma": {"pooling": "mean_tokens", "dense": (48, 32)},
}
RERANKERS = ("bert-reranker", "xlm-roberta-reranker", "modernbert-reranker")


def draw_texts() -> list[str]:
    rng = np.random.default_rng(11)
    return [
        " ".join(rng.choice(tiny_encoder.WORDS, rng.integers(1, 41)).tolist()) for _ in range(TEXTS)
    ]


def draw_rankings() -> list[tuple[str, list[str]]]:
    """Queries, each with its documents."""
    texts = draw_texts()
    return [
        (" ".join(texts[i - 1].split()[:8]), texts[i : i + PER_QUERY])
        for i in range(0, TEXTS, PER_QUERY)
    ]


def draw_directions(width: int) -> np.ndarray:
    """Unit vectors [width, DIRECTIONS]."""
    drawn = np.random.default_rng(width).standard_normal((width, DIRECTIONS))
    return drawn / np.linalg.norm(drawn, axis=0)


def main(filters: Sequence[str]) -> None:
    """filters: compute the models whose name contains one of these strings; by default all."""
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() and filters else {}
    with tempfile.TemporaryDirectory() as place:
        for name in (*ENCODERS, *RERANKERS):
            if not filters or any(part in name for part in filters):
                folder = tiny_encoder.write(Path(place) / name, name, **ENCODERS.get(name, {}))
                found[name] = _embed(folder) if name in ENCODERS else _rank(folder)
    lines = (
        f"{json.dumps(name)}:{json.dumps(rows, separators=(',', ':'))}"
        for name, rows in found.items()
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _embed(folder: Path) -> list[list[float]]:
    from sentence_transformers import (  # pyright: ignore[reportMissingImports]
        SentenceTransformer,
    )

    model = SentenceTransformer(str(_with_padding(folder)), device="cpu")
    vectors = model.encode(draw_texts(), normalize_embeddings=True, batch_size=1)
    return [_shorten(row) for row in vectors @ draw_directions(vectors.shape[1])]


def _rank(folder: Path) -> list[float]:
    import torch  # pyright: ignore[reportMissingImports]
    from sentence_transformers import CrossEncoder  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    model = CrossEncoder(str(_with_padding(folder)), device="cpu")
    pairs = [(query, document) for query, group in draw_rankings() for document in group]
    return _shorten(model.predict(pairs, batch_size=1))


def _shorten(row: Any) -> list[float]:
    return [float(f"{value:.7f}") for value in row.tolist()]


def _with_padding(folder: Path) -> Path:
    """transformers also pads single texts, and would create a different tokenizer for the model
    type."""
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": "[UNK]",
                "model_input_names": ["input_ids", "attention_mask"]
                + ["token_type_ids"] * folder.name.startswith("bert"),
            }
        )
    )
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
