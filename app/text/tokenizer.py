"""Token ids and the text they stand for.

Knows: the model's tokenizer.json, through the `tokenizers` library, and which ids begin and end a
text. Must not know: chat templates, requests, where ids come from or go to.

A token spells bytes. The text of ids is those bytes joined and read as UTF-8, where each malformed
sequence becomes one U+FFFD (the Unicode Standard's "maximal subpart", as everywhere on the web).
One definition for whole texts, streams and log-probabilities. It is what `tokenizers` does too, but
for one case: with byte tokens such as <0xFF>, one bad byte there turns the *whole run* of byte
tokens around it into U+FFFD, good characters included. A stream cannot take a character back, and
a reader is better served by what was good; so we, like SentencePiece, replace only what is bad.

How the tokens of a vocabulary spell bytes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any

import tokenizers

from app.core.errors import AppError, ErrorKind, PanicGuard, mark_client_text
from app.core.model_files import Json, ModelFiles
from app.text.tokenizer_expansion import ExpansionFactors

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


# tokens whose bytes are remembered, 100 B each
_TOKEN_BYTES_CACHE_SIZE = 1 << 15

# Bytes that one text may become in the library, which needs up to a hundred times as much memory
# for them, and how many for one of its own it may become in any case. Only a text that the
# tokenizer could make longer is measured first, in pieces that cannot become more than _AT_ONCE.
_MAX_NORMALIZED_BYTES, _MAX_EXPANSION = 16 << 20, 16
_NORMALIZER_CHUNK_BYTES = 4 << 20

# bytes of one character
_MAX_CHARACTER_BYTES = 4

# characters of what the library says that a message repeats
_MAX_REASON_LENGTH = 200


class Tokenizer:
    """One model's tokenizer; immutable.

    bos_token_id: the id that begins a text, if the model has one. special_ids: ids that are
    control, not text. byte_decoder: None where only the library's own decoder knows what tokens
    spell.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        add_bos: bool | None = None,
    ) -> None:
        """add_bos: whether a text begins with bos; None leaves it to the post-processor that
        tokenizer.json describes. Raises ValueError for a tokenizer that can make a text longer than
        `ExpansionFactors` accepts."""
        inner.no_truncation()  # what training set, some files still hold
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
        # twenty rivals of each token are mostly the same few
        self._cached_token_bytes = lru_cache(_TOKEN_BYTES_CACHE_SIZE)(self._compute_token_bytes)

    @staticmethod
    def load(files: ModelFiles) -> "Tokenizer":
        """Raises AppError(MODEL_FILES) when tokenizer.json is missing or broken."""
        path = files.tokenizer_path
        if not path.is_file():
            raise AppError(
                ErrorKind.MODEL_FILES, f"{path} is missing: a model needs its tokenizer.json"
            )
        add_bos = files.tokenizer_config.get("add_bos_token")
        with _LibraryErrorGuard(ErrorKind.MODEL_FILES, f"{path} is not a usable tokenizer"):
            inner = tokenizers.Tokenizer.from_file(str(path))
            return Tokenizer(
                inner,
                bos_token_id=_find_bos_token_id(files, inner),
                add_bos=add_bos if isinstance(add_bos, bool) else None,
            )

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included. The model's logits may be padded beyond it."""
        with _LibraryErrorGuard(ErrorKind.MODEL_FILES, _BROKEN_MESSAGE):
            return self._inner.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text. Special tokens written out in it are recognised.

        add_special_tokens: begin as this model's texts begin (with BOS, mostly), unless the text
        brings that itself. No EOS ever ends it: the text is there to be continued. Raises
        AppError(INVALID).
        """
        with _LibraryErrorGuard(ErrorKind.INVALID, "this model's tokenizer cannot encode the text"):
            self._check_expansion(text)
            try:
                # lets other threads run meanwhile; without offsets it is twice as fast
                ids = self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
            except TypeError as error:  # all that a str which is not UTF-8 comes to
                raise _surrogate_error() from error
        if not add_special_tokens or tuple(ids[: len(self._prefix_ids)]) == self._prefix_ids:
            return ids
        return [*self._prefix_ids, *ids]

    def encode_for_embedding(self, text: str) -> list[int]:
        """Ids of a text that nothing will follow, such as one that becomes a vector: begun as
        `encode` does with add_special, and ended as tokenizer.json's post-processor ends texts
        (where a vector is that of the last token, it is this one's). Raises AppError(INVALID)."""
        return [*self.encode(text, add_special_tokens=True), *self._suffix_ids]

    def truncate_text(self, text: str, num_tokens: int) -> str:
        """The text, or a beginning of it that alone has far more than `num_tokens` tokens: so that
        ten million characters cost no more than a context's worth does. Raises as `encode` does."""
        size = 8 * num_tokens
        while size < len(text):
            if len(self.encode(text[:size], add_special_tokens=False)) > 2 * num_tokens:
                return text[:size]
            size *= 2
        return text

    def _check_expansion(self, text: str) -> None:
        """Raises AppError(INVALID) for a text that the library would make too long to hold."""
        growth = self._expansion
        factor = growth.normalizer * growth.pre_tokenizer
        if (
            factor <= _MAX_EXPANSION
            or _MAX_CHARACTER_BYTES * len(text) * factor <= _MAX_NORMALIZED_BYTES
        ):
            return
        normalizer = self._inner.normalizer
        assert normalizer is not None, "pre-tokenizers alone are limited to less"
        most = max(_MAX_NORMALIZED_BYTES, _MAX_EXPANSION * len(text.encode(errors="surrogatepass")))
        step = max(1, int(_NORMALIZER_CHUNK_BYTES / (_MAX_CHARACTER_BYTES * growth.normalizer)))
        written = 0
        for at in range(0, len(text), step):
            try:
                piece = normalizer.normalize_str(text[at : at + step])
            except TypeError as error:
                raise _surrogate_error() from error
            written += len(piece.encode())
            if written * growth.pre_tokenizer > most:
                message = "the text is too long after this model's tokenizer has normalized it"
                raise AppError(ErrorKind.INVALID, message)

    def decode(self, ids: Sequence[int]) -> str:
        """The text a reader should see: special tokens, and ids that are no token, show nothing."""
        return self._decode_all([id for id in ids if self.is_visible(id)])

    def decode_verbatim(self, ids: Sequence[int]) -> str:
        """The text with special tokens written out. Raises AppError(INVALID) for an id outside the
        vocabulary, and for ids that the tokenizer cannot turn into a text."""
        for id in ids:
            if self._lookup_token(id) is None:
                message = f"{id} is not a token of this model, which has {self.vocab_size} tokens"
                raise AppError(ErrorKind.INVALID, message)
        try:
            return self._decode_all(ids)
        except AppError as error:
            raise AppError(ErrorKind.INVALID, error.marked_message) from error

    def is_visible(self, id: int) -> bool:
        """Whether the id is part of what a reader should see."""
        return id not in self.special_ids and self.has_id(id)

    def has_id(self, id: int) -> bool:
        """Whether the id is a token."""
        return self._lookup_token(id) is not None

    def id_to_token(self, id: int) -> str | None:
        """A token as the vocabulary writes it, such as "</s>"."""
        return self._lookup_token(id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, such as "</s>"."""
        with _LibraryErrorGuard(ErrorKind.MODEL_FILES, _BROKEN_MESSAGE):
            return self._inner.token_to_id(token)

    def added_token_to_id(self, text: str) -> int | None:
        """The id of a text that was added to the vocabulary as a whole: a marker, mostly."""
        return self._added_tokens.get(text)

    def token_bytes(self, id: int) -> bytes:
        """Exactly what one token spells in the middle of a text: its leading space included, half
        a character where it is half of one, b"" for an id that is no token."""
        return self._cached_token_bytes(id)

    def _compute_token_bytes(self, id: int) -> bytes:
        token = self._lookup_token(id)
        if token is None:
            return b""
        if self.byte_decoder is not None:
            return self.byte_decoder.decode_token(token)
        # Decoders of the other kind treat a first token apart: look at the second of two.
        return self._decode_all([id, id]).removeprefix(self._decode_all([id])).encode()

    def token_text(self, id: int) -> str:
        """`token_bytes` as text, with U+FFFD where they are not whole characters."""
        return self.token_bytes(id).decode(errors="replace")

    def _decode_all(self, ids: Sequence[int]) -> str:
        """Raises AppError(MODEL_FILES): ids that the model samples are nobody's mistake."""
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
        # The library takes 32 bits without a sign, and raises OverflowError for anything else.
        if not 0 <= id < 1 << 32:
            return None
        with _BROKEN_GUARD:
            return self._inner.id_to_token(id)


class _LibraryErrorGuard:
    """`with _Reported(…):` raises AppError in place of whatever the library raises, which is
    nothing narrower than Exception, or PanicException."""

    __slots__ = ("_kind", "_what")

    def __init__(self, kind: ErrorKind, what: str) -> None:
        self._kind = kind
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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


_BROKEN_MESSAGE = "this model's tokenizer is broken"
# made once: it is needed for each token of an answer
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
    """As tokenizer.json describes it; {} for none."""
    return {} if part is None else json.loads(part.__getstate__())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStopConditions:
    """What ends an answer of one model. ids: tokens that do. strings: those that are no token."""

    ids: frozenset[int]
    strings: tuple[str, ...]


def find_model_stop_conditions(
    files: ModelFiles, tokenizer: Tokenizer, extra_strings: Sequence[str] = ()
) -> ModelStopConditions:
    """The union of eos_token_id in generation_config.json (else in config.json), the eos_token of
    tokenizer_config.json, and `extra_strings`. A text that is a special token ends an answer as its
    id, since nobody ever sees it as text.

    mlx-lm (utils.py, TokenizerWrapper) and vLLM take the same union. Any of the three alone is
    wrong for some model: conversions lose generation_config.json, and then config.json names only
    the end of a document (Llama 3's <|end_of_text|>, Phi 3's <|endoftext|>) where tokenizer_config
    has the end of a turn; for Gemma it is the other way round. An id that is no token is never
    sampled, ends nothing, and is left out.

    Raises AppError(MODEL_FILES) for an eos_token_id which is neither an id nor a list of ids.
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
    """A special token as tokenizer_config.json writes it: a string, or an object around one."""
    match value:
        case str(text) | {"content": str(text)}:
            return text
        case _:
            return None


def _find_prefix_ids(
    inner: tokenizers.Tokenizer, bos: int | None, add_bos: bool | None
) -> tuple[int, ...]:
    """What every text begins with."""
    probe = inner.encode("a", add_special_tokens=True)
    mask = [*probe.special_tokens_mask, 0]
    written = tuple(probe.ids[: mask.index(0)])
    if add_bos is None:
        return written
    if not add_bos:
        return ()
    return written if bos is None or bos in written else (bos, *written)


def _find_suffix_ids(inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the post-processor writes behind every text."""
    probe = inner.encode("a", add_special_tokens=True)
    behind = probe.special_tokens_mask[::-1].index(0)
    return tuple(probe.ids[len(probe.ids) - behind :])


def _find_bos_token_id(files: ModelFiles, inner: tokenizers.Tokenizer) -> int | None:
    text = parse_special_token(files.tokenizer_config.get("bos_token"))
    if text is not None:
        return inner.token_to_id(text)
    ids = next(files.read_token_ids("bos_token_id"), frozenset[int]())
    return next((id for id in sorted(ids) if inner.id_to_token(id) is not None), None)
