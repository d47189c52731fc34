"""Parses model names: a folder, a hub ID, an Ollama name, or `builtin`.

Knows: the syntax of each kind of name. Must not know: the existing models.

Parsed names are safe to use in paths: no part can refer to a path outside the folder in which it is
looked up.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError, ErrorKind

BUILTIN = "builtin"

# Ollama's defaults
DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG = "registry.ollama.ai", "library", "latest"

_PATH_STARTS = ("/", "./", "../", "~")

# the parts of a hub ID, by huggingface_hub's own rule; `--` and `..` are also forbidden
_ORGANIZATION_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REPOSITORY_PATTERN = re.compile(r"\w[\w.-]{0,95}", re.ASCII)
# the labels of quantizations in file names of GGUF repositories; Ollama's tags are other words
_QUANTIZATION_PATTERN = re.compile(
    r"(.+):((?:UD-)?(?:I?Q\d[A-Z0-9_]{0,16}|BF16|F16|F32|MXFP4(?:_MOE)?))", re.IGNORECASE
)
# the file of a repository in GGUF that a name without a label selects
USUAL_QUANTIZATION = "Q4_K_M"
_HUB_HOSTS = ("hf.co/", "huggingface.co/")
# a folder whose name is the format of the weights in it, such as 4bit, mxfp4 or bf16
_FORMAT_PATTERN = re.compile(r"(mx|nv)?fp[48]|[bf](p|f)?(16|32)|fp(16|32)|\d{1,2}[-_]?bits?|q\d\w*")
_REVISION_PATTERN = re.compile(r"\w[\w./-]{0,254}", re.ASCII)

# the parts of an Ollama name; only the host may contain a colon, before its port
_HOST_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,253}(:\d{1,5})?")
_PART_PATTERN = re.compile(r"\w[\w.-]{0,79}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository on the Hugging Face hub. revision: a branch, a tag or a commit; None is the main
    branch. subfolder: the folder of the model, in a repository that has the same model in several
    formats, such as 4bit; None selects one. quantization: selects one of the repository's GGUF
    files, such as Q4_K_M."""

    repo_id: str
    revision: str | None = None
    subfolder: str | None = None
    quantization: str | None = None

    def __str__(self) -> str:
        path = self.repo_id if self.subfolder is None else f"{self.repo_id}/{self.subfolder}"
        text = path if self.revision is None else f"{path}@{self.revision}"
        return text if self.quantization is None else f"{text}:{self.quantization}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaName:
    """A fully qualified model in Ollama's store: manifests/<host>/<namespace>/<model>/<tag>."""

    host: str
    namespace: str
    model: str
    tag: str

    def __str__(self) -> str:
        """Returns the shortest form of the name, without defaults."""
        parts = [self.model]
        if self.namespace != DEFAULT_NAMESPACE or self.host != DEFAULT_HOST:
            parts.insert(0, self.namespace)
        if self.host != DEFAULT_HOST:
            parts.insert(0, self.host)
        return "/".join(parts) + (f":{self.tag}" if self.tag != DEFAULT_TAG else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """A name and its possible interpretations. Impossible interpretations are None."""

    text: str
    folder: Path | None
    hub: HubName | None
    ollama: OllamaName | None


def parse_model_name(text: str) -> ModelName:
    """Parses a name. Raises AppError(MODEL_NOT_FOUND) if no interpretation is valid."""
    if "\0" in text or not text.strip():
        raise _name_error(text, "is not the name of a model")
    if "://" in text:
        raise _name_error(text, "is a URL: use only the name, such as org/name")
    folder = Path(text)
    if text.startswith("~"):
        folder = _expand_user(folder)
    if text in (".", "..") or text.startswith(_PATH_STARTS):
        return ModelName(text=text, folder=folder, hub=None, ollama=None)
    name = ModelName(
        text=text, folder=folder, hub=parse_hub_name(text), ollama=parse_ollama_name(text)
    )
    if name.hub is None and name.ollama is None and not folder.is_dir():
        raise _name_error(
            text,
            "is neither a folder nor a valid model name: use org/name or org/name@revision for the "
            "hub, or name:tag or namespace/name:tag for Ollama's store",
        )
    return name


def parse_hub_name(text: str) -> HubName | None:
    """Parses org/name or org/name@revision, org/name/4bit for a folder of a repository, and for
    GGUF files org/name:Q4_K_M. hf.co/ may precede it, as in Ollama and llama.cpp."""
    for host in _HUB_HOSTS:
        text = text.removeprefix(host)
    quantization = None
    if match := _QUANTIZATION_PATTERN.fullmatch(text):
        text, quantization = match[1], match[2].upper()
    repo, at, revision = text.partition("@")
    organization, slash, name = repo.partition("/")
    name, inside, subfolder = name.partition("/")
    if inside and not is_format_folder(subfolder):
        return None
    repo = f"{organization}/{name}"
    if (
        not slash
        or not _ORGANIZATION_PATTERN.fullmatch(organization)
        or not _REPOSITORY_PATTERN.fullmatch(name)
    ):
        return None
    if "--" in repo or ".." in repo or repo.endswith((".git", ".", "-")):
        return None
    if at and not is_revision(revision):
        return None
    return HubName(
        repo_id=repo,
        revision=revision or None,
        subfolder=subfolder or None,
        quantization=quantization,
    )


def is_format_folder(name: str) -> bool:
    """Returns whether a folder of a repository has the name of a format, such as 4bit or bf16."""
    return bool(_FORMAT_PATTERN.fullmatch(name.lower()))


def is_revision(text: str) -> bool:
    """Returns whether `text` may be a branch, a tag or a commit."""
    safe = all(part and not part.startswith(".") for part in text.split("/"))
    return bool(_REVISION_PATTERN.fullmatch(text)) and safe and ".." not in text


def parse_ollama_name(text: str) -> OllamaName | None:
    """Parses name, name:tag, namespace/name:tag or host/namespace/name:tag."""
    path, colon, tag = text.rpartition(":")
    if not colon or "/" in tag:
        path, tag = text, DEFAULT_TAG
    match path.split("/"):
        case [model]:
            host, namespace = DEFAULT_HOST, DEFAULT_NAMESPACE
        case [namespace, model]:
            host = DEFAULT_HOST
        case [host, namespace, model]:
            pass
        case _:
            return None
    parts = (namespace, model, tag)
    if not _HOST_PATTERN.fullmatch(host) or not all(map(_PART_PATTERN.fullmatch, parts)):
        return None
    if any(".." in part for part in (host, *parts)):
        return None
    return OllamaName(host=host, namespace=namespace, model=model, tag=tag)


def _expand_user(folder: Path) -> Path:
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise _name_error(str(folder), f"is not a folder: {error}") from error


def _name_error(text: str, why: str) -> AppError:
    return AppError(ErrorKind.MODEL_NOT_FOUND, f"{text!r} {why}")


class ModelNotFoundError(AppError):
    """The model is not installed, or is incomplete.

    hub: the repository from which the model can be downloaded, or None.
    """

    def __init__(self, message: str, *, hub: HubName | None = None) -> None:
        super().__init__(ErrorKind.MODEL_NOT_FOUND, message)
        self.hub = hub
