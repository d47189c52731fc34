"""Builds fill-in-the-middle prompts, for models that were trained to generate the text between a
prefix and a suffix.

Knows: the fill-in-the-middle tokens of code models. Must not know: requests, API keys.

The method was introduced by Bavarian et al. 2022 (arXiv:2207.14255). The formats were published
with the following models: StarCoder and Granite, Qwen-Coder and CodeGemma, Code Llama,
DeepSeek-Coder, Codestral.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from app.core.errors import AppError, ErrorKind
from app.text.tokenizer import Tokenizer

# The tokens that end the middle, which may differ from the end-of-turn tokens. The last four would
# start another file. llama.cpp has the same list.
_FIM_STOP_TOKENS = (
    *("▁<EOT>", "<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>"),
    *("<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
)

# a rare character that does not merge with the following text
_BOUNDARY = "\u263a"


@dataclass(frozen=True, slots=True)
class _FimFormat:
    """The tokens before the prefix, the suffix and the middle. If the token before the middle is
    None, the middle directly follows the prefix, which comes last."""

    prefix: str
    suffix: str
    middle: str | None


_FIM_FORMATS = (
    _FimFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _FimFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _FimFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),
    _FimFormat("<PRE>", "<SUF>", "<MID>"),
    _FimFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _FimFormat("[PREFIX]", "[SUFFIX]", None),
)


def has_infill_tokens(tokenizer: bytes) -> bool:
    """Returns whether a tokenizer has the tokens of one of the formats. tokenizer: the content of
    tokenizer.json. It is searched rather than parsed, because it may be 35 MB in size."""

    def contains(token: str) -> bool:
        spellings = (json.dumps(token, ensure_ascii=escape) for escape in (False, True))
        return any(spelled.encode() in tokenizer for spelled in spellings)

    return any(
        all(contains(token) for token in (form.prefix, form.suffix, form.middle) if token)
        for form in _FIM_FORMATS
    )


def build_infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> Sequence[int]:
    """Returns the token IDs of a prompt for the text between the prefix and the suffix.

    Raises AppError(INVALID) if the tokenizer has no fill-in-the-middle tokens.
    """
    for form in _FIM_FORMATS:
        before = tokenizer.token_to_id(form.prefix)
        between = tokenizer.token_to_id(form.suffix)
        middle = None if form.middle is None else tokenizer.token_to_id(form.middle)
        if before is None or between is None or (middle is None and form.middle is not None):
            continue
        begin = tokenizer.encode("", add_special_tokens=True)
        head = tokenizer.encode(prefix, add_special_tokens=False)
        tail = _encode_continuation(tokenizer, suffix)
        if middle is None:
            return [*begin, between, *tail, before, *head]
        return [*begin, before, *head, between, *tail, middle]
    raise AppError(
        ErrorKind.INVALID,
        "this model does not support fill-in-the-middle, because its tokenizer has no tokens for a "
        "prefix and a suffix; omit suffix",
        param="suffix",
    )


def find_infill_stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the token IDs that end the middle, in addition to the end-of-sequence tokens."""
    ids = (tokenizer.token_to_id(text) for text in _FIM_STOP_TOKENS)
    return frozenset(id for id in ids if id is not None)


def _encode_continuation(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """Encodes text from the middle of a document, without the space that some tokenizers prepend.
    Code Llama and Codestral were trained this way (mistral-common, `encode_infilling`)."""
    if tokenizer.byte_decoder is None or not tokenizer.byte_decoder.strips_leading_space:
        return tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(_BOUNDARY + text, add_special_tokens=False)
    seam, read = _BOUNDARY.encode(), b""
    for index, id in enumerate(ids):
        read += tokenizer.token_bytes(id)
        if read.lstrip(b" ") == seam:
            return ids[index + 1 :]
    return tokenizer.encode(text, add_special_tokens=False)
