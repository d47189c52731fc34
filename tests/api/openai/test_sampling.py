"""How tokens are drawn, and when it is enough."""

from typing import Any

import pytest

from app.api.fields import Fields
from app.api.openai.sampling import StopConditions, read_sampling, read_stop_conditions
from app.core.errors import AppError, ErrorKind


def sampling_of(**given: Any) -> Any:
    return read_sampling(Fields.from_value(given))


def ending(*, constrained: bool = False, limit: int | None = None, **given: Any) -> StopConditions:
    return read_stop_conditions(Fields.from_value(given), max_tokens=limit, constrained=constrained)


def read(given: Any) -> None:
    fields = Fields.from_value(given)
    read_sampling(fields)
    read_stop_conditions(fields, max_tokens=None, constrained=False)


def test_only_what_was_set_is_said():
    assert sampling_of() == {}
    assert sampling_of(temperature=0, top_p=None, min_p=0.5) == {"temperature": 0, "min_p": 0.5}


@pytest.mark.parametrize(
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
def test_sampling_fields_are_taken_over(fields: Any, sampling: Any):
    assert sampling_of(**fields) == sampling


@pytest.mark.parametrize(
    ("stop", "read"), [("a", ("a",)), (["a", "bc"], ("a", "bc")), ([], ()), (None, ())]
)
def test_stop_is_one_string_or_several(stop: Any, read: tuple[str, ...]):
    assert ending(stop=stop).stop == read


def test_an_answer_may_have_a_least_length_and_no_end_of_its_own():
    assert ending() == StopConditions(min_tokens=0, ignore_eos=False, stop=())
    both = ending(limit=5, min_tokens=5, ignore_eos=True)
    assert (both.min_tokens, both.ignore_eos) == (5, True)


@pytest.mark.parametrize("given", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_a_grammar_says_itself_where_an_answer_may_end(given: Any):
    with pytest.raises(AppError, match="cannot be combined") as caught:
        ending(constrained=True, **given)
    assert caught.value.param == next(iter(given))
    assert ending(constrained=True, stop="a").stop == ("a",)


WRONG: list[tuple[dict[str, Any], str]] = [
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
    ({"logit_bias": []}, "logit_bias"),
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


@pytest.mark.parametrize(("given", "param"), WRONG)
def test_a_wrong_field_is_named(given: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(given)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
    assert param.split(".")[0] in caught.value.message
