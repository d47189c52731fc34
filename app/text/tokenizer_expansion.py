"""Limits how much a tokenizer can expand a text.

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
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from app.core.model_files import Json

# The maximum output of a chain in bytes per input byte. The chains of published tokenizers have
# factors of 1 to 150, except for ALBERT's chain with a factor of 550, because it normalizes Unicode
# twice.
MAX_NORMALIZER_FACTOR = 1000
# published tokenizers have at most 4
MAX_PRE_TOKENIZER_FACTOR = 8
# published tokenizers have at most 4
MAX_DECODER_FACTOR = 64

# the factor of an unknown component type
_UNKNOWN_COMPONENT_FACTOR = 4.0

# Matches patterns that consist of a single required character, possibly repeated. Any other pattern
# is treated as if it matched the empty string at every position. Lazy quantifiers are excluded,
# because Oniguruma interprets `x{2}?` as `(?:x{2})?`.
_ONE_CHARACTER = re.compile(
    r"(?:[^\\()\[\]{}|*+?.^$]|\\[snrtd]|\[\^?[^\[\]\\&]+\])(?:\+|\{[1-9][0-9]*(?:,[0-9]*)?\})?"
)

_Factors = Mapping[str, float | Callable[[Json], float]]


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
            normalizer=_chain_factor(
                "normalizers", normalizer, _NORMALIZERS, MAX_NORMALIZER_FACTOR
            ),
            pre_tokenizer=_chain_factor(
                "pre-tokenizers", pre_tokenizer, _PRE_TOKENIZERS, MAX_PRE_TOKENIZER_FACTOR
            ),
            decoder=_chain_factor("decoders", decoder, _DECODERS, MAX_DECODER_FACTOR),
        )


def _chain_factor(name: str, config: Json, factors: _Factors, limit: float) -> float:
    # an integer of this size does not fit into a float
    product = min(math.prod(_component_factor(part, factors) for part in _flatten(config)), 1e300)
    if product > limit:
        raise ValueError(
            f"its {name} can make a text {product:.3g} times as long; the limit is {limit} times"
        )
    return product


def _component_factor(part: Json, factors: _Factors) -> float:
    factor = factors.get(part["type"], _UNKNOWN_COMPONENT_FACTOR)
    return max(1.0, factor(part) if callable(factor) else factor)


def _flatten(config: Json) -> Iterator[Json]:
    for children in ("normalizers", "pretokenizers", "decoders"):
        if isinstance(config.get(children), list):
            for child in cast("list[Json]", config[children]):
                yield from _flatten(child)
            return
    if config:
        yield config


def _count_bytes(text: Any) -> int:
    return len(str(text).encode(errors="replace"))


def _prepend_factor(part: Json) -> float:
    """Returns the worst-case factor, which occurs for a text of one byte."""
    return 1 + _count_bytes(part["prepend"])


def _replace_factor(part: Json) -> float:
    """Returns the factor of a replacement. A pattern that matches the empty string matches on both
    sides of a single byte."""
    pattern, written = cast(Json, part["pattern"]), _count_bytes(part["content"])
    if "String" in pattern:
        size = _count_bytes(pattern["String"])
        return written / size if size else 1 + 2 * written
    return written if _ONE_CHARACTER.fullmatch(str(pattern["Regex"])) else 1 + 2 * written


def _precompiled_factor(part: Json) -> float:
    """Returns the factor of SentencePiece's table, which has the layout [size of the trie: 4 bytes
    trie
    null-terminated texts]. The trie may point to any text, so the factor is the length of the
    longest text."""
    try:
        table = base64.b64decode(str(part["precompiled_charsmap"]))
    except binascii.Error:
        return _UNKNOWN_COMPONENT_FACTOR
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _metaspace_factor(part: Json) -> float:
    """Returns the factor of a Metaspace. Each space becomes the replacement, and each word is
    prefixed with it."""
    return 1 + _count_bytes(part["replacement"])


def _byte_level_factor(part: Json) -> float:
    """Returns the factor of a ByteLevel. Most non-ASCII bytes become two bytes, and each word may
    be prefixed with a space."""
    return 4 if part.get("add_prefix_space", True) else 2


# Unicode's factors: https://www.unicode.org/faq/normalization.html#12, for UTF-8
_NORMALIZERS: _Factors = {
    "BertNormalizer": 8,  # adds spaces around a character, applies NFD and lowercases
    "ByteLevel": 2,
    "Lowercase": 1.5,
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
    "Nmt": 1,
    "Precompiled": _precompiled_factor,
    "Prepend": _prepend_factor,
    "Replace": _replace_factor,
    "Strip": 1,
    "StripAccents": 1,
}
_PRE_TOKENIZERS: _Factors = {
    "BertPreTokenizer": 1,
    "ByteLevel": _byte_level_factor,
    "CharDelimiterSplit": 1,
    "Digits": 1,
    "FixedLength": 1,
    "Metaspace": _metaspace_factor,
    "Punctuation": 1,
    "Split": 1,
    "UnicodeScripts": 1,
    "Whitespace": 1,
    "WhitespaceSplit": 1,
}
_DECODERS: _Factors = {
    "BPEDecoder": 2,  # an empty suffix matches between all characters
    "ByteFallback": 1,
    "ByteLevel": 3,  # one byte may become U+FFFD
    "CTC": 4,
    "Fuse": 1,
    "Metaspace": 1,
    "Replace": _replace_factor,
    "Strip": 1,
    "WordPiece": 2,
}
