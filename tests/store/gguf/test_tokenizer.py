"""Tokenizers from the metadata of GGUF files."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from app.core.errors import AppError
from app.store.gguf.pre_tokenizers import PRE_TOKENIZERS
from app.store.gguf.tokenizer import build_tokenizer, read_vocabulary
from models.gguf import reader
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


def write_file(path: Path, tokenizer: Any, *, model: str, pre: str, **options: bool) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, tokenizer, model=model, pre=pre)
    for name, value in options.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
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
