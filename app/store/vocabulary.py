"""Reads the vocabulary of a model without the tokenizers library: its size, and the tokens that
tokenizer.json lacks.

Knows: the position of the tokens in tokenizer.json, tokenizer_config.json and added_tokens.json.
Must not know: tokenization.

transformers adds the tokens of all three files to a tokenizer. Converted models sometimes have the
tokens of a chat format, which end the output, only outside tokenizer.json.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app.core.model_files import AddedToken
from app.store.config_files import as_object, model_files_error, read_json_object

# the maximum size of the file; the largest vocabularies, with a quarter of a million tokens, take
# 35 MB
_MAX_BYTES = 512 << 20

# the maximum length of an added token, in characters
_MAX_TOKEN_LENGTH = 200

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """size: the highest token ID plus one; None if tokenizer.json has no vocabulary, which is
    reported when the tokenizer is loaded. missing: the tokens to add to tokenizer.json."""

    size: int | None
    missing: tuple[AddedToken, ...] = ()


def read_vocabulary(
    tokenizer: Path, tokenizer_config: Mapping[str, Any], added: Mapping[str, Any]
) -> Vocabulary:
    """Reads tokenizer.json. tokenizer_config, added: the contents of the other files; empty if they
    do not exist.

    Raises AppError(MODEL_FILES) for a file that does not exist or is not a JSON object.
    """
    parsed = read_json_object(tokenizer, max_bytes=_MAX_BYTES)
    if parsed is None:
        raise model_files_error(f"{tokenizer} is missing: every model needs a tokenizer.json")
    size = _count_ids(parsed)
    named = _read_named_tokens(tokenizer_config, added)
    if size is None or not named:
        return Vocabulary(size=size)
    missing = _find_missing_tokens(tokenizer, parsed, named)
    return Vocabulary(size=max([size, *(token.id + 1 for token in missing)]), missing=missing)


def _read_named_tokens(
    tokenizer_config: Mapping[str, Any], added: Mapping[str, Any]
) -> list[AddedToken]:
    """Returns the tokens of the other files in the order of their IDs. As in transformers,
    added_tokens.json counts only without `added_tokens_decoder`. Invalid entries are ignored."""
    decoder = as_object(tokenizer_config.get("added_tokens_decoder"))
    tokens: list[AddedToken] = []
    if decoder:
        for number, entry in decoder.items():
            match entry:
                case {"content": str(content)} if number.isascii() and number.isdecimal():
                    flags = {
                        name: entry.get(name) is True
                        for name in ("special", "lstrip", "rstrip", "single_word", "normalized")
                    }
                    if "normalized" not in entry:
                        flags["normalized"] = not flags["special"]
                    tokens.append(AddedToken(id=int(number[:18]), content=content, **flags))
                case _:
                    continue
    else:
        special = set(_read_special_texts(tokenizer_config))
        tokens = [
            AddedToken(
                id=id,
                content=content,
                special=content in special,
                normalized=content not in special,
            )
            for content, id in added.items()
            if _is_id(id)
        ]
    usable = [token for token in tokens if 0 < len(token.content) <= _MAX_TOKEN_LENGTH]
    return sorted(usable, key=lambda token: token.id)


def _read_special_texts(tokenizer_config: Mapping[str, Any]) -> Iterator[str]:
    values = [value for name, value in tokenizer_config.items() if name.endswith("_token")]
    for value in [*values, *_list(tokenizer_config.get("additional_special_tokens"))]:
        match value:
            case str(text) | {"content": str(text)}:
                yield text
            case _:
                continue


def _find_missing_tokens(
    path: Path, tokenizer: Mapping[str, Any], named: list[AddedToken]
) -> tuple[AddedToken, ...]:
    """Returns the tokens that tokenizer.json does not have as added tokens, and that get their own
    IDs when they are added: those of its vocabulary, and those that follow it without a gap."""
    texts = _read_texts(tokenizer)
    known, highest = set[str](), len(texts) - 1
    for token in _list(tokenizer.get("added_tokens")):
        match token:
            case {"content": str(content), "id": id} if _is_id(id):
                known.add(content)
                highest = max(highest, id)
            case _:
                continue
    missing: list[AddedToken] = []
    for token in named:
        if token.content in known:
            continue
        if texts.get(token.content, highest + 1) != token.id:
            log.warning(
                "%s: the token %r of tokenizer_config.json or added_tokens.json is not added, "
                "because its ID %d is taken or leaves a gap",
                path,
                token.content,
                token.id,
            )
            continue
        missing.append(token)
        known.add(token.content)
        highest = max(highest, token.id)
    return tuple(missing)


def _read_texts(tokenizer: Mapping[str, Any]) -> Mapping[str, int]:
    """Returns the IDs of the vocabulary by text."""
    vocabulary: Any = as_object(tokenizer.get("model")).get("vocab")
    if isinstance(vocabulary, dict):
        return cast(dict[str, int], vocabulary)
    pairs = [cast("list[Any]", entry) for entry in _list(vocabulary) if isinstance(entry, list)]
    return {str(entry[0]): id for id, entry in enumerate(pairs) if entry}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _count_ids(tokenizer: Mapping[str, Any]) -> int | None:
    return max(_iterate_ids(tokenizer), default=-1) + 1 or None


def _iterate_ids(tokenizer: Mapping[str, Any]) -> Iterator[int]:
    vocabulary: Any = as_object(tokenizer.get("model")).get("vocab")
    if isinstance(vocabulary, dict):
        yield from filter(_is_id, cast(dict[str, Any], vocabulary).values())
    if isinstance(vocabulary, list):  # Unigram: tokens with scores, in the order of their IDs
        yield len(cast("list[Any]", vocabulary)) - 1
    for token in _list(tokenizer.get("added_tokens")):
        match token:
            case {"id": id} if _is_id(id):
                yield id
            case _:
                continue


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
