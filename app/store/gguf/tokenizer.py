"""Builds a tokenizer.json from the metadata of a GGUF file.

Knows: the keys `tokenizer.ggml.*` and the format of tokenizer.json. Must not know: the tokenizers
library, the location of files.

`tokenizer.ggml.model` is the algorithm: `gpt2` is byte-level BPE, `llama` is the BPE of
SentencePiece, whose merges follow from the scores of the tokens, `gemma4` is a BPE with merges over
the texts of SentencePiece, `bert` is WordPiece, and `t5` is the Unigram of SentencePiece.
"""

import base64
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.store.gguf.errors import UnsupportedGGUFError
from app.store.gguf.pre_tokenizers import (
    BYTE_LEVEL,
    PRE_TOKENIZERS,
    Component,
    join_components,
    make_bpe,
)
from models.gguf.reader import Array, GGUFFile

_PREFIX = "tokenizer.ggml."

# values of token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# SentencePiece's character for a space
_SPACE = "\u2581"

_MAX_TOKENS = 1 << 20

# longer tokens are mostly runs of spaces; the number of their splits is limited
_MAX_SPLIT_CHARACTERS = 256

# the splits of all tokens; 260,000 tokens have 2 million
_MAX_SPLITS = 1 << 22

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
        "[EOS]",
        "[e~[",
        "<end_of_utterance>",
        "<|tool_response>",
        "<|calls|>",
        "<|flush|>",
        "<｜end▁of▁sentence｜>",
    }
)

# ends only a message, and not the turn, in vocabularies that contain one of the other marks
_END_OF_MESSAGE, _ENDS_OF_TURN = "<|end|>", frozenset({"<|call|>", "<|calls|>"})

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Ollama's key for several of them
_END_LIST, _MAX_ENDS = "eos_token_ids", 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a file. kind: the value of `tokenizer.ggml.model`. types: one number per token,
    as in the file."""

    file: GGUFFile
    kind: str
    tokens: Sequence[str]
    types: Sequence[int]

    @property
    def ids(self) -> Mapping[str, int]:
        return {token: id for id, token in enumerate(self.tokens)}

    def find_token(self, key: str) -> int | None:
        """Returns the token ID in `tokenizer.ggml.{key}`. Returns None if there is none, or if it
        is not in the vocabulary."""
        value = self.file.metadata.get(_PREFIX + key)
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if 0 <= value < len(self.tokens) else None

    def list_end_tokens(self) -> list[int]:
        """Returns the IDs of all tokens that end text or a turn."""
        named = (self.find_token(key) for key in _END_KEYS)
        marks = {
            token: id
            for id, token in enumerate(self.tokens)
            if token in END_MARKS and self.types[id] in (_CONTROL, _USER_DEFINED)
        }
        if not _ENDS_OF_TURN.isdisjoint(marks):
            marks.pop(_END_OF_MESSAGE, None)
        ids = (*named, *self._read_end_list(), *marks.values())
        return list(dict.fromkeys(id for id in ids if id is not None))

    def _read_end_list(self) -> list[int]:
        value = self.file.metadata.get(_PREFIX + _END_LIST)
        if not isinstance(value, Array) or value.kind not in ("i32", "u32"):
            return []
        return [int(id) for id in value.numbers(_MAX_ENDS) if 0 <= id < len(self.tokens)]

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
        default = self.kind in ("bert", "t5")
        return self.file.metadata.get(_PREFIX + "add_eos_token", default) is True

    @property
    def adds_two_separators(self) -> bool:
        """Whether two EOS tokens are between a pair of texts, as in RoBERTa."""
        default = self.kind == "t5" and self.adds_bos
        value = self.file.metadata.get(_PREFIX + "add_sep_token")
        return self.kind != "bert" and (value if isinstance(value, bool) else default)

    @property
    def lowercases(self) -> bool:
        """Whether text is converted to lower case before it is split. If the file does not declare
        it, the tokens show it: texts in lower case never need a token with a capital letter."""
        value = self.file.metadata.get(_PREFIX + "normalizer.lowercase")
        if isinstance(value, bool):
            return value
        return all(
            token == token.lower()
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind == _NORMAL and not _is_bracketed(token)
        )

    @property
    def bos(self) -> int | None:
        """The token at the start of a text, if there is one. For BERT, that is [CLS]."""
        if self.kind != "bert":
            return self.find_token("bos_token_id")
        return self._find_first("[CLS]", "cls_token_id", "bos_token_id")

    @property
    def eos(self) -> int | None:
        """The token at the end of a text for an embedding, if there is one. For BERT, that is
        [SEP]."""
        if self.kind != "bert":
            return self.find_token("eos_token_id")
        # the first key is misspelled in llama.cpp
        return self._find_first("[SEP]", "seperator_token_id", "separator_token_id", "eos_token_id")

    @property
    def unknown(self) -> int | None:
        """The token for characters that no token has, if there is one."""
        if self.kind == "bert":
            return self._find_first("[UNK]", "unknown_token_id")
        found = self.find_token("unknown_token_id")
        if found is None and _UNKNOWN in self.types:
            found = self.types.index(_UNKNOWN)
        return found

    def _find_first(self, text: str, *keys: str) -> int | None:
        """Returns the token with the first of the keys, or with the text."""
        found = (id for key in keys if (id := self.find_token(key)) is not None)
        return next(found, self.tokens.index(text) if text in self.tokens else None)


# llama.cpp's defaults of add_bos_token
_DEFAULT_BOS: Mapping[str, bool] = {"llama": True, "bert": True, "t5": False}
_PRE_WITH_BOS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "midm-2.0", "tekken", "pixtral"),
)


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
    types: Sequence[Any] = [_NORMAL] * len(tokens)
    if _PREFIX + "token_type" in file.metadata:
        types = _read_numbers(file, "token_type", len(tokens))
    embeddings = file.tensors.get("token_embd.weight")
    rows = len(tokens) if embeddings is None else embeddings.shape[0]
    if _NORMAL not in types[rows:]:  # such as tokens of images that a text model does not have
        tokens, types = tokens[:rows], types[:rows]
    if kind == "bert":
        tokens = list(map(_restore_word_piece, tokens, types))
    if len(set(tokens)) < len(tokens):
        tokens = _rename_duplicates(tokens)
    return Vocabulary(file=file, kind=kind, tokens=tokens, types=types)


def _restore_word_piece(token: str, kind: int) -> str:
    """Returns a token as in a vocabulary of BERT, where `##` marks a piece that continues a word.
    In a GGUF file, a piece that begins a word has a mark. Special tokens have none."""
    if kind in (_UNKNOWN, _CONTROL) or _is_bracketed(token):
        return token
    if token.startswith(_SPACE) and token != _SPACE:
        return token.removeprefix(_SPACE)
    return f"##{token}"


def _is_bracketed(token: str) -> bool:
    """Returns whether a token is of the form of [unused1]."""
    return len(token) > 2 and token.startswith("[") and token.endswith("]")


def build_tokenizer(vocabulary: Vocabulary) -> Mapping[str, Any]:
    """Returns the content of a tokenizer.json. Raises AppError(MODEL_FILES), for example for
    unknown rules for splitting text."""
    added = [
        {
            "id": id,
            "content": vocabulary.tokens[id],
            "single_word": False,
            # of XLM-RoBERTa, the only models with Unigram that have it
            "lstrip": vocabulary.kind == "t5" and vocabulary.tokens[id] == "<mask>",
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
    bos = vocabulary.bos if vocabulary.adds_bos else None
    eos = vocabulary.eos if vocabulary.adds_eos else None
    if bos is None and eos is None:
        return None
    # the tokens before the second text, after the end of the first one
    second = eos if vocabulary.adds_two_separators else bos
    if vocabulary.kind == "bert":
        second = None

    def template(*parts: str | int | None) -> list[Component]:
        """parts: the names of texts, and the special tokens before and after them."""
        found: list[Component] = []
        sequence = 0
        for part in parts:
            if isinstance(part, str):
                sequence = int(part == "B")
                found.append({"Sequence": {"id": part, "type_id": sequence}})
            elif part is not None:
                token = vocabulary.tokens[part]
                found.append({"SpecialToken": {"id": token, "type_id": sequence}})
        return found

    return {
        "type": "TemplateProcessing",
        "single": template(bos, "A", eos),
        "pair": template(bos, "A", eos, second, "B", eos),
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
            f"{file.path}: its tokenizer splits text by the rules {str(name)[:80]!r} "
            f"({_PREFIX}pre), which are unknown; known rules: {', '.join(sorted(PRE_TOKENIZERS))}",
        )
    return {
        "normalizer": rules.normalizer,
        "pre_tokenizer": join_components("pretokenizers", rules.components),
        "decoder": BYTE_LEVEL,
        "model": make_bpe(
            vocabulary.ids, _read_merges(vocabulary), ignore_merges=rules.ignores_merges
        ),
    }


def _build_sentencepiece(vocabulary: Vocabulary) -> Mapping[str, Any]:
    adds_space = vocabulary.file.metadata.get(_PREFIX + "add_space_prefix", True) is not False
    scores = _read_numbers(vocabulary.file, "scores", len(vocabulary.tokens))
    splits = sum(min(len(token), _MAX_SPLIT_CHARACTERS) for token in vocabulary.tokens)
    if splits > _MAX_SPLITS:
        raise _error(vocabulary.file, f"the texts in {_PREFIX}tokens are too long")
    return _make_sentencepiece(
        vocabulary, list(_derive_merges(vocabulary.tokens, scores)), adds_space=adds_space
    )


def _build_gemma4(vocabulary: Vocabulary) -> Mapping[str, Any]:
    return _make_sentencepiece(vocabulary, _read_merges(vocabulary), adds_space=False)


def _build_word_piece(vocabulary: Vocabulary) -> Mapping[str, Any]:
    metadata = vocabulary.file.metadata
    # the second key is Ollama's; if there is none, accents are removed from lower case texts only
    strips = metadata.get(
        _PREFIX + "normalizer.strip_accents", metadata.get(_PREFIX + "strip_accents")
    )
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strips if isinstance(strips, bool) else None,
            "lowercase": vocabulary.lowercases,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.tokens[_require_unknown(vocabulary)],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary.ids,
        },
    }


def _build_unigram(vocabulary: Vocabulary) -> Mapping[str, Any]:
    """The steps of SentencePiece's normalizer, in its order."""
    file = vocabulary.file
    scores = _read_numbers(file, "scores", len(vocabulary.tokens))
    if not all(map(math.isfinite, scores)):
        raise _error(file, f"{_PREFIX}scores has a score that is not a finite number")
    normalizers: list[Component] = []
    if charsmap := _read_charsmap(file):
        encoded = base64.b64encode(charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if file.metadata.get(_PREFIX + "remove_extra_whitespaces") is True:
        normalizers += [_replace(r"\A +| +\z", ""), _replace(" {2,}", " ")]
    adds_space = file.metadata.get(_PREFIX + "add_space_prefix", True) is not False
    metaspace: Component = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if adds_space else "never",
        # words can be tokenized on their own if no token has a space in the middle
        "split": not any(
            _SPACE in token[1:]
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind == _NORMAL
        ),
    }
    return {
        "normalizer": join_components("normalizers", normalizers) if normalizers else None,
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": _require_unknown(vocabulary),
            "vocab": list(zip(vocabulary.tokens, scores, strict=True)),
            "byte_fallback": _BYTE in vocabulary.types,
        },
    }


def _replace(pattern: str, content: str) -> Component:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _read_charsmap(file: GGUFFile) -> bytes:
    """Returns SentencePiece's table of normalized characters, or nothing. Its layout is [size of
    the trie: 4 bytes, trie, null-terminated texts]."""
    key = _PREFIX + "precompiled_charsmap"
    value = file.metadata.get(key)
    if value is None:
        return b""
    table = b""
    if isinstance(value, Array) and value.kind in ("u8", "i8"):
        table = bytes(value.data)
    elif isinstance(value, Array) and value.kind == "string":  # Ollama's: characters of base64
        with contextlib.suppress(ValueError):
            table = base64.b64decode(b"".join(value.strings()), validate=True)
    size = int.from_bytes(table[:4], "little")
    if not 0 < size < len(table) - 4 or size % 4 or table[-1]:
        raise _error(file, f"{key} is not a table of SentencePiece")
    return table


def _require_unknown(vocabulary: Vocabulary) -> int:
    if vocabulary.unknown is None:
        raise _error(vocabulary.file, f"it has no {_PREFIX}unknown_token_id")
    return vocabulary.unknown


_BUILDERS = {
    "gpt2": _build_byte_level,
    "llama": _build_sentencepiece,
    "gemma4": _build_gemma4,
    "bert": _build_word_piece,
    "t5": _build_unigram,
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
    unknown = vocabulary.unknown
    return {
        "normalizer": join_components("normalizers", [prepend, replace]) if adds_space else replace,
        "pre_tokenizer": None,
        "decoder": join_components("decoders", decoders),
        "model": make_bpe(
            vocabulary.ids,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
        ),
    }


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
    return array.numbers(count)


def _error(file: GGUFFile, why: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, f"{file.path} is not a usable GGUF file: {why}")
