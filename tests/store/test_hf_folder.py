"""Folders in the layout of the hub: ModelFiles, or a one-line error."""

import json
import os
import shutil
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tokenizers
from tokenizers import models

from app import store
from app.core.errors import AppError, ErrorKind
from app.store.vocabulary import read_vocabulary
from tests import tiny
from tests.store.shards import tensor_entry, write, write_tensors

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of a model folder, for a test to damage."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def complaint(folder: Path) -> str:
    with pytest.raises(AppError) as caught:
        store.resolve(str(folder))
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert "\n" not in caught.value.message
    return caught.value.message


def index(folder: Path, **places: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def shard_names(folder: Path) -> list[str]:
    return [path.name for path in store.resolve(str(folder)).shards]


def test_a_separate_template_file_is_read(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }} é", encoding="utf-8")
    assert store.resolve(str(folder)).chat_template == "{{ messages }} é"


def test_weight_bytes_and_vocabulary_size_are_counted(folder: Path) -> None:
    files = store.resolve(str(folder))
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert files.weight_bytes == sum(array.nbytes for array in weights.values())
    assert files.tokenizer_vocab_size == tiny.VOCAB


def test_replaced_weights_have_another_digest(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = store.resolve(str(folder))
    assert store.resolve(str(folder)) == before
    stat, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert store.resolve(str(folder)).weights_digest != before.weights_digest
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    mx.save_safetensors(str(path), arrays, {"another": "header"})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert store.resolve(str(folder)).weights_digest != before.weights_digest


def test_infinity_in_a_config_is_a_number(folder: Path) -> None:
    """Python's json writes Infinity, so transformers does for models with a time_step_limit."""
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, "time_step_limit": [0, inf]}))
    assert store.resolve(str(folder)).config["time_step_limit"] == [0, inf]
    (folder / "config.json").write_text('{"a": Infinity, "b": "\\ud800"}')
    assert "config.json cannot be read: " in complaint(folder)


class TestShards:
    def test_the_index_lists_the_shards(self, folder: Path) -> None:
        write_tensors(folder / "b.safetensors", "x", "z")
        write_tensors(folder / "a.safetensors", "y")
        index(folder, x="b.safetensors", y="a.safetensors", z="b.safetensors")
        assert shard_names(folder) == ["a.safetensors", "b.safetensors"]
        assert store.resolve(str(folder)).weight_bytes == 24

    def test_without_an_index_shards_are_found_by_name(self, folder: Path) -> None:
        write_tensors(folder / "adapters.safetensors", "x")
        shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
        assert shard_names(folder) == ["model.safetensors"]
        (folder / "model.safetensors").unlink()
        (folder / "adapters.safetensors").unlink()
        assert shard_names(folder) == ["consolidated.safetensors"]

    def test_a_tensor_in_two_shards_is_an_error(self, folder: Path) -> None:
        write_tensors(folder / "model-2.safetensors", "x")
        write_tensors(folder / "model-3.safetensors", "x")
        assert (
            f"tensor x is in both {folder}/model-3.safetensors and model-2.safetensors"
            in complaint(folder)
        )

    @pytest.mark.parametrize(
        "name",
        [
            "gone.safetensors",
            "model-00001-of-00002.safetensors",
            "mtp/model.safetensors",
            "../model.safetensors",
            "/model.safetensors",
            "a/../model.safetensors",
            "./model.safetensors",
            "..",
            "",
            "\0.safetensors",
            "pytorch_model.bin",
            "a" * 10_000,
        ],
    )
    def test_an_index_with_other_files_is_not_used(
        self, folder: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The files next to it are read, and no other files."""
        os.mkfifo(folder.parent / "model.safetensors")  # opening it would block forever
        index(folder, x=name)
        assert shard_names(folder) == ["model.safetensors"]
        assert f"{INDEX} does not match the files next to it and is not used" in caplog.text

    def test_an_index_with_other_tensors_is_not_used(self, folder: Path) -> None:
        index(folder, x="model.safetensors")
        assert shard_names(folder) == ["model.safetensors"]
        write_tensors(folder / "model-b.safetensors", "y")
        index(folder, y="model.safetensors")
        assert shard_names(folder) == ["model-b.safetensors", "model.safetensors"]

    @pytest.mark.parametrize("indexed", [True, False])
    def test_a_missing_shard_of_a_set_is_named(self, folder: Path, indexed: bool) -> None:
        (folder / "model.safetensors").unlink()
        names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
        write_tensors(folder / names[0], "x")
        write_tensors(folder / names[2], "z")
        if indexed:
            index(folder, x=names[0], y=names[1], z=names[2])
        assert f"has no {names[1]}{f', which {INDEX} lists' if indexed else ''}" in complaint(
            folder
        )
        (folder / names[0]).unlink()
        (folder / names[2]).unlink()
        assert f"has no {names[0] if indexed else '.safetensors file'}" in complaint(folder)

    @pytest.mark.parametrize(
        "text",
        ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"x": 3}}', "[", "[]"],
    )
    def test_a_broken_index_is_named(self, folder: Path, text: str) -> None:
        (folder / INDEX).write_text(text)
        assert INDEX in complaint(folder)

    def test_a_broken_shard_is_named(self, folder: Path) -> None:
        write(folder / "model-2.safetensors", {"x": tensor_entry("F32", [-1], 0, 4)}, 4)
        assert "model-2.safetensors is not a valid safetensors file" in complaint(folder)


class TestOtherFormats:
    @pytest.mark.parametrize(
        "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model-1.bin"]
    )
    def test_pickles_are_not_opened(self, folder: Path, name: str) -> None:
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / name)  # opening it would block forever
        assert "a pickle file, which is never opened because it can run code: use" in complaint(
            folder
        )

    def test_a_folder_with_several_gguf_files_is_ambiguous(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for kind in ("Q4_K_M", "Q8_0"):
            (folder / f"model.{kind}.gguf").write_bytes(b"GGUF")
        assert "only a GGUF file: name the file itself, or remove config.json" in complaint(folder)
        (folder / "config.json").unlink()
        message = complaint(folder)
        assert "contains 2 GGUF files: name one of them, such as" in message
        assert message.endswith("model.Q4_K_M.gguf")

    def test_other_formats_are_ignored_beside_safetensors(self, folder: Path) -> None:
        (folder / "model.gguf").write_bytes(b"GGUF")
        os.mkfifo(folder / "pytorch_model.bin")
        assert shard_names(folder) == ["model.safetensors"]


JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json")


class TestDocuments:
    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("config.json", None, "has no config.json: it is not a model folder"),
            (
                "tokenizer.json",
                None,
                "has no tokenizer.json: use a copy of the model that has this",
            ),
            ("model.safetensors", None, "has no .safetensors file"),
            ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
            *((file, b"{", f"{file} cannot be read") for file in JSON_FILES),
            *((file, b'{"a": "\xff"}', f"{file} cannot be read") for file in JSON_FILES),
            *((file, b'{"a": NaN}', f"{file} cannot be read") for file in JSON_FILES),
            *((file, b'{"a":' * 5000, f"{file} cannot be read") for file in JSON_FILES),
            *((file, b"[]", f"{file} is not a JSON object") for file in JSON_FILES),
            *((file, b"3", f"{file} is not a JSON object") for file in JSON_FILES),
        ],
    )
    def test_a_missing_or_invalid_file_is_named(
        self, folder: Path, file: str, content: bytes | None, message: str
    ) -> None:
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(content)
        assert message in complaint(folder)

    @pytest.mark.parametrize("file", ["config.json", "chat_template.jinja", INDEX])
    def test_an_oversized_file_is_not_read(self, folder: Path, file: str) -> None:
        with (folder / file).open("wb") as sparse:
            sparse.truncate(10 << 30)
        assert f"{file} cannot be read: it is larger than" in complaint(folder)

    @pytest.mark.parametrize("file", [*JSON_FILES, "chat_template.jinja", INDEX])
    def test_a_pipe_or_a_folder_is_named_and_not_read(self, folder: Path, file: str) -> None:
        path = folder / file
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        assert f"{file} cannot be read: it is not a regular file" in complaint(folder)
        path.unlink()
        path.mkdir()
        assert f"{file} cannot be read: it is not a regular file" in complaint(folder)

    def test_code_of_the_model_is_logged_and_not_run(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        config = {**tiny.CONFIG, "auto_map": {"AutoModel": "modeling.Mine"}}
        (folder / "config.json").write_text(json.dumps(config))
        store.resolve(str(folder))
        assert "model: the model's own code (auto_map) is not run" in caplog.text


class TestLinks:
    def test_links_of_the_hub_cache_are_followed(self, folder: Path, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
        blobs.mkdir()
        snapshot.mkdir(parents=True)
        for place, file in enumerate(sorted(folder.iterdir())):
            shutil.move(file, blobs / str(place))
            (snapshot / file.name).symlink_to(f"../../blobs/{place}")
        assert shard_names(snapshot) == ["model.safetensors"]

    @pytest.mark.parametrize("file", [*JSON_FILES, "chat_template.jinja", INDEX])
    def test_circular_and_dangling_links_are_named(self, folder: Path, file: str) -> None:
        path = folder / file
        path.unlink(missing_ok=True)
        path.symlink_to(path)
        assert f"{file} cannot be read" in complaint(folder)
        path.unlink()
        path.symlink_to("nowhere")
        assert f"{file} cannot be read: it is a link to a missing file" in complaint(folder)

    def test_circular_and_dangling_links_of_weights_are_named(self, folder: Path) -> None:
        shard = folder / "model.safetensors"
        shard.unlink()
        shard.symlink_to(shard)
        assert "model.safetensors is not a valid safetensors file" in complaint(folder)
        shard.unlink()
        shard.symlink_to("nowhere")
        assert "model.safetensors is not a valid safetensors file" in complaint(folder)


class TestVocabulary:
    @pytest.mark.parametrize(
        "name",
        [
            "tokenizers/gpt2",
            "tokenizers/qwen3",
            "tokenizers/phi-3",
            "tokenizers/mistral-v3",
            "tokenizers/falcon",
            "tokenizers/gpt-neox-20b",
            "models/stories260K",
        ],
    )
    def test_the_count_of_a_real_tokenizer_equals_that_of_the_library(
        self, shared: Path, name: str
    ) -> None:
        path = shared / name / "tokenizer.json"
        vocabulary = tokenizers.Tokenizer.from_file(str(path)).get_vocab()
        assert read_vocabulary(path, {}, {}).size == max(vocabulary.values()) + 1

    def test_unigram_pieces_and_added_tokens_are_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
        tokenizer.save(str(path))
        assert read_vocabulary(path, {}, {}).size == 2
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.save(str(path))
        assert read_vocabulary(path, {}, {}).size == 3

    @pytest.mark.parametrize(
        "text",
        [
            "{}",
            '{"model": 3}',
            '{"model": {"vocab": 3}}',
            '{"model": {"vocab": {"a": "x", "b": true, "c": -1, "d": 1.5, "e": null}}}',
            '{"added_tokens": 3}',
            '{"added_tokens": [3, {}, {"id": "x"}, {"id": -1}]}',
        ],
    )
    def test_an_uncountable_vocabulary_is_unknown(self, tmp_path: Path, text: str) -> None:
        """The error is reported later, when the tokenizer is loaded."""
        path = tmp_path / "tokenizer.json"
        path.write_text(text)
        assert read_vocabulary(path, {}, {}).size is None


def test_the_settings_of_the_image_processor_are_those_of_both_files(folder: Path):
    assert store.resolve(str(folder)).processor_config == {}
    old = {"patch_size": 14, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(old))
    assert store.resolve(str(folder)).processor_config == old
    new = {"processor_class": "Processor", "image_processor": {"patch_size": 16}}
    (folder / "processor_config.json").write_text(json.dumps(new))
    assert store.resolve(str(folder)).processor_config == {"patch_size": 16, "merge_size": 2}


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_damaged_configuration_of_the_image_processor_is_named(folder: Path, name: str):
    (folder / name).write_text("[")
    assert name in complaint(folder)
