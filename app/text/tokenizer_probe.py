"""Probes a tokenizer with test inputs, before the server process loads it.

Knows: texts that crash tokenizers. Must not know: processes, memory and time limits, which the
caller sets.

A tokenizer may reject any of these texts, which only fails the request. However, it must not abort
the process, or use unbounded memory or time.
"""

from collections.abc import Iterator

from app.core.errors import AppError, ErrorKind
from app.text.tokenizer import Tokenizer

# the length of a run of any ASCII character, and of a character that often occurs in long runs
_RUN_LENGTH, _LONG_RUN_LENGTH = 500, 5_000
_LONG_RUN_CHARACTERS = " \n\t-=_.#*a0x"

# Samples of scripts and symbols that normalizers change: Latin, Greek, Cyrillic, Arabic, Hebrew,
# Devanagari, Thai, Hangul, Kana, Han, ligatures that become many letters, emoji, combining marks,
# blanks.
_SAMPLES = (
    "éüßøıİſ Ελληνικά Русский",
    "العربية عברית हिन्दी ไทย",
    "한국어 각 ひらがな カタカナ ｶﾞ 漢字",
    "ﷺﷻﬃﬀ①½㎏™",
    "👩‍👩‍👧‍👦🇳🇴🏳️‍🌈🤷🏽‍♀️",
    "a\u0300\u0301\u0302\u0303\u0304\u0323 e\u0301\u0344",
    "\u00a0\u2003\u2028\u3000\u200b\u200d\ufeff\ufffd▁Ġ\ue000\U0010ffff",
)
_SAMPLE_REPEATS = 50

# the number of code points per test text
_CODE_POINTS_PER_TEXT = 4096
_SURROGATES = range(0xD800, 0xE000)
_BASIC_PLANE_END = 0x10000

# the maximum number of special tokens in a text, and the number of tokens decoded per call
_MAX_SPECIAL_TOKENS, _IDS_PER_DECODE = 2_000, 1_000

# The maximum total length of all tokens in characters. The bytes of 32768 tokens are cached. The
# largest vocabularies have a quarter of a million tokens and two megabytes of text.
_MAX_DECODED_CHARACTERS = 64 << 20


def probe_tokenizer(tokenizer: Tokenizer) -> None:
    """Encodes texts of all kinds, and decodes every token.

    Raises AppError(MODEL_FILES) if the text of all tokens is too large. Raises MemoryError if the
    tokenizer runs out of memory.
    """
    for text in (*_probe_texts(), *_special_token_texts(tokenizer)):
        try:
            ids = tokenizer.encode(text, add_special_tokens=True)
            if len(text) <= _RUN_LENGTH:
                tokenizer.encode_for_embedding(text)
                tokenizer.decode(ids)
                tokenizer.decode_verbatim(ids)
        except AppError as error:
            _raise_memory_error(error)
    # unless tokens are bytes in GPT-2's alphabet, their text is not bounded by the file size
    if tokenizer.byte_decoder is None or not tokenizer.byte_decoder.alphabet:
        _decode_all(tokenizer)


def _probe_texts() -> Iterator[str]:
    ascii_characters = "".join(map(chr, range(128)))
    yield ""
    yield ascii_characters
    yield ascii_characters[::-1] * 10
    for character in ascii_characters:
        yield character
        yield character * _RUN_LENGTH
    for character in _LONG_RUN_CHARACTERS:
        yield character * _LONG_RUN_LENGTH
    for sample in _SAMPLES:
        yield sample
        yield sample * _SAMPLE_REPEATS
        for character in sample:
            yield character * _SAMPLE_REPEATS
    for start in range(0, _BASIC_PLANE_END, _CODE_POINTS_PER_TEXT):
        together = range(start, start + _CODE_POINTS_PER_TEXT)
        yield "".join(chr(point) for point in together if point not in _SURROGATES)


def _special_token_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yields texts with the special tokens of the model."""
    marks = [tokenizer.token_text(id) for id in sorted(tokenizer.special_ids)[:_MAX_SPECIAL_TOKENS]]
    yield from marks
    yield "".join(marks)
    yield " a\n".join(marks)


def _decode_all(tokenizer: Tokenizer) -> None:
    spelled = 0
    for start in range(0, tokenizer.vocab_size, _IDS_PER_DECODE):
        try:
            spelled += len(tokenizer.decode(range(start, start + _IDS_PER_DECODE)))
        except AppError as error:
            _raise_memory_error(error)
        if spelled > _MAX_DECODED_CHARACTERS:
            raise AppError(
                ErrorKind.MODEL_FILES,
                f"its tokens decode to more than {_MAX_DECODED_CHARACTERS >> 20} MiB of text",
            )


def _raise_memory_error(error: AppError) -> None:
    """Raises MemoryError if the error was caused by running out of memory rather than by a rejected
    text."""
    if isinstance(error.__cause__, MemoryError):
        raise error.__cause__
