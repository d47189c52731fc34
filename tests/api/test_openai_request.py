"""What OpenAI's dialect makes of a request, and how it says no."""

import json
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from app.api.dialects.openai_request import Wish, parse_chat, parse_completion
from app.core.errors import AppError, Kind

HI = [{"role": "user", "content": "hi"}]
MODELS = {"m"}


def chat(**fields: Any) -> Wish:
    return parse_chat({"model": "m", "messages": HI, **fields}, MODELS)


def completion(**fields: Any) -> Wish:
    return parse_completion({"model": "m", "prompt": "hi", **fields}, MODELS)


def schema_format(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def refusal(parse: Any, **fields: Any) -> AppError:
    with pytest.raises(AppError) as caught:
        parse(**fields)
    return caught.value


def test_only_what_the_client_set_reaches_the_sampler():
    assert chat().request.sampling == {}
    assert chat(temperature=0, top_p=0.5).request.sampling == {"temperature": 0, "top_p": 0.5}


def test_null_means_absent_for_every_optional_field():
    fields = set(chat_create_params.CompletionCreateParamsNonStreaming.__annotations__)
    fields |= set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    fields -= {"model", "messages"}
    extensions = ("top_k", "min_p", "repetition_penalty", "repeat_last_n", "cache_prompt")
    assert chat(**dict.fromkeys([*fields, *extensions])) == chat()


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
    assert chat(**fields).request.sampling == sampling
    assert completion(**fields).request.sampling == sampling


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
def test_the_newer_token_limit_wins(fields: Any, limit: int | None):
    assert chat(**fields).request.max_tokens == limit


@pytest.mark.parametrize("parse", [chat, completion])
def test_the_cache_may_be_kept_out_of_it(parse: Any):
    assert parse().request.reuse is True
    assert parse(cache_prompt=True).request.reuse is True
    assert parse(cache_prompt=False).request.reuse is False
    assert refusal(parse, cache_prompt="no").param == "cache_prompt"


def test_completions_stop_after_sixteen_tokens_unless_told_otherwise():
    assert completion().request.max_tokens == 16
    assert completion(max_tokens=3).request.max_tokens == 3


@pytest.mark.parametrize(
    ("stop", "read"), [("a", ("a",)), (["a", "bc"], ("a", "bc")), ([], ()), (None, ())]
)
def test_stop_is_one_string_or_several(stop: Any, read: tuple[str, ...]):
    assert chat(stop=stop).request.stop == read


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_asks_for_logprobs_in_two_fields(fields: Any, count: int | None):
    assert chat(**fields).request.top_logprobs == count


def test_completions_ask_for_logprobs_in_one():
    assert completion().request.top_logprobs is None
    assert completion(logprobs=0).request.top_logprobs == 0
    assert completion(logprobs=5).request.top_logprobs == 5


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("", ""),
        ("text", "text"),
        (["text"], "text"),
        ([5, 6, 0], (5, 6, 0)),
        ([[5, 6]], (5, 6)),
        ([5], (5,)),
    ],
)
def test_a_prompt_is_text_or_ids(prompt: Any, read: Any):
    assert completion(prompt=prompt).request.prompt == read


def test_a_response_format_becomes_a_grammar():
    assert chat().request.grammar is None
    assert chat(response_format={"type": "text"}).request.grammar is None
    for kind, text in (("json_object", '{"type":"object"}'), ("text", None)):
        grammar = chat(response_format={"type": kind, "json_schema": None}).request.grammar
        assert (grammar and grammar.text) == text
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"type": "integer"}}}
    for more in ({}, {"strict": True}, {"strict": False}, {"description": "of a thing"}):
        grammar = chat(**schema_format(name="thing", schema=schema, **more)).request.grammar
        assert grammar is not None
        assert grammar.text == json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def test_usage_at_the_end_of_a_stream_is_asked_for():
    assert not chat(stream=True).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_obfuscation": False}).include_usage


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"response_format": {"type": "text"}},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"modalities": ["text"]},
        {"tool_choice": "none"},
        {"prompt_cache_retention": "in_memory"},
    ],
)
def test_fields_that_ask_for_what_happens_anyway_are_welcome(fields: Any):
    assert chat(**fields) == chat()


def test_so_they_are_for_completions():
    assert completion(best_of=1, echo=False, suffix="", n=1, user="u") == completion()


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
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
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "3"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1e30}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": "1"}, "n"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", None]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": "x"}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"07": 1}}, "logit_bias.07"),
    ({"logit_bias": {"٣": 1}}, "logit_bias.٣"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 20),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999"),
    ({"logit_bias": {"7": 101}}, "logit_bias.7"),
    ({"logit_bias": {"7": None}}, "logit_bias.7"),
    ({"user": 5}, "user"),
    ({"flux_capacitor": 1}, "flux_capacitor"),
    ({"flux_capacitor": None}, "flux_capacitor"),
]

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_object", "json_schema": {}}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (schema_format(), "response_format.json_schema.name"),
    (schema_format(name="x"), "response_format.json_schema.schema"),
    (schema_format(name="x", schema=[]), "response_format.json_schema.schema"),
    (schema_format(name="x", schema=True), "response_format.json_schema.schema"),
    (schema_format(name="x", schema={}, strict="yes"), "response_format.json_schema.strict"),
    (schema_format(name="x", schema={}, more=1), "response_format.json_schema.more"),
    (schema_format(name="x", schema=nested(400)), "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "text"}, "response_format"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ({"metadata": {"a" * 65: "b"}}, "metadata." + "a" * 64),
    ({"metadata": {str(n): "b" for n in range(17)}}, "metadata"),
    ({"metadata": "x"}, "metadata"),
    ({"safety_identifier": {}}, "safety_identifier"),
    ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"modalities": []}, "modalities"),
    ({"tools": []}, "tools"),
    ({"tools": "x"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"prediction": {}}, "prediction"),
    ({"audio": {}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": []}, "functions"),
    ({"function_call": "none"}, "function_call"),
    ({"moderation": {}}, "moderation"),
    ({"prompt_cache_options": {}}, "prompt_cache_options"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ({"echo": False}, "echo"),
    ({"prompt": "hi"}, "prompt"),
]

COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": [1, -1]}, "prompt.1"),
    ({"prompt": [True]}, "prompt.0"),
    ({"prompt": [None]}, "prompt.0"),
    ({"prompt": [2**31]}, "prompt.0"),
    ({"prompt": [[0.5]]}, "prompt.0.0"),
    ({"prompt": {}}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": HI}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH + CHAT)
def test_a_wrong_field_of_chat_is_named(fields: Any, param: str):
    error = refusal(chat, **fields)
    assert (error.kind, error.param) == (Kind.INVALID, param)
    assert param.split(".")[0] in error.message


@pytest.mark.parametrize(("fields", "param"), BOTH + COMPLETION)
def test_a_wrong_field_of_completions_is_named(fields: Any, param: str):
    error = refusal(completion, **fields)
    assert (error.kind, error.param) == (Kind.INVALID, param)
    assert param.split(".")[0] in error.message


@pytest.mark.parametrize("parse", [chat, completion])
def test_a_model_that_is_not_served_is_not_found(parse: Any):
    error = refusal(parse, model="../../etc")
    assert (error.kind, error.param) == (Kind.MODEL_NOT_FOUND, "model")


@pytest.mark.parametrize("body", [[], 7, "x", None, True])
def test_a_body_is_an_object(body: Any):
    for parse in (parse_chat, parse_completion):
        with pytest.raises(AppError, match="the body must be an object"):
            parse(body, MODELS)


def documented(params: Any) -> set[str]:
    streaming = params.CompletionCreateParamsStreaming
    return set(params.CompletionCreateParamsBase.__annotations__) | set(streaming.__annotations__)


@pytest.mark.parametrize(
    ("parse", "params"),
    [(chat, chat_create_params), (completion, completion_create_params)],
)
def test_no_documented_field_is_unknown(parse: Any, params: Any):
    """Each is honoured, or refused as what it is; a new SDK shows here what has been added."""
    assert len(documented(params)) > 15
    for name in documented(params):
        error = refusal(parse, **{name: [[]]})  # wrong for every one of them
        assert error.param is not None
        assert error.param.split(".")[0] == name
        assert not error.message.startswith(f"unknown field '{name}'")


def test_what_is_echoed_is_cut():
    error = refusal(chat, response_format="x" * 5000)
    assert len(error.message) < 400
    error = refusal(chat, **{"y" * 5000: 1})
    assert error.param == "y" * 200
    assert len(error.message) < 400


def test_deep_nesting_is_not_walked_into():
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    for name in ("stop", "tools", "response_format", "temperature", "messages", "unheard_of"):
        refusal(chat, **{name: deep})
