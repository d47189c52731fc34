"""Runs architectures that are not implemented here with mlx-lm's model classes.

Knows: the names and the constructors of mlx-lm's models, the interface of models/base.py. Must not
know: individual architectures.

This is the only module that imports mlx-lm. It does so only when such a model is loaded, because
the import takes about a second (it imports transformers). Nothing is downloaded, and no code from a
model's folder is run.

The adapter has three disadvantages compared with native architectures. The rows of a batch are
computed one by one, so batching gives no speedup. Context shift is not supported. The last chunk of
a prompt computes the logits of all its positions, although only the last position needs them.
Logits of earlier chunks are never computed.
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

from models.attention_pieces import device_of_shape
from models.attention_route import longest_query
from models.base import Model, ModelError, SelectPositions, select_all
from models.checkpoint_config import explain_missing_library, num_query_heads
from models.kv import LayerCache, evaluate_caches
from models.mlx_lm_cache import MlxLmBatch, MlxLmLayerCache, wrap_caches
from models.mlx_lm_config import ClassKeys, find_class_keys, normalize_config

_LIBRARY = "mlx_lm"

# the config keys of the context length, in order of preference
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

# the prefixes of the text model in multimodal classes; see models/multimodal.py
_TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The config values that the server needs. mlx-lm reads all other values."""

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
    """Has the same attributes as an architecture module: Config and Model."""

    Config: type[AdapterConfig]
    Model: Callable[[AdapterConfig], Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelClasses:
    """The classes of an architecture in mlx-lm. keys: the config keys that they use. wraps: whether
    they expect the text config inside the config of a multimodal model."""

    kind: str
    model: Any
    arguments: Any
    keys: ClassKeys
    wraps: bool = False


def find_architecture(
    config: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> Architecture:
    """Returns mlx-lm's class for a checkpoint. config: the config of the text model. whole: the
    config of the whole model; None if it is a text model. mlx-lm's class for the whole model is
    preferred. Raises ModelError if there is none, or if the library is not installed."""
    kind: str = config["model_type"]
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None:
        raise ModelError(explain_missing_library(kind))
    if config.get("model_file") is not None:
        raise ModelError(
            "config.json's model_file refers to code in the model folder, which must not be run"
        )
    folders = spec.submodule_search_locations or ()
    # import the library only if no file has that name, because the import takes a second
    if not any((Path(folder) / "models" / f"{kind}.py").is_file() for folder in folders):
        _resolve_classes(config, whole)

    def make(_: AdapterConfig) -> Model:
        return _build_model(_resolve_classes(config, whole), config, whole)

    return Architecture(Config=AdapterConfig, Model=make)


def _build_model(
    classes: _ModelClasses, config: Mapping[str, Any], whole: Mapping[str, Any] | None
) -> Model:
    normalized = normalize_config(config, classes.keys)
    given = normalized.config
    if classes.wraps:
        # mlx-lm's classes may modify the config
        outer = copy.deepcopy(dict(whole)) if whole is not None else {"model_type": classes.kind}
        given = {**outer, "text_config": given}
    lacking = [
        field.name
        for field in dataclasses.fields(classes.arguments)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in given
    ]
    if lacking:
        raise ModelError(f"config.json lacks {', '.join(lacking)}")
    with _as_model_error(
        f"mlx-lm's {classes.kind} implementation does not support this config.json"
    ):
        heads = num_query_heads(normalized.config)
        subclass = _subclass_model(classes, heads, normalized.window)
        made: Any = subclass(classes.arguments.from_dict(given))
    normalized.check_rope(made)
    # fail here rather than at the first request
    with _as_model_error(
        f"mlx-lm's {classes.kind} implementation cannot create caches for this config.json"
    ):
        made.make_kv()
    return made


def _subclass_model(classes: _ModelClasses, heads: int, window: int | None) -> Any:
    """Returns mlx-lm's class with our interface. The result is a subclass, so that parameters keep
    their checkpoint names. heads: the number of query heads. window: of all layers; None if the
    class creates its caches."""
    base, cache = classes.model, _import_cache()

    class MlxLmModel(base):
        # MLX's norms and attention select the summation order by shape
        batch_invariant: ClassVar[bool] = False
        kv_dtype: mx.Dtype | None = None

        def __call__(
            self, tokens: mx.array, kv: Sequence[Any], select: SelectPositions = select_all
        ) -> mx.array:
            """Returns the logits [B, L, V] of tokens [B, L]. They are lazy. `logits` returns its
            input."""
            if not isinstance(kv[0], MlxLmBatch):
                return select(_forward_in_parts(self._forward, tokens, kv))
            return select(_forward_rows(self._forward, tokens, kv))

        def logits(self, hidden: mx.array) -> mx.array:
            return hidden

        def make_kv(self) -> list[LayerCache]:
            if window is None:
                made = cache.make_prompt_cache(self)
            else:
                made = [cache.RotatingKVCache(max_size=window) for _ in self.layers]
            return wrap_caches(made, cache, heads=heads, dtype=self.kv_dtype)

        def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
            return False

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = _add_text_prefix(weights, self.parameters())
            if not hasattr(base, "sanitize"):
                return weights
            with _as_model_error(f"mlx-lm's {classes.kind} implementation rejects these tensors"):
                return super().sanitize(weights)

        def _forward(self, tokens: mx.array, kv: Sequence[MlxLmLayerCache]) -> mx.array:
            end = kv[0].offset + tokens.shape[1]
            wrapped = [layer.to_mlx_lm(cache) for layer in kv]
            with _as_model_error(f"mlx-lm's {classes.kind} implementation fails with this config"):
                logits: mx.array = super().__call__(tokens, cache=wrapped)
            for layer, given in zip(kv, wrapped, strict=True):
                if not layer.update_from_mlx_lm(given, tokens.shape[1]) or layer.offset != end:
                    raise _unsupported_cache_error(classes.kind)
            return logits

    return MlxLmModel


def _forward_rows(
    forward: Callable[[mx.array, Sequence[MlxLmLayerCache]], mx.array],
    tokens: mx.array,
    kv: Sequence[Any],
) -> mx.array:
    """Computes one row of a batch at a time. kv: an MlxLmBatch per layer."""
    rows: Any = zip(*(layer.rows for layer in kv), strict=True)
    return mx.concatenate(
        [
            forward(tokens[i : i + 1], row)
            for i, row in enumerate(cast(Sequence[Sequence[MlxLmLayerCache]], list(rows)))
        ]
    )


def _forward_in_parts(
    forward: Callable[[mx.array, Sequence[MlxLmLayerCache]], mx.array],
    tokens: mx.array,
    kv: Sequence[MlxLmLayerCache],
) -> mx.array:
    """Computes fewer positions at a time if the scores of all of them would not fit into one piece
    (models/attention_route.py), because mlx-lm does not compute pieces."""
    length = tokens.shape[1]
    step = _longest_part(kv, length)
    parts: list[mx.array] = []
    for start in range(0, length, step):
        if parts:
            evaluate_caches(kv)
        parts.append(forward(tokens[:, start : start + step], kv))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _longest_part(kv: Sequence[MlxLmLayerCache], length: int) -> int:
    """Returns the number of positions that are computed together, at most `length`."""
    if length == 1:
        return 1
    total = kv[0].offset + length
    return min(
        (
            longest_query(device_of_shape(shape), shape, total, length)
            for layer in kv
            for shape in layer.attention_shapes
        ),
        default=length,
    )


def _unsupported_cache_error(kind: str) -> ModelError:
    return ModelError(
        f"mlx-lm's {kind} implementation has a cache that does not advance by one entry per "
        "position, which is not supported"
    )


# names


def _add_text_prefix(weights: Mapping[str, mx.array], parameters: Any) -> dict[str, mx.array]:
    """Returns the tensors under the names that the class uses. The text model of a multimodal
    checkpoint is passed to this function with the names of a text-only checkpoint."""
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
        if type(value) is int and 0 < value < _MAX_INT32:  # not isinstance, because True is an int
            return value
    raise ModelError(f"config.json does not define the {meaning}: add {names[0]}")


# the library


def _resolve_classes(
    config: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> _ModelClasses:
    """Looks up the classes of the whole model, and then those of the text model. See
    `find_architecture`."""
    if whole is not None and isinstance(whole.get("model_type"), str):
        found = _resolve_kind(whole["model_type"], whole)
        if found is not None and "text_config" in found.keys.arguments:
            return dataclasses.replace(found, wraps=True)
    kind: str = config["model_type"]
    found = _resolve_kind(kind, config)
    if found is not None:
        return found
    # some models have a class only for the multimodal model
    base = kind.removesuffix("_text")
    if base != kind and (found := _resolve_kind(base, config)) is not None:
        return dataclasses.replace(found, kind=base, wraps="text_config" in found.keys.arguments)
    raise ModelError(f"model_type {kind!r} is not supported, and mlx-lm does not support it either")


def _resolve_kind(kind: str, config: Mapping[str, Any]) -> _ModelClasses | None:
    """Looks up the classes in the same order as mlx-lm: by architecture, by alias, by name."""
    utils = _import_utils()
    declared: Any = config.get("architectures")
    names = [str(name) for name in (declared if isinstance(declared, list) else [declared])]
    byname = utils.MODEL_ARCHITECTURE_REMAPPING
    remapped = [byname[kind, name] for name in names if (kind, name) in byname]
    module = _import_model_module(
        remapped[0] if remapped else utils.MODEL_REMAPPING.get(kind, kind)
    )
    if module is None:
        return None
    keys = find_class_keys(module)
    return _ModelClasses(kind=kind, model=module.Model, arguments=module.ModelArgs, keys=keys)


def _import_model_module(name: str) -> Any:
    """Returns the module of an architecture. Returns None if there is no module of that name, or if
    it is not an architecture."""
    # the name is used in an import, so its characters are restricted
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        return None
    module_name = f"{_LIBRARY}.models.{name}"
    with _as_model_error(f"{module_name} cannot be imported"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise
            return None
    return module if {"Model", "ModelArgs"} <= vars(module).keys() else None


def _import_utils() -> Any:
    with _as_model_error("mlx-lm cannot be imported"), _keep_open_file_limit():
        from mlx_lm import utils

        return utils


def _import_cache() -> Any:
    from mlx_lm.models import cache

    return cache


@contextlib.contextmanager
def _keep_open_file_limit() -> Generator[None]:
    """Keeps the limit of open files. mlx-lm (0.32) lowers the limit when it is imported. The lower
    limit is too low for a busy server and cannot be raised again. No other code sets a limit at the
    same time."""
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
    """Converts any exception of mlx-lm's code to a ModelError with a message of one line."""
    try:
        yield
    except ModelError:
        raise
    except (Exception, SystemExit) as error:  # mlx-lm's olmo exits if a package is missing
        # MLX's messages for wrong arguments have many lines
        summary = str(error).partition("\n")[0]
        raise ModelError(f"{message}: {type(error).__name__}: {summary}") from error
