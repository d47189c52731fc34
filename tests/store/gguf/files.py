"""Writes tests.tiny's model as a GGUF file, with its tokenizer and template."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests import tiny
from tests.models.gguf.converter import Types, convert
from tests.models.gguf.tokens import add_tokenizer


def write_tiny(
    path: Path,
    *,
    seed: int = 0,
    template: str | None = tiny.CHAT_TEMPLATE,
    markers: Sequence[str] = (),
    quantize: Callable[[str], Types | None] = lambda name: None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **changes: Any,
) -> Path:
    """markers: further special tokens. extra: adds keys. changes: of tests.tiny's config."""

    def add(writer: gguf.GGUFWriter) -> None:
        tokenizer = json.loads(tiny.tokenizer().to_str())
        tokenizer["model"]["vocab"] |= {"ab": tiny.VOCAB}
        tokenizer["model"]["merges"] = ["a b"]
        tokenizer["added_tokens"] += [
            {"id": tiny.VOCAB + 1 + number, "content": marker, "special": True}
            for number, marker in enumerate(markers)
        ]
        add_tokenizer(writer, tokenizer, pre="gpt-2")
        writer.add_bos_token_id(tiny.BOS)
        writer.add_eos_token_id(tiny.END)
        if template is not None:
            writer.add_chat_template(template)
        extra(writer)

    config = {**tiny.CONFIG, "vocab_size": tiny.VOCAB + 1 + len(markers), **changes}
    weights = {name: np.array(array) for name, array in tiny.weights(config, seed).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    convert(config, weights, path, extra=add, quantize=quantize)
    return path
