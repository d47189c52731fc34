"""Architectures that have no file here, run through the classes of the library mlx-lm.

Knows: how that library names and makes its models; the contract of models/base.py. Must not know:
any one architecture. The only module that imports it, and only when such a model is loaded: it
brings transformers along and takes about a second. Nothing is downloaded, and no code from a
model's folder runs.

What is lost against a file of our own: the rows of a batch are evaluated one by one, so a batch
saves nothing; a context cannot shift; and a prompt's last chunk computes the logits of all its
positions, though only the last are read (those of the chunks before are never computed).
"""

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import re
import resource
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import mlx.core as mx

from models.base import Model, ModelError
from models.kv import LayerCache
from models.mlx_lm_cache import MlxLmBatch, MlxLmLayerCache, wrap_cache

_LIBRARY = "mlx_lm"
# by the library's own name: what an index has under ours may be anybody's
_INSTALL_HINT = 'pip install "mlx-lm>=0.32"'

# how config.json names the positions that a model was made for; the first that is there
_CONTEXT_LENGTH_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "model_max_length",
    "max_context_length",
    "n_positions",
    "n_ctx",
    "seq_length",
    "block_size",
)
_MAX_INT32 = 1 << 31
_VOCAB_SIZE_KEYS = ("vocab_size", "padded_vocab_size", "n_vocab")

# where classes for text and pictures keep the text part; see models/multimodal.py
_TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What a server asks of config.json; the rest is between it and mlx-lm."""

    max_position_embeddings: int
    vocab_size: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        return cls(
            max_position_embeddings=_first_positive_int(
                config, _CONTEXT_LENGTH_KEYS, "context length"
            ),
            vocab_size=_first_positive_int(config, _VOCAB_SIZE_KEYS, "vocabulary size"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What `models.build` finds in a file of ours: a Config and a Model."""

    Config: type[AdapterConfig]
    Model: Callable[[AdapterConfig], Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelClasses:
    """Of one architecture in mlx-lm. wraps: whether they want the text part's config inside of that
    of a whole."""

    kind: str
    model: Any
    arguments: Any
    wraps: bool = False


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """mlx-lm's class for config["model_type"]. Raises ModelError where there is none, or where
    the library is not installed."""
    kind: str = config["model_type"]
    found = importlib.util.find_spec(_LIBRARY)
    if found is None:
        raise ModelError(
            f"model_type {kind!r} is not supported, but mlx-lm may support it: {_INSTALL_HINT}"
        )
    if config.get("model_file") is not None:
        raise ModelError(
            "config.json's model_file would run code from the model folder, which is not allowed"
        )
    folders = found.submodule_search_locations or ()
    # a second of imports only for what is not there by its own name
    if not any((Path(folder) / "models" / f"{kind}.py").is_file() for folder in folders):
        _resolve_classes(config)

    def make(_: AdapterConfig) -> Model:
        return _build_model(_resolve_classes(config), config)

    return Architecture(Config=AdapterConfig, Model=make)


def _build_model(classes: _ModelClasses, config: Mapping[str, Any]) -> Model:
    # theirs may write into what they are given
    given: dict[str, Any] = copy.deepcopy(dict(config))
    if classes.wraps:
        given = {"model_type": classes.kind, "text_config": given}
    lacking = [
        field.name
        for field in dataclasses.fields(classes.arguments)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in given
    ]
    if lacking:
        raise ModelError(f"config.json lacks {', '.join(lacking)}")
    with _as_model_error(f"mlx-lm cannot build its {classes.kind} from this config.json"):
        made: Any = _subclass_model(classes)(classes.arguments.from_dict(given))
    # refuses here rather than at the first request
    with _as_model_error(f"mlx-lm cannot make caches for its {classes.kind} from this config.json"):
        made.make_kv()
    return made


def _subclass_model(classes: _ModelClasses) -> Any:
    """Their class with our contract, as a subclass: so parameters keep the names that they have in
    checkpoints."""
    theirs, cache = classes.model, _import_cache()

    class MlxLmModel(theirs):
        # its norms and its attention are MLX's, whose order suits the shape
        batch_invariant: ClassVar[bool] = False

        def __call__(self, tokens: mx.array, kv: Sequence[Any]) -> mx.array:
            """[B, L] ids -> their logits [B, L, V], lazy; `logits` passes them on."""
            if not isinstance(kv[0], MlxLmBatch):
                return self._forward(tokens, kv)
            rows: Any = zip(*(layer.rows for layer in kv), strict=True)
            return mx.concatenate(
                [
                    self._forward(tokens[i : i + 1], row)
                    for i, row in enumerate(cast(Sequence[Sequence[MlxLmLayerCache]], list(rows)))
                ]
            )

        def logits(self, hidden: mx.array) -> mx.array:
            return hidden

        def make_kv(self) -> list[LayerCache]:
            return [wrap_cache(one, cache) for one in cache.make_prompt_cache(self)]

        def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
            return False

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = _add_text_prefix(weights, self.parameters())
            if not hasattr(theirs, "sanitize"):
                return weights
            with _as_model_error(f"mlx-lm's {classes.kind} cannot use these tensors"):
                return super().sanitize(weights)

        def _forward(self, tokens: mx.array, kv: Sequence[MlxLmLayerCache]) -> mx.array:
            end = kv[0].offset + tokens.shape[1]
            lent = [layer.to_mlx_lm(cache) for layer in kv]
            with _as_model_error(f"mlx-lm's {classes.kind} cannot be run with this config.json"):
                logits: mx.array = super().__call__(tokens, cache=lent)
            for layer, given in zip(kv, lent, strict=True):
                if not layer.update_from_mlx_lm(given, tokens.shape[1]) or layer.offset != end:
                    raise ModelError(
                        f"mlx-lm's {classes.kind} has a cache that does not advance by "
                        "one entry per "
                        "position, which is not supported"
                    )
            return logits

    return MlxLmModel


# names


def _add_text_prefix(weights: Mapping[str, mx.array], parameters: Any) -> dict[str, mx.array]:
    """Tensors under the names that the class has for them: of a multimodal checkpoint we have the
    text part alone, named as if it were all."""
    for nested, plain in _TEXT_PREFIXES:
        inner: Any = parameters
        for key in nested.split(".")[:-1]:
            inner = inner.get(key, {}) if isinstance(inner, dict) else {}
        if inner:
            return {
                nested + name.removeprefix(plain) if name.startswith(plain) else name: array
                for name, array in weights.items()
            }
    return dict(weights)


def _first_positive_int(config: Mapping[str, Any], names: Sequence[str], meaning: str) -> int:
    for name in names:
        value = config.get(name)
        if type(value) is int and 0 < value < _MAX_INT32:  # True is one, too
            return value
    raise ModelError(f"config.json does not give the {meaning}: add {names[0]}")


# the library


def _resolve_classes(config: Mapping[str, Any]) -> _ModelClasses:
    """Found as mlx-lm finds them: by architecture, by another name for the same, by name."""
    utils = _import_utils()
    kind: str = config["model_type"]
    said: Any = config.get("architectures")
    names = [str(name) for name in (said if isinstance(said, list) else [said])]
    byname = utils.MODEL_ARCHITECTURE_REMAPPING
    found = [byname[kind, name] for name in names if (kind, name) in byname]
    name = found[0] if found else utils.MODEL_REMAPPING.get(kind, kind)
    if (module := _import_model_module(name)) is not None:
        return _ModelClasses(kind=kind, model=module.Model, arguments=module.ModelArgs)
    # some have a class for the whole only, not for its text part
    whole = name.removesuffix("_text")
    if whole != name and (module := _import_model_module(whole)) is not None:
        return _ModelClasses(kind=whole, model=module.Model, arguments=module.ModelArgs, wraps=True)
    raise ModelError(f"model_type {kind!r} is not supported, and mlx-lm does not support it either")


def _import_model_module(name: str) -> Any:
    """Of an architecture; None for anything else that is there, or is not."""
    # the name goes into an import
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        return None
    whole = f"{_LIBRARY}.models.{name}"
    with _as_model_error(f"{whole} cannot be imported"):
        try:
            found = importlib.import_module(whole)
        except ModuleNotFoundError as error:
            if error.name != whole:
                raise
            return None
    return found if {"Model", "ModelArgs"} <= vars(found).keys() else None


def _import_utils() -> Any:
    with _as_model_error("mlx-lm cannot be imported"), _keep_open_file_limit():
        from mlx_lm import utils

        return utils


def _import_cache() -> Any:
    from mlx_lm.models import cache

    return cache


@contextlib.contextmanager
def _keep_open_file_limit() -> Generator[None]:
    """When it is imported, mlx-lm (0.32) sets how many files the process may open: too few for a
    busy server, and no way back up. Nobody else sets anything meanwhile."""
    setrlimit = resource.setrlimit

    def ignore(limited: int, limits: tuple[int, int], /) -> None:
        pass

    resource.setrlimit = ignore
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


@contextlib.contextmanager
def _as_model_error(message: str) -> Generator[None]:
    """Whatever their code raises over a checkpoint becomes one line."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # what MLX says of wrong arguments goes on for lines
        said = str(error).partition("\n")[0]
        raise ModelError(f"{message}: {type(error).__name__}: {said}") from error
