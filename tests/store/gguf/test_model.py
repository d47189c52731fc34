"""GGUF files as models: their names, the files of a model folder in them, and errors."""

import errno
import os
import shutil
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.engine.parameter_count import count_parameters
from app.engine.weights import list_parameters, open_model, read_weights
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer, find_model_stop_conditions
from models import kernels
from models.cpu_layout import is_batch_invariant
from models.gguf import reader
from tests import tiny
from tests.models.test_llama import logits
from tests.store.gguf.files import write_tiny
from tests.store.test_ollama import complete_config

IDS = [1, 5, 9, 33]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def complaint(name: str | Path) -> str:
    with pytest.raises(AppError) as caught:
        store.resolve(str(name))
    assert caught.value.kind in (ErrorKind.MODEL_FILES, ErrorKind.MODEL_NOT_FOUND)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_file_is_a_model_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path / "Tiny-Q8_0.gguf")
    files = store.resolve(str(path))
    assert (files.name, files.path, files.shards) == ("Tiny-Q8_0", path, (path,))
    assert (files.context_length, files.vocab_size) == (4096, tiny.VOCAB + 1)
    assert files.tokenizer_vocab_size == tiny.VOCAB + 1
    monkeypatch.chdir(tmp_path)
    assert store.resolve("Tiny-Q8_0.gguf").path == path


def test_a_file_without_the_suffix_is_recognized_by_its_content(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "sha256-1234")
    assert store.resolve(str(path)).name == "sha256-1234"


def test_a_folder_with_one_model_has_the_name_of_the_folder(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny" / "model.gguf")
    (tmp_path / "tiny" / "mmproj-model.gguf").write_bytes(b"GGUF")
    files = store.resolve(str(tmp_path / "tiny"))
    assert (files.name, files.path) == ("tiny", path)


def test_the_weights_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = store.resolve(str(tiny.write(tmp_path / "folder", vocab_size=tiny.VOCAB + 1)))
    file = store.resolve(str(write_tiny(tmp_path / "m.gguf")))
    found = []
    for files in (folder, file):
        model = open_model(complete_config(files), None)
        read_weights(model, files.path, lambda percent, memory: None)
        found.append(logits(model, IDS))
    assert np.abs(found[0] - found[1]).max() <= 1e-5


def test_nothing_is_in_memory_before_the_weights_are_read(tmp_path: Path) -> None:
    files = store.resolve(str(write_tiny(tmp_path / "m.gguf", hidden_size=512)))
    before = mx.get_active_memory()
    model = open_model(complete_config(files), None)
    expected = sum(array.nbytes for array in list_parameters(model))
    assert mx.get_active_memory() - before < expected / 10
    read_weights(model, files.path, lambda percent, memory: None)
    assert mx.get_active_memory() - before >= expected


@pytest.mark.skipif(kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}")
def test_quantized_weights_take_the_memory_of_the_file(tmp_path: Path) -> None:
    def choose_type(name: str) -> gguf.GGMLQuantizationType | None:
        return None if "norm" in name else gguf.GGMLQuantizationType.Q4_0

    path = write_tiny(tmp_path / "m.gguf", hidden_size=512, quantize=choose_type)
    model = open_model(complete_config(store.resolve(str(path))), None)
    assert sum(array.nbytes for array in list_parameters(model)) <= 1.05 * path.stat().st_size
    assert is_batch_invariant(model)


@pytest.mark.skipif(kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}")
def test_parameters_are_counted_by_the_types_of_the_file(tmp_path: Path) -> None:
    types = gguf.GGMLQuantizationType

    def choose_type(name: str) -> gguf.GGMLQuantizationType | None:
        return types.Q8_0 if "token_embd" in name else types.Q4_0

    path = write_tiny(tmp_path / "m.gguf", hidden_size=64, intermediate_size=128)
    blocks = write_tiny(
        tmp_path / "b.gguf", hidden_size=64, intermediate_size=128, quantize=choose_type
    )
    plain, packed = (
        count_parameters(complete_config(store.resolve(str(one)))) for one in (path, blocks)
    )
    assert packed.parameters == plain.parameters
    assert set(packed.by_format) == {"Q4_0", "Q8_0", "float32"}
    assert packed.bits_per_parameter < 10


def test_a_split_model_is_named_by_any_of_its_files(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole.gguf")
    parts = split_file(whole, tmp_path / "Tiny")
    expected = store.resolve(str(whole))
    for part in parts:
        files = store.resolve(str(part))
        assert (files.name, files.shards) == ("Tiny", tuple(parts))
        assert files.config == expected.config
    assert store.resolve(str(tmp_path / "Tiny")).shards == tuple(parts)
    models = [open_model(complete_config(files), None) for files in (expected, files)]
    for model in models:
        read_weights(model, files.path, lambda percent, memory: None)
    assert (logits(models[0], IDS) == logits(models[1], IDS)).all()


def split_file(whole: Path, folder: Path) -> list[Path]:
    """Writes the tensors alternately into two files, as llama-gguf-split does."""
    reader = gguf.GGUFReader(whole)
    folder.mkdir()
    paths = [folder / f"Tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    for index, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for field in reader.fields.values() if index == 0 else ():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            kind = field.types[0]
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[index::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_license_of_megabytes_is_left_out(tmp_path: Path) -> None:
    """The server would send it to each client that asks for the details of the model."""

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_string("general.license", "x" * (1 << 20) + "x")

    assert store.resolve(str(write_tiny(tmp_path / "m.gguf", extra=extra))).license == ""


def test_special_tokens_templates_and_sampling_are_read(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")
        writer.add_string("general.license", "apache-2.0")
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_add_bos_token(True)

    files = store.resolve(str(write_tiny(tmp_path / "m.gguf", extra=extra)))
    assert files.license == "apache-2.0"
    assert files.generation_config == {"eos_token_id": [tiny.END], "temperature": 0.6, "top_k": 20}
    templates = files.tokenizer_config["chat_template"]
    assert [entry["name"] for entry in templates] == ["default", "tool_use"]
    tokenizer = Tokenizer.load(files)
    assert tokenizer.bos_token_id == tiny.BOS
    assert tokenizer.encode("ab", add_special_tokens=True) == [tiny.BOS, tiny.VOCAB]
    # text that begins with BOS, such as a rendered template, gets no second one
    assert tokenizer.encode("<s>ab", add_special_tokens=True) == [tiny.BOS, tiny.VOCAB]
    assert find_model_stop_conditions(files, tokenizer).ids == {tiny.END}
    assert ChatTemplate(files).render([]) == "assistant: "


def test_the_tokenizer_is_written_once(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    first = store.resolve(str(path)).tokenizer_path
    written = first.stat().st_mtime_ns
    shutil.copy(path, tmp_path / "other.gguf")
    assert store.resolve(str(tmp_path / "other.gguf")).tokenizer_path == first
    assert first.stat().st_mtime_ns == written
    other = write_tiny(tmp_path / "third.gguf", template=None)
    assert store.resolve(str(other)).tokenizer_path != first


def test_a_file_is_parsed_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Path] = []

    def parse(path: Path) -> reader.GGUFFile:
        parsed.append(path)
        return read(path)

    read = reader.read
    monkeypatch.setattr(reader, "read", parse)
    path = write_tiny(tmp_path / "m.gguf")
    first = store.find(str(path))
    assert store.find(str(path)) == first
    assert parsed == [path]
    first.tokenizer_path.unlink()
    assert store.find(str(path)).tokenizer_path.is_file()
    assert parsed == [path] * 2
    write_tiny(path, hidden_size=32)
    assert store.find(str(path)) != first
    assert parsed == [path] * 3


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file")
    message = complaint(write_tiny(tmp_path / "m.gguf"))
    assert "set XDG_CACHE_HOME to a writable folder" in message


def test_a_full_disk_leaves_no_file_in_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server tries again with each list of its models."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert "No space left on device" in complaint(write_tiny(tmp_path / "m.gguf"))
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_invalid_files_are_errors_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"no model")
    assert "does not begin with b'GGUF'" in complaint(path)
    whole = write_tiny(tmp_path / "whole.gguf").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "truncated" in complaint(path)
    assert "neither a folder nor a GGUF file" in complaint(tmp_path / "missing.gguf")


def test_a_file_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    content = path.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.mxxxx")
    path.write_bytes(content)
    assert "it has no tokenizer.ggml.model" in complaint(path)


def test_a_changed_file_has_another_digest(tmp_path: Path) -> None:
    one = store.resolve(str(write_tiny(tmp_path / "m.gguf")))
    other = store.resolve(str(write_tiny(tmp_path / "m.gguf", hidden_size=32)))
    assert one.weights_digest != other.weights_digest
    assert one.weight_bytes != other.weight_bytes
