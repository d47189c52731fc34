"""Reads models from GGUF files, by converting their metadata to the files of a model folder.

Knows: the keys of a GGUF file that are not about its architecture. Must not know: tensors,
tokenization.

The tokenizer is written as tokenizer.json into the cache folder, once per file, because the code
that uses it reads that format.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.core.model_files import Json, ModelFiles
from app.store.cache_folder import cache_tokenizer
from app.store.gguf.errors import UnsupportedGGUFError, translate_gguf_errors
from app.store.gguf.projector import VisionFiles, is_projector, read_vision
from app.store.gguf.tokenizer import Vocabulary, build_tokenizer, read_vocabulary
from models.gguf import reader
from models.gguf.architectures import CONFIG_TENSORS, read_config
from models.gguf.ollama_towers import has_tower
from models.gguf.ollama_variant import translate
from models.gguf.reader import GGUFFile

# changes whenever `build_tokenizer` returns something else for the same file
_TOKENIZER_VERSION = 2

_SUFFIX = ".gguf"

# the end of the name of one file of several
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")

# the end of the name of a file with one quantization
_QUANTIZATION = re.compile(r"[-.](UD-)?(I?Q\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = "general.sampling."

# the longest licenses have 50,000 characters
_MAX_TEXT_CHARACTERS = 1 << 20

# keys of general.sampling and the equivalent keys of generation_config.json
_SAMPLING_KEYS: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read(path: Path, *, name: str, projectors: Iterable[Path] = ()) -> ModelFiles:
    """Reads a model. path: the file, or any file of a split model. projectors: files that may be
    its projector, the best one first. Raises AppError(MODEL_FILES) for a file that is invalid or
    not supported. The message is one line that names file and key."""
    with translate_gguf_errors():
        versions = reader.read_versions(path)
    projectors = tuple(one for one in projectors if one.is_file())
    versions += tuple(reader.get_version(one.stat()) for one in projectors)
    files = _read_version(path, projectors, versions)
    # the folder of the cache may be deleted at any time
    if isinstance(files, ModelFiles) and not files.tokenizer_path.is_file():
        _read_version.cache_clear()
        files = _read_version(path, projectors, versions)
    if not isinstance(files, ModelFiles):
        kind, message = files
        raise kind(message)
    return replace(files, name=name)


def _unusable_error(message: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, message)


_Unusable = tuple[Callable[[str], AppError], str]


# with a vocabulary of 150,000 tokens, this takes 0.1 s, and a server scans its models often
@lru_cache(maxsize=4096)
def _read_version(
    path: Path, projectors: tuple[Path, ...], versions: tuple[str, ...]
) -> ModelFiles | _Unusable:
    """Reads a model without its name, or returns the constructor of its error and the message.
    versions: the versions of its files. A model whose files did not change is read once, even if it
    cannot be used. Raises AppError(MODEL_FILES) for a failure that may be temporary."""
    del versions
    try:
        return _read(path, projectors)
    except AppError as error:
        if _is_temporary(error):
            raise
        is_unsupported = isinstance(error, UnsupportedGGUFError)
        return (UnsupportedGGUFError if is_unsupported else _unusable_error), error.message


def _is_temporary(error: BaseException | None) -> bool:
    """Returns whether the cause of an error is the disk and not the content of a file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None


def _read(path: Path, projectors: tuple[Path, ...]) -> ModelFiles:
    with translate_gguf_errors():
        stored = reader.read(path)
        file = translate(stored)
        config = read_config(file)
    vocabulary = read_vocabulary(file)
    files = ModelFiles(
        name="",
        path=file.path,
        config=config,
        shards=file.paths,
        tokenizer_path=_write_tokenizer(vocabulary),
        tokenizer_config=_make_tokenizer_config(vocabulary),
        generation_config=_make_generation_config(vocabulary),
        chat_template=None,
        created=int(file.path.stat().st_mtime),
        license=_get_text(file, "general.license"),
        tokenizer_vocab_size=len(vocabulary.tokens),
        weight_bytes=file.nbytes,
        weights_digest=file.fingerprint,
    )
    # a separate projector is preferred to a tower in the model's file
    candidates = [*projectors, file.path] if has_tower(stored) else projectors
    vision = read_vision(candidates, config, vocabulary)
    return files if vision is None else _add_vision(files, vision)


def _add_vision(files: ModelFiles, vision: VisionFiles) -> ModelFiles:
    return replace(
        files,
        config=vision.config,
        processor_config=vision.processor_config,
        added_tokens=vision.added_tokens,
        projector_path=vision.file.path,
        weight_bytes=files.weight_bytes + vision.file.nbytes,
        weights_digest=f"{files.weights_digest} {vision.file.fingerprint}",
    )


def copy_header(fetch: Callable[[int, int], bytes], size: int, path: Path) -> None:
    """Writes a sparse file with all of a GGUF file that `read` needs. size: the size of the GGUF
    file. fetch: returns a number of its bytes at an offset. Raises AppError(MODEL_FILES), OSError,
    and the errors of `fetch`."""
    with translate_gguf_errors():
        reader.copy_header(fetch, size, path, contents=CONFIG_TENSORS)


def is_gguf(path: Path) -> bool:
    """Returns whether the path is a GGUF file, or a file that should be one by its name."""
    if not path.is_file():
        return False
    return path.suffix == _SUFFIX or reader.has_magic(path)


def is_gguf_model(files: ModelFiles) -> bool:
    """Returns whether the weights of a model are in GGUF. Raises AppError(MODEL_FILES) if they
    cannot be read."""
    try:
        return bool(files.shards) and reader.has_magic(files.shards[0])
    except OSError as error:
        message = f"{files.shards[0]} cannot be read: {error.strerror or error}"
        raise AppError(ErrorKind.MODEL_FILES, message) from error


def get_name(path: Path) -> str:
    """Returns the name of a model by the name of its file."""
    return _SHARD.sub("", path.name.removesuffix(_SUFFIX))


def get_base_name(path: Path) -> str:
    """Returns the name of a model without its quantization: `Qwen3-8B` for
    `Qwen3-8B-Q4_K_M.gguf`."""
    return _QUANTIZATION.sub("", get_name(path))


def find_in_folder(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder that contains one model in GGUF and none in any other
    format. Its projector does not count."""
    if (folder / "config.json").exists():
        return None
    found = [path for path in sorted(folder.glob(f"*{_SUFFIX}")) if is_model_file(path)]
    return found[0] if len(found) == 1 else None


def is_model_file(path: Path) -> bool:
    """Returns whether this is the name of a model, and not of a projector or a later file of a
    split model."""
    if reader.is_later_shard(path) or is_projector(path.name):
        return False
    return path.suffix == _SUFFIX and path.is_file()


def _make_tokenizer_config(vocabulary: Vocabulary) -> Json:
    config: dict[str, Any] = {"add_bos_token": vocabulary.adds_bos}
    for key, name in (
        ("bos_token_id", "bos_token"),
        ("eos_token_id", "eos_token"),
        ("unknown_token_id", "unk_token"),
        ("padding_token_id", "pad_token"),
    ):
        id = vocabulary.find_token(key)
        if id is not None:
            config[name] = vocabulary.tokens[id]
    templates = _list_templates(vocabulary.file)
    if len(templates) > 1:
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    elif templates:
        [config["chat_template"]] = templates.values()
    return config


def _list_templates(file: GGUFFile) -> Mapping[str, str]:
    """Returns the chat templates by name. The main one is called `default`."""
    found: dict[str, str] = {}
    for key, value in file.metadata.items():
        if isinstance(value, str) and (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")):
            found[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = value
    return found


def _make_generation_config(vocabulary: Vocabulary) -> Json:
    config: dict[str, Any] = {}
    if ends := vocabulary.list_end_tokens():
        config["eos_token_id"] = ends
    for key, name in _SAMPLING_KEYS.items():
        value = vocabulary.file.metadata.get(_SAMPLING + key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[name] = value if isinstance(value, int) else round(value, 6)
    return config


def _get_text(file: GGUFFile, key: str) -> str:
    """Returns text to be shown, or "" if there is none or it is too long."""
    value = file.metadata.get(key)
    return value if isinstance(value, str) and len(value) <= _MAX_TEXT_CHARACTERS else ""


def _write_tokenizer(vocabulary: Vocabulary) -> Path:
    """Returns the path of the tokenizer.json. It is built if the cache does not have it yet."""
    version = f"{_TOKENIZER_VERSION} {vocabulary.file.header_digest}"
    digest = hashlib.sha256(version.encode()).hexdigest()
    return cache_tokenizer(
        "gguf", digest, vocabulary.file.path, lambda: build_tokenizer(vocabulary)
    )
