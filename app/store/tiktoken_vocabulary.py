"""Builds a tokenizer.json from a tiktoken.model, as Kimi's repositories have it.

Knows: the format of tiktoken's files and of tokenizer.json, how Kimi's tokenizer splits text. Must
not know: the tokenizers library, models.

A line of the file is a token in base64 and its rank, which is also its ID. tiktoken merges the pair
of parts whose union has the lowest rank. A tokenizer.json lists the pairs in this order.

The splitting rules are not in the file, but in the repository's Python code, which is not run. So
only the code of Kimi K2 and K3 is supported, by its name. It reserves 256 IDs after the tokens for
special tokens.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from app.store.cache_folder import cache_tokenizer
from app.store.config_files import as_object, is_regular_file, unreadable_error
from app.store.gguf.pre_tokenizers import BYTE_LEVEL, KIMI, join_components, make_bpe

FILE_NAME = "tiktoken.model"

# changes when the result for the same file changes
_VERSION = "1"

# Kimi's file has 163,584 tokens in 2.8 MB. A token of n bytes has n - 1 splits.
_MAX_BYTES = 16 << 20
_MAX_TOKEN_BYTES = 256

_NUM_SPECIAL_TOKENS = 256

# the prefix of the class in tokenizer_config.json's auto_map
_KIMI_CODE = "tokenization_kimi."


def uses_known_code(tokenizer_config: Mapping[str, Any]) -> bool:
    """Returns whether tokenizer_config.json names Kimi's code."""
    named = as_object(tokenizer_config.get("auto_map")).get("AutoTokenizer")
    names = cast("list[Any]", named) if isinstance(named, list) else [named]
    return any(isinstance(name, str) and name.startswith(_KIMI_CODE) for name in names)


def write_tokenizer(path: Path, tokenizer_config: Mapping[str, Any]) -> Path:
    """Returns the path of the tokenizer.json for a tiktoken.model. It is in the cache folder, and
    is built if it is not there yet. Raises AppError(MODEL_FILES)."""
    content = _read(path)
    special = tokenizer_config.get("added_tokens_decoder")
    key = [_VERSION.encode(), content, orjson.dumps(special, option=orjson.OPT_SORT_KEYS)]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in key)).hexdigest()
    return cache_tokenizer(
        "tiktoken", digest, path, lambda: build_tokenizer(path, content, tokenizer_config)
    )


def build_tokenizer(
    path: Path, content: bytes, tokenizer_config: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns the content of a tokenizer.json. Raises AppError(MODEL_FILES) for an invalid line."""
    ranks = _parse_ranks(path, content)
    letters = _map_bytes()

    def spell(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _list_special_tokens(len(ranks), tokenizer_config),
        "normalizer": None,
        "pre_tokenizer": join_components("pretokenizers", KIMI.components),
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": make_bpe(
            {spell(token): rank for token, rank in ranks.items()},
            [(spell(left), spell(right)) for left, right in _derive_merges(ranks)],
            ignore_merges=KIMI.ignores_merges,
        ),
    }


def _read(path: Path) -> bytes:
    is_regular_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise unreadable_error(path, error.strerror or str(error)) from error
    if len(content) > _MAX_BYTES:
        raise unreadable_error(path, f"it has more than {_MAX_BYTES} bytes")
    return content


def _parse_ranks(path: Path, content: bytes) -> Mapping[bytes, int]:
    """Returns the rank of each token, the lowest first."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            token = b""
        if not 0 < len(token) <= _MAX_TOKEN_BYTES or rank != b"%d" % len(ranks):
            raise unreadable_error(
                path, f"line {number} is not a token in base64 and its rank {len(ranks)}"
            )
        if token in ranks:
            raise unreadable_error(path, f"line {number} repeats a token")
        ranks[token] = len(ranks)
    if any(bytes([value]) not in ranks for value in range(256)):
        raise unreadable_error(path, "some single bytes have no token")
    return ranks


def _derive_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns all pairs of tokens whose concatenation is a token, in the order of its rank."""
    merges: list[tuple[bytes, bytes]] = []
    for token in ranks:
        pairs = [
            (ranks[token[:cut]], ranks[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in ranks and token[cut:] in ranks
        ]
        merges += [(token[:cut], token[cut:]) for _, _, cut in sorted(pairs)]
    return merges


def _list_special_tokens(
    first: int, tokenizer_config: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Returns the tokens with the IDs after the vocabulary. Those without a name in
    added_tokens_decoder are reserved."""
    named = as_object(tokenizer_config.get("added_tokens_decoder"))
    tokens: list[Mapping[str, Any]] = []
    for id in range(first, first + _NUM_SPECIAL_TOKENS):
        declared = as_object(named.get(str(id)))
        content, special = declared.get("content"), declared.get("special") is not False
        if not isinstance(content, str) or not content:
            content, special = f"<|reserved_token_{id}|>", True
        tokens.append(
            {
                "id": id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
        )
    return tokens


def _map_bytes() -> Mapping[int, str]:
    """Returns the printable character for each byte (GPT-2, Radford et al. 2019): bytes that are
    not printable characters in Latin-1 are mapped to U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {
        value: chr(0x100 + place) for place, value in enumerate(others)
    }
