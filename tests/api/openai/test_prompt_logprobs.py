"""vLLM's `prompt_logprobs`, and numbers of alternatives that the operator allows."""

from dataclasses import replace
from typing import Any

import pytest

from app.core.events import PromptTokenLogprobs, TokenLogprob, TopLogprob
from app.core.requests import GenerateRequest
from app.core.sampling_params import LogprobsLimit
from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, FakeGenerate, Script, finish, text
from tests.rows import rows

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
BOTH = rows(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])


def top(id: int, logprob: float) -> TopLogprob:
    return TopLogprob(text=f"<{id}>", token_bytes=b"", logprob=logprob, token_id=id)


def token(id: int, logprob: float | None, *alternatives: TopLogprob) -> TokenLogprob:
    return TokenLogprob(
        text=f"<{id}>", token_bytes=b"", logprob=logprob, top_logprobs=alternatives, token_id=id
    )


SCORES = [
    PromptTokenLogprobs(logprobs=(token(1, None), token(2, -0.5, top(2, -0.5), top(3, -1.0)))),
    PromptTokenLogprobs(logprobs=(token(9, float("-inf"), top(4, -0.25)),)),
]


def write_answer(request: GenerateRequest) -> Script:
    return [*(SCORES if request.prompt_logprobs is not None else []), text("x"), finish()]


def send(path: str, body: Any, card: Any = CARD, **fields: Any) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate(write_answer, cards=(card,))
    return send_request(generate, "POST", path, body | fields), generate


@BOTH
def test_each_token_of_the_prompt_has_an_object_as_in_vllm(path: str, body: Any):
    reply, generate = send(path, body, prompt_logprobs=2)
    assert generate.opened[0].prompt_logprobs == 2
    answer = reply.json
    holder = answer if "messages" in body else answer["choices"][0]
    assert holder["prompt_logprobs"] == [
        None,
        {
            "2": {"logprob": -0.5, "rank": 1, "decoded_token": "<2>"},
            "3": {"logprob": -1.0, "rank": 2, "decoded_token": "<3>"},
        },
        {
            "9": {"logprob": -9999.0, "rank": None, "decoded_token": "<9>"},
            "4": {"logprob": -0.25, "rank": 1, "decoded_token": "<4>"},
        },
    ]


@BOTH
def test_a_stream_has_no_logprobs_of_its_prompt(path: str, body: Any):
    reply, _ = send(path, body, prompt_logprobs=0, stream=True)
    assert (reply.status, reply.error["param"]) == (400, "prompt_logprobs")


def test_each_prompt_of_a_completion_has_its_own():
    events = [
        replace(SCORES[0], prompt_index=1),
        text("a"),
        finish(),
        replace(text("b"), choice=1),
        replace(finish(), choice=1, prompt_index=1),
    ]
    reply = send_request(
        FakeGenerate(events),
        "POST",
        "/v1/completions",
        {"prompt": ["a", "b"], "prompt_logprobs": 1},
    )
    first, second = reply.json["choices"]
    assert "prompt_logprobs" not in first
    assert len(second["prompt_logprobs"]) == 2


COUNTS = rows(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True}, "top_logprobs"),
        ("/v1/chat/completions", CHAT, "prompt_logprobs"),
        ("/v1/completions", COMPLETION, "logprobs"),
        ("/v1/completions", COMPLETION, "prompt_logprobs"),
        ("/v1/responses", {"input": "hi"}, "top_logprobs"),
        ("/completion", COMPLETION, "n_probs"),
    ],
)


@COUNTS
def test_the_operator_sets_the_number_of_alternatives(path: str, body: Any, name: str):
    some = replace(CARD, logprobs_limit=LogprobsLimit(maximum=500))
    assert send(path, body, some, **{name: 500})[0].status == 200
    for value in (501, -1):
        refused = send(path, body, some, **{name: value})[0]
        assert (refused.status, refused.error["param"]) == (400, name)
        assert "500" in refused.error["message"]


@COUNTS
def test_minus_one_is_the_whole_vocabulary_where_it_is_allowed(path: str, body: Any, name: str):
    whole = replace(CARD, logprobs_limit=LogprobsLimit(maximum=700, is_vocabulary=True))
    reply, generate = send(path, body, whole, **{name: -1})
    assert reply.status == 200
    request = generate.opened[0]
    assert 700 in (request.top_logprobs, request.prompt_logprobs)


@pytest.mark.parametrize("name", ["top_logprobs", "prompt_logprobs"])
def test_the_default_is_twenty(name: str):
    body = {**CHAT, "logprobs": True}
    assert send("/v1/chat/completions", body, **{name: 20})[0].status == 200
    assert send("/v1/chat/completions", body, **{name: 21})[0].status == 400
