"""Builds a tokenizer.json from the metadata of a GGUF file.

Knows: the keys `tokenizer.ggml.*` and the format of tokenizer.json. Must not know: the tokenizers
library, the location of files.

`tokenizer.ggml.model` is the algorithm: `gpt2` is byte-level BPE, `llama` is the BPE of
SentencePiece, whose merges follow from the scores of the tokens, and `gemma4` is a BPE with merges
over the texts of SentencePiece.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.store.gguf.errors import UnsupportedGGUFError
from app.store.gguf.pre_tokenizers import BYTE_LEVEL, PRE_TOKENIZERS, Component
from models.gguf.reader import Array, GGUFFile

_PREFIX = "tokenizer.ggml."

# values of token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# SentencePiece's character for a space
_SPACE = "\u2581"

_MAX_TOKENS = 1 << 21

# longer tokens are runs of spaces and the like; the number of their splits is limited
_MAX_SPLIT_CHARACTERS = 256

# the texts of tokens that end a turn or a text, whether or not the metadata names them
END_MARKS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<turn|>",
        "<|observation|>",
        "<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
    }
)

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a file. kind: the value of `tokenizer.ggml.model`. types: one number per token,
    as in the file."""

    file: GGUFFile
    kind: str
    tokens: Sequence[str]
    types: Sequence[int]

    def find_token(self, key: str) -> int | None:
        """Returns the token ID in `tokenizer.ggml.{key}`. Returns None if there is none, or if it
        is not in the vocabulary."""
        value = self.file.metadata.get(_PREFIX + key)
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if 0 <= value < len(self.tokens) else None

    def list_end_tokens(self) -> list[int]:
        """Returns the IDs of all tokens that end a text or a turn."""
        named = (self.find_token(key) for key in _END_KEYS)
        marks = (
            id
            for id, token in enumerate(self.tokens)
            if token in END_MARKS and self.types[id] in (_CONTROL, _USER_DEFINED)
        )
        return list(dict.fromkeys(id for id in (*named, *marks) if id is not None))

    @property
    def adds_bos(self) -> bool:
        """Whether a text begins with the BOS token."""
        value = self.file.metadata.get(_PREFIX + "add_bos_token", _DEFAULT_BOS.get(self.kind))
        if value is None:
            value = self.file.metadata.get(_PREFIX + "pre") in _PRE_WITH_BOS
        return value is True or self.kind == "gemma4"

    @property
    def adds_eos(self) -> bool:
        """Whether the text of an embedding ends with the EOS token."""
        return self.file.metadata.get(_PREFIX + "add_eos_token") is True


# llama.cpp's defaults of add_bos_token
_DEFAULT_BOS: Mapping[str, bool] = {"llama": True}
_PRE_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "tekken", "pixtral")


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Reads the tokens. Raises AppError(MODEL_FILES) for a file without a vocabulary, and for an
    unsupported algorithm, with its name."""
    kind = file.metadata.get(_PREFIX + "model")
    if not isinstance(kind, str):
        raise _error(file, f"it has no {_PREFIX}model: a model needs a tokenizer")
    if kind not in _BUILDERS:
        raise UnsupportedGGUFError(
            f"{file.path}: its {_PREFIX}model is {kind[:80]!r}, which is not supported; supported "
            f"tokenizers: {', '.join(sorted(_BUILDERS))}",
        )
    raw = _read_array(file, "tokens", "string").strings()
    if not 0 < len(raw) <= _MAX_TOKENS:
        raise _error(file, f"{_PREFIX}tokens has {len(raw)} tokens")
    tokens = [token.decode(errors="replace") or f"[EMPTY_{id}]" for id, token in enumerate(raw)]
    if len(set(tokens)) < len(tokens):
        tokens = _rename_duplicates(tokens)
    types: Sequence[Any] = [1] * len(tokens)
    if _PREFIX + "token_type" in file.metadata:
        types = _read_numbers(file, "token_type", len(tokens))
    return Vocabulary(file=file, kind=kind, tokens=tokens, types=types)


def build_tokenizer(vocabulary: Vocabulary) -> Mapping[str, Any]:
    """Returns the content of a tokenizer.json. Raises AppError(MODEL_FILES), for example for an
    unknown way to split a text."""
    added = [
        {
            "id": id,
            "content": vocabulary.tokens[id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (_UNKNOWN, _CONTROL),
        }
        for id, kind in enumerate(vocabulary.types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _make_post_processor(vocabulary),
        **_BUILDERS[vocabulary.kind](vocabulary),
    }


def _make_post_processor(vocabulary: Vocabulary) -> Component | None:
    """Returns the component that adds BOS and EOS, or None."""
    bos = vocabulary.find_token("bos_token_id") if vocabulary.adds_bos else None
    eos = vocabulary.find_token("eos_token_id") if vocabulary.adds_eos else None
    if bos is None and eos is None:
        return None

    def special(id: int, sequence: int) -> Component:
        return {"SpecialToken": {"id": vocabulary.tokens[id], "type_id": sequence}}

    def template(*names: str) -> list[Component]:
        parts: list[Component] = []
        for sequence, name in enumerate(names):
            parts += [] if bos is None else [special(bos, sequence)]
            parts.append({"Sequence": {"id": name, "type_id": sequence}})
            parts += [] if eos is None else [special(eos, sequence)]
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            vocabulary.tokens[id]: {
                "id": vocabulary.tokens[id],
                "ids": [id],
                "tokens": [vocabulary.tokens[id]],
            }
            for id in (bos, eos)
            if id is not None
        },
    }


def _build_byte_level(vocabulary: Vocabulary) -> Mapping[str, Any]:
    file = vocabulary.file
    name = file.metadata.get(_PREFIX + "pre", "default")
    rules = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rules is None:
        raise UnsupportedGGUFError(
            f"{file.path}: its tokenizer splits texts by the rules {str(name)[:80]!r} "
            f"({_PREFIX}pre), which are unknown; known rules: {', '.join(sorted(PRE_TOKENIZERS))}",
        )
    return {
        "normalizer": rules.normalizer,
        "pre_tokenizer": _sequence("pretokenizers", rules.components),
        "decoder": BYTE_LEVEL,
        "model": _make_bpe(
            vocabulary, _read_merges(vocabulary), ignore_merges=rules.ignores_merges
        ),
    }


def _build_sentencepiece(vocabulary: Vocabulary) -> Mapping[str, Any]:
    adds_space = vocabulary.file.metadata.get(_PREFIX + "add_space_prefix", True) is not False
    scores = _read_numbers(vocabulary.file, "scores", len(vocabulary.tokens))
    return _make_sentencepiece(
        vocabulary, list(_derive_merges(vocabulary.tokens, scores)), adds_space=adds_space
    )


def _build_gemma4(vocabulary: Vocabulary) -> Mapping[str, Any]:
    return _make_sentencepiece(vocabulary, _read_merges(vocabulary), adds_space=False)


_BUILDERS = {
    "gpt2": _build_byte_level,
    "llama": _build_sentencepiece,
    "gemma4": _build_gemma4,
}


def _make_sentencepiece(
    vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], *, adds_space: bool
) -> Mapping[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[Component] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.find_token("unknown_token_id")
    if unknown is None and _UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(_UNKNOWN)
    return {
        "normalizer": _sequence("normalizers", [prepend, replace]) if adds_space else replace,
        "pre_tokenizer": None,
        "decoder": _sequence("decoders", decoders),
        "model": _make_bpe(
            vocabulary,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
        ),
    }


def _make_bpe(
    vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], **options: Any
) -> Mapping[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: id for id, token in enumerate(vocabulary.tokens)},
        "merges": merges,
        **options,
    }


def _sequence(kind: str, components: Sequence[Component]) -> Component:
    if len(components) == 1:
        return components[0]
    return {"type": "Sequence", kind: list(components)}


def _read_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that are merged, the first ones first."""
    merges: list[tuple[str, str]] = []
    for raw in _read_array(vocabulary.file, "merges", "string").strings():
        merge = raw.decode(errors="replace")
        space = merge.find(" ", 1)
        if space < 0:
            raise _error(vocabulary.file, f"{_PREFIX}merges contains {merge[:80]!r}, not a pair")
        merges.append((merge[:space], merge[space + 1 :]))
    return merges


def _derive_merges(tokens: Sequence[str], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yields the merges of SentencePiece's BPE: every pair of tokens whose concatenation is a
    token, in the order of its score. This is what SentencePiece computes while it encodes, and how
    transformers converts such a vocabulary."""
    ids = {token: id for id, token in enumerate(tokens)}
    order = sorted(range(len(tokens)), key=lambda id: -scores[id])
    for id in order:
        token = tokens[id]
        pairs = [
            (ids[token[:split]], ids[token[split:]])
            for split in range(1, min(len(token), _MAX_SPLIT_CHARACTERS))
            if token[:split] in ids and token[split:] in ids
        ]
        for left, right in sorted(pairs):
            yield tokens[left], tokens[right]


def _rename_duplicates(tokens: Sequence[str]) -> list[str]:
    """Gives tokens that occur a second time, such as invalid UTF-8 that is decoded to the same
    text, names that no text contains."""
    seen: set[str] = set()
    renamed: list[str] = []
    for id, token in enumerate(tokens):
        renamed.append(f"[DUPLICATE_{id}]" if token in seen else token)
        seen.add(renamed[-1])
    return renamed


def _read_array(file: GGUFFile, name: str, kind: str) -> Array:
    value = file.metadata.get(_PREFIX + name)
    if not isinstance(value, Array) or (kind and value.kind != kind):
        raise _error(file, f"it has no {_PREFIX}{name}, or not as an array of the right type")
    return value


def _read_numbers(file: GGUFFile, name: str, count: int) -> Sequence[Any]:
    array = _read_array(file, name, "")
    if array.kind in ("string", "array") or array.count < count:
        raise _error(file, f"{_PREFIX}{name} must have a number for each of the {count} tokens")
    return array.numbers()[:count]


def _error(file: GGUFFile, why: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, f"{file.path} is not a usable GGUF file: {why}")
