"""Converts config.json to the form that mlx-lm's classes read, and finds keys that they ignore.

Knows: the keys of config.json that transformers 4 and 5 write, the arguments of mlx-lm's classes,
their source text. Must not know: tensors, caches.

transformers 5 writes the settings of rope only inside `rope_parameters`, where most of mlx-lm's
classes do not look, so that they would use their defaults. It also omits keys that are the same for
every model of an architecture. A class ignores the keys that are not among its arguments. Therefore
keys that change the logits must be read, either by the class or by this module.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError
from models.config_check import changes_logits

_PACKAGE = "mlx_lm.models"
_MAX_DEPTH = 32

# transformers writes a float that JSON does not have as an object
_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf}

_FULL, _SLIDING = "full_attention", "sliding_attention"

# the names of a window among the arguments of classes
_WINDOW_KEYS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
_LAYER_KINDS = (
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "block_types",
    "is_moe_layer",
    "full_attn_idxs",
)

# the names of the theta of sliding layers, of all other layers, and of the share of rotated
# dimensions among the arguments of classes
_LOCAL_THETA_KEYS = ("rope_local_base_freq", "swa_rope_theta", "local_rope_theta")
_THETA_KEYS = ("rope_theta", "rotary_emb_base", "rope_base")
_SHARE_KEYS = ("partial_rotary_factor", "rotary_pct", "rotary_dim", "rope_pct")

# the keys that a type of rope scaling uses
_YARN_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)
_SCALING_KEYS: Mapping[str, Sequence[str]] = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": _YARN_KEYS,
    "deepseek_yarn": _YARN_KEYS,
    "longrope": ("long_factor", "original_max_position_embeddings", "attention_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
    # Hunyuan's
    "dynamic": ("alpha",),
}
# the keys of the activation, and the activations of names in the source text of classes
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
_ACTIVATION_OF_NAME: Mapping[str, str] = {
    **dict.fromkeys(("silu", "swiglu", "precise_swiglu", "clamped_swiglu", "SwitchGLU"), "silu"),
    **dict.fromkeys(("gelu", "gelu_approx", "gelu_fast_approx", "geglu", "SwitchMLP"), "gelu"),
    **dict.fromkeys(("relu2", "relu_squared"), "relu2"),
    "relu": "relu",
}
# types that do not change the rotation of text within the context length (models/rope.py)
_UNSCALED_TYPES = ("default", "dynamic", "mrope")


class _ReadKeys(dict[str, Any]):
    """A dict that records which of its keys were read. used: these keys."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.used.add(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:
        self.used.update(super().__iter__())
        return super().__iter__()

    def keys(self) -> Any:
        self.used.update(super().keys())
        return super().keys()

    def items(self) -> Any:
        self.used.update(super().keys())
        return super().items()

    def values(self) -> Any:
        self.used.update(super().keys())
        return super().values()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassKeys:
    """The config keys that a class of mlx-lm uses. name: its module's. arguments: the fields of
    its dataclasses. required: the arguments without a default. used: the keys that its source text
    contains outside the declarations of fields. activations: the activations that it names."""

    name: str
    arguments: frozenset[str]
    required: frozenset[str]
    used: frozenset[str]
    activations: frozenset[str]

    def reads(self, *names: str) -> bool:
        """Returns whether the class uses at least one of these keys."""
        return any(name in self.used for name in names)


@dataclass(slots=True, kw_only=True)
class ClassConfig:
    """A config in the form that a class reads. config: the keys and values. window: the number of
    positions that all layers attend to, if the class has no windows, so that its caches must have
    them. `check_rope` completes the checks after the model was built."""

    config: dict[str, Any]
    window: int | None = None
    _rope: "_RopeFacts | None" = None
    _keys: ClassKeys | None = None
    _recorded: Sequence[_ReadKeys] = field(default_factory=tuple)

    def check_rope(self, model: nn.Module) -> None:
        """Raises ModelError for a setting of rope that the class did not read when it built
        `model`. If it did not read the theta, or how many dimensions are rotated, they are set
        here."""
        if self._rope is None or self._keys is None or self.config.get("mla_use_nope"):
            return
        used = self._keys.used.union(*(one.used for one in self._recorded))
        ropes = [module for module in model.modules() if type(module) is nn.RoPE]
        theta = self._rope.main.get("rope_theta")
        if theta is not None and not used & {*_THETA_KEYS}:
            if not ropes or not isinstance(theta, int | float) or not theta > 0:
                raise _ignored_error(self._keys, "rope_theta")
            for rope in ropes:
                rope.base = theta
        self._rope.check(self._keys, used)
        share = self.config.get("partial_rotary_factor")
        if share in (None, 1) or used & {*_SHARE_KEYS, "qk_rope_head_dim"}:
            return
        if not ropes or not isinstance(share, int | float) or not 0 < share < 1:
            raise _ignored_error(self._keys, "partial_rotary_factor")
        size = _find_head_dim(self.config)
        for rope in ropes:
            # a class may have the usual share of its architecture as a constant
            rope.dims = int((size or rope.dims) * share)


def normalize_config(config: Mapping[str, Any], keys: ClassKeys) -> ClassConfig:
    """Returns the config of a text model for a class. Raises ModelError for a key that changes the
    logits and that the class does not read."""
    given = cast(dict[str, Any], _decode_floats(config))
    rope = _RopeFacts.find(given)
    if rope is not None:
        given |= {key: value for key, value in rope.keys(given).items() if _absent(given, key)}
        given["rope_scaling"] = rope.scaling(rope.main)
    elif "rope_scaling" in keys.required:
        given.setdefault("rope_scaling", None)
    for key, derive in _DERIVED_KEYS.items():
        if key in keys.arguments and _absent(given, key):
            value = derive(given)
            if value is not None:
                given[key] = value
    for key, value in _CONSTANTS.get(keys.name, {}).items():
        if _absent(given, key):
            given[key] = value(given) if callable(value) else value
    if keys.name == "exaone4":
        given["sliding_window_pattern"] = _spell_pattern(given)
    if reason := _find_fault(keys.name, given):
        raise ModelError(f"mlx-lm's {keys.name} implementation {reason}")
    window = _find_unread_window(given, keys)
    _check_critical_keys(given, keys)
    recorded: list[_ReadKeys] = []
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(given.get(key), Mapping):
            given[key] = _record(given[key], recorded)
    return ClassConfig(config=given, window=window, _rope=rope, _keys=keys, _recorded=recorded)


def find_class_keys(module: ModuleType) -> ClassKeys:
    """Returns the keys that the classes of a module of mlx-lm use. Classes of other modules that it
    imports, on which its classes are based, are included."""
    arguments: dict[str, bool] = {}
    used: set[str] = set()
    activations: set[str] = set()
    for one in find_modules(module):
        activations.update(_find_activations(one))
        for kind in vars(one).values():
            if inspect.isclass(kind) and dataclasses.is_dataclass(kind):
                for each in dataclasses.fields(kind):
                    optional = (
                        each.default is not dataclasses.MISSING
                        or each.default_factory is not dataclasses.MISSING
                    )
                    arguments[each.name] = arguments.get(each.name, False) or optional
        used.update(_find_used_names(one))
    return ClassKeys(
        name=module.__name__.rpartition(".")[2],
        arguments=frozenset(arguments),
        required=frozenset(name for name, optional in arguments.items() if not optional),
        used=frozenset(used),
        activations=frozenset(activations),
    )


def find_modules(module: ModuleType) -> Sequence[ModuleType]:
    """Returns the module, and the modules of other architectures from which it imports."""
    found, waiting = dict[str, ModuleType](), [module]
    while waiting:
        one = waiting.pop()
        if one.__name__ in found:
            continue
        found[one.__name__] = one
        for name in _find_imports(one.__name__):
            other = importlib.import_module(name)
            if "ModelArgs" in vars(other):
                waiting.append(other)
    return list(found.values())


@functools.cache
def _parse(module_name: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module_name)))


def _find_imports(module_name: str) -> Iterator[str]:
    for node in ast.walk(_parse(module_name)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module:
                yield f"{_PACKAGE}.{node.module}"
            else:
                yield from (f"{_PACKAGE}.{alias.name}" for alias in node.names)


def _find_used_names(module: ModuleType) -> Iterator[str]:
    """Yields the attributes that the source text reads, and its strings."""
    for node in ast.walk(_parse(module.__name__)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _find_activations(module: ModuleType) -> Iterator[str]:
    for node in ast.walk(_parse(module.__name__)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _ACTIVATION_OF_NAME:
                yield _ACTIVATION_OF_NAME[name]
            case _:
                pass


def _absent(config: Mapping[str, Any], key: str) -> bool:
    return config.get(key) is None


def _record(values: Mapping[str, Any], recorded: list[_ReadKeys]) -> _ReadKeys:
    inner = {
        key: _record(cast(Mapping[str, Any], value), recorded)
        if isinstance(value, Mapping)
        else value
        for key, value in values.items()
    }
    recorded.append(_ReadKeys(inner))
    return recorded[-1]


def _decode_floats(value: Any, depth: int = 0) -> Any:
    """Replaces objects such as {"__float__": "Infinity"} by the floats. The result shares no lists
    or objects with `value`, because classes may change their config."""
    if depth > _MAX_DEPTH:
        raise ModelError("config.json is nested too deeply")
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value)
        if list(items) == [_FLOAT_TAG]:
            tag = items[_FLOAT_TAG]
            if not isinstance(tag, str) or tag not in _TAGGED_FLOATS:
                raise ModelError(f"config.json: {_FLOAT_TAG} is {str(tag)[:20]!r}")
            return _TAGGED_FLOATS[tag]
        return {key: _decode_floats(one, depth + 1) for key, one in items.items()}
    if isinstance(value, list | tuple):
        return [_decode_floats(one, depth + 1) for one in cast(Sequence[Any], value)]
    return value


# rope


@dataclass(frozen=True, slots=True, kw_only=True)
class _RopeFacts:
    """The rope of a config. main, local: the settings of layers with full attention, and of layers
    with a window if they are given separately. max_positions: the context length."""

    main: Mapping[str, Any]
    local: Mapping[str, Any] | None
    max_positions: int | None

    @classmethod
    def find(cls, config: Mapping[str, Any]) -> "_RopeFacts | None":
        """Returns the rope, or None if the config does not define any."""
        parameters = config.get("rope_parameters")
        scaling = config.get("rope_scaling")
        local = None
        main: dict[str, Any] = {}
        if isinstance(parameters, Mapping):
            parameters = cast(Mapping[str, Any], parameters)
            kinds = {k: v for k, v in parameters.items() if isinstance(v, Mapping)}
            if kinds:
                main = dict(kinds.get(_FULL, next(iter(kinds.values()))))
                local = kinds.get(_SLIDING)
            else:
                main = dict(parameters)
        if isinstance(scaling, Mapping):
            main = {**main, **cast(Mapping[str, Any], scaling)}
        for key in ("rope_theta", "partial_rotary_factor"):
            if main.get(key) is None and config.get(key) is not None:
                main[key] = config[key]
        positions = config.get("max_position_embeddings")
        positions = positions if type(positions) is int else None
        return cls(main=main, local=local, max_positions=positions) if main else None

    def keys(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys that classes read, with the values of the rope."""
        theta, share = self.main.get("rope_theta"), self.main.get("partial_rotary_factor")
        found: dict[str, Any] = {
            **dict.fromkeys(_THETA_KEYS, theta),
            "partial_rotary_factor": share,
            "rotary_pct": share,
        }
        if self.local is not None:
            found |= dict.fromkeys(_LOCAL_THETA_KEYS, self.local.get("rope_theta"))
        size = _find_head_dim(config)
        if size is not None and isinstance(share, int | float):
            found["rotary_dim"] = int(size * share)
        return {key: value for key, value in found.items() if value is not None or key in config}

    def scaling(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the scaling for the class. mlx-lm's yarn has no `attention_factor`, and another
        default of the original length. With `alpha`, dynamic scaling has a fixed base."""
        kind = _scaling_type(settings)
        if kind in _UNSCALED_TYPES and settings.get("alpha") in (None, 1):
            return None
        found = {
            key: value
            for key, value in settings.items()
            if value is not None and key not in ("rope_theta",)
        }
        found |= {"rope_type": kind, "type": kind}
        if self.max_positions is not None:
            found.setdefault("original_max_position_embeddings", self.max_positions)
        attention, factor = found.get("attention_factor"), found.get("factor")
        if (
            kind == "yarn"
            and attention is not None
            and not found.get("mscale")
            and isinstance(factor, int | float)
            and factor > 1
        ):
            found["mscale"] = (found.pop("attention_factor") - 1) / (0.1 * math.log(factor))
        if found.get("truncate") is True:
            del found["truncate"]
        if kind == "longrope" and self._has_default_longrope(found):
            found.pop("attention_factor", None)
            found.pop("factor", None)
        return found

    def _has_default_longrope(self, scaling: Mapping[str, Any]) -> bool:
        original, attention = (
            scaling.get("original_max_position_embeddings"),
            scaling.get("attention_factor"),
        )
        if self.max_positions is None or not isinstance(original, int) or original < 2:
            return False
        factor = scaling.get("factor") or self.max_positions / original
        usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        same_factor = abs(factor - self.max_positions / original) < 1e-6
        return same_factor and (attention is None or abs(attention - usual) < 1e-6)

    def check(self, keys: ClassKeys, used: frozenset[str]) -> None:
        """Raises ModelError for a setting that is not among the used keys."""
        reads_parameters = "rope_parameters" in used
        scaling = self.scaling(self.main)
        self._check_scaling(keys, used, scaling)
        if self.local is None or reads_parameters:
            return
        theta = self.local.get("rope_theta")
        if theta != self.main.get("rope_theta") and not used & {*_LOCAL_THETA_KEYS}:
            raise _ignored_error(keys, f"rope_theta of {_SLIDING}")
        if self.scaling(self.local) is not None:
            raise _ignored_error(keys, f"rope scaling of {_SLIDING}")

    def _check_scaling(
        self, keys: ClassKeys, used: frozenset[str], scaling: Mapping[str, Any] | None
    ) -> None:
        if scaling is None:
            return
        kind = scaling["rope_type"]
        if kind not in _SCALING_KEYS and not used & {"rope_scaling", "rope_parameters"}:
            raise _ignored_error(keys, f"rope scaling {kind!r}")
        for key in _SCALING_KEYS.get(kind, ()):
            if scaling.get(key) is not None and key not in used:
                raise _ignored_error(keys, f"{key} of rope scaling {kind!r}")


def _scaling_type(settings: Mapping[str, Any]) -> str:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: rope_type is {str(kind)[:20]!r}, but must be a string")
    return "longrope" if kind == "su" else kind


# other keys


def _find_head_dim(config: Mapping[str, Any]) -> int | None:
    match config:
        case {"head_dim": int(size)}:
            return size
        case {"hidden_size": int(hidden), "num_attention_heads": int(heads)} if heads > 0:
            return hidden // heads
        case _:
            return None


def _first(*names: str) -> Callable[[Mapping[str, Any]], Any]:
    def derive(config: Mapping[str, Any]) -> Any:
        return next((config[name] for name in names if not _absent(config, name)), None)

    return derive


def _multiply(*names: str) -> Callable[[Mapping[str, Any]], Any]:
    def derive(config: Mapping[str, Any]) -> Any:
        values = [value for name in names if type(value := config.get(name)) is int]
        return math.prod(values) if len(values) == len(names) else None

    return derive


def _find_pattern(config: Mapping[str, Any]) -> int | None:
    """Returns the period of layers with full attention, for classes that do not read
    `layer_types`."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or _FULL not in kinds:
        return None
    period = cast("list[Any]", kinds).index(_FULL) + 1
    for layer, kind in enumerate(cast("list[Any]", kinds), 1):
        if (kind == _FULL) != (layer % period == 0):
            raise ModelError("config.json: layer_types has no period, which mlx-lm's class needs")
    return period


def _count_dense_layers(config: Mapping[str, Any]) -> int | None:
    """Returns the number of layers before the first one with experts."""
    kinds = config.get("mlp_layer_types")
    if not isinstance(kinds, list):
        return None
    dense = cast("list[Any]", kinds).count("dense")
    if any(kind != "dense" for kind in kinds[:dense]):
        raise ModelError("config.json: mlp_layer_types has dense layers after the first ones")
    return dense


def _list_expert_layers(config: Mapping[str, Any]) -> list[bool] | None:
    kinds = config.get("mlp_layer_types")
    if not isinstance(kinds, list):
        return None
    return [kind == "sparse" for kind in cast("list[Any]", kinds)]


def _list_windowed_layers(config: Mapping[str, Any]) -> list[int] | None:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return None
    return [int(kind == _SLIDING) for kind in cast("list[Any]", kinds)]


def _double_kv_heads(config: Mapping[str, Any]) -> int | None:
    heads = config.get("num_key_value_heads")
    return 2 * heads if type(heads) is int else None


def _find_attention_interval(config: Mapping[str, Any]) -> int | None:
    """Returns n if `layer_types` has full attention in every n-th layer and in no other."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or _FULL not in kinds:
        return None
    listed = cast("list[Any]", kinds)
    interval = listed.index(_FULL) + 1
    is_regular = all(
        (kind == _FULL) == (layer % interval == 0) for layer, kind in enumerate(listed, 1)
    )
    return interval if is_regular else None


# arguments of classes that are derived from other keys
_DERIVED_KEYS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "head_dim": _find_head_dim,
    "num_experts": _first("num_local_experts", "n_routed_experts"),
    "num_local_experts": _first("num_experts", "n_routed_experts"),
    "n_ctx": _first("n_positions", "max_position_embeddings"),
    "sliding_window_pattern": _find_pattern,
    "sliding_window_size": _first("sliding_window"),
    "first_k_dense_replace": _count_dense_layers,
    "full_attention_interval": _find_attention_interval,
    "is_moe_layer": _list_expert_layers,
    "hybrid_layer_pattern": _list_windowed_layers,
    "layernorm_epsilon": _first("rms_norm_eps", "layer_norm_epsilon"),
}

# The values of arguments that are not in configs of transformers 5, because they are the same for
# all models of the architecture. A function computes a value from the config.
_CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "exaone": {
        "num_layers": _first("num_hidden_layers"),
        "layer_norm_epsilon": _first("rms_norm_eps"),
    },
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mamba2": {"intermediate_size": _multiply("expand", "hidden_size")},
    "mimo_v2_flash": {
        "moe_layer_freq": _list_expert_layers,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": _first("num_attention_heads"),
        "swa_num_key_value_heads": _double_kv_heads,
        "swa_head_dim": _first("head_dim"),
        "swa_v_head_dim": _first("v_head_dim"),
        "n_shared_experts": None,
    },
    "minimax": {"shared_intermediate_size": 0, "rotary_dim": _find_head_dim},
    "qwen3_vl_moe": {"norm_topk_prob": True},
    # without dense layers, their width is not used
    "solar_open": {
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 0,
        "intermediate_size": _first("moe_intermediate_size"),
    },
}


# classes that do not read `scoring_func`, by the function that they use
_SOFTMAX_ROUTERS = ("deepseek", "deepseek_v2")
_SIGMOID_ROUTERS = (
    "deepseek_v32",
    "dots1",
    "exaone_moe",
    "glm_moe_dsa",
    "mimo_v2_flash",
    "minimax",
    "solar_open",
)

# values that are constants in the source text of a class
_FIXED_VALUES: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    # every fourth layer has no rope
    "llama4": {
        "no_rope_layers": lambda value: all(
            bool(each) == (layer % 4 != 0) for layer, each in enumerate(value, 1)
        ),
        "no_rope_layer_interval": lambda value: value == 4,
    },
    "nanochat": {"final_logit_softcapping": lambda value: value == 15},
    **{name: {"scoring_func": lambda value: value == "softmax"} for name in _SOFTMAX_ROUTERS},
    **{name: {"scoring_func": lambda value: value == "sigmoid"} for name in _SIGMOID_ROUTERS},
}


def _spell_pattern(config: Mapping[str, Any]) -> str | None:
    """Returns EXAONE 4's pattern of local (L) and global (G) layers."""
    pattern, kinds = config.get("sliding_window_pattern"), config.get("layer_types")
    if isinstance(kinds, list):
        return "".join("L" if kind == _SLIDING else "G" for kind in cast("list[Any]", kinds))
    if type(pattern) is int and pattern > 0:
        return "L" * (pattern - 1) + "G"
    return pattern if isinstance(pattern, str) else None


def _find_fault(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns why a class must not be used, as a clause, or None."""
    if name == "jamba" and config.get("num_experts") not in (None, 1):
        return "normalizes the expert weights differently than in training"
    if name == "ernie4_5_moe" and config.get("moe_use_aux_free", True):
        return (
            "ignores the bias of the router (e_score_correction_bias): its results would be wrong"
        )
    groups = config.get("n_groups")
    if name == "mamba2" and type(groups) is int and groups > 1:
        return "normalizes all groups together: its results would be wrong with n_groups > 1"
    if name == "phi3small" and mx.default_device().type == mx.DeviceType.cpu:
        return "corrupts memory on a CPU (MLX 0.32.4)"
    return None


def _find_unread_window(config: Mapping[str, Any], keys: ClassKeys) -> int | None:
    """Returns the window of all layers if the class does not read it. Raises ModelError if only
    some of the layers have a window that the class does not read."""
    kinds = config.get("layer_types")
    kinds = cast("list[Any]", kinds) if isinstance(kinds, list) else None
    if kinds and not keys.reads(*_LAYER_KINDS, "sliding_window_pattern"):
        other = sorted({str(kind) for kind in kinds} - {_FULL, _SLIDING})
        if keys.reads("full_attention_interval"):
            if _find_attention_interval(config) != config.get("full_attention_interval"):
                raise _ignored_error(keys, "layer_types")
        # a single other type is used by all models of the architecture
        elif other and len({str(kind) for kind in kinds}) > 1:
            raise _ignored_error(keys, f"layer_types with {other[0]!r}")
    window = config.get("sliding_window")
    limit = config.get("max_position_embeddings")
    if type(window) is not int or window < 1 or config.get("use_sliding_window") is False:
        return None
    if (type(limit) is int and window >= limit) or keys.reads(*_WINDOW_KEYS):
        return None
    if kinds is None:
        return window
    if _SLIDING not in kinds:
        return None
    if _FULL in kinds:
        raise _ignored_error(keys, "sliding_window of some layers")
    return window


def _check_critical_keys(config: Mapping[str, Any], keys: ClassKeys) -> None:
    for key, value in config.items():
        fixed = _FIXED_VALUES.get(keys.name, {}).get(key)
        if keys.reads(key) and fixed is None:
            continue
        if key in (*_THETA_KEYS, *_SHARE_KEYS, *_LOCAL_THETA_KEYS, *_WINDOW_KEYS):
            continue  # checked with the values that they have
        if fixed is not None:
            ignored = value is not None and not fixed(value)
        elif key in _ACTIVATION_KEYS:
            ignored = _is_other_activation(value, keys)
        else:
            ignored = changes_logits(key, value)
        if ignored:
            raise _ignored_error(keys, key)


def _is_other_activation(value: Any, keys: ClassKeys) -> bool:
    """Returns whether the source text names activations, but not this one. The forms of GELU, which
    differ by less than 0.0005, count as one."""
    if not isinstance(value, str) or not keys.activations:
        return False
    kind = {"swish": "silu", "swiglu": "silu", "sqrelu": "relu2"}.get(value, value)
    return ("gelu" if "gelu" in kind else kind) not in keys.activations


def _ignored_error(keys: ClassKeys, key: str) -> ModelError:
    return ModelError(
        f"config.json sets {key}, which mlx-lm's {keys.name} implementation ignores: its results "
        "would be wrong"
    )
