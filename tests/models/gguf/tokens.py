"""Writes a tokenizer.json as the metadata of a GGUF file, as llama.cpp's converter does."""

import base64
import re
from collections.abc import Mapping
from typing import Any

import gguf

Types = gguf.TokenType


def add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any], *, model: str = "gpt2", pre: str = ""
) -> None:
    """tokenizer: a parsed tokenizer.json. model: gpt2 writes its merges, and llama the scores that
    they were derived from: the tokens in the order of their merges. bert writes WordPiece, and t5
    Unigram."""
    if model == "t5":
        _add_unigram(writer, tokenizer)
        return
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    texts = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    texts |= {id: token["content"] for id, token in added.items()}
    size = max(texts) + 1
    tokens = [texts.get(id, f"[PAD{id}]") for id in range(size)]
    types = [_find_type(id, texts, added) for id in range(size)]
    if model == "bert":
        tokens = [
            token
            if kind == Types.CONTROL
            else token[2:]
            if token.startswith("##")
            else f"\u2581{token}"
            for token, kind in zip(tokens, types, strict=True)
        ]
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model == "bert":
        return
    if model == "gpt2":
        writer.add_token_merges(
            [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
        )
    else:
        ranks: dict[str, int] = {}
        for merge in tokenizer["model"]["merges"]:
            text = merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
            ranks.setdefault(text, len(ranks))
        writer.add_token_scores([-float(ranks.get(token, 10**9)) for token in tokens])


def _find_type(id: int, texts: Mapping[int, str], added: Mapping[int, Any]) -> Types:
    if id not in texts:
        return Types.UNUSED
    if texts[id] == "<unk>":
        return Types.UNKNOWN
    if id in added:
        return Types.CONTROL if added[id]["special"] else Types.USER_DEFINED
    return Types.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", texts[id]) else Types.NORMAL


def _add_unigram(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any]) -> None:
    """The vocabulary of a SentencePiece model that transformers has converted."""
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    vocab: list[tuple[str, float]] = tokenizer["model"]["vocab"]
    unknown = tokenizer["model"]["unk_id"]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_scores([score for _, score in vocab])
    writer.add_token_types(
        [
            Types.UNKNOWN if id == unknown else Types.CONTROL if token in special else Types.NORMAL
            for id, (token, _) in enumerate(vocab)
        ]
    )
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    for part in tokenizer["normalizer"]["normalizers"]:
        if part["type"] == "Precompiled":
            table = base64.b64decode(part["precompiled_charsmap"])
            writer.add_precompiled_charsmap(table)
