"""Limits how much a tokenizer can expand text.

Knows: the normalizers, pre-tokenizers and decoders of tokenizer.json, their maximum output per
input byte. Must not know: the `tokenizers` library, texts.

The factors of several `Replace` normalizers multiply: six normalizers that each replace one
character with a thousand produce 10^18 characters from a single letter. The library aborts the
process when it runs out of memory. Test inputs cannot find the right letter, so the product of the
worst cases is limited.
"""

import base64
import binascii
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from app.core.model_files import Json

# The maximum output of a chain in bytes per input byte. The normalizers of published tokenizers
# have factors of 1 to 150, except for ALBERT's with a factor of 1600; the other chains at most 4.
MAX_NORMALIZER_FACTOR = 2000
MAX_PRE_TOKENIZER_FACTOR = 8
MAX_DECODER_FACTOR = 64

# The factors of components that may expand text but contain none. For Unicode's normal forms in
# UTF-8, see https://www.unicode.org/faq/normalization.html#12.
_FACTORS = {
    "BertNormalizer": 8,  # adds spaces around a character, applies NFD and lowercases
    "BPEDecoder": 2,  # an empty suffix matches between all characters
    "ByteLevel": 4,  # most non-ASCII bytes become two, and a word may be prefixed with a space
    "CTC": 4,
    "Lowercase": 1.5,
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
    "WordPiece": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpansionFactors:
    """The maximum output of each component in bytes per input byte."""

    normalizer: float
    pre_tokenizer: float
    decoder: float

    @staticmethod
    def from_config(normalizer: Json, pre_tokenizer: Json, decoder: Json) -> "ExpansionFactors":
        """Computes the factors. Each argument is the configuration of a component in
        tokenizer.json, or {} if there is none. Raises ValueError for a chain that exceeds the
        limit."""
        return ExpansionFactors(
            normalizer=_chain_factor("normalizers", normalizer, MAX_NORMALIZER_FACTOR),
            pre_tokenizer=_chain_factor("pre-tokenizers", pre_tokenizer, MAX_PRE_TOKENIZER_FACTOR),
            decoder=_chain_factor("decoders", decoder, MAX_DECODER_FACTOR),
        )


def _chain_factor(name: str, config: Json, limit: float) -> float:
    # an integer of this size does not fit into a float
    product = min(math.prod(max(1.0, _factor(part)) for part in _flatten(config)), 1e300)
    if product > limit:
        raise ValueError(
            f"its {name} can make a text {product:.3g} times as long; the limit is {limit} times"
        )
    return product


def _flatten(config: Json) -> Iterator[Json]:
    for children in ("normalizers", "pretokenizers", "decoders"):
        if isinstance(config.get(children), list):
            for child in cast("list[Json]", config[children]):
                yield from _flatten(child)
            return
    if config:
        yield config


def _factor(part: Json) -> float:
    match part:
        case {"pattern": {"String": pattern}, "content": content} if pattern:
            return _count_bytes(content) / _count_bytes(pattern)
        case {"pattern": _, "content": content}:
            # a pattern that matches the empty string matches on both sides of a single byte
            return 1 + 2 * _count_bytes(content)
        case {"prepend": text} | {"replacement": text}:
            return 1 + _count_bytes(text)  # for a text of one byte, or a word of one byte
        case {"precompiled_charsmap": table}:
            return _precompiled_factor(str(table))
        case _:
            return _FACTORS.get(str(part["type"]), 1)


def _count_bytes(text: Any) -> int:
    return len(str(text).encode(errors="replace"))


def _precompiled_factor(charsmap: str) -> float:
    """Returns the factor of SentencePiece's table, which has the layout [size of the trie: 4 bytes,
    trie, null-terminated texts]. The trie may point to any text, so the factor is the length of the
    longest text."""
    try:
        table = base64.b64decode(charsmap)
    except binascii.Error:
        return 1  # the library does not load it
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
