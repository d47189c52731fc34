"""Deletes and copies installed models.

Knows: which stores can be changed. Must not know: servers, the contents of the files.

Ollama's store and the Hugging Face cache can be changed. The built-in model belongs to the program,
a folder to the user, and the files of LM Studio and llama.cpp to these programs.
"""

from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.model_files import ModelFiles
from app.core.models import ModelRecipe
from app.core.thread_pools import CancelToken
from app.store import local_apps
from app.store.library_names import find_equivalent_of
from app.store.model_names import (
    BUILTIN,
    HubName,
    ModelNotFoundError,
    OllamaName,
    parse_hub_name,
    parse_model_name,
    parse_ollama_name,
)
from app.store.ollama import manifest, writer
from app.store.ollama.create import create_model


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovableModel:
    """A model that can be deleted. path: its manifest, or its folder in the cache."""

    name: HubName | OllamaName
    path: Path


def find_removable(text: str) -> RemovableModel:
    """Finds the model that `store.find` finds under this name, even if it is incomplete. Raises
    AppError(INVALID) for a model that cannot be deleted, and ModelNotFoundError."""
    if text == BUILTIN:
        raise AppError(ErrorKind.INVALID, f"{BUILTIN} is part of mlxrunner: it cannot be deleted")
    name = parse_model_name(text)
    is_path = name.hub is None and name.ollama is None
    if name.folder is not None and (is_path or (name.folder / "config.json").is_file()):
        raise AppError(
            ErrorKind.INVALID, f"{text} is a folder and not in a store: delete the folder itself"
        )
    from app.store.hub import cache

    if name.hub is not None and (folder := cache.repo_folder(name.hub.repo_id)).is_dir():
        if name.hub.revision is not None:
            message = f"{text} is one revision: delete {name.hub.repo_id}, with all of them"
            raise AppError(ErrorKind.INVALID, message)
        return RemovableModel(name=name.hub, path=folder)
    if name.ollama is not None:
        path = manifest.get_manifest_path(name.ollama)
        if path.is_file():
            return RemovableModel(name=name.ollama, path=path)
        equivalent = find_equivalent_of(name.ollama)
        if equivalent and (folder := cache.repo_folder(equivalent.repo_id)).is_dir():
            return RemovableModel(name=equivalent, path=folder)
    check_not_of_other_program(text)
    raise ModelNotFoundError(
        f"model {text} is not installed: run `mlxrunner list` to see the installed models"
    )


def check_not_of_other_program(text: str) -> None:
    """Raises AppError(INVALID) for the name of a model in a folder of LM Studio or llama.cpp, whose
    models are listed, but never changed."""
    hub, file = parse_hub_name(text), local_apps.find_gguf_file(text)
    folder = None if hub is None else local_apps.find_lm_studio_folder(hub)
    path = folder if file is None else file.path
    if path is not None:
        owner = "LM Studio" if file is None or file.source == "lm studio" else "llama.cpp"
        raise AppError(
            ErrorKind.INVALID,
            f"{mark_client_text(text)} belongs to {owner}: delete it there, or delete {path}",
        )


def delete_model(model: RemovableModel) -> None:
    """Deletes a model. Raises AppError(MODEL_FILES) if its files cannot be deleted."""
    from app.store.hub import cache

    try:
        if isinstance(model.name, HubName):
            cache.delete_repository(model.name)
        else:
            writer.delete_manifest(model.name)
    except OSError as error:
        raise _write_error(f"{model.name} cannot be deleted", error) from error


def copy_model(base: ModelFiles, text: str) -> OllamaName:
    """Copies a model to a name in Ollama's store, like `derive_model`."""
    return derive_model(base, ModelRecipe(name=text, base=base.name))


def derive_model(base: ModelFiles, recipe: ModelRecipe) -> OllamaName:
    """Creates a model in Ollama's store, which shares the files of the base where the disk allows
    it. Raises AppError(INVALID) for a name that is invalid or taken, and AppError(MODEL_FILES) if
    the store cannot be written."""
    name = parse_ollama_name(recipe.name)
    if name is None:
        raise AppError(ErrorKind.INVALID, f"{recipe.name!r} is not a name: use name or name:tag")
    if str(name) == BUILTIN or manifest.get_manifest_path(name).exists():
        raise AppError(ErrorKind.INVALID, f"{name} exists: choose another name, or delete it first")
    try:
        create_model(name, recipe, base, CancelToken())
    except OSError as error:
        raise _write_error(f"{name} cannot be written", error) from error
    return name


def _write_error(what: str, error: OSError) -> AppError:
    where = f" ({error.filename})" if error.filename else ""
    return AppError(ErrorKind.MODEL_FILES, f"{what}: {error.strerror or error}{where}")
