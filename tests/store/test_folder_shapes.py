"""Shapes of model folders that were seen or reported, each with its right outcome.

A shape is a change of a complete folder. Its outcome is a part of the error message, or the files
that are read.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import constants

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles, read_generation_defaults
from app.core.settings import Settings
from app.serving.prompt_jobs import JobBuilder
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer, find_model_stop_conditions
from tests import tiny
from tests.store.shards import write_tensors

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """change: makes the folder, and returns the name to serve if it is not the folder. error: a
    part of the message; empty if the model is found. kind: of the error. shards: the files with the
    weights. name: of the served model. log: a part of a warning. warnings: parts of what the server
    would log about chats. check: is called with the files."""

    id: str
    change: Callable[[Path], object]
    error: str = ""
    kind: ErrorKind = ErrorKind.MODEL_FILES
    shards: tuple[str, ...] = (WEIGHTS,)
    name: str = ""
    log: str = ""
    warnings: tuple[str, ...] = ()
    check: Callable[[ModelFiles], object] = field(default=lambda files: None)


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    """Changes fields of a JSON file. None removes a field; `null` writes null."""

    def change(folder: Path) -> None:
        path = folder / file
        fields = json.loads(path.read_text()) if path.is_file() else {}
        fields |= changes
        fields = {k: None if v is NULL else v for k, v in fields.items() if v is not None}
        path.write_text(json.dumps(fields))

    return change


NULL = object()


def write(file: str, content: bytes | str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def remove(*files: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return change


def all_of(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> object:
        results = [one(folder) for one in changes]
        return next((result for result in results if result is not None), None)

    return change


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / old).rename(folder / new))


def copy(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: void(shutil.copy(folder / old, folder / new))


def void(_: object) -> None:
    return None


def index(**places: str) -> Callable[[Path], None]:
    return write(INDEX, json.dumps({"weight_map": places}))


def tensors(file: str, *names: str) -> Callable[[Path], None]:
    return lambda folder: void(write_tensors(folder / file, *names))


def split(shards: int, *, indexed: bool) -> Callable[[Path], None]:
    """Splits the weights into a set of shards."""

    def change(folder: Path) -> None:
        loaded = mx.load(str(folder / WEIGHTS))
        assert isinstance(loaded, dict)
        names, places = sorted(loaded), {}
        (folder / WEIGHTS).unlink()
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {name: loaded[name] for name in names[number::shards]}
            mx.save_safetensors(str(folder / file), part)
            places |= dict.fromkeys(part, file)
        if indexed:
            index(**places)(folder)

    return change


SHARDS = tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


def into_subfolders(*names: str) -> Callable[[Path], None]:
    """Moves the whole model to folders inside it."""

    def change(folder: Path) -> None:
        files = [path for path in folder.iterdir() if path.is_file()]
        for name in names:
            (folder / name).mkdir()
            for path in files:
                shutil.copy(path, folder / name / path.name)
        for path in files:
            path.unlink()

    return change


def into_cache(folder: Path) -> Path:
    """Moves the model to a repository's folder in the Hugging Face cache."""
    storage = get_storage()
    snapshot = storage / "snapshots" / ("0" * 39 + "1")
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(snapshot.name)
    return snapshot


def get_storage() -> Path:
    return Path(constants.HF_HUB_CACHE) / "models--org--tiny"


def into_linked_cache(folder: Path) -> Path:
    """Like `into_cache`, with blobs and links, as huggingface_hub stores a download."""
    snapshot = into_cache(folder)
    blobs = get_storage() / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = blobs / f"{number:064x}"
        file.rename(blob)
        file.symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def set_ref(text: str) -> Callable[[Path], None]:
    return lambda _: void((get_storage() / "refs" / "main").write_text(text))


def break_link(file: str) -> Callable[[Path], None]:
    """Deletes the blob of a file."""
    return lambda _: next(get_storage().glob(f"snapshots/*/{file}")).resolve().unlink()


def interrupt(file: str) -> Callable[[Path], None]:
    """Leaves a partial blob in place of a file, as an interrupted download does."""

    def change(_: Path) -> None:
        link = next(get_storage().glob(f"snapshots/*/{file}"))
        blob = link.resolve()
        blob.rename(blob.with_name(f"{blob.name}.incomplete"))
        link.unlink()

    return change


def cached(*changes: Callable[[Path], object], path: bool = False) -> Callable[[Path], object]:
    """The model as a repository in the cache, which is found by name or by the path of the
    snapshot."""

    def change(folder: Path) -> object:
        snapshot = into_linked_cache(folder)
        for one in changes:
            one(snapshot)
        return snapshot if path else "org/tiny"

    return change


def into_home(folder: Path) -> str:
    Path.home().mkdir(exist_ok=True)
    folder.rename(Path.home() / "model")
    return "~/model"


def prepend(file: str, start: bytes) -> Callable[[Path], None]:
    return lambda folder: void((folder / file).write_bytes(start + (folder / file).read_bytes()))


def into_lm_studio(home: str) -> Callable[[Path], str]:
    def change(folder: Path) -> str:
        target = Path.home() / home / "models" / "org" / "tiny-mlx"
        target.parent.mkdir(parents=True)
        folder.rename(target)
        return "org/tiny-mlx"

    return change


def point_lm_studio(folder: Path) -> str:
    (Path.home()).mkdir(exist_ok=True)
    (Path.home() / ".lmstudio-home-pointer").write_text(str(Path.home() / "elsewhere"))
    return into_lm_studio("elsewhere")(folder)


def template(text: str | None, *, tools: str | None = None) -> Callable[[ModelFiles], None]:
    def check(files: ModelFiles) -> None:
        found = ChatTemplate(files)
        assert found.includes_special_tokens == (text is not None)
        if text is not None:
            assert found.get_source(tools=False) == text
            assert found.get_source(tools=True) == (tools or text)

    return check


def stops(*ids: int) -> Callable[[ModelFiles], None]:
    return lambda files: void(_check_stops(files, ids))


def _check_stops(files: ModelFiles, ids: tuple[int, ...]) -> None:
    defaults = read_generation_defaults(files)
    tokenizer = Tokenizer.load(files)
    assert find_model_stop_conditions(files, tokenizer, defaults.stop_strings).ids == set(ids)


def encodes(text: str, *ids: int) -> Callable[[ModelFiles], None]:
    """Also for grammars, whose library reads the file itself."""

    def check(files: ModelFiles) -> None:
        assert Tokenizer.load(files).encode(text, add_special_tokens=False) == list(ids)
        assert json.loads(files.read_tokenizer())["model"]

    return check


GENERATION = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
NEW = tiny.VOCAB  # the ID of the first token after those of tokenizer.json


def added(text: str, id: int, *, special: bool = True) -> Callable[[ModelFiles], None]:
    def check(files: ModelFiles) -> None:
        tokenizer = Tokenizer.load(files)
        assert tokenizer.encode(f"a{text}b", add_special_tokens=False)[1] == id
        assert (id in tokenizer.special_ids) == special
        assert files.tokenizer_vocab_size == max(tiny.VOCAB, id + 1)

    return check


DECODER = {str(NEW): {"content": "<|end|>", "special": True, "normalized": False}}
NO_TEMPLATE = edit("tokenizer_config.json", chat_template=None)
NO_STOP = all_of(
    edit("config.json", eos_token_id=None), edit("tokenizer_config.json", eos_token=None)
)
WARNS_TEMPLATE, WARNS_STOP = "has no chat template", "has no stop token"

SHAPES = [
    # weights
    Shape(id="one file", change=void),
    Shape(id="shards with an index", change=split(3, indexed=True), shards=SHARDS),
    Shape(id="shards without an index", change=split(3, indexed=False), shards=SHARDS),
    Shape(
        id="an index that lacks a tensor of its files",
        change=all_of(split(3, indexed=True), tensors("model-x.safetensors", "x")),
        shards=SHARDS,
    ),
    Shape(
        id="a missing shard",
        change=all_of(split(3, indexed=True), remove(SHARDS[1])),
        error=f"has no {SHARDS[1]}, which {INDEX} lists",
    ),
    Shape(
        id="a missing shard without an index",
        change=all_of(split(3, indexed=False), remove(SHARDS[2])),
        error=f"has no {SHARDS[2]}",
    ),
    Shape(
        id="all shards of the index missing",
        change=all_of(remove(WEIGHTS), index(x=SHARDS[0])),
        error=f"has no {SHARDS[0]}, which {INDEX} lists",
    ),
    Shape(
        id="a truncated file",
        change=lambda f: void((f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-4])),
        error=f"{WEIGHTS} is not a valid safetensors file: it is truncated",
    ),
    Shape(
        id="an empty file",
        change=write(WEIGHTS, b""),
        error=f"{WEIGHTS} is not a valid safetensors file: it has 0 bytes",
    ),
    Shape(
        id="a stale index of shards that were merged",
        change=index(x=SHARDS[0], y=SHARDS[1]),
        log="is not used",
    ),
    Shape(
        id="a stale index with tensors in no file", change=index(gone=WEIGHTS), log="is not used"
    ),
    Shape(
        id="an index with a folder of draft weights",
        change=index(x=WEIGHTS, y="mtp/model.safetensors"),
        log="is not used",
    ),
    Shape(id="a folder of draft weights", change=write("mtp/weights.safetensors", b"")),
    Shape(id="a folder of vision weights", change=write("optiq_vision/vision.safetensors", b"")),
    Shape(id="consolidated weights beside", change=copy(WEIGHTS, "consolidated.safetensors")),
    Shape(
        id="consolidated weights alone",
        change=rename(WEIGHTS, "consolidated.safetensors"),
        shards=("consolidated.safetensors",),
    ),
    Shape(
        id="weights.00 of early MLX",
        change=rename(WEIGHTS, "weights.00.safetensors"),
        shards=("weights.00.safetensors",),
    ),
    Shape(
        id="a pickle alone",
        change=rename(WEIGHTS, "pytorch_model.bin"),
        error="only a pickle file, which is never opened",
    ),
    Shape(id="a pickle beside", change=write("pytorch_model.bin", b"x")),
    Shape(id="npz alone", change=rename(WEIGHTS, "weights.npz"), error="has no .safetensors file"),
    Shape(id="no weights", change=remove(WEIGHTS), error="has no .safetensors file"),
    Shape(id="a tensor twice", change=copy(WEIGHTS, "model-2.safetensors"), error="is in both"),
    # files that stand for others
    Shape(
        id="a Git LFS pointer of the weights",
        change=write(WEIGHTS, LFS_POINTER),
        error=f"{WEIGHTS} is a Git LFS pointer and not the file itself: run `git lfs pull`",
    ),
    Shape(
        id="a Git LFS pointer of the tokenizer",
        change=write("tokenizer.json", LFS_POINTER),
        error="tokenizer.json is a Git LFS pointer",
    ),
    Shape(
        id="a Git LFS pointer of one shard",
        change=all_of(split(3, indexed=True), write(SHARDS[2], LFS_POINTER)),
        error=f"{SHARDS[2]} is a Git LFS pointer",
    ),
    Shape(
        id="an interrupted download into a folder",
        change=all_of(remove(WEIGHTS), write(".cache/huggingface/download/abc.incomplete", b"x")),
        error="is incomplete (model.safetensors is missing)",
    ),
    Shape(
        id="an interrupted download of a shard",
        change=all_of(
            split(3, indexed=True),
            remove(SHARDS[1]),
            write(".cache/huggingface/download/abc.incomplete", b"x"),
        ),
        error=f"is incomplete ({SHARDS[1]} is missing)",
    ),
    Shape(
        id="an interrupted download without a config",
        change=all_of(
            remove("config.json", WEIGHTS),
            write(".cache/huggingface/download/abc.incomplete", b"x"),
        ),
        error="is incomplete (config.json is missing)",
    ),
    # adapters
    Shape(
        id="an adapter of PEFT",
        change=all_of(
            remove("config.json"),
            rename(WEIGHTS, "adapter_model.safetensors"),
            write(
                "adapter_config.json",
                '{"peft_type": "LORA", "base_model_name_or_path": "org/base"}',
            ),
        ),
        error="is a LoRA adapter of PEFT and not a model: serve org/base",
    ),
    Shape(
        id="an adapter of mlx-lm",
        change=all_of(
            remove("config.json"),
            rename(WEIGHTS, "adapters.safetensors"),
            write("adapter_config.json", '{"fine_tune_type": "lora", "model": "org/base"}'),
        ),
        error="is a LoRA adapter of mlx-lm and not a model: serve org/base",
    ),
    Shape(
        id="an adapter without the name of a model",
        change=all_of(remove("config.json"), write("adapter_config.json", "{}")),
        error="serve the model that it was trained for",
    ),
    Shape(
        id="an adapter with the config of its model",
        change=all_of(
            rename(WEIGHTS, "adapter_model.safetensors"),
            write("adapter_config.json", '{"peft_type": "LORA"}'),
        ),
        error="is a LoRA adapter of PEFT",
    ),
    Shape(
        id="an adapter of mlx-lm beside a model",
        change=tensors("adapters.safetensors", "x"),
        log="the LoRA adapter adapters.safetensors next to the model is not used",
    ),
    Shape(
        id="an adapter of PEFT beside a model",
        change=tensors("adapter_model.safetensors", "x"),
        log="the LoRA adapter adapter_model.safetensors next to the model is not used",
    ),
    # config.json
    Shape(
        id="no config",
        change=remove("config.json"),
        error="has no config.json: it is not a model folder",
    ),
    Shape(id="a config with a byte order mark", change=prepend("config.json", BYTE_ORDER_MARK)),
    Shape(
        id="Infinity in a config",
        change=lambda f: void(
            (f / "config.json").write_text(
                (f / "config.json").read_text()[:-1] + ', "time_step_limit": [0.0, Infinity]}'
            )
        ),
    ),
    Shape(
        id="NaN in a config",
        change=lambda f: void(
            (f / "config.json").write_text((f / "config.json").read_text()[:-1] + ', "x": NaN}')
        ),
        error="config.json cannot be read",
    ),
    Shape(
        id="a pipeline of Diffusers",
        change=all_of(
            remove("config.json"), write("model_index.json", '{"_class_name": "FluxPipeline"}')
        ),
        error="is a pipeline of Diffusers ('FluxPipeline' in model_index.json) and not a language",
    ),
    Shape(id="unknown keys", change=edit("config.json", some_key={"a": [1]})),
    Shape(id="custom code", change=edit("config.json", auto_map={"AutoModel": "modeling.Model"})),
    # tokenizers
    Shape(
        id="no tokenizer",
        change=remove("tokenizer.json"),
        error="has no tokenizer.json: use a copy of the model that has this file",
    ),
    Shape(
        id="SentencePiece only",
        change=rename("tokenizer.json", "tokenizer.model"),
        error="has no tokenizer.json, only tokenizer.model: use a copy",
    ),
    Shape(
        id="tiktoken only",
        change=rename("tokenizer.json", "tiktoken.model"),
        error="has a tiktoken.model, but no tokenizer.json: only the model's own code",
    ),
    Shape(
        id="tekken only",
        change=rename("tokenizer.json", "tekken.json"),
        error="has no tokenizer.json, only tekken.json: use a copy",
    ),
    Shape(
        id="vocab and merges only",
        change=rename("tokenizer.json", "vocab.json"),
        error="has no tokenizer.json, only vocab.json: use a copy",
    ),
    Shape(
        id="an empty tokenizer",
        change=write("tokenizer.json", b""),
        error="tokenizer.json cannot be read",
    ),
    Shape(
        id="a tokenizer with a byte order mark",
        change=prepend("tokenizer.json", BYTE_ORDER_MARK),
        check=encodes("ab", 97, 98),
    ),
    Shape(
        id="a tokenizer with a byte order mark, and added tokens",
        change=all_of(
            prepend("tokenizer.json", BYTE_ORDER_MARK),
            write("added_tokens.json", json.dumps({"<think>": NEW})),
        ),
        check=added("<think>", NEW, special=False),
    ),
    Shape(
        id="no tokenizer_config",
        change=remove("tokenizer_config.json"),
        check=stops(tiny.END),
        warnings=(WARNS_TEMPLATE,),
    ),
    Shape(
        id="the class of transformers 5",
        change=edit("tokenizer_config.json", tokenizer_class="TokenizersBackend"),
        check=stops(tiny.END),
    ),
    Shape(
        id="eos_token as an object",
        change=edit("tokenizer_config.json", eos_token={"content": "</s>", "special": True}),
    ),
    Shape(
        id="eos_token as a list",
        change=edit("tokenizer_config.json", eos_token=["</s>", "<s>"]),
        check=stops(tiny.END),
    ),
    Shape(
        id="eos_token null",
        change=edit("tokenizer_config.json", eos_token=NULL),
        check=stops(tiny.END),
    ),
    Shape(
        id="a huge model_max_length", change=edit("tokenizer_config.json", model_max_length=10**30)
    ),
    # added tokens
    Shape(
        id="a token of added_tokens_decoder",
        change=edit("tokenizer_config.json", added_tokens_decoder=DECODER, eos_token="<|end|>"),
        check=lambda files: (added("<|end|>", NEW)(files), _check_stops(files, (tiny.END, NEW))),
    ),
    Shape(
        id="a token of added_tokens.json",
        change=write("added_tokens.json", json.dumps({"<think>": NEW})),
        check=added("<think>", NEW, special=False),
    ),
    Shape(
        id="a special token of added_tokens.json",
        change=all_of(
            write("added_tokens.json", json.dumps({"<|end|>": NEW})),
            edit("tokenizer_config.json", eos_token="<|end|>"),
        ),
        check=added("<|end|>", NEW),
    ),
    Shape(
        id="added tokens that tokenizer.json has",
        change=edit(
            "tokenizer_config.json",
            added_tokens_decoder={str(tiny.END): {"content": "<end>", "special": True}},
        ),
        log="is not added",
    ),
    Shape(
        id="an added token after a gap",
        change=edit(
            "tokenizer_config.json", added_tokens_decoder={str(NEW + 3): {"content": "<far>"}}
        ),
        log="its ID 261 is taken or leaves a gap",
    ),
    Shape(
        id="invalid added tokens",
        change=edit(
            "tokenizer_config.json",
            added_tokens_decoder={
                "x": 1,
                "-1": {"content": "a"},
                "3": {"content": 4},
                "9" * 99: {"content": "far"},
            },
        ),
        log="is not added",
    ),
    # templates
    Shape(
        id="a separate template",
        change=write("chat_template.jinja", "jinja"),
        check=template("jinja"),
    ),
    Shape(
        id="chat_template.json alone",
        change=all_of(NO_TEMPLATE, write("chat_template.json", '{"chat_template": "json"}')),
        check=template("json"),
    ),
    Shape(
        id="chat_template.json beside others",
        change=write("chat_template.json", '{"chat_template": "json"}'),
        check=template(tiny.CHAT_TEMPLATE),
    ),
    Shape(
        id="chat_template.json without a text",
        change=all_of(NO_TEMPLATE, write("chat_template.json", '{"chat_template": 3}')),
        error="chat_template.json has no text in chat_template",
    ),
    Shape(
        id="a list of templates",
        change=edit(
            "tokenizer_config.json",
            chat_template=[
                {"name": "default", "template": "d"},
                {"name": "tool_use", "template": "t"},
            ],
        ),
        check=template("d", tools="t"),
    ),
    Shape(
        id="additional templates",
        change=all_of(
            write("chat_template.jinja", "d"),
            write("additional_chat_templates/tool_use.jinja", "t"),
        ),
        check=template("d", tools="t"),
    ),
    Shape(
        id="additional templates beside one in the config",
        change=write("additional_chat_templates/tool_use.jinja", "t"),
        check=template(tiny.CHAT_TEMPLATE, tools="t"),
    ),
    Shape(id="no template", change=NO_TEMPLATE, check=template(None), warnings=(WARNS_TEMPLATE,)),
    Shape(
        id="a template with a block for training",
        change=write("chat_template.jinja", GENERATION),
        check=template(GENERATION),
    ),
    Shape(
        id="a template with a byte order mark",
        change=write("chat_template.jinja", BYTE_ORDER_MARK + b"jinja"),
        check=template("jinja"),
    ),
    Shape(
        id="the template of a processor",
        change=all_of(NO_TEMPLATE, write("processor_config.json", '{"chat_template": "p"}')),
        check=template("p"),
    ),
    Shape(
        id="the template of a processor beside others",
        change=write("processor_config.json", '{"chat_template": "p"}'),
        check=template(tiny.CHAT_TEMPLATE),
    ),
    Shape(
        id="the template of a processor that is no text",
        change=all_of(NO_TEMPLATE, write("processor_config.json", '{"chat_template": {"a": 1}}')),
        error="processor_config.json has no text in chat_template",
    ),
    # stop tokens
    Shape(
        id="a list of stop tokens",
        change=edit("config.json", eos_token_id=[1, 2]),
        check=stops(1, 2, tiny.END),
    ),
    Shape(
        id="a stop token out of range",
        change=all_of(NO_STOP, edit("config.json", eos_token_id=999_999)),
        check=stops(),
        warnings=(WARNS_STOP,),
    ),
    Shape(
        id="a stop token null",
        change=all_of(NO_STOP, edit("config.json", eos_token_id=NULL)),
        check=stops(),
        warnings=(WARNS_STOP,),
    ),
    Shape(id="no stop token", change=NO_STOP, check=stops(), warnings=(WARNS_STOP,)),
    Shape(
        id="neither template nor stop token",
        change=all_of(NO_STOP, NO_TEMPLATE),
        warnings=(WARNS_TEMPLATE, WARNS_STOP),
    ),
    Shape(
        id="stop tokens of generation_config",
        change=edit("generation_config.json", eos_token_id=[3]),
        check=stops(3, tiny.END),
    ),
    Shape(
        id="odd values in a generation_config",
        change=write(
            "generation_config.json",
            '{"_from_model_config": true, "do_sample": null, "max_length": 20, "pad_token_id": -1, '
            '"temperature": 0, "top_k": 0, "top_p": 1, "eos_token_id": [1, -1, null]}',
        ),
        check=stops(1, tiny.END),
    ),
    Shape(
        id="a generation_config with a comma too many",
        change=write("generation_config.json", '{"top_p": 0.9,}'),
        error="generation_config.json cannot be read",
    ),
    # places
    Shape(
        id="a folder of each format", change=into_subfolders("8bit", "4bit", "bf16"), name="4bit"
    ),
    Shape(id="a folder of one format", change=into_subfolders("mxfp4"), name="mxfp4"),
    Shape(
        id="the folder of one format by its path",
        change=lambda f: (into_subfolders("8bit", "4bit")(f), f / "8bit")[1],
        name="8bit",
    ),
    Shape(
        id="folders that are no formats",
        change=into_subfolders("original"),
        error="has no config.json: it is not a model folder",
    ),
    Shape(id="a relative path", change=lambda f: os.path.relpath(f)),
    Shape(id="a path in the home folder", change=into_home),
    Shape(id="a trailing slash", change=lambda f: f"{f}/"),
    Shape(id="dots in a path", change=lambda f: f"{f}/../{f.name}"),
    Shape(id="a link", change=lambda f: ((f.parent / "link").symlink_to(f), f.parent / "link")[1]),
    Shape(
        id="spaces and non-ASCII letters",
        change=lambda f: f.rename(f.parent / "ein Modell é"),
        name="ein Modell é",
    ),
    Shape(id="a read-only folder", change=lambda f: void(f.chmod(0o555))),
    Shape(id="the path of a snapshot", change=into_cache, name="org/tiny"),
    Shape(
        id="the path of a repository in the cache",
        change=lambda f: into_cache(f).parent.parent,
        name="org/tiny",
    ),
    Shape(
        id="a repository in the cache without refs",
        change=lambda f: (
            into_cache(f),
            shutil.rmtree(Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "refs"),
            Path(constants.HF_HUB_CACHE) / "models--org--tiny",
        )[2],
        name="org/tiny",
    ),
    Shape(
        id="a repository in the cache by name",
        change=lambda f: (into_cache(f), "org/tiny")[1],
        name="org/tiny",
    ),
    Shape(
        id="hf.co before the name",
        change=lambda f: (into_cache(f), "hf.co/org/tiny")[1],
        name="org/tiny",
    ),
    Shape(id="a cache of links, by name", change=cached(), name="org/tiny"),
    Shape(id="a cache of links, by path", change=cached(path=True), name="org/tiny"),
    Shape(
        id="a cache without refs, by name",
        change=cached(lambda _: shutil.rmtree(get_storage() / "refs")),
        error="run `mlxrunner pull org/tiny` to download it, or serve it with --pull; did you mean "
        "org/tiny@000000000000?",
        kind=ErrorKind.MODEL_NOT_FOUND,
    ),
    Shape(
        id="a cache without refs, by name and commit",
        change=lambda f: (
            cached(lambda _: shutil.rmtree(get_storage() / "refs"))(f),
            "org/tiny@000000000000",
        )[1],
        name="org/tiny@000000000000",
    ),
    Shape(
        id="a ref with a line break, by name",
        change=cached(set_ref("0" * 39 + "1\n")),
        name="org/tiny",
    ),
    *(
        Shape(
            id=f"a ref {id}, by name",
            change=cached(set_ref(text)),
            error="refs/main names a revision that was not downloaded: run `mlxrunner pull "
            "org/tiny`, or serve org/tiny@000000000000",
            kind=ErrorKind.MODEL_NOT_FOUND,
        )
        for id, text in (
            ("to a revision that is not there", "f" * 40),
            ("that is empty", ""),
            ("that leads elsewhere", "../../../../model"),
        )
    ),
    Shape(
        id="a ref to a revision that is not there, by path",
        change=cached(set_ref("f" * 40), path=True),
        name="org/tiny",
    ),
    Shape(
        id="a ref to a revision that is not there, by the path of the repository",
        change=lambda f: (cached(set_ref("f" * 40))(f), get_storage())[1],
        name="org/tiny",
    ),
    *(
        Shape(
            id=f"a broken link of {file}, by name",
            change=cached(break_link(file)),
            error=f"the download of org/tiny is incomplete ({file} missing): run `mlxrunner pull",
            kind=ErrorKind.MODEL_NOT_FOUND,
        )
        for file in ("config.json", "tokenizer.json", WEIGHTS)
    ),
    Shape(
        id="a broken link of the config, by path",
        change=cached(break_link("config.json"), path=True),
        error="config.json cannot be read: it is a link to a missing file",
    ),
    Shape(
        id="a broken link of the weights, by path",
        change=cached(break_link(WEIGHTS), path=True),
        error=f"{WEIGHTS} is not a valid safetensors file: it is a link to a missing file",
    ),
    Shape(
        id="an interrupted download in the cache, by name",
        change=cached(interrupt(WEIGHTS)),
        error=f"the download of org/tiny is incomplete ({WEIGHTS} missing): run `mlxrunner pull",
        kind=ErrorKind.MODEL_NOT_FOUND,
    ),
    Shape(
        id="an interrupted download in the cache, by path",
        change=cached(interrupt(WEIGHTS), path=True),
        error="is incomplete",
    ),
    Shape(id="LM Studio's folder by name", change=into_lm_studio(".lmstudio"), name="org/tiny-mlx"),
    Shape(
        id="LM Studio's old folder", change=into_lm_studio(".cache/lm-studio"), name="org/tiny-mlx"
    ),
    Shape(id="LM Studio's folder elsewhere", change=point_lm_studio, name="org/tiny-mlx"),
]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.id)
def test_a_folder_loads_or_its_fault_is_named(
    shape: Shape, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = shape.change(folder)
    caplog.set_level(logging.WARNING)
    if shape.error:
        with pytest.raises(AppError) as caught:
            store.find(str(given or folder))
        assert caught.value.kind is shape.kind
        assert shape.error in caught.value.message
        assert "\n" not in caught.value.message
        return
    files = store.find(str(given or folder))
    assert tuple(path.name for path in files.shards) == shape.shards
    assert files.name == (shape.name or folder.name)
    assert shape.log in caplog.text
    assert bool(caplog.text) == bool(shape.log)
    shape.check(files)
    warnings = list(JobBuilder(files, Settings()).list_warnings())
    assert len(warnings) == len(shape.warnings)
    assert all(part in warning for part, warning in zip(shape.warnings, warnings, strict=True))


def test_lm_studios_models_are_listed(folder: Path) -> None:
    name = into_lm_studio(".lmstudio")(folder)
    [entry] = [entry for entry in store.list_installed() if entry.source == "lm studio"]
    assert (entry.name, entry.read().name) == (name, name)


def test_the_grammar_compiler_knows_added_tokens(folder: Path) -> None:
    edit("tokenizer_config.json", added_tokens_decoder=DECODER)(folder)
    tokens: Mapping[str, Any] = json.loads(store.find(str(folder)).read_tokenizer())
    assert tokens["added_tokens"][-1]["content"] == "<|end|>"
