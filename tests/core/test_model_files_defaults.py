"""generation_config.json is either valid as a whole or rejected."""

from pathlib import Path
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.model_files import GenerationDefaults, ModelFiles, read_generation_defaults
from app.core.sampling_params import SamplingParams
from tests.rows import rows


def make_model_files(generation_config: dict[str, Any], **fields: Any) -> ModelFiles:
    defaults: dict[str, Any] = {
        "name": "m",
        "path": Path("/models/m"),
        "config": {"max_position_embeddings": 100, "vocab_size": 50},
        "shards": (),
        "tokenizer_path": Path("/models/m/tokenizer.json"),
        "tokenizer_config": {},
        "generation_config": generation_config,
        "chat_template": None,
        "created": 0,
    }
    return ModelFiles(**{**defaults, **fields})


@rows(
    ("config", "sampling"),
    [
        ({}, {}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.1}, {"top_p": 0.9, "top_k": 20, "min_p": 0.1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
        ({"repeat_last_n": 64, "seed": 7}, {"repeat_last_n": 64, "seed": 7}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"transformers_version": "4.51", "num_beams": 4, "max_length": 20}, {}),
    ],
)
def test_sampling_parameters_are_read_key_by_key(
    config: dict[str, Any], sampling: dict[str, Any]
) -> None:
    defaults = read_generation_defaults(make_model_files(config))
    assert defaults == GenerationDefaults(sampling=sampling)
    SamplingParams.merge(defaults.sampling)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_new_tokens": 100}, GenerationDefaults(max_tokens=100)),
        ({"max_new_tokens": -1}, GenerationDefaults()),
        ({"max_new_tokens": None}, GenerationDefaults()),
        ({"stop_strings": "END"}, GenerationDefaults(stop_strings=("END",))),
        ({"stop_strings": ["a", "b", "a"]}, GenerationDefaults(stop_strings=("a", "b"))),
        ({"stop_strings": []}, GenerationDefaults()),
    ],
)
def test_max_tokens_and_stop_strings_are_read(
    config: dict[str, Any], expected: GenerationDefaults
) -> None:
    assert read_generation_defaults(make_model_files(config)) == expected


@rows(
    ("key", "value"),
    [
        *(
            (key, value)
            for key in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
            for value in ("hot", True, [], {}, -3, 1000, float("nan"), float("inf"))
        ),
        ("frequency_penalty", "x"),
        ("repetition_penalty", 1e-46),
        *((key, value) for key in ("top_k", "repeat_last_n") for value in ("5", 1.5, True, -2)),
        ("top_k", 10**30),
        ("seed", 1.0),
        ("seed", 1 << 64),
        *(("do_sample", value) for value in ("false", 0, [])),
        *(("max_new_tokens", value) for value in (0, -3, 1.5, "10", True, [])),
        *(("stop_strings", value) for value in (3, "", [""], ["a", 3], {"a": 1})),
    ],
)
def test_an_invalid_value_is_reported_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(AppError) as caught:
        read_generation_defaults(make_model_files({key: value}))
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert caught.value.message.startswith(f"generation_config.json of /models/m: {key} is ")
    assert "\n" not in caught.value.message


def test_a_long_value_is_truncated_in_the_error() -> None:
    with pytest.raises(AppError) as caught:
        read_generation_defaults(make_model_files({"temperature": "x" * 10_000}))
    assert len(caught.value.message) < 250
