"""Tokenizers from the metadata of GGUF files."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from app.core.errors import AppError
from app.store.gguf.pre_tokenizers import PRE_TOKENIZERS
from app.store.gguf.tokenizer import build_tokenizer, read_vocabulary
from models.gguf import reader
from tests.models.gguf.raw_file import ARRAY, STRING, array, entry, string, text_entry
from tests.models.gguf.raw_file import gguf as raw_gguf
from tests.models.gguf.tokens import add_tokenizer

# folder of shared/tokenizers -> tokenizer.ggml.model, tokenizer.ggml.pre
FAMILIES = {
    "gpt2": ("gpt2", "gpt-2"),
    "qwen3": ("gpt2", "qwen2"),
    "falcon": ("gpt2", "falcon"),
    "gpt-neox-20b": ("gpt2", "olmo"),
    "phi-3": ("llama", ""),
    "mistral-v3": ("llama", ""),
}


def write_file(
    path: Path, tokenizer: Any, *, model: str, pre: str, **options: bool | int | Sequence[int]
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, tokenizer, model=model, pre=pre)
    for name, value in options.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def build(path: Path) -> tokenizers.Tokenizer:
    built = build_tokenizer(read_vocabulary(reader.read(path)))
    return tokenizers.Tokenizer.from_str(json.dumps(built))


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_are_those_of_the_original_tokenizer(tmp_path, shared, family: str):
    source = shared / "tokenizers" / family / "tokenizer.json"
    model, pre = FAMILIES[family]
    original = tokenizers.Tokenizer.from_file(str(source))
    parsed = json.loads(source.read_text())
    ours = build(write_file(tmp_path / "t.gguf", parsed, model=model, pre=pre))
    fixtures = (shared / "tokenizers/fixtures_upstream.jsonl").read_text().splitlines()
    texts = [row["text"] for row in map(json.loads, fixtures)]
    texts += [token["content"] + " a  b" for token in parsed["added_tokens"][:40]]
    for corpus in ("alice_in_wonderland.txt", "tinyshakespeare.txt"):
        text = (shared / "corpora" / corpus).read_text()[:150_000]
        texts += [text[start : start + 5_000] for start in range(0, len(text), 5_000)]
    different = [text for text in texts if encode(ours, text) != encode(original, text)]
    assert len(texts) > 400
    assert different == []
    # visible and hidden tokens of the vocabulary
    assert ours.get_vocab_size() == original.get_vocab_size()
    ids = list(range(0, original.get_vocab_size(), 97))
    assert ours.decode(ids) == original.decode(ids)


BYTES = {
    "added_tokens": [
        {"id": 3, "content": "<s>", "special": True},
        {"id": 4, "content": "</s>", "special": True},
        {"id": 5, "content": "<think>", "special": False},
    ],
    "model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def write_bytes_file(tmp_path: Path, **options: Any) -> Path:
    keys = {"pre": "llama-bpe", "model": "gpt2", **options}
    return write_file(tmp_path / "t.gguf", BYTES, **keys)


def test_control_tokens_are_hidden_and_others_are_text(tmp_path):
    tokenizer = build(write_bytes_file(tmp_path))
    assert encode(tokenizer, "<s>ab<think></s>") == [3, 2, 5, 4]
    assert tokenizer.decode([3, 2, 5, 4], skip_special_tokens=True) == "ab<think>"


def test_unknown_rules_are_rejected_by_name(tmp_path):
    with pytest.raises(AppError, match=r"rules 'klingon' \(tokenizer\.ggml\.pre\), which are unkn"):
        build(write_bytes_file(tmp_path, pre="klingon"))
    with pytest.raises(AppError, match="rules 'default'"):
        build(write_bytes_file(tmp_path, pre=""))


def test_an_unknown_algorithm_is_rejected_by_name(tmp_path):
    with pytest.raises(AppError, match="is 'rwkv', which is not supported; supported tokenizers"):
        build(write_bytes_file(tmp_path, model="rwkv"))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_all_rules_are_valid(tmp_path, pre: str):
    tokenizer = build(write_bytes_file(tmp_path, pre=pre))
    assert encode(tokenizer, "ab") == [2]


def test_bos_and_eos_are_added_as_the_metadata_says(tmp_path):
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, BYTES, pre="qwen2")
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert build(path).encode("ab").ids == [3, 2, 4]
    assert read_vocabulary(reader.read(path)).adds_bos


@pytest.mark.parametrize(
    ("model", "pre", "options", "adds_bos"),
    [
        ("gpt2", "qwen2", {}, False),
        ("gpt2", "llama-bpe", {}, True),
        ("gpt2", "llama-bpe", {"add_bos_token": False}, False),
        ("llama", "", {}, True),
        ("llama", "", {"add_bos_token": False}, False),
    ],
)
def test_the_default_of_bos_depends_on_the_tokenizer(
    tmp_path, model: str, pre: str, options: dict[str, bool], adds_bos: bool
):
    path = write_file(tmp_path / "t.gguf", BYTES, model=model, pre=pre, **options)
    assert read_vocabulary(reader.read(path)).adds_bos is adds_bos


def test_all_end_marks_are_found(tmp_path):
    tokens = {**BYTES, "added_tokens": [*BYTES["added_tokens"]]}
    tokens["added_tokens"] += [
        {"id": 6, "content": "<|im_end|>", "special": True},
        {"id": 7, "content": "<|eot_id|>", "special": True},
        {"id": 8, "content": "<|python_tag|>", "special": True},
    ]
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, tokens, pre="qwen2")
    writer.add_eos_token_id(4)
    writer.add_eot_token_id(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_vocabulary(reader.read(path)).list_end_tokens() == [4, 8, 6, 7]


def test_empty_and_equal_tokens_get_names(tmp_path):
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([b"a", b"", b"\xff", b"\xfe"])
    writer.add_token_merges(["a a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert len(set(read_vocabulary(reader.read(path)).tokens)) == 4


def test_a_vocabulary_that_would_take_minutes_is_rejected(tmp_path):
    words = [f"{number:06}" + "x" * 250 for number in range(33_000)]
    entries = [
        text_entry("tokenizer.ggml.model", "llama"),
        entry("tokenizer.ggml.tokens", ARRAY, array(STRING, [string(word) for word in words])),
        entry("tokenizer.ggml.scores", ARRAY, array(6, [bytes(4)] * len(words))),
    ]
    (tmp_path / "t.gguf").write_bytes(raw_gguf(entries))
    with pytest.raises(AppError, match=r"texts in tokenizer\.ggml\.tokens are too long"):
        build(tmp_path / "t.gguf")


def test_a_list_of_end_tokens_is_read(tmp_path):
    path = write_bytes_file(tmp_path, eos_token_id=4, eos_token_ids=[4, 3, 99])
    assert read_vocabulary(reader.read(path)).list_end_tokens() == [4, 3]


def test_the_end_of_a_harmony_message_is_not_that_of_the_turn(tmp_path):
    marks = ["<|end|>", "<|call|>", "<|return|>"]
    tokens = {
        **BYTES,
        "added_tokens": [
            {"id": 3 + number, "content": mark, "special": True}
            for number, mark in enumerate(marks)
        ],
    }
    path = write_file(tmp_path / "t.gguf", tokens, model="gpt2", pre="gpt-4o")
    assert read_vocabulary(reader.read(path)).list_end_tokens() == [4, 5]
    del tokens["added_tokens"][1:]  # those of a Phi
    path = write_file(tmp_path / "t.gguf", tokens, model="gpt2", pre="gpt-4o")
    assert read_vocabulary(reader.read(path)).list_end_tokens() == [3]


TEXTS = (
    *("", " ", "a", "Alice", "  Alice  was\tbeginning \n\n to get", "don't", "x" * 120, "Ünïcödé"),
    *(
        "I\u0307STANBUL",
        "\u00e9 e\u0301",
        "中文字符 and 汉字",
        "日本語テキスト",
        "한국어",
        "naïve café",
        "½ ﬁ ①",
    ),
    *(
        "😀👍🏽",
        "a\u200bb\u0000c\ufffd",
        "[MASK] [CLS]",
        "[unused1] [x]",
        "a[b]c##d ▁e",
        "1,234.5 $9 ~^`|",
    ),
    *("</s> <s> a <mask>  b", "\u3000全角\u00a0space", "e.g. U.S.A. — “quoted”", "𝐀𝒷", "\r\n\r\na"),
)


def train(shared: Path, tokenizer: tokenizers.Tokenizer, trainer: Any) -> None:
    text = (shared / "corpora/alice_in_wonderland.txt").read_text()[:60_000]
    tokenizer.train_from_iterator([*text.splitlines(), *TEXTS], trainer)


def read_texts(shared: Path) -> list[str]:
    fixtures = (shared / "tokenizers/fixtures_upstream.jsonl").read_text().splitlines()
    alice = (shared / "corpora/alice_in_wonderland.txt").read_text()[60_000:120_000]
    pieces = [alice[start : start + 2_000] for start in range(0, len(alice), 2_000)]
    return [*TEXTS, *pieces, *(row["text"] for row in map(json.loads, fixtures))]


def train_word_piece(shared: Path, *, lowercase: bool) -> tokenizers.Tokenizer:
    """Trains a tokenizer as that of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.decoder = decoders.WordPiece()
    train(
        shared,
        trained,
        trainers.WordPieceTrainer(vocab_size=1500, special_tokens=special, show_progress=False),
    )
    trained.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return trained


@pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])
def test_word_pieces_are_those_of_the_original_tokenizer(tmp_path, shared, lowercase: bool):
    original = train_word_piece(shared, lowercase=lowercase)
    path = write_file(
        tmp_path / "t.gguf",
        json.loads(original.to_str()),
        model="bert",
        pre="jina-v2-en",
        cls_token_id=2,
        seperator_token_id=3,
        unknown_token_id=1,
    )
    ours = build(path)
    assert read_vocabulary(reader.read(path)).lowercases is lowercase
    for text in read_texts(shared):
        assert ours.encode(text).ids == original.encode(text).ids, text
        assert encode(ours, text) == encode(original, text), text
    pair, expected = (one.encode("Alice was", "tired?") for one in (ours, original))
    assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)
    assert ours.get_vocab() == original.get_vocab()
    ids = list(range(original.get_vocab_size()))
    assert ours.decode(ids) == original.decode(ids)


def test_the_case_of_word_pieces_can_be_declared(tmp_path, shared):
    tokenizer = json.loads(train_word_piece(shared, lowercase=True).to_str())
    path = tmp_path / "t.gguf"
    for value in (True, False):
        options = {"normalizer.lowercase": value, "normalizer.strip_accents": not value}
        write_file(path, tokenizer, model="bert", pre="", **options)
        normalizer = json.loads(build(path).to_str())["normalizer"]
        assert (normalizer["lowercase"], normalizer["strip_accents"]) == (value, not value)


def test_word_pieces_of_ollamas_converter_are_read(tmp_path):
    """Its special tokens are recognized by their brackets, and have no type."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[unused0]", "\u2581al", "ice", "\u2581\u2581"]
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_bool("tokenizer.ggml.strip_accents", False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = build(path)
    assert tokenizer.encode("Alice \u2581 x").ids == [2, 5, 6, 7, 1, 3]
    assert tokenizer.id_to_token(6) == "##ice"
    assert json.loads(tokenizer.to_str())["normalizer"]["strip_accents"] is False


def train_unigram(shared: Path) -> tokenizers.Tokenizer:
    """Trains a tokenizer as that of XLM-RoBERTa, without its table of characters."""
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Sequence([normalizers.Replace("\t", " ")])
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trained.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    train(
        shared,
        trained,
        trainers.UnigramTrainer(
            vocab_size=800, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return trained


def test_unigrams_are_those_of_the_original_tokenizer(tmp_path, shared):
    original = train_unigram(shared)
    parsed = json.loads(original.to_str())
    path = write_file(
        tmp_path / "t.gguf",
        parsed,
        model="t5",
        pre="",
        bos_token_id=0,
        eos_token_id=2,
        unknown_token_id=3,
        add_bos_token=True,
    )
    ours = build(path)
    # The table of characters, which is not in this file, changes all spaces to " ". Text with
    # SentencePiece's own character for a space has different tokens in some conversions.
    texts = [" ".join(text.replace("\u2581", "").split()) for text in read_texts(shared)]
    texts += ["  Alice  was   tired ", "   "]
    for text in texts:
        assert ours.encode(text).ids == original.encode(text).ids, text
    assert ours.encode("a", "b").ids == original.encode("a", "b").ids
    assert ours.get_vocab() == original.get_vocab()


SENTENCEPIECE = Path(__file__).with_name("unigram_reference.json")


@pytest.mark.parametrize("form", ["bytes", "base64"])
def test_unigrams_are_those_of_sentencepiece(tmp_path, form: str):
    """The file holds a model that SentencePiece trained with its table nmt_nfkc reduced to some
    characters, and its tokens for texts. base64: the form of Ollama's converter."""
    reference = json.loads(SENTENCEPIECE.read_text())
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([token for token, _, _ in reference["tokens"]])
    writer.add_token_scores([score for _, score, _ in reference["tokens"]])
    writer.add_token_types([kind for _, _, kind in reference["tokens"]])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    table = reference["charsmap"]
    if form == "bytes":
        writer.add_precompiled_charsmap(base64.b64decode(table))
    else:
        writer.add_array("tokenizer.ggml.precompiled_charsmap", list(table))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = build(path)
    for text, ids in reference["texts"]:
        assert encode(tokenizer, text) == ids, text


@pytest.mark.parametrize(
    ("content", "types"),
    [(b"\x08\0\0\0" + bytes(4), 0), (b"\x04\0\0\0" + bytes(4) + b"x", 0), (b"", 8)],
)
def test_an_invalid_table_of_characters_is_an_error(tmp_path, content: bytes, types: int):
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(["<unk>", "a"])
    writer.add_token_scores([0.0, -1.0])
    writer.add_token_types([2, 1])
    if types:
        writer.add_array("tokenizer.ggml.precompiled_charsmap", ["*"])
    else:
        writer.add_precompiled_charsmap(content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(AppError, match="precompiled_charsmap is not a table of SentencePiece"):
        build(path)


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("kimi-k2", "HelloWorld's 汉字abc 12345!\n/x", "Hello|World's| |汉字|abc| |123|45|!\n|/x"),
        ("gpt-4o", "HelloWorld's 汉字abc 12345!\n/x", "Hello|World's| 汉字abc| |123|45|!\n/|x"),
        ("minimax-m2", "ДокументПродажи", "Документ|Продажи"),
        ("deepseek-llm", "It's 123\n\n 汉字, ok  ", "It|'|s| |1|2|3|\n|\n| |汉字|,| ok|  "),
        ("deepseek-coder", "x = 'ab_c' + 12", "x| =| '|ab|_|c|'| + |1|2"),
        ("seed-coder", "a+b\n\n12", "a|+b|\n\n|1|2"),
        ("roberta-bpe", "It's 123  ok", "It|'s| 123| | ok"),
    ],
)
def test_texts_are_split_by_the_rules(tmp_path, pre: str, text: str, parts: str):
    built = build(write_bytes_file(tmp_path, pre=pre))
    pre_tokenizer: Any = built.pre_tokenizer
    split = [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(split) == parts
