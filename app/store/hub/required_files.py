"""Selects the files of a repository that a model needs.

Knows: conventional file names on the hub. Must not know: the location of the files.
"""

import re
from collections.abc import Iterable

from app.core.errors import AppError, ErrorKind
from app.store.gguf.projector import choose_projectors, is_projector
from app.store.model_names import USUAL_QUANTIZATION, is_format_folder

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
        "preprocessor_config.json",
        "processor_config.json",
        INDEX,
    }
)
# the modules of sentence-transformers (app/serving/pooling_config.py, app/engine/pooler.py)
_EMBEDDING_FILES = re.compile(
    r"modules\.json|\d_Pooling/config\.json|\d_Dense/(config\.json|model\.safetensors)"
)
# named templates next to the default one, as transformers saves them
_TEMPLATE = re.compile(r"additional_chat_templates/\w[\w.-]*\.jinja", re.ASCII)
# the formats that are preferred if a repository has a folder for each
_PREFERRED_FORMATS = ("4bit", "mxfp4", "nvfp4", "8bit", "bf16")
# the same weights in a different layout (Mistral's own), and weights that are not a model
_OTHER_WEIGHTS = re.compile(r"(consolidated|adapter)")
_SAFE_NAME = re.compile(r"\w[\w.+ -]*", re.ASCII)

# files of large models are in a folder named after the quantization
_SAFE_PATH = re.compile(r"(\w[\w.+ -]*/)?\w[\w.+ -]*", re.ASCII)
_LABEL = re.compile(
    r"[-._]((?:UD-)?(?:I?Q\d[A-Z0-9_]*|BF16|F16|F32|MXFP4(?:_MOE)?))$", re.IGNORECASE
)

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def select_files(paths: Iterable[str], subfolder: str | None = None) -> list[str]:
    """Returns the files needed to load a model, with the weights last. With few exceptions, only
    top-level files are selected, because folders contain other formats of the same model.
    subfolder: the folder of the model; None for the repository itself."""
    prefix = "" if subfolder is None else f"{subfolder}/"
    paths = sorted(path.removeprefix(prefix) for path in paths if path.startswith(prefix))
    root_files = [path for path in paths if _SAFE_NAME.fullmatch(path)]
    small = [
        path
        for path in paths
        if path in _CONFIG_FILES or _EMBEDDING_FILES.fullmatch(path) or _TEMPLATE.fullmatch(path)
    ]
    return [prefix + path for path in small + _select_weights(root_files)]


def choose_subfolder(paths: Iterable[str]) -> str | None:
    """Returns the folder of a model, in a repository that has a complete model in a folder of each
    format (`4bit/`, `8bit/`) and none outside of them. Otherwise returns None."""
    paths = list(paths)
    if any(map(is_weights_file, select_files(paths))):
        return None
    folders = sorted(
        folder
        for folder in {path.partition("/")[0] for path in paths if "/" in path}
        if is_format_folder(folder) and any(map(is_weights_file, select_files(paths, folder)))
    )
    return next((name for name in _PREFERRED_FORMATS if name in folders), next(iter(folders), None))


_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf")


def select_gguf(repo: str, paths: Iterable[str], quantization: str | None) -> list[str]:
    """Returns the GGUF file of a quantization, or the files of a split one. Without a quantization,
    the usual one, Q4_K_M, or the only one is selected. Raises AppError(MODEL_FILES), with the
    labels that the repository has."""
    by_label: dict[str, list[str]] = {}
    for path in sorted(paths):
        label = get_quantization(path)
        if label is not None:
            by_label.setdefault(label, []).append(path)
    wanted = quantization or USUAL_QUANTIZATION
    if quantization is None and len(by_label) == 1:
        [wanted] = by_label
    found = by_label.get(wanted, [])
    if not found:
        labels = ", ".join(sorted(by_label)) or "none"
        raise AppError(ErrorKind.MODEL_FILES, f"{repo} has no GGUF file {wanted}; it has: {labels}")
    models = {_SHARD.sub("", path) for path in found}
    if len(models) > 1:
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"{repo} has several GGUF files {wanted}: {', '.join(sorted(models)[:4])}",
        )
    return found


def select_projector(model: str, paths: Iterable[str]) -> list[str]:
    """Returns the projector of a GGUF model, if the repository has one. model: its file."""
    safe = (path for path in paths if _SAFE_PATH.fullmatch(path))
    return choose_projectors(model, safe)[:1]


def get_quantization(path: str) -> str | None:
    """Returns the label in the name of a model's GGUF file, in capitals, or None."""
    name = path.rpartition("/")[2]
    if not _SAFE_PATH.fullmatch(path) or not name.endswith(".gguf") or is_projector(name):
        return None
    match = _LABEL.search(_SHARD.sub("", name).removesuffix(".gguf"))
    return match[1].upper() if match else None


def has_gguf(paths: Iterable[str]) -> bool:
    """Returns whether a repository has models in GGUF."""
    return any(get_quantization(path) for path in paths)


def is_weights_file(path: str) -> bool:
    return path.endswith(".safetensors")


def check_loadable(repo: str, paths: Iterable[str], subfolder: str | None = None) -> None:
    """Raises AppError(MODEL_FILES) for a repository without a loadable model. The message lists the
    formats in the repository. subfolder: see `select_files`."""
    prefix = "" if subfolder is None else f"{subfolder}/"
    paths = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
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
    if "adapter_config.json" in paths or "adapters.safetensors" in paths:
        return "is a LoRA adapter and not a model: use the model that it was trained for"
    if any(path.endswith(".gguf") for path in paths):
        return (
            "contains GGUF files without a known quantization in their names: download one, and "
            "serve the file"
        )
    if any(path.endswith(_PICKLED) for path in paths):
        return (
            "contains pickled weights, which are never opened because they can run code: "
            "use the same model in the safetensors format"
        )
    return "has no .safetensors file in its top-level folder: it is not a language model"
