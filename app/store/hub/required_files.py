"""Selects the files of a repository that a model needs.

Knows: conventional file names on the hub. Must not know: the location of the files.
"""

import re
from collections.abc import Iterable

from app.core.errors import AppError, ErrorKind

INDEX = "model.safetensors.index.json"

_CONFIG_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tiktoken.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        INDEX,
    }
)
# the modules of sentence-transformers (app/serving/pooling_config.py, app/engine/embedding_head.py)
_EMBEDDING_FILES = re.compile(
    r"modules\.json|\d_Pooling/config\.json|\d_Dense/(config\.json|model\.safetensors)"
)
# the same weights in another layout (Mistral's own), and weights that are not a model
_OTHER_WEIGHTS = re.compile(r"(consolidated|adapter)")
_SAFE_NAME = re.compile(r"\w[\w.+ -]*", re.ASCII)

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def select_files(paths: Iterable[str]) -> list[str]:
    """Returns the files needed to load a model, with the weights last. With few exceptions, only
    top-level files are selected, because folders contain other formats of the same model."""
    paths = sorted(paths)
    root_files = [path for path in paths if _SAFE_NAME.fullmatch(path)]
    small = [p for p in paths if p in _CONFIG_FILES or _EMBEDDING_FILES.fullmatch(p)]
    return small + _select_weights(root_files)


def is_weights_file(path: str) -> bool:
    return path.endswith(".safetensors")


def check_loadable(repo: str, paths: Iterable[str]) -> None:
    """Raises AppError(MODEL_FILES) for a repository without a loadable model. The message lists the
    formats in the repository."""
    paths = list(paths)
    selected = set(select_files(paths))
    if not any(map(is_weights_file, selected)):
        raise AppError(ErrorKind.MODEL_FILES, f"{repo} {_describe_contents(paths)}")
    for name in ("config.json", "tokenizer.json"):
        # app/store/tiktoken_vocabulary.py replaces a tokenizer.json
        has_other = name == "tokenizer.json" and "tiktoken.model" in selected
        if name not in selected and not has_other:
            raise AppError(
                ErrorKind.MODEL_FILES,
                f"{repo} has no {name}, which is required: use a copy of the model that "
                "has this file, for example from mlx-community",
            )


def _select_weights(here: list[str]) -> list[str]:
    """Returns `model*.safetensors` if there are such files. Otherwise it returns all weights except
    those with known other purposes."""
    weights = [path for path in here if is_weights_file(path)]
    usual = [path for path in weights if path.startswith("model")]
    return usual or [path for path in weights if not _OTHER_WEIGHTS.match(path)]


def _describe_contents(paths: list[str]) -> str:
    if any(path.endswith(".gguf") for path in paths):
        return (
            "contains GGUF files, which are not supported: use the same model in the safetensors "
            "format, for example from mlx-community"
        )
    if any(path.endswith(_PICKLED) for path in paths):
        return (
            "contains pickled weights, which are never opened because they can run code: "
            "use the same model in the safetensors format"
        )
    return "has no .safetensors file in its top-level folder: it is not a language model"
