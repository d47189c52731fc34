"""Small and real tokenizers of every kind, and the files of a model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from app.core.model_files import ModelFiles
from app.text.prompt import PromptBuilder
from app.text.tokenizer import Tokenizer
from tests.text.families.rows import templates
from tests.text.templates import MADE_FOR_OTHER_CONVERSATIONS, make_prompt_builder

# Half of "é", all of "é", the first half of most emoji, and two words with their space.
_BYTE_MERGES = [("Ã", "©"), ("ð", "Ł"), ("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("Ġ", "Ã")]
_PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!é", "▁t", "he", "▁the", "▁▁"]
_PIECE_MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
_WORDS = ["the", "a", "cat", "sat", "##s", "##ing", ".", ",", "'", "do", "not", "éa", "##"]


def byte_level() -> tokenizers.Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in _BYTE_MERGES)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=_BYTE_MERGES)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens(["日本", "  "])  # not in the byte alphabet, so they are literal
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: id for id, token in enumerate(tokens)},
            merges=_PIECE_MERGES,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def spaces_kept() -> tokenizers.Tokenizer:
    """Like Gemma's: no dummy prefix, so none is stripped."""
    tokenizer = sentence_piece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in _PIECES)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def metaspace_bytes() -> tokenizers.Tokenizer:
    """Byte tokens with a decoder that joins words: bytes are held back for at most four tokens."""
    tokenizer = sentence_piece()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    tokens = ["[UNK]", "[CLS]", "[SEP]", *_WORDS]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({token: id for id, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def word_suffix() -> tokenizers.Tokenizer:
    tokens = [*"abcdefgh", *(f"{letter}</w>" for letter in "abcdefgh"), "<|end|>"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: id for id, token in enumerate(tokens)},
            merges=[],
            end_of_word_suffix="</w>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def no_decoder() -> tokenizers.Tokenizer:
    tokens = ["[UNK]", *_WORDS]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({token: id for id, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


BUILDERS = (
    byte_level,
    sentence_piece,
    spaces_kept,
    metaspace,
    metaspace_bytes,
    word_piece,
    word_suffix,
    no_decoder,
)

REAL = (
    "tokenizers/gpt2",
    "tokenizers/qwen3",
    "tokenizers/phi-3",
    "tokenizers/mistral-v3",
    "tokenizers/falcon",
    "tokenizers/gpt-neox-20b",
    "models/stories260K",
    "models/babyllama-361",
)


@pytest.fixture(scope="session")
def tokenizers_by_kind() -> dict[str, tokenizers.Tokenizer]:
    """One small tokenizer of each kind, by name."""
    return {make.__name__: make() for make in BUILDERS}


@pytest.fixture(scope="session")
def bytewise(tokenizers_by_kind) -> Tokenizer:
    return Tokenizer(tokenizers_by_kind["byte_level"])


@pytest.fixture(scope="session")
def pieces(tokenizers_by_kind) -> Tokenizer:
    return Tokenizer(tokenizers_by_kind["sentence_piece"], bos_token_id=1)


KINDS = tuple(make.__name__ for make in BUILDERS)


@pytest.fixture(scope="session", params=[*KINDS, *REAL])
def library(request) -> tokenizers.Tokenizer:
    """Each tokenizer, as an object of the library."""
    return _library(request)


@pytest.fixture(scope="session", params=[*KINDS[:3], *REAL])
def byte_spelling_library(request) -> tokenizers.Tokenizer:
    """Each tokenizer of the library with tokens for bytes."""
    return _library(request)


def _library(request) -> tokenizers.Tokenizer:
    if "/" not in request.param:
        return request.getfixturevalue("tokenizers_by_kind")[request.param]
    shared: Path = request.getfixturevalue("shared")
    return tokenizers.Tokenizer.from_file(str(shared / request.param / "tokenizer.json"))


@pytest.fixture
def files(tmp_path) -> Callable[..., ModelFiles]:
    """files(tokenizer=…, config=…, …): the files of a model; a tokenizer is written to disk."""
    base = ModelFiles(
        name="test-model",
        path=tmp_path,
        config={},
        shards=(),
        tokenizer_path=tmp_path / "tokenizer.json",
        tokenizer_config={},
        generation_config={},
        chat_template=None,
        created=0,
    )

    def build(tokenizer: tokenizers.Tokenizer | str | None = None, **fields) -> ModelFiles:
        if tokenizer is not None:
            text = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
            base.tokenizer_path.write_text(text)
        return replace(base, **fields)

    return build


@pytest.fixture
def real_files(shared) -> Callable[[str], ModelFiles]:
    """The files of a real tokenizer, by folder."""

    def build(folder: str) -> ModelFiles:
        def read(name: str):
            path = shared / folder / name
            return json.loads(path.read_text()) if path.is_file() else {}

        return ModelFiles(
            name=folder,
            path=shared / folder,
            config=read("config.json"),
            shards=(),
            tokenizer_path=shared / folder / "tokenizer.json",
            tokenizer_config=read("tokenizer_config.json"),
            generation_config=read("generation_config.json"),
            chat_template=None,
            created=0,
        )

    return build


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(3, id="third"),
        pytest.param(1, id="all", marks=pytest.mark.exhaustive),
    ],
)
def builders(request: pytest.FixtureRequest, shared: Path) -> dict[str, PromptBuilder]:
    """The prompt builders of every third or every real template, by file name."""
    sources = list(templates(shared).items())[:: request.param]
    return {
        name: make_prompt_builder(source)
        for name, source in sources
        if name not in MADE_FOR_OTHER_CONVERSATIONS
    }
