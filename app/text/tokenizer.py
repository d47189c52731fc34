"""Token ids and the text they stand for.

Knows: the model's tokenizer.json, through the `tokenizers` library, and which ids begin and end a
text. Must not know: chat templates, requests, where ids come from or go to.

A token spells bytes. The text of ids is those bytes joined and read as UTF-8, where each malformed
sequence becomes one U+FFFD (the Unicode Standard's "maximal subpart", as everywhere on the web).
One definition for whole texts, streams and log-probabilities. It is what `tokenizers` does too, but
for one case: with byte tokens such as <0xFF>, one bad byte there turns the *whole run* of byte
tokens around it into U+FFFD, good characters included. A stream cannot take a character back, and
a reader is better served by what was good; so we, like SentencePiece, replace only what is bad.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any

import tokenizers

from app.core.errors import AppError, Kind, PanicGuard, quote_client
from app.core.files import Json, ModelFiles
from app.text.growth import Growth
from app.text.spelling import Spelling

# tokens whose bytes are remembered, 100 B each
_SPELLED = 1 << 15

# Bytes that one text may become in the library, which needs up to a hundred times as much memory
# for them, and how many for one of its own it may become in any case. Only a text that the
# tokenizer could make longer is measured first, in pieces that cannot become more than _AT_ONCE.
_MOST_WRITTEN, _MOST_GROWTH = 16 << 20, 16
_AT_ONCE = 4 << 20

# bytes of one character
_WIDEST = 4

# characters of what the library says that a message repeats
_SHOWN = 200


class Tokenizer:
    """One model's tokenizer; immutable.

    bos: the id that begins a text, if the model has one. special: ids that are control, not text.
    spelling: None where only the library's own decoder knows what tokens spell.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, *, bos: int | None = None, add_bos: bool | None = None
    ) -> None:
        """add_bos: whether a text begins with bos; None leaves it to the post-processor that
        tokenizer.json describes. Raises ValueError for a tokenizer that can make a text longer than
        `Growth` accepts."""
        inner.no_truncation()  # what training set, some files still hold
        inner.no_padding()
        self._inner = inner
        self.bos = bos
        self._growth = Growth.of(*map(_described, _chains(inner)))
        added = inner.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)
        self._added = {token.content: id for id, token in added.items()}
        self.spelling = Spelling.of(_described(inner.decoder))
        self._prefix = _prefix(inner, bos, add_bos)
        self._suffix = _suffix(inner)
        # twenty rivals of each token are mostly the same few
        self._spelled = lru_cache(_SPELLED)(self._spell)

    @staticmethod
    def load(files: ModelFiles) -> "Tokenizer":
        """Raises AppError(MODEL_FILES) when tokenizer.json is missing or broken."""
        path = files.tokenizer
        if not path.is_file():
            raise AppError(Kind.MODEL_FILES, f"{path} is missing: a model needs its tokenizer.json")
        add_bos = files.tokenizer_config.get("add_bos_token")
        with _Reported(Kind.MODEL_FILES, f"{path} is not a usable tokenizer"):
            inner = tokenizers.Tokenizer.from_file(str(path))
            return Tokenizer(
                inner,
                bos=_bos(files, inner),
                add_bos=add_bos if isinstance(add_bos, bool) else None,
            )

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included. The model's logits may be padded beyond it."""
        with _Reported(Kind.MODEL_FILES, _BROKEN):
            return self._inner.get_vocab_size()

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of a text. Special tokens written out in it are recognised.

        add_special: begin as this model's texts begin (with BOS, mostly), unless the text brings
        that itself. No EOS ever ends it: the text is there to be continued.
        Raises AppError(INVALID).
        """
        with _Reported(Kind.INVALID, "this model's tokenizer cannot encode the text"):
            self._check_growth(text)
            try:
                # lets other threads run meanwhile; without offsets it is twice as fast
                ids = self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
            except TypeError as error:  # all that a str which is not UTF-8 comes to
                raise _surrogate() from error
        if not add_special or tuple(ids[: len(self._prefix)]) == self._prefix:
            return ids
        return [*self._prefix, *ids]

    def encode_whole(self, text: str) -> list[int]:
        """Ids of a text that nothing will follow, such as one that becomes a vector: begun as
        `encode` does with add_special, and ended as tokenizer.json's post-processor ends texts
        (where a vector is that of the last token, it is this one's). Raises AppError(INVALID)."""
        return [*self.encode(text, add_special=True), *self._suffix]

    def enough_of(self, text: str, count: int) -> str:
        """The text, or a beginning of it that alone has far more than `count` tokens: so that ten
        million characters cost no more than a context's worth does. Raises as `encode` does."""
        size = 8 * count
        while size < len(text):
            if len(self.encode(text[:size], add_special=False)) > 2 * count:
                return text[:size]
            size *= 2
        return text

    def _check_growth(self, text: str) -> None:
        """Raises AppError(INVALID) for a text that the library would make too long to hold."""
        growth = self._growth
        factor = growth.normalizer * growth.pre_tokenizer
        if factor <= _MOST_GROWTH or _WIDEST * len(text) * factor <= _MOST_WRITTEN:
            return
        normalizer = self._inner.normalizer
        assert normalizer is not None, "pre-tokenizers alone are limited to less"
        most = max(_MOST_WRITTEN, _MOST_GROWTH * len(text.encode(errors="surrogatepass")))
        step = max(1, int(_AT_ONCE / (_WIDEST * growth.normalizer)))
        written = 0
        for at in range(0, len(text), step):
            try:
                piece = normalizer.normalize_str(text[at : at + step])
            except TypeError as error:
                raise _surrogate() from error
            written += len(piece.encode())
            if written * growth.pre_tokenizer > most:
                message = "the text is too long after this model's tokenizer has normalized it"
                raise AppError(Kind.INVALID, message)

    def decode(self, ids: Sequence[int]) -> str:
        """The text a reader should see: special tokens, and ids that are no token, show nothing."""
        return self._text([id for id in ids if self.shows(id)])

    def decode_verbatim(self, ids: Sequence[int]) -> str:
        """The text with special tokens written out. Raises AppError(INVALID) for an id outside the
        vocabulary, and for ids that the tokenizer cannot turn into a text."""
        for id in ids:
            if self._token(id) is None:
                message = f"{id} is not a token of this model, which has {self.vocab_size} tokens"
                raise AppError(Kind.INVALID, message)
        try:
            return self._text(ids)
        except AppError as error:
            raise AppError(Kind.INVALID, error.marked) from error

    def shows(self, id: int) -> bool:
        """Whether the id is part of what a reader should see."""
        return id not in self.special and self.has(id)

    def has(self, id: int) -> bool:
        """Whether the id is a token."""
        return self._token(id) is not None

    def name(self, id: int) -> str | None:
        """A token as the vocabulary writes it, such as "</s>"."""
        return self._token(id)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, such as "</s>"."""
        with _Reported(Kind.MODEL_FILES, _BROKEN):
            return self._inner.token_to_id(token)

    def added_id(self, text: str) -> int | None:
        """The id of a text that was added to the vocabulary as a whole: a marker, mostly."""
        return self._added.get(text)

    def token_bytes(self, id: int) -> bytes:
        """Exactly what one token spells in the middle of a text: its leading space included, half
        a character where it is half of one, b"" for an id that is no token."""
        return self._spelled(id)

    def _spell(self, id: int) -> bytes:
        token = self._token(id)
        if token is None:
            return b""
        if self.spelling is not None:
            return self.spelling.bytes_of(token)
        # Decoders of the other kind treat a first token apart: look at the second of two.
        return self._text([id, id]).removeprefix(self._text([id])).encode()

    def token_text(self, id: int) -> str:
        """`token_bytes` as text, with U+FFFD where they are not whole characters."""
        return self.token_bytes(id).decode(errors="replace")

    def _text(self, ids: Sequence[int]) -> str:
        """Raises AppError(MODEL_FILES): ids that the model samples are nobody's mistake."""
        if self.spelling is None:
            with _Reported(Kind.MODEL_FILES, "this model's tokenizer cannot decode tokens"):
                return self._inner.decode(ids, skip_special_tokens=False)
        raw = b"".join(map(self.token_bytes, ids))
        if self.spelling.strips_space:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def _token(self, id: int) -> str | None:
        # The library takes 32 bits without a sign, and raises OverflowError for anything else.
        if not 0 <= id < 1 << 32:
            return None
        with _REPORTED_BROKEN:
            return self._inner.id_to_token(id)


class _Reported:
    """`with _Reported(…):` raises AppError in place of whatever the library raises, which is
    nothing narrower than Exception, or PanicException."""

    __slots__ = ("_kind", "_what")

    def __init__(self, kind: Kind, what: str) -> None:
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
            if len(reason) > _SHOWN:
                reason = f"{reason[:_SHOWN]} …"
            if self._kind is Kind.INVALID:
                reason = quote_client(reason)
            raise AppError(self._kind, f"{self._what}: {reason}") from error


_BROKEN = "this model's tokenizer is broken"
# made once: it is needed for each token of an answer
_REPORTED_BROKEN = _Reported(Kind.MODEL_FILES, _BROKEN)


def _surrogate() -> AppError:
    message = (
        "the text contains an unpaired surrogate (\\ud800 to \\udfff), which is not a character: "
        "send the whole pair or omit it"
    )
    return AppError(Kind.INVALID, message)


def _chains(inner: tokenizers.Tokenizer) -> tuple[Any, Any, Any]:
    return inner.normalizer, inner.pre_tokenizer, inner.decoder


def _described(part: Any) -> Json:
    """As tokenizer.json describes it; {} for none."""
    return {} if part is None else json.loads(part.__getstate__())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """What ends an answer of one model. ids: tokens that do. texts: those that are no token."""

    ids: frozenset[int]
    texts: tuple[str, ...]


def stops(files: ModelFiles, tokenizer: Tokenizer, texts: Sequence[str] = ()) -> Stops:
    """The union of eos_token_id in generation_config.json (else in config.json), the eos_token of
    tokenizer_config.json, and `texts`. A text that is a special token ends an answer as its id,
    since nobody ever sees it as text.

    mlx-lm (utils.py, TokenizerWrapper) and vLLM take the same union. Any of the three alone is
    wrong for some model: conversions lose generation_config.json, and then config.json names only
    the end of a document (Llama 3's <|end_of_text|>, Phi 3's <|endoftext|>) where tokenizer_config
    has the end of a turn; for Gemma it is the other way round. An id that is no token is never
    sampled, ends nothing, and is left out.

    Raises AppError(MODEL_FILES) for an eos_token_id which is neither an id nor a list of ids.
    """
    ids = set(next(files.configured_ids("eos_token_id"), frozenset[int]()))
    eos = special_text(files.tokenizer_config.get("eos_token"))
    named = {text: tokenizer.token_id(text) for text in texts}
    hidden = {text: id for text, id in named.items() if id in tokenizer.special}
    last = None if eos is None else tokenizer.token_id(eos)
    ids.update(id for id in (*hidden.values(), last) if id is not None)
    return Stops(
        ids=frozenset(filter(tokenizer.has, ids)),
        texts=tuple(text for text in texts if text not in hidden),
    )


def special_text(value: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object around one."""
    match value:
        case str(text) | {"content": str(text)}:
            return text
        case _:
            return None


def _prefix(inner: tokenizers.Tokenizer, bos: int | None, add_bos: bool | None) -> tuple[int, ...]:
    """What every text begins with."""
    probe = inner.encode("a", add_special_tokens=True)
    mask = [*probe.special_tokens_mask, 0]
    written = tuple(probe.ids[: mask.index(0)])
    if add_bos is None:
        return written
    if not add_bos:
        return ()
    return written if bos is None or bos in written else (bos, *written)


def _suffix(inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the post-processor writes behind every text."""
    probe = inner.encode("a", add_special_tokens=True)
    behind = probe.special_tokens_mask[::-1].index(0)
    return tuple(probe.ids[len(probe.ids) - behind :])


def _bos(files: ModelFiles, inner: tokenizers.Tokenizer) -> int | None:
    text = special_text(files.tokenizer_config.get("bos_token"))
    if text is not None:
        return inner.token_to_id(text)
    ids = next(files.configured_ids("bos_token_id"), frozenset[int]())
    return next((id for id in sorted(ids) if inner.id_to_token(id) is not None), None)
