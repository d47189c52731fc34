"""The dialect of Ollama's runner, as its Go client uses it."""

import json
from typing import Any

import pytest

from app.api.ollama_runner import parse
from app.core.errors import AppError, ErrorKind
from app.core.events import TokenLogprob, TopLogprob
from app.core.requests import JsonSchema
from app.core.sampling_params import SamplingParams
from tests.fakes import FakeGenerate, finish, text
from tests.rows import rows

LINE = {
    "Content": "",
    "Done": False,
    "DoneReason": 0,
    "PromptEvalCount": 0,
    "PromptEvalDuration": 0,
    "EvalCount": 0,
    "EvalDuration": 0,
    "Error": None,
}


def options(**fields: Any) -> Any:
    return parse(json.dumps({"prompt": "hi", "options": fields}).encode(), "m")


def merge_sampling(**fields: Any) -> SamplingParams:
    """The sampling parameters for a model whose own defaults are not neutral."""
    model_defaults = {
        "temperature": 2.0,
        "top_p": 0.1,
        "top_k": 3,
        "min_p": 0.9,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repeat_last_n": 5,
        "seed": 9,
    }
    return SamplingParams.merge(model_defaults, options(**fields).sampling)


def test_unset_options_are_neutral_whatever_the_model_defaults():
    assert merge_sampling() == SamplingParams(temperature=0.0)


def test_zero_means_unset():
    names = (
        "temperature",
        "top_p",
        "min_p",
        "top_k",
        "max_tokens",
        "num_predict",
        "repeat_last_n",
        "presence_penalty",
        "repeat_penalty",
        "frequency_penalty",
    )
    assert options(**dict.fromkeys(names, 0)) == options()


def test_options_reach_the_sampler():
    assert merge_sampling(
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        top_k=40,
        repeat_last_n=64,
        presence_penalty=1,
        frequency_penalty=-1,
        repeat_penalty=1.1,
        seed=5,
    ) == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        top_k=40,
        repeat_last_n=64,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        seed=5,
    )


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"num_predict": 6}, 6),
        ({"max_tokens": 5, "num_predict": 6}, 5),
        ({"max_tokens": 0, "num_predict": 6}, 6),
        ({"num_predict": -1}, None),
        ({"max_tokens": -1, "num_predict": 6}, None),
    ],
)
def test_the_first_nonzero_token_limit_is_used(fields: Any, limit: int | None):
    assert options(**fields).max_tokens == limit


def test_negative_seeds_mean_random():
    assert options(seed=-1).sampling["seed"] is None
    assert options(seed=0).sampling["seed"] == 0


def test_repeat_last_n_is_unlimited_by_default():
    assert [options(repeat_last_n=n).sampling["repeat_last_n"] for n in (-1, 0, 8)] == [-1, -1, 8]


def test_keys_are_case_insensitive():
    assert parse(
        json.dumps({"Prompt": "hi", "Options": {"Temperature": 1, "NUM_PREDICT": 4}}).encode(), "m"
    ) == options(temperature=1, num_predict=4)


@pytest.mark.parametrize(
    ("fields", "num_keep"),
    [
        ({}, 0),
        ({"num_keep": 4}, 4),
        ({"n_keep": 5}, 5),
        ({"num_keep": 4, "n_keep": 5}, 4),
        ({"num_keep": 0, "n_keep": 5}, 5),
        ({"num_keep": -1}, -1),
    ],
)
def test_the_first_nonzero_num_keep_is_used(fields: Any, num_keep: int):
    assert options(**fields).num_keep == num_keep


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, True), ({"cache_prompt": None}, True), ({"Cache_Prompt": False}, False)],
)
def test_cache_prompt_can_be_disabled(fields: Any, expected: bool):
    assert parse(json.dumps({"prompt": "hi", **fields}).encode(), "m").cache_prompt is expected


# The request of the client of August 2026 if nothing is set: the nonzero DefaultOptions of Ollama's
# api/types.go, and the fields of its CompletionRequest.
NEWEST: dict[str, Any] = {
    "Prompt": "hi",
    "Format": None,
    "Options": {
        "num_keep": 4,
        "seed": -1,
        "num_predict": -1,
        "top_k": 40,
        "top_p": 0.9,
        "typical_p": 1,
        "repeat_last_n": 64,
        "temperature": 0.8,
        "repeat_penalty": 1.1,
        "num_ctx": 4096,
        "num_batch": 512,
        "num_gpu": -1,
        "use_mmap": None,
        "draft_num_predict": 4,
    },
    "Media": None,
    "Logprobs": False,
    "TopLogprobs": 0,
}


def test_the_newest_client_is_supported(call: Any, generate: FakeGenerate):
    assert call("POST", "/completion", NEWEST).status == 200
    (request,) = generate.opened
    assert (request.prompt, request.max_tokens, request.num_keep) == ("hi", None, 4)
    assert (request.grammar, request.top_logprobs) == (None, None)
    assert SamplingParams.merge(request.sampling) == SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, repeat_last_n=64, repetition_penalty=1.1
    )


def test_options_that_ollamas_runner_ignores_are_ignored():
    """Options for loading a model, and a sampling filter that the runner does not have."""
    ignored = {
        **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread"), 7),
        "draft_num_predict": 4,
        "use_mmap": False,
        "typical_p": 0.5,
    }
    assert options(**ignored) == options()


@pytest.mark.parametrize(
    ("format_", "text"),
    [("json", '{"type":"object"}'), ({"type": "integer"}, '{"type":"integer"}'), ("", None)],
)
def test_a_format_becomes_a_grammar(format_: Any, text: str | None):
    grammar = parse(json.dumps({"Prompt": "hi", "Format": format_}).encode(), "m").grammar
    assert grammar == (None if text is None else JsonSchema(text=text, param="format"))


def test_logprobs_are_sent_with_the_text_of_their_tokens(call: Any, generate: FakeGenerate):
    def token_logprob(token: str) -> TokenLogprob:
        rival = TopLogprob(text="?", token_bytes=b"?", logprob=-2.0)
        return TokenLogprob(
            text=token, token_bytes=token.encode(), logprob=-0.5, top_logprobs=(rival,)
        )

    generate.script = [
        text("Hel", token_logprob("H"), token_logprob("el")),
        text("", token_logprob("l")),
        finish(),
    ]
    body = {"Prompt": "hi", "Logprobs": True, "TopLogprobs": 1}
    lines = [json.loads(line) for line in call("POST", "/completion", body).body.splitlines()]
    assert generate.opened[0].top_logprobs == 1
    assert [[entry["token"] for entry in line["Logprobs"]] for line in lines] == [
        ["H", "el"],
        ["l"],
    ]
    assert lines[0]["Logprobs"][0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [{"token": "?", "logprob": -2.0, "bytes": [63]}],
    }


def test_stop_strings_are_read():
    assert options(stop=["a", "b"]).stop == ("a", "b")


@rows(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "images": ["eA=="]}, "images"),
        ({"prompt": "a", "Media": [{"id": 1}]}, "media"),
        ({"prompt": "a", "Format": "yaml"}, "format"),
        ({"prompt": "a", "Format": [1]}, "format"),
        ({"prompt": "a", "Logprobs": 1}, "logprobs"),
        ({"prompt": "a", "Logprobs": True, "TopLogprobs": 21}, "toplogprobs"),
        ({"prompt": "a", "options": []}, "options"),
        ({"prompt": "a", "options": {"num_ctx": "4096"}}, "options.num_ctx"),
        ({"prompt": "a", "options": {"use_mmap": 1}}, "options.use_mmap"),
        ({"prompt": "a", "options": {"typical_p": "1"}}, "options.typical_p"),
        ({"prompt": "a", "options": {"top_kk": 1}}, "options.top_kk"),
        ({"prompt": "a", "options": {"temperature": -1}}, "options.temperature"),
        ({"prompt": "a", "options": {"temperature": "1"}}, "options.temperature"),
        ({"prompt": "a", "options": {"top_p": 1.5}}, "options.top_p"),
        ({"prompt": "a", "options": {"min_p": -1}}, "options.min_p"),
        ({"prompt": "a", "options": {"top_k": 0.5}}, "options.top_k"),
        ({"prompt": "a", "options": {"num_predict": 1.5}}, "options.num_predict"),
        ({"prompt": "a", "options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"prompt": "a", "options": {"repeat_penalty": -2}}, "options.repeat_penalty"),
        ({"prompt": "a", "options": {"repeat_penalty": 1e-46}}, "options.repeat_penalty"),
        ({"prompt": "a", "options": {"presence_penalty": 3}}, "options.presence_penalty"),
        ({"prompt": "a", "options": {"seed": 2**63}}, "options.seed"),
        ({"prompt": "a", "options": {"num_keep": 1.5}}, "options.num_keep"),
        ({"prompt": "a", "options": {"n_keep": "4"}}, "options.n_keep"),
        ({"prompt": "a", "cache_prompt": 0}, "cache_prompt"),
        ({"prompt": "a", "options": {"stop": [""]}}, "options.stop"),
    ],
)
def test_an_invalid_field_is_named(body: Any, param: str):
    with pytest.raises(AppError) as caught:
        parse(json.dumps(body).encode(), "m")
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)


def test_every_line_has_every_key_and_the_last_line_has_the_counters(call: Any):
    reply = call("POST", "/completion", {"prompt": "hi", "options": {}})
    assert reply.headers["content-type"] == "application/jsonl"
    assert [json.loads(line) for line in reply.body.splitlines()] == [
        {**LINE, "Content": "Hel"},
        {**LINE, "Content": "lo"},
        {
            **LINE,
            "Done": True,
            "PromptEvalCount": 7,
            "PromptEvalDuration": 2_000_000,
            "EvalCount": 2,
            "EvalDuration": 60_000_000,
        },
    ]


def test_done_reason_of_the_token_limit_is_one(call: Any, generate: FakeGenerate):
    generate.script = [text("a"), finish("length")]
    last = json.loads(
        call("POST", "/completion", {"prompt": "hi", "options": {}}).body.splitlines()[-1]
    )
    assert last["DoneReason"] == 1


def test_completion_without_a_model_fails(call: Any, generate: FakeGenerate):
    generate.cards = ()
    assert call("POST", "/completion", {"prompt": "hi", "options": {}}).status == 503
