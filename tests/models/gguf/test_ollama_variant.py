"""Files of Ollama's converter are read as those of llama.cpp."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from app.store.gguf.tokenizer import read_vocabulary
from models import architectures
from models.gguf import reader
from models.gguf.architectures import read_config, rename_tensors
from models.gguf.ollama_variant import list_other_modules, read_model, translate
from models.gguf.reader import Array
from models.gguf.weights import open_weights
from tests.models.architectures import Case
from tests.models.gguf.raw_file import array, entry, int_entry, string, tensor, text_entry
from tests.models.gguf.raw_file import gguf as raw_gguf
from tests.models.gguf.test_architectures import CASES, build, logits, write_model

# the case -> Ollama's name of the architecture, its keys and the ends of its tensors, where they
# differ from llama.cpp's: (llama.cpp's, Ollama's), or None for a key that is missing
VARIANTS: Mapping[str, tuple[str, Mapping[str, str | None], Mapping[str, str]]] = {
    "gpt_oss-plain": (
        "gptoss",
        {"expert_feed_forward_length": None, "rope.scaling.type": None},
        {
            ".attn_output.weight": ".attn_out.weight",
            ".attn_output.bias": ".attn_out.bias",
            ".attn_sinks.weight": ".attn_sinks",
            ".post_attention_norm.weight": ".ffn_norm.weight",
        },
    ),
    "glm4_moe_lite-plain": (
        "glm4moelite",
        {
            "attention.key_length": None,
            "attention.value_length": None,
            "attention.key_length_mla": "attention.key_length",
            "attention.value_length_mla": "attention.value_length",
        },
        {},
    ),
    "olmo3-windowed": ("olmo3", {}, {}),
    "qwen3_next-mixed": ("qwen3next", {}, {".ssm_dt.bias": ".ssm_dt"}),
    "qwen3_5-tied": ("qwen35", {}, {".ssm_dt.bias": ".ssm_dt"}),
    "gemma4_text-26b-a4b": (
        "gemma4",
        {},
        {".ffn_down_exps.scale": ".ffn_gate_inp.per_expert_scale"},
    ),
    "nemotron_h-latent": (
        "nemotron_h_moe",
        {"moe_latent_size": None},
        {
            ".ffn_latent_down.weight": ".ffn_latent_in.weight",
            ".ffn_latent_up.weight": ".ffn_latent_out.weight",
        },
    ),
    "gemma3_text-plain": (
        "gemma3",
        {"rope.freq_base": "rope.global.freq_base", "rope.freq_base_swa": "rope.local.freq_base"},
        {},
    ),
    "ministral3-plain": (
        "mistral3",
        {
            "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
            "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
            "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
            "attention.temperature_scale": "rope.scaling_beta",
        },
        {},
    ),
}


def rewrite(path: Path, target: Path, case: str) -> Path:
    """Writes a file of llama.cpp's converter as Ollama's, with a vision tower."""
    name, keys, ends = VARIANTS[case]
    source = gguf.GGUFReader(path)
    original = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, name)
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        own = field.name.removeprefix(f"{original}.")
        if keys.get(own, own) is None:
            continue
        key = field.name if own == field.name else f"{name}.{keys.get(own, own)}"
        kind = field.types[0]
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub_type)
    for stored in source.tensors:
        end = next((end for end in ends if stored.name.endswith(end)), "")
        renamed = stored.name.removesuffix(end) + ends.get(end, "")
        writer.add_tensor(renamed, stored.data, raw_dtype=stored.tensor_type)
    for extra in ("v.patch_embd.weight", "mm.input_projection.weight", "mtp.fc.weight"):
        writer.add_tensor(extra, np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.id in VARIANTS], ids=lambda c: c.id
)
def test_the_model_is_the_same(tmp_path: Path, case: Case):
    path, _ = write_model(case, tmp_path)
    other = rewrite(path, tmp_path / "ollama.gguf", case.id)
    file = read_model(other)
    expected = read_config(reader.read(path))
    assert read_config(file) == expected
    weights, unread = open_weights(file)
    model = architectures.build(read_config(file), weights)
    unread.read()
    assert np.array_equal(logits(model, case), logits(build(path), case))


def test_every_variant_has_a_case():
    assert {case.id for case in CASES} >= set(VARIANTS)


def test_other_modules_are_named_and_have_no_parameters(tmp_path: Path):
    case = next(case for case in CASES if case.id == "gemma3_text-plain")
    path, _ = write_model(case, tmp_path)
    assert list_other_modules(reader.read(path)) == []
    file = reader.read(rewrite(path, tmp_path / "ollama.gguf", case.id))
    assert list_other_modules(file) == [
        "layers for multi-token prediction",
        "projector",
        "vision tower",
    ]
    assert rename_tensors(translate(file)) == rename_tensors(reader.read(path))


def write(path: Path, architecture: str, *entries: bytes, tensors: Any = ()) -> reader.GGUFFile:
    named = text_entry("general.architecture", architecture)
    parts = [tensor(name, (32, 2), 0, 256 * i) for i, name in enumerate(tensors)]
    path.write_bytes(raw_gguf([named, *entries], parts, bytes(256 * len(parts))))
    return read_model(path)


def test_the_keys_of_a_qwen25vl_are_those_of_a_qwen2vl(tmp_path: Path):
    sections = entry("qwen25vl.rope.mrope_section", 9, array(5, [bytes([4, 0, 0, 0])] * 3))
    blocks = int_entry("qwen25vl.block_count", 2)
    file = write(tmp_path / "m.gguf", "qwen25vl", sections, blocks)
    assert file.metadata["general.architecture"] == "qwen2vl"
    assert file.metadata["qwen2vl.block_count"] == 2
    found = file.metadata["qwen2vl.rope.dimension_sections"]
    assert isinstance(found, Array)
    assert found.numbers(9) == [4, 4, 4]
    assert not any(key.startswith("qwen25vl.") for key in file.metadata)


@pytest.mark.parametrize(
    ("context", "tensors", "factor"),
    [
        (131_072, ["blk.0.x", "v.x"], 8.0),
        (131_072, ["blk.0.x"], None),
        (32_768, ["blk.0.x", "v.x"], None),
    ],
)
def test_a_gemma3_with_a_vision_tower_has_scaled_frequencies(
    tmp_path: Path, context: int, tensors: list[str], factor: float | None
):
    entries = int_entry("gemma3.context_length", context)
    file = write(tmp_path / "m.gguf", "gemma3", entries, tensors=tensors)
    assert file.metadata.get("gemma3.rope.scaling.factor") == factor
    given = text_entry("gemma3.rope.scaling.type", "none")
    file = write(tmp_path / "m.gguf", "gemma3", entries, given, tensors=tensors)
    assert file.metadata["gemma3.rope.scaling.type"] == "none"


def tokens(count: int, named: Mapping[int, str]) -> bytes:
    texts = [string(named.get(id, f"t{id}")) for id in range(count)]
    return entry("tokenizer.ggml.tokens", 9, array(8, texts))


@pytest.mark.parametrize(
    ("architecture", "pre", "expected"),
    [
        ("gptoss", "default", "gpt-4o"),
        ("glm4moelite", "llama-bpe", "glm4"),
        ("mistral3", "default", "tekken"),
        ("mistral3", "llama-bpe", "llama-bpe"),
        ("qwen2", "default", "default"),
    ],
)
def test_the_rules_for_splitting_are_those_of_the_model(
    tmp_path: Path, architecture: str, pre: str, expected: str
):
    entries = text_entry("tokenizer.ggml.model", "gpt2"), text_entry("tokenizer.ggml.pre", pre)
    file = write(tmp_path / "m.gguf", architecture, *entries)
    assert file.metadata["tokenizer.ggml.pre"] == expected


def test_the_vocabulary_of_llama3_is_recognized(tmp_path: Path):
    named = {128006: "<|start_header_id|>", 128009: "<|eot_id|>"}
    model = text_entry("tokenizer.ggml.model", "gpt2")
    file = write(tmp_path / "m.gguf", "llama", model, tokens(128_010, named))
    assert file.metadata["tokenizer.ggml.pre"] == "llama-bpe"
    file = write(tmp_path / "m.gguf", "llama", model, tokens(128_010, {128009: "<|eot_id|>"}))
    assert "tokenizer.ggml.pre" not in file.metadata


def test_the_tokenizer_of_a_gemma4_has_merges(tmp_path: Path):
    model = text_entry("tokenizer.ggml.model", "llama")
    merges = entry("tokenizer.ggml.merges", 9, array(8, [string("a b")]))
    file = write(tmp_path / "m.gguf", "gemma4", model, merges)
    assert file.metadata["tokenizer.ggml.model"] == "gemma4"
    file = write(tmp_path / "m.gguf", "gemma4", model)
    assert file.metadata["tokenizer.ggml.model"] == "llama"


def test_added_tokens_without_embeddings_are_not_in_the_vocabulary(tmp_path: Path):
    for kind, expected in ((4, ["t0", "t1"]), (1, ["t0", "t1", "t2"])):
        types = [struct.pack("<i", number) for number in (1, 1, kind)]
        entries = (
            text_entry("tokenizer.ggml.model", "gpt2"),
            tokens(3, {}),
            entry("tokenizer.ggml.token_type", 9, array(5, types)),
        )
        file = write(tmp_path / "m.gguf", "gemma3", *entries, tensors=["token_embd.weight"])
        assert read_vocabulary(file).tokens == expected


def test_a_file_of_llama_cpp_is_unchanged(tmp_path: Path):
    path, _ = write_model(next(case for case in CASES if case.id == "llama-plain"), tmp_path)
    file = reader.read(path)
    assert translate(file) == file
