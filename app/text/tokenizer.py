"""Tokenization and decoding of text.

Knows: the model's tokenizer.json, through the `tokenizers` library; the special tokens at the start
and end of a text; the bytes of tokens. Must not know: chat templates, requests, the engine.

Each token represents a sequence of bytes. The text of several tokens is their concatenated bytes,
decoded as UTF-8. Each malformed sequence becomes one U+FFFD (the Unicode Standard's "maximal
subpart", as on the web). This definition applies to complete texts, streams and log probabilities.
`tokenizers` uses the same definition, with one exception: if the vocabulary has byte tokens such as
<0xFF>, an invalid byte turns the *whole run* of byte tokens around it into U+FFFD, including valid
characters. A stream cannot retract valid characters, so this module replaces only the malformed
bytes, like SentencePiece.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from app.core.errors import AppError, ErrorKind, PanicGuard, mark_client_text
from app.core.model_files import Json, ModelFiles
from app.text.tokenizer_expansion import ExpansionFactors

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# the maximum number of tokens whose bytes are cached (100 bytes each)
_TOKEN_BYTES_CACHE_SIZE = 1 << 15

# Limits on the normalized size of a text. The library needs up to a hundred times as much memory.
# The first limit is the total size in bytes, and the second is an expansion factor that is always
# accepted. Only texts that the tokenizer could expand further are measured, in chunks.
_MAX_NORMALIZED_BYTES, _MAX_EXPANSION = 16 << 20, 16
_NORMALIZER_CHUNK_BYTES = 4 << 20

# the maximum number of bytes of one character
_MAX_CHARACTER_BYTES = 4

# the number of characters to search for the next token
_MAX_SPACES = 8

# the maximum length of a library error in an error message, in characters
_MAX_REASON_LENGTH = 200

_BROKEN_MESSAGE = "this model's tokenizer is broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteDecoder:
    """Decodes tokens to bytes. alphabet: maps characters to bytes; empty if tokens are plain text.
    replacements: pairs (from, to) that are applied to plain text in order. strips_leading_space:
    whether the tokenizer adds one space at the start of a text, which must be removed
    (SentencePiece's dummy prefix)."""

    alphabet: Mapping[str, int]
    replacements: tuple[tuple[str, str], ...] = ()
    strips_leading_space: bool = False

    @staticmethod
    def from_config(config: Json) -> "ByteDecoder | None":
        """Builds the byte decoder from the "decoder" of a tokenizer.json. Returns None if there is
        no decoder, or for decoders that join words instead of bytes: WordPiece, Metaspace, BPE with
        a word suffix, and CTC."""
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
        """Returns the bytes of one token in the middle of a text."""
        if self.alphabet:
            try:
                return bytes([self.alphabet[character] for character in token])
            except KeyError:  # an added token, which is stored as plain text
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
    """Returns the printable characters that byte-level BPE uses for bytes (openai/gpt-2
    `src/encoder.py`, bytes_to_unicode). A printable Latin-1 byte is represented by its own
    character. The other bytes are represented by the characters U+0100 and up, in order."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    remaining = (byte for byte in range(256) if byte not in own)
    return {
        **{chr(byte): byte for byte in own},
        **{chr(256 + index): byte for index, byte in enumerate(remaining)},
    }


class Tokenizer:
    """The tokenizer of one model. Instances are immutable.

    bos_token_id: the token at the start of a text; None if the model has none. special_ids: the
    special tokens, which are not part of the visible text. byte_decoder: None if tokens can be
    decoded only with the library's decoder.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        add_bos: bool | None = None,
    ) -> None:
        """add_bos: whether to add the BOS token at the start of a text; None uses the
        post-processor of tokenizer.json. Raises ValueError if the tokenizer can expand text beyond
        the limits of `ExpansionFactors`."""
        inner.no_truncation()  # was set for training, and is still present in some files
        inner.no_padding()
        self._inner = inner
        self.bos_token_id = bos_token_id
        self._expansion = ExpansionFactors.from_config(
            *map(_component_config, _pipeline_components(inner))
        )
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._added_tokens = {token.content: id for id, token in added.items()}
        self.byte_decoder = ByteDecoder.from_config(_component_config(inner.decoder))
        self._prefix_ids = _find_prefix_ids(inner, bos_token_id, add_bos)
        self._suffix_ids = _find_suffix_ids(inner)
        # cached, because the top log probabilities mostly contain the same few tokens
        self._cached_token_bytes = lru_cache(_TOKEN_BYTES_CACHE_SIZE)(self._compute_token_bytes)
        # called for each output token
        self.visible_bytes = lru_cache(_TOKEN_BYTES_CACHE_SIZE)(self._compute_visible_bytes)

    @staticmethod
    def load(files: ModelFiles) -> "Tokenizer":
        """Loads a tokenizer. Raises AppError(MODEL_FILES) if tokenizer.json is missing or
        invalid."""
        path = files.tokenizer_path
        if not path.is_file():
            raise AppError(
                ErrorKind.MODEL_FILES, f"{path} is missing: every model needs a tokenizer.json"
            )
        add_bos = files.tokenizer_config.get("add_bos_token")
        with _LibraryErrorGuard(ErrorKind.MODEL_FILES, f"{path} is not a usable tokenizer"):
            if files.added_tokens or _has_byte_order_mark(path):
                inner = tokenizers.Tokenizer.from_str(files.read_tokenizer())
                _check_added_tokens(inner, files)
            else:
                inner = tokenizers.Tokenizer.from_file(str(path))
            return Tokenizer(
                inner,
                bos_token_id=_find_bos_token_id(files, inner),
                add_bos=add_bos if isinstance(add_bos, bool) else None,
            )

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added tokens. The logits of the model may be padded to a
        larger size."""
        with _LibraryErrorGuard(ErrorKind.MODEL_FILES, _BROKEN_MESSAGE):
            return self._inner.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenizes a text. Special tokens in the text are recognized.

        add_special_tokens: whether to add the model's special tokens at the start of a text
        (usually BOS), unless the text already starts with them. EOS is never added, because the
        text will be continued. Raises AppError(INVALID) if the text cannot be encoded.
        """
        # releases the GIL; twice as fast without offsets
        ids = self._encode_with(self._inner.encode_batch_fast, text).ids
        return [*self._missing_prefix(ids, add_special_tokens), *ids]

    def encode_with_positions(
        self, text: str, positions: Sequence[int], *, add_special_tokens: bool
    ) -> tuple[list[int], list[int]]:
        """Tokenizes a text like `encode`. For each of the given positions in the text, also returns
        the number of leading tokens that are likely to stay the same if the text continues
        differently there. Next to an added token, these are all tokens before the position,
        otherwise one less, because the last token may merge with the following text. The end of the
        text counts as the position before the last token. Positions without a known token are
        omitted."""
        if not positions:
            return self.encode(text, add_special_tokens=add_special_tokens), []
        encoding = self._encode_with(self._inner.encode_batch, text)
        ids, added = encoding.ids, frozenset(self._added_tokens.values())
        prefix = self._missing_prefix(ids, add_special_tokens)
        counts: list[int] = []
        for position in positions:
            # some tokenizers do not include the leading space in a token's offsets
            after = range(position, min(position + _MAX_SPACES, len(text)))
            tokens = (encoding.char_to_token(char_position) for char_position in after)
            count = next((token for token in tokens if token is not None), None)
            if count is None and position < len(text):
                continue
            count = len(ids) - 1 if count is None else count
            is_safe = any(id in added for id in ids[max(0, count - 1) : count + 1])
            counts.append(len(prefix) + max(0, count - (not is_safe)))
        return [*prefix, *ids], counts

    def _encode_with(self, encode_batch: Any, text: str) -> tokenizers.Encoding:
        with _LibraryErrorGuard(ErrorKind.INVALID, "this model's tokenizer cannot encode the text"):
            self._check_expansion(text)
            try:
                return encode_batch([text], add_special_tokens=False)[0]
            except TypeError as error:  # raised for a str that cannot be encoded as UTF-8
                raise _surrogate_error() from error

    def _missing_prefix(self, ids: Sequence[int], add_special_tokens: bool) -> tuple[int, ...]:
        """Returns the special tokens that must be prepended to the token IDs."""
        if not add_special_tokens or tuple(ids[: len(self._prefix_ids)]) == self._prefix_ids:
            return ()
        return self._prefix_ids

    def encode_for_embedding(self, text: str) -> list[int]:
        """Tokenizes text for an embedding. The result includes the special tokens that `encode`
        adds at the start, and the special tokens that tokenizer.json's post-processor adds at the
        end, the last of which is used for last-token pooling. Raises AppError(INVALID) if the text
        cannot be encoded."""
        return [*self.encode(text, add_special_tokens=True), *self._suffix_ids]

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """The special tokens at the end of a text for an embedding."""
        return self._suffix_ids

    def encode_pair(self, first: str, second: str, max_tokens: int) -> tuple[list[int], int]:
        """Tokenizes two texts, so that the model can score the second one, with all special tokens.
        Returns the tokens, and the number of those that belong to the first segment. If there are
        more than `max_tokens`, the end of the second text is removed. Raises
        AppError(CONTEXT_LENGTH) if the first text leaves no room for the second one, and
        AppError(INVALID) if a text cannot be encoded."""
        with _LibraryErrorGuard(ErrorKind.INVALID, "this model's tokenizer cannot encode the text"):
            self._check_expansion(first)
            self._check_expansion(second)
            try:
                encoding = self._inner.encode(first, second, add_special_tokens=True)
            except TypeError as error:  # raised for a str that cannot be encoded as UTF-8
                raise _surrogate_error() from error
        places = [place for place, text in enumerate(encoding.sequence_ids) if text == 1]
        excess = len(encoding.ids) - max_tokens
        if excess > 0 and excess >= len(places):
            raise AppError(
                ErrorKind.CONTEXT_LENGTH,
                f"the query has too many tokens: a query and a document can have at most "
                f"{max_tokens} tokens together; shorten the query",
                param="query",
            )
        dropped = frozenset(places[len(places) - max(0, excess) :])
        kept = [place for place in range(len(encoding.ids)) if place not in dropped]
        segments = [encoding.type_ids[place] for place in kept]
        return [encoding.ids[place] for place in kept], segments.count(0)

    def truncate_text(self, text: str, num_tokens: int) -> str:
        """Returns the text, or a prefix with far more than `num_tokens` tokens. This bounds the
        cost of a very long text by the cost of one context. Raises the same errors as `encode`."""
        size = 8 * num_tokens
        while size < len(text):
            if len(self.encode(text[:size], add_special_tokens=False)) > 2 * num_tokens:
                return text[:size]
            size *= 2
        return text

    def _check_expansion(self, text: str) -> None:
        """Raises AppError(INVALID) for text whose normalized form would be too large."""
        expansion = self._expansion
        factor = expansion.normalizer * expansion.pre_tokenizer
        if (
            factor <= _MAX_EXPANSION
            or _MAX_CHARACTER_BYTES * len(text) * factor <= _MAX_NORMALIZED_BYTES
        ):
            return
        normalizer = self._inner.normalizer
        assert normalizer is not None, "pre-tokenizers have a lower limit"
        limit = max(
            _MAX_NORMALIZED_BYTES, _MAX_EXPANSION * len(text.encode(errors="surrogatepass"))
        )
        step = max(1, int(_NORMALIZER_CHUNK_BYTES / (_MAX_CHARACTER_BYTES * expansion.normalizer)))
        written = 0
        for start in range(0, len(text), step):
            try:
                piece = normalizer.normalize_str(text[start : start + step])
            except TypeError as error:
                raise _surrogate_error() from error
            written += len(piece.encode())
            if written * expansion.pre_tokenizer > limit:
                message = "the text is too long after this model's tokenizer has normalized it"
                raise AppError(ErrorKind.INVALID, message)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the visible text. Special tokens and unknown IDs are skipped."""
        return self._decode_all([id for id in ids if self.is_visible(id)])

    def decode_verbatim(self, ids: Sequence[int]) -> str:
        """Returns the text, including the special tokens. Raises AppError(INVALID) for an ID
        outside the vocabulary, and for tokens that the tokenizer cannot decode."""
        for id in ids:
            if self._lookup_token(id) is None:
                message = (
                    f"{id} is not a token of this model, which has {self.vocab_size} tokens: use "
                    "the token IDs of this model"
                )
                raise AppError(ErrorKind.INVALID, message, param="tokens")
        try:
            return self._decode_all(ids)
        except AppError as error:
            raise AppError(ErrorKind.INVALID, error.marked_message) from error

    def is_visible(self, id: int) -> bool:
        """Returns whether the token is part of the visible text."""
        return id not in self.special_ids and self.has_id(id)

    def has_id(self, id: int) -> bool:
        """Returns whether the vocabulary contains the ID."""
        return self._lookup_token(id) is not None

    def id_to_token(self, id: int) -> str | None:
        """Returns a token as stored in the vocabulary, such as "</s>"."""
        return self._lookup_token(id)

    def token_to_id(self, token: str) -> int | None:
        """Returns the ID of a token as stored in the vocabulary, such as "</s>"."""
        with _LibraryErrorGuard(ErrorKind.MODEL_FILES, _BROKEN_MESSAGE):
            return self._inner.token_to_id(token)

    def added_token_to_id(self, text: str) -> int | None:
        """Returns the ID of an added token, which is usually a marker."""
        return self._added_tokens.get(text)

    def token_bytes(self, id: int) -> bytes:
        """Returns the exact bytes of a token in the middle of a text, including leading spaces and
        incomplete characters. Returns b"" for an unknown ID."""
        return self._cached_token_bytes(id)

    def _compute_visible_bytes(self, id: int) -> bytes:
        """Returns `token_bytes`, or b"" for a special token and for an unknown ID."""
        return self.token_bytes(id) if self.is_visible(id) else b""

    def _compute_token_bytes(self, id: int) -> bytes:
        token = self._lookup_token(id)
        if token is None:
            return b""
        if self.byte_decoder is not None:
            return self.byte_decoder.decode_token(token)
        # Other decoders treat the first token differently, so decode two tokens and use the second.
        return self._decode_all([id, id]).removeprefix(self._decode_all([id])).encode()

    def token_text(self, id: int) -> str:
        """Returns `token_bytes` as text, with U+FFFD for incomplete characters."""
        return self.token_bytes(id).decode(errors="replace")

    def _decode_all(self, ids: Sequence[int]) -> str:
        """Decodes tokens sampled by the model. Raises AppError(MODEL_FILES), because a failure is
        not the client's fault."""
        if self.byte_decoder is None:
            with _LibraryErrorGuard(
                ErrorKind.MODEL_FILES, "this model's tokenizer cannot decode tokens"
            ):
                return self._inner.decode(ids, skip_special_tokens=False)
        raw = b"".join(map(self.token_bytes, ids))
        if self.byte_decoder.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def _lookup_token(self, id: int) -> str | None:
        # The library accepts unsigned 32-bit IDs, and raises OverflowError for other integers.
        if not 0 <= id < 1 << 32:
            return None
        with _BROKEN_GUARD:
            return self._inner.id_to_token(id)


class _LibraryErrorGuard:
    """A context manager that converts library errors to AppError. The library raises plain
    Exception or PanicException."""

    __slots__ = ("_kind", "_what")

    def __init__(self, kind: ErrorKind, what: str) -> None:
        self._kind = kind
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, AppError):
            return
        try:
            with PanicGuard():
                raise error
        except Exception as raised:
            reason = " ".join(str(raised).split()) or type(raised).__name__
            if len(reason) > _MAX_REASON_LENGTH:
                reason = f"{reason[:_MAX_REASON_LENGTH]} …"
            if self._kind is ErrorKind.INVALID:
                reason = mark_client_text(reason)
            raise AppError(self._kind, f"{self._what}: {reason}") from error


# created once, because it is used for each output token
_BROKEN_GUARD = _LibraryErrorGuard(ErrorKind.MODEL_FILES, _BROKEN_MESSAGE)


def _surrogate_error() -> AppError:
    message = (
        "the text contains an unpaired surrogate (\\ud800 to \\udfff), which is not a character: "
        "send the whole pair or omit it"
    )
    return AppError(ErrorKind.INVALID, message)


def _pipeline_components(inner: tokenizers.Tokenizer) -> tuple[Any, Any, Any]:
    return inner.normalizer, inner.pre_tokenizer, inner.decoder


def _component_config(part: Any) -> Json:
    """Returns the component's configuration in tokenizer.json, or {} if there is no component."""
    return {} if part is None else json.loads(part.__getstate__())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStopConditions:
    """The stop conditions of one model. ids: the stop tokens. strings: the stop strings that are
    not tokens."""

    ids: frozenset[int]
    strings: tuple[str, ...]


def find_model_stop_conditions(
    files: ModelFiles, tokenizer: Tokenizer, extra_strings: Sequence[str] = ()
) -> ModelStopConditions:
    """Returns the union of three sources: eos_token_id in generation_config.json (or in config.json
    if it is missing there), the eos_token of tokenizer_config.json, and `extra_strings`. A string
    that is a special token is used as a token ID, because it never appears as text.

    mlx-lm (utils.py, TokenizerWrapper) and vLLM use the same union. No single source is correct for
    all models. Some conversions drop generation_config.json. In this case, config.json contains
    only the end-of-document token (Llama 3's <|end_of_text|>, Phi 3's <|endoftext|>), and
    tokenizer_config.json contains the end-of-turn token. For Gemma, it is the other way round. IDs
    outside the vocabulary are never sampled, so they are omitted.

    Raises AppError(MODEL_FILES) if eos_token_id is neither an ID nor a list of IDs.
    """
    ids = set(next(files.read_token_ids("eos_token_id"), frozenset[int]()))
    eos = parse_special_token(files.tokenizer_config.get("eos_token"))
    named = {text: tokenizer.token_to_id(text) for text in extra_strings}
    hidden = {text: id for text, id in named.items() if id in tokenizer.special_ids}
    last = None if eos is None else tokenizer.token_to_id(eos)
    ids.update(id for id in (*hidden.values(), last) if id is not None)
    return ModelStopConditions(
        ids=frozenset(filter(tokenizer.has_id, ids)),
        strings=tuple(text for text in extra_strings if text not in hidden),
    )


def parse_special_token(value: Any) -> str | None:
    """Parses a special token of tokenizer_config.json, which is a string or an object that contains
    one."""
    match value:
        case str(text) | {"content": str(text)}:
            return text
        case _:
            return None


def _find_prefix_ids(
    inner: tokenizers.Tokenizer, bos: int | None, add_bos: bool | None
) -> tuple[int, ...]:
    """Returns the tokens at the start of every text."""
    probe = inner.encode("a", add_special_tokens=True)
    mask = [*probe.special_tokens_mask, 0]
    written = tuple(probe.ids[: mask.index(0)])
    if add_bos is None:
        return written
    if not add_bos:
        return ()
    return written if bos is None or bos in written else (bos, *written)


def _find_suffix_ids(inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Returns the special tokens that the post-processor appends to every text."""
    probe = inner.encode("a", add_special_tokens=True)
    num_suffix_ids = probe.special_tokens_mask[::-1].index(0)
    return tuple(probe.ids[len(probe.ids) - num_suffix_ids :])


def _has_byte_order_mark(path: Path) -> bool:
    """Returns whether a file begins with a mark that the library does not accept."""
    with path.open("rb") as file:
        return file.read(len(BOM_UTF8)) == BOM_UTF8


def _check_added_tokens(inner: tokenizers.Tokenizer, files: ModelFiles) -> None:
    """Raises AppError(MODEL_FILES) if the library has given a token another ID."""
    for token in files.added_tokens:
        if inner.token_to_id(token.content) != token.id:
            message = (
                f"the added token {token.content!r} of {files.path} has the ID {token.id}, but "
                f"would get {inner.token_to_id(token.content)} in {files.tokenizer_path.name}: add "
                "it to this file"
            )
            raise AppError(ErrorKind.MODEL_FILES, message)


def _find_bos_token_id(files: ModelFiles, inner: tokenizers.Tokenizer) -> int | None:
    text = parse_special_token(files.tokenizer_config.get("bos_token"))
    if text is not None:
        return inner.token_to_id(text)
    ids = next(files.read_token_ids("bos_token_id"), frozenset[int]())
    return next((id for id in sorted(ids) if inner.id_to_token(id) is not None), None)


def encode_bad_words(
    tokenizer: Tokenizer, words: Sequence[str], vocab: int
) -> tuple[tuple[int, ...], ...]:
    """Tokenizes each word with and without a leading space, as in vLLM. Other tokenizations of the
    same text are not excluded. vocab: the number of token IDs that can be sampled. A word with
    different token IDs is omitted."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (word, bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and max(ids) < vocab:
                sequences[ids] = None
    return tuple(sequences)
