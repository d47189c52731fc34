"""Model names as spelled by Ollama's clients: with a tag or a registry, in upper or lower case.

Knows: the spellings of one name. Must not know: which models exist, where they are.
"""

from collections.abc import Iterator

from app.api.fields import invalid_request
from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.ports import Models, ResolvedModel

DEFAULT_TAG = ":latest"

# longer texts are rejected
MAX_NAME_CHARS = 512

# host prefixes that clients may use: Ollama's registry, and Ollama's prefixes for the hub
_PREFIXES = ("registry.ollama.ai/library/", "registry.ollama.ai/", "library/")
HUB_PREFIXES = ("hf.co/", "huggingface.co/")


def add_tag(name: str) -> str:
    """Returns the name with a tag. Clients such as Open WebUI compare names with tags."""
    return name if ":" in name.rpartition("/")[2] else name + DEFAULT_TAG


def get_name(**fields: str | None) -> str:
    """Returns the name of a model from the first field that is set. Raises AppError(INVALID)."""
    param = next(iter(fields))
    names = [name for name in fields.values() if name]
    if not names or not names[0].strip() or "\0" in names[0]:
        raise invalid_request(param, "model is required")
    for name in names:
        if len(name) > MAX_NAME_CHARS:
            raise invalid_request(
                param, f"the name of a model has at most {MAX_NAME_CHARS} characters"
            )
    return names[0]


async def find_model(models: Models, name: str | None) -> ResolvedModel:
    """Returns the model of that name, or the only model. Raises AppError(MODEL_NOT_FOUND), and
    AppError(INVALID) without a name if there are several models."""
    if name is None and len(models.list_model_states()) == 1:
        return await models.resolve(None)
    if name is None or not name.strip() or len(name) > MAX_NAME_CHARS:
        raise invalid_request("model", "model is required")
    for spelled in _iter_spellings(name, models):
        try:
            return await models.resolve(spelled)
        except AppError as error:
            if error.kind is not ErrorKind.MODEL_NOT_FOUND:
                raise
    raise not_found_error(name)


def not_found_error(name: str) -> AppError:
    shown = mark_client_text(name[:MAX_NAME_CHARS])
    return AppError(ErrorKind.MODEL_NOT_FOUND, f"model '{shown}' not found", param="model")


def strip_prefix(name: str) -> str:
    """Returns the name without the host of a registry."""
    for prefix in (*_PREFIXES, *HUB_PREFIXES):
        if name.lower().startswith(prefix):
            return name[len(prefix) :]
    return name


def _iter_spellings(name: str, models: Models) -> Iterator[str]:
    """Yields the name, the name without a registry host, then the names of models that differ from
    it only in spelling."""
    yield name
    if (stripped := strip_prefix(name)) != name:
        yield stripped
    normalized = normalize(name)
    for card in models.list_models():
        if card.id != name and normalize(card.id) == normalized:
            yield card.id


def normalize(name: str) -> str:
    return strip_prefix(name).removesuffix(DEFAULT_TAG).casefold()
