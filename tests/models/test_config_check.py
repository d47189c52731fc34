"""Values of config.json have the right type and a sensible size, or the error names the key."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from models import llama
from models.base import Config, ModelError
from models.config_check import matches_annotation
from tests.models.test_llama import TINY
from tests.rows import rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleConfig(Config):
    hidden_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    num_hidden_layers: int = 2
    head_dim: int | None = None
    first_k_dense: int = 0
    scale: float = 1.0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tied: bool = False
    hidden_act: str = "silu"
    rope_scaling: Mapping[str, Any] | None = None
    layer_types: Sequence[str] | None = None
    full_attention_interval: int = 4


@rows(
    ("hint", "good", "bad"),
    [
        (int, [0, -1, 10**400], [1.0, True, "1", None, [1], {}]),
        (float, [0.5, 3, -1e300], [True, "1", None, math.nan, math.inf, 10**400, [1.0]]),
        (bool, [True, False], [0, 1, "true", None]),
        (str, ["", "x"], [1, None, ["x"]]),
        (int | None, [3, None], ["x", 1.5, False]),
        (int | Sequence[int], [3, [3, 4]], ["x", [1.5], True]),
        (Sequence[str], [[], ["a"], ("a", "b")], ["a", [1], {"a": 1}, None]),
        (tuple[int, ...], [[], [1]], [["a"], 1]),
        (Mapping[str, Any], [{}, {"a": [1]}], [[], "a", 1, None]),
        (Mapping[str, float], [{"a": 1}], [{"a": "x"}, {"a": True}]),
        (Literal["a", "b"], ["a"], ["c", 1]),
        (Any, [1, "x", None], []),
    ],
)
def test_values_are_checked_against_their_annotation(
    hint: Any, good: list[Any], bad: list[Any]
) -> None:
    assert [value for value in good if not matches_annotation(value, hint)] == []
    assert [value for value in bad if matches_annotation(value, hint)] == []


@rows(
    ("key", "value", "words"),
    [
        ("hidden_size", "64", "hidden_size is '64', but must be an integer"),
        ("hidden_size", 64.0, "must be an integer"),
        ("hidden_size", True, "must be an integer"),
        ("hidden_size", 0, "must be between 1 and"),
        ("hidden_size", 1 << 40, "must be between 1 and 16777216"),
        ("hidden_size", 10**400, "hidden_size is"),
        ("hidden_size", 2, "which cannot be split into 4 attention heads"),
        ("hidden_size", 1 << 24, "which cannot be split into 4 attention heads"),
        ("head_dim", 10**6, "must be between 1 and 4096"),
        (
            "num_hidden_layers",
            10**9,
            "num_hidden_layers is 1000000000, but must be between 1 and 1024",
        ),
        ("num_attention_heads", 0, "must be between 1 and"),
        ("num_key_value_heads", 3, "which does not divide 4 attention heads"),
        ("num_key_value_heads", 0, "must be between 1 and"),
        ("first_k_dense", 1 << 31, "must be between -1 and 2147483647"),
        ("full_attention_interval", 0, "must be between 1 and"),
        ("scale", "1", "must be a number"),
        ("scale", math.nan, "must be a number"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0"),
        ("rms_norm_eps", -1.0, "rms_norm_eps is -1.0"),
        ("rope_theta", 0.0, "rope_theta is 0.0"),
        ("rope_theta", -5, "rope_theta is -5"),
        ("tied", "false", "must be true or false"),
        ("tied", 0, "must be true or false"),
        ("hidden_act", 3, "must be a string"),
        ("rope_scaling", "linear", "must be an object"),
        ("layer_types", "full", "must be a list whose items are each a string"),
        ("layer_types", [1], "must be a list whose items are each a string"),
        ("layer_types", ["x"] * 10_000, None),
        ("layer_types", [["x" * 10_000]], "layer_types is [['xxx"),
    ],
)
def test_the_error_names_an_invalid_value(key: str, value: Any, words: str | None) -> None:
    if words is None:
        ExampleConfig.from_dict({key: value})
        return
    with pytest.raises(ModelError) as caught:
        ExampleConfig.from_dict({key: value})
    message = str(caught.value)
    assert message.startswith(f"config.json: {key} ")
    assert words in message
    assert len(message) < 200


def test_null_counts_as_missing_and_unknown_keys_are_ignored() -> None:
    assert ExampleConfig.from_dict({"hidden_size": None, "other": object()}) == ExampleConfig()


def test_an_integer_is_accepted_as_a_float() -> None:
    assert ExampleConfig.from_dict({"rope_theta": 1_000_000, "scale": 3}).rope_theta == 1_000_000


def test_a_number_that_python_cannot_print_is_reported() -> None:
    with pytest.raises(ModelError, match="hidden_size is a very long number"):
        ExampleConfig.from_dict({"hidden_size": 10**5000})


@pytest.mark.parametrize(
    ("key", "value"),
    [("final_logit_softcapping", 30.0), ("rope_scale", 2), ("attention_multiplier", 0.5)],
)
def test_a_key_that_changes_the_logits_must_be_read(key: str, value: Any) -> None:
    config = {"model_type": "llama", **TINY, key: value}
    with pytest.raises(ModelError, match=f"sets {key}, which is not supported for model_type"):
        llama.Config.from_dict(config)
    for neutral in (None, 1, 0.0):
        llama.Config.from_dict({**config, key: neutral})
