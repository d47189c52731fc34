"""Converts a model folder with a vision tower to a GGUF file and its projector, as llama.cpp's
converter does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from models.checkpoint_config import get_text_config
from tests.models.gguf import converter, projector_converter
from tests.models.gguf.converter import Types
from tests.models.gguf.tokens import add_tokenizer

PROJECTOR = "mmproj-model-F32.gguf"


def convert_folder(
    folder: Path,
    target: Path,
    *,
    name: str = "model.gguf",
    projector: str = PROJECTOR,
    quantize: Callable[[str], Types | None] = lambda name: None,
    omit_last_token: bool = False,
) -> Path:
    """Returns the path of the text model; the projector is next to it. folder: with a byte-level
    tokenizer without merges. omit_last_token: whether the GGUF file lacks the last token."""
    config = json.loads((folder / "config.json").read_text())
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    weights = {key: np.array(array.astype(mx.float32)) for key, array in loaded.items()}
    text = {
        key.replace("model.language_model.", "model.").removeprefix("language_model."): array
        for key, array in weights.items()
        if "language_model." in key
    }
    vision = {key: array for key, array in weights.items() if "language_model." not in key}
    target.mkdir(parents=True, exist_ok=True)

    def add(writer: gguf.GGUFWriter) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        if omit_last_token:
            tokenizer["added_tokens"].pop()
        # a GGUF file needs a merge: one of bytes that no text contains
        last = max(token["id"] for token in tokenizer["added_tokens"])
        tokenizer["model"]["vocab"]["ÿþ"] = last + 1
        tokenizer["model"]["merges"] = ["ÿ þ"]
        add_tokenizer(writer, tokenizer, pre="gpt-2")
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        writer.add_eos_token_id(ids[settings["eos_token"]])
        template = folder / "chat_template.jinja"
        writer.add_chat_template(
            template.read_text() if template.exists() else settings["chat_template"]
        )

    text_config = {**get_text_config(config), **config["text_config"]}
    converter.convert(text_config, text, target / name, quantize=quantize, extra=add)
    projector_converter.convert(
        {**config, "text_config": text_config},
        vision,
        target / projector,
        processor=json.loads((folder / "preprocessor_config.json").read_text()),
        quantize=quantize,
    )
    return target / name
