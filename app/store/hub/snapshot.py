"""Which files of a repository a model needs.

Knows: file names as they are usual on the hub. Must not know: where the files are.
"""

import re
from collections.abc import Iterable

from app.core.errors import AppError, Kind

INDEX = "model.safetensors.index.json"

_SMALL = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        INDEX,
    }
)
# how sentence-transformers makes vectors of what the model says (app/embedding.py)
_VECTORS = frozenset({"modules.json", "1_Pooling/config.json"})
# The same weights in another cut (Mistral's own), and weights that are no model.
_NOT_THE_MODEL = re.compile(r"(consolidated|adapter)")
_SAFE = re.compile(r"\w[\w.+ -]*", re.ASCII)

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def needed(paths: Iterable[str]) -> list[str]:
    """Of a repository's files, those that a model is loaded from; weights last. Hardly any but such
    as lie at its top: folders hold other formats of the same model."""
    paths = sorted(paths)
    here = [path for path in paths if _SAFE.fullmatch(path)]
    return [path for path in paths if path in _SMALL | _VECTORS] + _weights(here)


def is_weights(path: str) -> bool:
    return path.endswith(".safetensors")


def check(repo: str, paths: Iterable[str]) -> None:
    """Raises AppError(MODEL_FILES) for a repository that holds nothing to be loaded, and says
    what it does hold."""
    paths = list(paths)
    found = set(needed(paths))
    if not any(map(is_weights, found)):
        raise AppError(Kind.MODEL_FILES, f"{repo} {_what_it_holds(paths)}")
    for name in ("config.json", "tokenizer.json"):
        if name not in found:
            raise AppError(
                Kind.MODEL_FILES,
                f"{repo} has no {name}, which is required: look for a copy that "
                "has one, such as those of mlx-community",
            )


def _weights(here: list[str]) -> list[str]:
    """`model*.safetensors` where there are such; else all that is not known to be something
    else."""
    weights = [path for path in here if is_weights(path)]
    usual = [path for path in weights if path.startswith("model")]
    return usual or [path for path in weights if not _NOT_THE_MODEL.match(path)]


def _what_it_holds(paths: list[str]) -> str:
    if any(path.endswith(".gguf") for path in paths):
        return (
            "contains GGUF files, which are not supported: look for the same model in safetensors, "
            "such as those of mlx-community"
        )
    if any(path.endswith(_PICKLED) for path in paths):
        return (
            "contains pickled weights, which are never opened because they can run code: "
            "look for the same model in safetensors"
        )
    return "has no .safetensors file in its top folder: it is not a language model"
