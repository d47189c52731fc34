"""How the tokens of a vocabulary spell bytes.

Knows: the two alphabets that language models use, GPT-2's byte-level one and SentencePiece's
(▁ for a space, <0x0A> for a byte). Must not know: ids, texts, the `tokenizers` library.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from app.core.files import Json

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteDecoder:
    """alphabet: character → byte; empty where tokens are plain text. replacements: (from, to),
    applied to plain text in order. strips_leading_space: one space at the very start of a text
    belongs to the tokenizer and is not shown (SentencePiece's dummy prefix)."""

    alphabet: Mapping[str, int]
    replacements: tuple[tuple[str, str], ...] = ()
    strips_leading_space: bool = False

    @staticmethod
    def from_config(config: Json) -> "ByteDecoder | None":
        """The spelling behind the "decoder" of a tokenizer.json. None for decoders that join words
        rather than bytes: WordPiece, Metaspace, BPE with a word suffix, CTC, none at all."""
        parts = _flatten_decoder(config)
        if [part["type"] for part in parts] == ["ByteLevel"]:
            return ByteDecoder(alphabet=_build_byte_alphabet())
        replace: list[tuple[str, str]] = []
        while parts and parts[0]["type"] == "Replace" and "String" in parts[0]["pattern"]:
            part = parts.pop(0)
            replace.append((part["pattern"]["String"], part["content"]))
        match parts:
            case [{"type": "ByteFallback"}, {"type": "Fuse"}]:
                strips_space = False
            case [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]:
                strips_space = True
            case _:
                return None
        return ByteDecoder(
            alphabet={}, replacements=tuple(replace), strips_leading_space=strips_space
        )

    def decode_token(self, token: str) -> bytes:
        """What one token spells in the middle of a text."""
        if self.alphabet:
            try:
                return bytes([self.alphabet[character] for character in token])
            except KeyError:  # an added token, which stands in the file as itself
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.encode()


def _flatten_decoder(decoder: Json) -> list[Json]:
    if decoder.get("type") == "Sequence":
        return [part for child in decoder["decoders"] for part in _flatten_decoder(child)]
    return [decoder] if decoder else []


def _build_byte_alphabet() -> Mapping[str, int]:
    """Byte-level BPE's printable stand-ins (openai/gpt-2 `src/encoder.py`, bytes_to_unicode): a
    printable Latin-1 byte is its own character, the others follow from U+0100 on, in order."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = (byte for byte in range(256) if byte not in own)
    return {
        **{chr(byte): byte for byte in own},
        **{chr(256 + place): byte for place, byte in enumerate(others)},
    }
