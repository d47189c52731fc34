"""Sampling parameters and stop conditions."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.api.openai.sampling import build_sampling, build_stop_conditions
from app.api.schema.decode import BodyDecoder
from app.api.schema.generation import GenerationFields
from app.core.errors import AppError, ErrorKind
from app.core.requests import GenerateRequest
from tests.rows import rows

DECODER = BodyDecoder(GenerationFields)
NO_CONDITIONS = GenerateRequest(model="m", prompt="")


def decode(body: Any) -> GenerationFields:
    return DECODER.decode(json.dumps(body).encode())


def sampling_of(**body: Any) -> Any:
    return build_sampling(decode(body))


def stop_conditions_of(
    *, constrained: bool = False, limit: int | None = None, **body: Any
) -> GenerateRequest:
    conditions = build_stop_conditions(decode(body), max_tokens=limit, constrained=constrained)
    return replace(NO_CONDITIONS, **conditions)


def read(body: Any) -> None:
    decoded = decode(body)
    build_sampling(decoded)
    build_stop_conditions(decoded, max_tokens=None, constrained=False)


def test_unset_fields_are_absent():
    assert sampling_of() == {}
    assert sampling_of(temperature=0, top_p=None, min_p=0.5) == {"temperature": 0, "min_p": 0.5}


@rows(
    ("fields", "sampling"),
    [
        ({"top_k": 40}, {"top_k": 40}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.05}, {"min_p": 0.05}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_last_n": -1}, {"repeat_last_n": -1}),
        ({"presence_penalty": -2}, {"presence_penalty": -2}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": 7.0}, {"seed": 7}),
        ({"logit_bias": {"7": -100, "0": 0.5}}, {"logit_bias": ((7, -100.0), (0, 0.5))}),
        ({"logit_bias": {}}, {"logit_bias": ()}),
    ],
)
def test_sampling_fields_are_read(fields: Any, sampling: Any):
    assert sampling_of(**fields) == sampling


@pytest.mark.parametrize(
    ("stop", "expected"), [("a", ("a",)), (["a", "bc"], ("a", "bc")), ([], ()), (None, ())]
)
def test_stop_is_one_string_or_several(stop: Any, expected: tuple[str, ...]):
    assert stop_conditions_of(stop=stop).stop == expected


def test_min_tokens_and_ignore_eos_are_read():
    assert stop_conditions_of() == NO_CONDITIONS
    conditions = stop_conditions_of(limit=5, min_tokens=5, ignore_eos=True)
    assert (conditions.min_tokens, conditions.ignore_eos) == (5, True)


def test_stop_tokens_are_listed_once_and_the_stop_may_be_included():
    both = stop_conditions_of(stop_token_ids=[9, 3.0, 9], include_stop_str_in_output=True)
    assert (both.stop_token_ids, both.include_stop) == ((3, 9), True)


def test_bad_words_are_a_text_or_several():
    assert stop_conditions_of(bad_words="tide").bad_words == ("tide",)
    assert stop_conditions_of(bad_words=["tide", "ebb and flow"]).bad_words == (
        "tide",
        "ebb and flow",
    )


def test_allowed_tokens_are_listed_once():
    assert sampling_of(allowed_token_ids=[7, 5, 7]) == {"allowed_token_ids": (5, 7)}


def test_the_repetition_penalty_has_the_name_of_llama_cpp_too():
    assert sampling_of(repeat_penalty=1.5) == {"repetition_penalty": 1.5}
    assert sampling_of(repeat_penalty=1.5, repetition_penalty=1.5) == {"repetition_penalty": 1.5}


@pytest.mark.parametrize(
    "body",
    [
        {"min_tokens": 1},
        {"ignore_eos": True},
        {"stop_token_ids": [1]},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
    ],
)
def test_fields_that_end_or_limit_the_output_cannot_be_combined_with_a_grammar(body: Any):
    with pytest.raises(AppError, match="cannot be combined") as caught:
        stop_conditions_of(constrained=True, **body)
    assert caught.value.param == next(iter(body))
    assert stop_conditions_of(constrained=True, stop="a").stop == ("a",)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"repeat_penalty": 1.5, "repetition_penalty": 1.25}, "repeat_penalty"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": 5}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
    ({"stop_token_ids": ["</s>"]}, "stop_token_ids.0"),
    ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
    ({"stop_token_ids": [3] * 1025}, "stop_token_ids"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"repeat_last_n": -2}, "repeat_last_n"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"presence_penalty": 2.01}, "presence_penalty"),
    ({"frequency_penalty": 100}, "frequency_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": float(2**70)}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"seed": False}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", None]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {}}, "stop"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"07": 1}}, "logit_bias.07"),
    ({"logit_bias": {"٣": 1}}, "logit_bias.٣"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 20),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999"),
    ({"logit_bias": {"7": 101}}, "logit_bias.7"),
    ({"logit_bias": {"7": False}}, "logit_bias.7"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
]


@rows(("body", "param"), WRONG)
def test_an_invalid_field_is_named(body: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(body)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
    assert param.split(".")[0] in caught.value.message
