"""What OpenAI's dialect makes of a request, and how it says no."""

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from app.api.openai.request import ParsedCompletionRequest, parse_chat, parse_completion
from app.core.errors import AppError, ErrorKind
from app.core.requests import (
    GenerateRequest,
    JsonSchema,
    NamedToolChoice,
    PromptBatch,
    ReasoningOptions,
)

HI = [{"role": "user", "content": "hi"}]
MODEL = "m"


def chat(**fields: Any) -> ParsedCompletionRequest:
    return parse_chat({"model": MODEL, "messages": HI, **fields}, MODEL)


def completion(**fields: Any) -> ParsedCompletionRequest:
    return parse_completion({"model": MODEL, "prompt": "hi", **fields}, MODEL)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = {"tools": [function("f")]}


def refusal(parse: Any, **fields: Any) -> AppError:
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


def test_only_what_the_client_set_reaches_the_sampler():
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
def test_the_cache_may_be_kept_out_of_it(parse: Any):
    assert parse().request.cache_prompt is True
    assert parse(cache_prompt=True).request.cache_prompt is True
    assert parse(cache_prompt=False).request.cache_prompt is False
    assert refusal(parse, cache_prompt="no").param == "cache_prompt"


def test_completions_stop_after_sixteen_tokens_unless_told_otherwise():
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
def test_chat_asks_for_logprobs_in_two_fields(fields: Any, count: int | None):
    assert chat(**fields).request.top_logprobs == count


def test_completions_ask_for_logprobs_in_one():
    assert completion().request.top_logprobs is None
    assert completion(logprobs=0).request.top_logprobs == 0
    assert completion(logprobs=5).request.top_logprobs == 5


def test_a_chat_request_says_everything_it_was_told():
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


def test_a_completion_says_everything_it_was_told():
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
def test_an_answer_may_have_a_least_length_and_no_end_of_its_own(parse: Any):
    request = parse(min_tokens=5, max_tokens=5, ignore_eos=True).request
    assert (request.min_tokens, request.max_tokens, request.ignore_eos) == (5, 5, True)


@pytest.mark.parametrize("parse", [chat, completion])
def test_both_endpoints_take_grammars(parse: Any):
    request = parse(guided_json={"type": "object"}).request
    assert request.grammar == JsonSchema(text='{"type":"object"}', param="guided_json")


def test_where_calls_must_be_made_the_format_of_texts_has_nothing_to_say():
    """As at OpenAI, where both may be asked for and the calls are what comes."""
    both = {**TOOLS, "response_format": {"type": "json_object"}}
    assert chat(**both).request.grammar is not None
    assert chat(**both, tool_choice="none").request.grammar is not None
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        assert chat(**both, tool_choice=choice).request.grammar is None


def test_of_candidates_the_best_are_told():
    parsed = completion(n=2, best_of=5)
    assert (parsed.n, parsed.request.n) == (2, 5)
    # their likelihood must be known, and is not told
    assert parsed.request.top_logprobs == 0
    assert not parsed.logprobs
    assert completion(best_of=5, logprobs=3).request.top_logprobs == 3


def test_as_many_candidates_as_answers_are_no_choice():
    assert completion(n=2, best_of=2) == completion(n=2)
    assert completion(n=2, best_of=2, stream=True) == completion(n=2, stream=True)


def test_the_service_tier_is_told_where_one_was_named():
    assert chat().tier is None
    assert chat(service_tier="auto").tier == "default"
    assert chat(service_tier="default").tier == "default"


def test_the_older_words_are_told_the_newer_ones():
    assert "use tools" in refusal(chat, functions=[]).message
    assert "use tool_choice" in refusal(chat, function_call="auto").message


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
        {"modalities": ["text"]},
        {"verbosity": "medium"},
        {"min_tokens": 0, "ignore_eos": False},
        {"thinking_budget": -1},
        {"chat_template_kwargs": {}},
        {"return_token_ids": False},
        {"tool_choice": "none"},
        {"prompt_cache_retention": "in_memory"},
    ],
)
def test_fields_that_ask_for_what_happens_anyway_are_welcome(fields: Any):
    assert chat(**fields) == chat()


def test_so_they_are_for_completions():
    fields: Any = {"best_of": 1, "echo": False, "suffix": "", "n": 1, "user": "u"}
    assert completion(**fields) == completion()


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
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
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"user": 5}, "user"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": 1, "guided_regex": "a"}, "min_tokens"),
    ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"flux_capacitor": 1}, "flux_capacitor"),
]

CHAT: list[tuple[dict[str, Any], str]] = [
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
    ({"verbosity": "low"}, "verbosity"),
    ({"prediction": {}}, "prediction"),
    ({"audio": {}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": []}, "functions"),
    ({"function_call": "none"}, "function_call"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"moderation": {}}, "moderation"),
    ({"prompt_cache_options": {}}, "prompt_cache_options"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
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
]


@pytest.mark.parametrize(("fields", "param"), BOTH + CHAT)
def test_a_wrong_field_of_chat_is_named(fields: Any, param: str):
    error = refusal(chat, **fields)
    assert (error.kind, error.param) == (ErrorKind.INVALID, param)
    assert param.split(".")[0] in error.message


@pytest.mark.parametrize(("fields", "param"), BOTH + COMPLETION)
def test_a_wrong_field_of_completions_is_named(fields: Any, param: str):
    error = refusal(completion, **fields)
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
            parse(body, MODEL)


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
