"""Fill-in-the-middle prompts: the text between a prefix and a suffix, for models trained for it.

Knows: the tokens that code models use for the three parts. Must not know: requests, callers.

Each format was published with its models (introduced by Bavarian et al. 2022, arXiv:2207.14255):
StarCoder and Granite, Qwen-Coder and CodeGemma, Code Llama, DeepSeek-Coder, Codestral.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.core.errors import AppError, ErrorKind
from app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _FimFormat:
    """Tokens before the prefix, before the suffix, and before the middle (None: the middle follows
    the prefix, which then comes last)."""

    prefix: str
    suffix: str
    middle: str | None


# The models end the middle with these, which may differ from their end-of-turn tokens; the last
# four would start another file (llama.cpp's vocabulary has the same list).
_FIM_STOP_TOKENS = (
    *("▁<EOT>", "<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>"),
    *("<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
)

# a character that starts no other text
_BOUNDARY = "\u263a"

_FIM_FORMATS = (
    _FimFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _FimFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _FimFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),
    _FimFormat("<PRE>", "<SUF>", "<MID>"),
    _FimFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _FimFormat("[PREFIX]", "[SUFFIX]", None),
)


def build_infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> Sequence[int]:
    """Returns the ids of a prompt for the text between the two.

    Raises AppError(INVALID) if the tokenizer has no tokens for it.
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
        "this model does not support fill-in-the-middle: its tokenizer has no tokens for a prefix "
        "and a suffix; omit suffix",
        param="suffix",
    )


def find_infill_stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns ids that end the middle, besides the end-of-sequence ids."""
    ids = (tokenizer.token_to_id(text) for text in _FIM_STOP_TOKENS)
    return frozenset(id for id in ids if id is not None)


def _encode_continuation(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """Encodes a text that starts in the middle, without the space that some tokenizers prepend.
    Code Llama and Codestral were trained this way (mistral-common, `encode_infilling`)."""
    if tokenizer.byte_decoder is None or not tokenizer.byte_decoder.strips_leading_space:
        return tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(_BOUNDARY + text, add_special_tokens=False)
    seam, read = _BOUNDARY.encode(), b""
    for place, id in enumerate(ids):
        read += tokenizer.token_bytes(id)
        if read.lstrip(b" ") == seam:
            return ids[place + 1 :]
    return tokenizer.encode(text, add_special_tokens=False)
