"""Parsing of OpenAI requests, and their errors."""

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from app.api.openai.request import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    ParsedCompletionRequest,
    parse_chat,
    parse_completion,
)
from app.core.errors import AppError, ErrorKind
from app.core.requests import (
    Conversation,
    GenerateRequest,
    JsonSchema,
    NamedToolChoice,
    PromptBatch,
    ReasoningOptions,
)
from tests.rows import rows

HI = [{"role": "user", "content": "hi"}]
MODEL = "m"


def encode(body: Any) -> bytes:
    return json.dumps(body).encode()


def chat(**fields: Any) -> ParsedCompletionRequest:
    return parse_chat(encode({"model": MODEL, "messages": HI, **fields}), MODEL)


def completion(**fields: Any) -> ParsedCompletionRequest:
    return parse_completion(encode({"model": MODEL, "prompt": "hi", **fields}), MODEL)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = {"tools": [function("f")]}


def get_error(parse: Any, **fields: Any) -> AppError:
    with pytest.raises(AppError) as caught:
        parse(**fields)
    return caught.value


EXTENSIONS = {
    "cache_prompt",
    "chat_template_kwargs",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "min_p",
    "min_tokens",
    "reasoning_budget_tokens",
    "repeat_last_n",
    "repetition_penalty",
    "return_token_ids",
    "structured_outputs",
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "top_k",
}


def test_only_fields_set_by_the_client_reach_the_sampler():
    assert chat().request.sampling == {}
    assert chat(temperature=0, top_p=0.5).request.sampling == {"temperature": 0, "top_p": 0.5}


def test_null_means_absent_for_every_optional_field():
    fields = set(chat_create_params.CompletionCreateParamsNonStreaming.__annotations__)
    fields |= set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    fields -= {"model", "messages"}
    assert chat(**dict.fromkeys([*fields, *EXTENSIONS])) == chat()


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": -1}, None),  # as LM Studio's examples write it
        ({"max_tokens": -1, "max_completion_tokens": 6}, 6),
    ],
)
def test_the_newer_token_limit_wins(fields: Any, limit: int | None):
    assert chat(**fields).request.max_tokens == limit


@pytest.mark.parametrize("parse", [chat, completion])
def test_cache_prompt_can_be_disabled(parse: Any):
    assert parse().request.cache_prompt is True
    assert parse(cache_prompt=True).request.cache_prompt is True
    assert parse(cache_prompt=False).request.cache_prompt is False
    assert get_error(parse, cache_prompt="no").param == "cache_prompt"


def test_completions_stop_after_sixteen_tokens_by_default():
    assert completion().request.max_tokens == 16
    assert completion(max_tokens=3).request.max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_has_two_fields_for_logprobs(fields: Any, count: int | None):
    assert chat(**fields).request.top_logprobs == count


def test_completions_have_one_field_for_logprobs():
    assert completion().request.top_logprobs is None
    assert completion(logprobs=0).request.top_logprobs == 0
    assert completion(logprobs=5).request.top_logprobs == 5


def test_a_chat_request_carries_all_its_fields():
    fields = {
        **TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "high",
        "thinking_budget": 64,
        "chat_template_kwargs": {"enable_thinking": True},
        "n": 3,
        "return_token_ids": True,
    }
    request = chat(**fields).request
    assert [tool.name for tool in request.tools] == ["f"]
    assert request.tool_choice == NamedToolChoice(name="f")
    assert request.parallel_tool_calls is False
    assert request.reasoning == ReasoningOptions(effort="high", token_budget=64)
    assert request.chat_template_kwargs == {"enable_thinking": True}
    assert (request.n, request.return_token_ids) == (3, True)


def test_a_completion_request_carries_all_its_fields():
    parsed = completion(
        prompt=["a", [1, 2]], n=2, echo=True, suffix=" end", max_tokens=0, return_token_ids=True
    )
    assert parsed.request == GenerateRequest(
        model="m",
        prompt=PromptBatch(prompts=("a", (1, 2))),
        n=2,
        max_tokens=0,
        echo=True,
        suffix=" end",
        return_token_ids=True,
    )
    assert (parsed.num_prompts, parsed.n) == (2, 2)


@pytest.mark.parametrize("parse", [chat, completion])
def test_min_tokens_and_ignore_eos_are_read(parse: Any):
    request = parse(min_tokens=5, max_tokens=5, ignore_eos=True).request
    assert (request.min_tokens, request.max_tokens, request.ignore_eos) == (5, 5, True)


@pytest.mark.parametrize("parse", [chat, completion])
def test_both_endpoints_accept_grammars(parse: Any):
    request = parse(guided_json={"type": "object"}).request
    assert request.grammar == JsonSchema(text='{"type":"object"}', param="guided_json")


def test_response_format_is_ignored_if_a_tool_call_is_required():
    """As in OpenAI's API, which accepts both and returns tool calls."""
    both = {**TOOLS, "response_format": {"type": "json_object"}}
    assert chat(**both).request.grammar is not None
    assert chat(**both, tool_choice="none").request.grammar is not None
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        assert chat(**both, tool_choice=choice).request.grammar is None


def test_best_of_generates_more_choices_than_n():
    parsed = completion(n=2, best_of=5)
    assert (parsed.n, parsed.request.n) == (2, 5)
    # ranking needs the logprobs, but they are not returned
    assert parsed.request.top_logprobs == 0
    assert not parsed.logprobs
    assert completion(best_of=5, logprobs=3).request.top_logprobs == 3


def test_best_of_equal_to_n_has_no_effect():
    assert completion(n=2, best_of=2) == completion(n=2)
    assert completion(n=2, best_of=2, stream=True) == completion(n=2, stream=True)


def test_the_service_tier_is_reported_if_requested():
    assert chat().tier is None
    assert chat(service_tier="auto").tier == "default"
    assert chat(service_tier="default").tier == "default"


def test_errors_of_deprecated_fields_name_the_new_ones():
    assert "use tools" in get_error(chat, functions=[]).message
    assert "use tool_choice" in get_error(chat, function_call="auto").message


def test_usage_at_the_end_of_a_stream_must_be_requested():
    assert not chat(stream=True).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_obfuscation": False}).include_usage


@rows(
    "fields",
    [
        {"n": 1},
        {"response_format": {"type": "text"}},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"modalities": ["text"]},
        {"min_tokens": 0, "ignore_eos": False},
        {"thinking_budget": -1},
        {"chat_template_kwargs": {}},
        {"return_token_ids": False},
        {"tool_choice": "none"},
        {"prompt_cache_retention": "in_memory"},
    ],
)
def test_fields_with_their_default_values_are_accepted(fields: Any):
    assert chat(**fields) == chat()


def test_completion_fields_with_their_default_values_are_accepted():
    fields: Any = {"best_of": 1, "echo": False, "suffix": "", "n": 1, "user": "u"}
    assert completion(**fields) == completion()


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": "3"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1e30}, "max_tokens"),
    ({"n": 129}, "n"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": "1"}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": "x"}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"stream": True, "stream_options": {"include_usages": 1}}, "stream_options.include_usages"),
    ({"user": 5}, "user"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": 1, "guided_regex": "a"}, "min_tokens"),
    ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"temprature": 1}, "temprature"),
]

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ({"store": 0}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"modalities": []}, "modalities"),
    ({"min_tokens": 1, **TOOLS, "tool_choice": "required"}, "min_tokens"),
    ({"min_tokens": 1, "tools": [function("f", strict=True)]}, "min_tokens"),
    ({"min_tokens": 1, "thinking_budget": 5}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 9, "max_completion_tokens": 5}, "min_tokens"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"prediction": "x"}, "prediction"),
    ({"audio": {}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": []}, "functions"),
    ({"function_call": "none"}, "function_call"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"moderation": {}}, "moderation"),
    ({"prompt_cache_options": "all"}, "prompt_cache_options"),
    ({"prompt_cache_retention": 24}, "prompt_cache_retention"),
    ({"ttl": "soon"}, "ttl"),
    ({"ttl": 5, "keep_alive": 6}, "ttl"),
    ({"echo": True}, "echo"),
    ({"store": True}, "store"),
    ({"store": "no"}, "store"),
    ({"prompt": "hi"}, "prompt"),
]

COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", "b"], "n": 65}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 21}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 20, "prompt": ["a"] * 7}, "best_of"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": 5}, "suffix"),
    ({"tools": TOOLS["tools"]}, "tools"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"messages": HI}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
]


@rows(("fields", "param"), BOTH + CHAT)
def test_an_invalid_field_of_chat_is_named(fields: Any, param: str):
    error = get_error(chat, **fields)
    assert (error.kind, error.param) == (ErrorKind.INVALID, param)
    assert param.split(".")[0] in error.message


@rows(("fields", "param"), BOTH + COMPLETION)
def test_an_invalid_field_of_completions_is_named(fields: Any, param: str):
    error = get_error(completion, **fields)
    assert (error.kind, error.param) == (ErrorKind.INVALID, param)
    assert param.split(".")[0] in error.message


@pytest.mark.parametrize("parse", [chat, completion])
def test_a_request_has_the_canonical_name_of_its_model(parse: Any):
    """Whatever the body names, the model was resolved before the body is parsed."""
    assert parse(model=f"{MODEL}:latest").request.model == MODEL


@pytest.mark.parametrize("body", [[], 7, "x", None, True])
def test_a_body_is_an_object(body: Any):
    for parse in (parse_chat, parse_completion):
        with pytest.raises(AppError, match="the body must be an object"):
            parse(encode(body), MODEL)


def list_documented_fields(params: Any) -> set[str]:
    streaming = params.CompletionCreateParamsStreaming
    return set(params.CompletionCreateParamsBase.__annotations__) | set(streaming.__annotations__)


@pytest.mark.parametrize(
    ("parse", "params"),
    [(chat, chat_create_params), (completion, completion_create_params)],
)
def test_no_documented_field_is_unknown(parse: Any, params: Any):
    """Each field is supported or rejected by its name; a new SDK's new fields fail this test."""
    assert len(list_documented_fields(params)) > 15
    for name in list_documented_fields(params):
        error = get_error(parse, **{name: [[]]})  # invalid for every field
        assert error.param is not None
        assert error.param.split(".")[0] == name
        assert not error.message.startswith(f"unknown field '{name}'")


def test_values_in_error_messages_are_truncated():
    error = get_error(chat, response_format="x" * 5000)
    assert len(error.message) < 400


def test_deep_nesting_does_not_cause_recursion():
    deep = b"[" * 50_000 + b"]" * 50_000
    for name in (b"stop", b"tools", b"response_format", b"temperature", b"messages", b"unheard_of"):
        with pytest.raises(AppError) as caught:
            parse_chat(b'{"messages": [{"role": "user"}], "%b": %b}' % (name, deep), MODEL)
        assert caught.value.kind is ErrorKind.INVALID


ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "Once upon"}


@pytest.mark.parametrize("begins", [None, False])
def test_the_last_message_of_the_assistant_may_be_continued(begins: bool | None):
    said = [{"role": "user", "content": "hi"}, ASSISTANT]
    read = chat(messages=said, continue_final_message=True, add_generation_prompt=begins)
    plain = chat(messages=said).request.prompt
    assert isinstance(plain, Conversation)
    assert read.request.prompt == replace(plain, continue_final=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "assistant", "content": ""}]},
        {"messages": [ASSISTANT], "add_generation_prompt": True},
    ],
)
def test_no_other_message_can_be_continued(fields: Any):
    with pytest.raises(AppError) as caught:
        chat(continue_final_message=True, **fields)
    assert caught.value.param == "continue_final_message"


def test_fields_of_a_returned_message_that_change_nothing_are_accepted():
    returned = {"id": "m1", "reasoning_details": [{"type": "reasoning.text", "text": "x"}]}
    part = {"type": "text", "text": "Once upon", "cache_control": {"type": "ephemeral"}}
    plain = [{"role": "user", "content": "hi"}, ASSISTANT]
    marked = [plain[0] | {"cache_control": {}}, ASSISTANT | returned | {"content": [part]}]
    assert chat(messages=marked) == chat(messages=plain)


@pytest.mark.parametrize("name", ["keep_alive", "ttl"])
def test_ttl_is_keep_alive(name: str):
    assert chat(**{name: 300}).request.keep_alive == 300


def test_n_predict_is_llama_cpps_name_of_max_tokens():
    assert chat(n_predict=5).request.max_tokens == 5
    assert chat(n_predict=5, max_tokens=7).request.max_tokens == 7
    assert chat(n_predict=-1).request.max_tokens is None
    assert completion().request.max_tokens == DEFAULT_COMPLETION_MAX_TOKENS
    assert completion(n_predict=5).request.max_tokens == 5
    assert completion(max_tokens=-1).request.max_tokens is None
    assert completion(n_keep=-1).request.num_keep == -1


def test_options_may_be_in_camel_case():
    """As Vercel's AI SDK passes on the options of a provider."""
    camel = chat(
        reasoningEffort="low",
        topK=5,
        maxCompletionTokens=7,
        textVerbosity="low",
        promptCacheKey="k",
    )
    snake = chat(reasoning_effort="low", top_k=5, max_completion_tokens=7, verbosity="low")
    verbosity = camel.request.verbosity
    assert verbosity is not None
    assert (verbosity.level, verbosity.param) == ("low", "text_verbosity")
    assert replace(camel.request, verbosity=snake.request.verbosity) == snake.request
    assert get_error(chat, reasoningEffort="much").param == "reasoning_effort"
    assert completion(minTokens=3).request.min_tokens == 3
    # the documented name has precedence
    assert chat(topK=5, top_k=6).request.sampling["top_k"] == 6
