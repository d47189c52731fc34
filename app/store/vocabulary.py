"""Reads the vocabulary size of a tokenizer.json without the tokenizers library.

Knows: the position of the tokens in the file. Must not know: the text of tokens, tokenization.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.store.config_files import read_json_object

# the maximum size of the file; the largest vocabularies, with a quarter of a million tokens, take
# 35 MB
_MAX_BYTES = 512 << 20


def count_token_ids(tokenizer: Path) -> int | None:
    """Returns the highest token ID plus one. Returns None if the file does not contain a
    vocabulary. The error is reported when the tokenizer is loaded.

    Raises AppError(MODEL_FILES) for a file that does not exist or is not a JSON object.
    """
    parsed = read_json_object(tokenizer, max_bytes=_MAX_BYTES)
    if parsed is None:
        raise AppError(
            ErrorKind.MODEL_FILES, f"{tokenizer} is missing: every model needs a tokenizer.json"
        )
    return max(_iterate_ids(parsed), default=-1) + 1 or None


def _iterate_ids(tokenizer: Mapping[str, Any]) -> Iterator[int]:
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary: Any = cast(dict[str, Any], model).get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from filter(_is_id, cast(dict[str, Any], vocabulary).values())
    if isinstance(vocabulary, list):  # Unigram: tokens with scores, in the order of their IDs
        yield len(cast("list[Any]", vocabulary)) - 1
    for token in cast("list[Any]", added) if isinstance(added, list) else ():
        match token:
            case {"id": id} if _is_id(id):
                yield id
            case _:
                continue


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
